"""What others may see of a worker, from any thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

from awa_sqla.worker.config import MaintenanceOptions, WorkerOptions
from awa_sqla.worker.dispatch import QueueLoop
from awa_sqla.worker.dump import dump
from awa_sqla.worker.flight import Flight
from awa_sqla.worker.forks import awaited_in_child, check, in_child
from awa_sqla.worker.health import Health


class Visible:
    """The base of `Worker` and `Maintenance`."""

    id: str
    #: How many attempts did not end within grace and were put back while still running.
    abandoned = 0
    #: How many attempts have ended here.
    finished = 0

    _flight: Flight
    _loops: dict[str, QueueLoop]
    _stop: asyncio.Event
    #: The thread of the event loop, when there is one.
    _thread = 0

    def __init__(self, version: str, options: WorkerOptions | MaintenanceOptions) -> None:
        self.version = version
        self._process = os.getpid()
        self._health = Health(options.health, options.stale_after, self)

    @property
    def stopping(self) -> bool:
        """Whether somebody has asked it to stop."""
        return self._stop.is_set()

    @property
    def health_address(self) -> str | None:
        """Where health checks are served, as `host:port`; None before the start and without the option."""
        return self._health.address

    def load(self) -> dict[str, tuple[int, int]]:
        """For each queue, how many attempts run here and how many may, by the settings that are in force now."""
        return {name: (loop.busy, loop.capacity) for name, loop in self._loops.items()}

    def dump(self) -> str:
        """The running jobs with the stack of each handler, for a person; also while a handler blocks the loop."""
        return dump(self.id, list(self._flight), self._thread)

    def _take_thread(self) -> Callable[[], None]:
        """This is the event loop's thread; its children must not go on with the loop, until what is returned is called.

        Raises `ConfigurationError` in a child of the process that the worker was made in.
        """
        check(self._process, "worker")
        loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

        def in_the_child() -> None:
            if threading.get_ident() == self._thread:
                loop.call_soon(awaited_in_child)

        return in_child(in_the_child)
