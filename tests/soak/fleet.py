"""The worker and maintenance processes: each in a place of its own, with its proxy, in which one follows the other."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

from sqlalchemy import URL

from tests.soak import worker
from tests.soak.proxy import Proxy

_nursery = multiprocessing.get_context("forkserver")
_nursery.set_forkserver_preload([worker.__name__])

#: Seconds that a process may take to end after SIGTERM: its grace, and time to spare.
PATIENCE = 30.0
#: How often processes in one place may find no database when they start, before something else must be wrong.
TRIES = 30


class Place:
    """Where one process runs at a time."""

    def __init__(self, number: int, role: worker.Role, url: URL, logs: Path, sabotage: str | None) -> None:
        assert url.host is not None
        assert url.port is not None
        self.number = number
        self.role = role
        self.proxy = Proxy((url.host, url.port))
        #: Somebody is doing something to this process.
        self.busy = False
        #: Nobody kills or stops the one in the first place: what leaks, leaks there longest.
        self.spared = number == 0 and not role.alone
        self._url = url
        self._logs = logs
        self._sabotage = sabotage
        self._generation = 0
        self._process: ForkServerProcess | None = None
        self._claims_before = 0

    @property
    def status(self) -> int | None:
        """The exit status of its process, negative for a signal; None while it runs."""
        assert self._process is not None
        return self._process.exitcode

    @property
    def log(self) -> Path:
        return self._logs / f"{self.role.name}-{self.number}-{self._generation:03d}.log"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def has_begun(self) -> bool:
        """Whether its process has been there, whatever has become of it."""
        return self.role.begun in self.log.read_text(errors="replace")

    @property
    def at_work(self) -> bool:
        """Whether it has begun to claim, or to maintain."""
        if self.role.alone:
            return self.status is None and self.has_begun
        return self.status is None and self.proxy.commits["claim"] > self._claims_before

    def start(self) -> None:
        """Start the next process."""
        self._generation += 1
        self._claims_before = self.proxy.commits["claim"]
        self.log.touch()
        url = self._url.set(port=self.proxy.port, drivername=f"postgresql+{('psycopg', 'asyncpg')[self.number % 2]}")
        given = (self.role, url.render_as_string(hide_password=False), str(self.log), self._sabotage)
        self._process = _nursery.Process(target=worker.live, args=given)
        self._process.start()

    async def ended(self, seconds: float = PATIENCE) -> int | None:
        """Its exit status; None when it still runs after so long."""
        deadline = time.monotonic() + seconds
        while self.status is None and time.monotonic() < deadline:  # noqa: ASYNC110 - it is a process
            await asyncio.sleep(0.02)
        return self.status

    def kill(self) -> None:
        """SIGKILL, also to a frozen process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.join()

    def send(self, number: signal.Signals) -> None:
        if self.status is None and self._process is not None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def tail(self, lines: int = 12) -> str:
        """The end of what it has said."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Fleet:
    """All places: `workers` of them, and two whose processes only maintain, of which one may be `forced` to lead.

    Every other worker maintains beside its jobs, and every third is patient: so long as it asks for, its jobs are its.
    """

    def __init__(self, url: URL, logs: Path, *, workers: int, forced: bool, sabotage: str | None) -> None:
        roles = [
            worker.Role("worker", maintains=number % 2 == 0, stale_after=worker.STALE_AFTER * (1 + (number % 3 == 2)))
            for number in range(workers)
        ]
        keepers = [worker.Role("maintenance", alone=True, forced=forced and number == 1) for number in range(2)]
        self.workers = [Place(number, role, url, logs, sabotage) for number, role in enumerate(roles)]
        self.keepers = [Place(number, role, url, logs, sabotage) for number, role in enumerate(keepers)]
        self.places = self.workers + self.keepers
        self.logs = logs
        #: What processes did that they should not, one line each.
        self.wrong: list[str] = []
        self.terms = 0
        self.no_start = 0
        self.in_vain: Counter[Place] = Counter()

    async def __aenter__(self) -> Self:
        for place in self.places:
            await place.proxy.start()
            place.start()
        self._watch = asyncio.create_task(self._watched())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._watch.cancel()
        for place in self.places:
            place.kill()
            place.proxy.stop()

    async def stop(self) -> None:
        """All of them, gracefully."""
        self._watch.cancel()
        await asyncio.gather(*(self.term(place, again=False) for place in self.places))

    async def term(self, place: Place, *, twice: bool = False, again: bool = True) -> None:
        """SIGTERM, perhaps `twice`: it must end by itself, with status 0 unless it had to abandon something."""
        place.busy = True
        try:
            place.send(signal.SIGTERM)
            if twice:
                await asyncio.sleep(0.2)
                place.send(signal.SIGTERM)
            status = await place.ended()
            if status is None:
                place.send(signal.SIGUSR1)  # it tells where it hangs
                await asyncio.sleep(0.5)
                self.wrong.append(f"SIGTERM did not end it within {PATIENCE:.0f} s: {place.log}")
                place.kill()
            elif status != 0 and not (status == 1 and "abandoned jobs" in place.log.read_text(errors="replace")):
                self.wrong.append(f"after SIGTERM it ended with status {status}: {place.log}\n{place.tail()}")
            if again:
                place.start()
        finally:
            place.busy = False

    async def _watched(self) -> None:
        """Start again what ended by itself: a process may find no database when it starts, and must not die later."""
        while True:
            await asyncio.sleep(0.2)
            for place in self.places:
                if place.at_work:
                    self.in_vain[place] = 0
                if place.busy or (status := place.status) is None:
                    continue
                if place.has_begun:
                    self.wrong.append(f"it ended by itself with status {status}: {place.log}\n{place.tail()}")
                self.no_start += 1
                self.in_vain[place] += 1
                if self.in_vain[place] > TRIES:
                    self.wrong.append(f"it does not start: {place.log}\n{place.tail()}")
                    return
                place.start()
