"""Threads for `def` handlers.

They are daemons, unlike those of `concurrent.futures`, for which the interpreter waits: one whose handler never ends
must not keep a process that has abandoned it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """At most `most` threads, started when none is idle. For the event loop's thread alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._idle = threading.Semaphore(0)
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """What `function`, which must not raise, returns in a thread. Raises `RuntimeError` when none can start."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(result: T) -> None:
            if not future.done():
                future.set_result(result)

        def call() -> None:
            result = function()
            with suppress(RuntimeError):  # the loop is closed: nobody waits for an abandoned handler
                loop.call_soon_threadsafe(tell, result)

        if not self._idle.acquire(blocking=False) and self._count < self._most:
            threading.Thread(target=self._serve, name=f"awa_sqla_{self._count + 1}", daemon=True).start()
            self._count += 1
        self._calls.put(call)
        return future

    def close(self) -> None:
        """Let the threads end when their handlers do. Does not wait for them."""
        for _ in range(self._count):
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and with it what the handler was given
            self._idle.release()
