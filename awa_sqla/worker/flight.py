"""The attempts in flight: each from its claim until its outcome is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from awa_sqla.models.job import Attempt
from awa_sqla.worker import run as running
from awa_sqla.worker.run import Run


class Flight:
    """What this process runs, by attempt. Changed on the loop's thread only, read on others too."""

    def __init__(self) -> None:
        self._runs: dict[Attempt, Run] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, attempt: Attempt) -> Run | None:
        """The run of an attempt, if it is in flight."""
        return self._runs.get(attempt)

    def add(self, run: Run) -> None:
        """One more."""
        self._loop = asyncio.get_running_loop()
        self._runs[run.attempt] = run
        self._idle.clear()

    def land(self, run: Run) -> bool:
        """Its outcome is acknowledged; whether that is news."""
        if self._runs.pop(run.attempt, None) is None:
            return False
        if run.alarm is not None:
            run.alarm.cancel()
        if not self._runs:
            self._idle.set()
        return True

    def attempts(self) -> list[Attempt]:
        """All of them. From any thread."""
        return list(self._runs)

    def stop(self, reason: str, attempt: Attempt | None = None) -> None:
        """Ask one attempt, or all, to stop."""
        for run in list(self) if attempt is None else filter(None, (self.get(attempt),)):
            run.stop(reason)

    def lost(self, attempts: list[Attempt]) -> None:
        """Their leases are somebody else's by now. From the heartbeat's thread."""
        for attempt in attempts:
            if attempt in self._runs and self._loop is not None:
                self._loop.call_soon_threadsafe(self.stop, running.LOST, attempt)

    async def landed_within(self, seconds: float) -> bool:
        """Wait until all have landed; whether they have, within `seconds`."""
        try:
            async with asyncio.timeout(max(seconds, 0)):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
