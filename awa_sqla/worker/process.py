"""A worker or maintenance as a process: its event loop, signals and exit status."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol, Self

from awa_sqla.errors import ConfigurationError
from awa_sqla.worker.forks import in_child
from awa_sqla.worker.loops import loop_factory

log = logging.getLogger("awa_sqla.worker")


class Process(Protocol):
    """What can be run until it is stopped: a worker, or maintenance alone."""

    abandoned: int

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def wait(self) -> None: ...

    def request_stop(self) -> None: ...

    def interrupt(self) -> None: ...

    def dump(self) -> str: ...


class Reloader(Protocol):
    """Starts the program anew, in this process."""

    #: Whether to, when the worker has ended.
    wanted: bool

    def watching(self, changed: Callable[[], None]) -> AbstractContextManager[object]:
        """Call `changed` from any thread when the program's files have changed."""
        ...

    def restart(self) -> NoReturn:
        """Do it now."""
        ...


def run_until_stopped(
    make: Callable[[], Process],
    *,
    uvloop: bool | None = None,
    reloader: Reloader | None = None,
) -> int:
    """Run a worker until it is told to stop; 0, or 1 when jobs had to be abandoned.

    With a `reloader`, SIGHUP and changed files end the worker too, with `reloader.wanted` set.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "this handles signals and needs the main thread; elsewhere use `async with awa.worker(...)`"
        )
    with asyncio.Runner(loop_factory=loop_factory(uvloop)) as runner:
        return runner.run(_run(make, reloader))


async def _run(make: Callable[[], Process], reloader: Reloader | None) -> int:
    worker = make()
    with ExitStack() as stack:
        signals = stack.enter_context(Signals(worker, asyncio.get_running_loop(), reloads=reloader is not None))
        if reloader is not None:
            stack.enter_context(reloader.watching(signals.reload))
        try:
            async with worker:
                await worker.wait()
        except Exception:
            if not worker.abandoned:
                raise
            log.exception("the worker did not end well")
        if reloader is not None:
            reloader.wanted = signals.reloading
        if worker.abandoned:
            # What asks tasks to end, and waits for it, would wait for ever.
            logging.shutdown()
            if reloader is not None and reloader.wanted:
                reloader.restart()
            os._exit(1)
    return 0


class Signals:
    """What signals do to a worker, for `with` around its life, in the main thread.

    The handlers proper do no more than put the number into a queue, so they may interrupt anything, and also do while
    a handler of a job blocks the event loop; a thread then does what was asked.
    """

    def __init__(self, worker: Process, loop: asyncio.AbstractEventLoop, *, reloads: bool) -> None:
        self._worker = worker
        self._loop = loop
        self._reloads = reloads
        #: Whether the program shall start anew when the worker has ended.
        self.reloading = False
        self._told = 0
        self._hung_up = False
        self._caught: SimpleQueue[int | None] = SimpleQueue()
        self._before: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._serve, name="awa_sqla signals", daemon=True)

    def __enter__(self) -> Self:
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if self._reloads or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else nohup has asked for that
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._before[number] = signal.signal(number, lambda number, _: self._caught.put(number))
        self._forget = in_child(self._leave_to_child)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._forget()
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._caught.put(None)
        self._thread.join()

    def _leave_to_child(self) -> None:
        """What a forked child is told is its own matter, and would reach our loop through the loop's pipe."""
        signal.set_wakeup_fd(-1)
        for number in self._before:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def reload(self) -> None:
        """As SIGHUP does. From any thread."""
        self._caught.put(signal.SIGHUP)

    def _serve(self) -> None:
        while (number := self._caught.get()) is not None:
            try:
                self._act(signal.Signals(number))
            except Exception:
                log.exception("could not do what signal %d asks for", number)

    def _act(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1:
            # Not through logging: its locks may be what somebody waits for.
            sys.stderr.write(self._worker.dump())
            sys.stderr.flush()
        elif number == signal.SIGHUP:
            self._hang_up()
        else:
            self._stop(number)

    def _hang_up(self) -> None:
        if self._told or self._hung_up:
            return  # a terminal that is closed says it twice, itself and through the shell: no reason to interrupt jobs
        self._hung_up = True
        self.reloading = self._reloads
        self._tell(self._worker.request_stop)
        log.info("SIGHUP: no more claims, running jobs may end%s", ", then all starts anew" if self._reloads else "")

    def _stop(self, number: signal.Signals) -> None:
        self._told += 1
        self.reloading = False
        if self._told == 1:
            self._tell(self._worker.request_stop)
            log.info("%s: no more claims, running jobs may end", number.name)
        elif self._told == 2:
            self._tell(self._worker.interrupt)
            log.warning("%s again: asking running jobs to stop; once more leaves at once", number.name)
        else:
            os._exit(128 + number)

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the worker has ended
            self._loop.call_soon_threadsafe(what)
