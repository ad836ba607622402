"""Leadership over time: seek the lease, keep it while it can be renewed, and stop before it ends."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from awa_sqla.maintenance.leader import NAME, Standing, hold, look, release
from awa_sqla.session.trouble import transient

log = logging.getLogger("awa_sqla.maintenance")

#: How long a lease lasts; and seconds between renewals, and by which a leader stops before its lease ends.
LEASE, RENEWAL, MARGIN = timedelta(seconds=15), 5.0, 2.0
#: Seconds until a renewal that failed is tried again.
AGAIN = 1.0
#: By how many seconds the database's clock may move against ours between two looks.
DRIFT = 3.0


def clock() -> float:
    """Seconds that also count while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Contact:
    """For how long the database could be reached, so that all hearts have had their chance to beat.

    After an outage, or a jump of the database's clock, every attempt looks as if nobody had cared for it. Rescue must
    wait until living workers have beaten again.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._last: tuple[float, datetime] | None = None
        self._since = clock()

    def note(self, sent: float, standing: Standing) -> None:
        """The database answered a question that was sent at `sent`."""
        if self._last is None:
            self._since = sent - standing.up.total_seconds()
        else:
            passed = sent - self._last[0]
            drift = (standing.now - self._last[1]).total_seconds() - passed
            if passed > self._most:
                self._since = sent
            elif drift > DRIFT + self._most:
                log.warning("the database's clock has jumped by %.0f s: rescue waits for the hearts", drift)
                self._since = sent
            self._since = max(self._since, sent - standing.up.total_seconds())
        self._last = (sent, standing.now)

    def lasted(self) -> float:
        """Seconds since when there was no gap."""
        return clock() - self._since


class Leadership:
    """One candidate. `engine` is in AUTOCOMMIT mode, so that no lease is lost to an open transaction."""

    def __init__(
        self, engine: AsyncEngine, holder: str, contact: Contact, *, pace: float = RENEWAL, name: str = NAME
    ) -> None:
        self._engine = engine
        self._holder = holder
        self._contact = contact
        self._pace = min(pace, RENEWAL)
        self._name = name
        self._until = 0.0
        #: How often the lease has changed hands, when it is ours.
        self.term = 0

    def leading(self) -> bool:
        """Whether the lease is ours, with a margin. Asks nobody."""
        return clock() < self._until

    async def serve(self, lead: Callable[[], Awaitable[None]]) -> None:
        """For ever: whenever the lease can be had, run `lead()` until it is lost."""
        while True:
            try:
                found = await self.seek()
            except Exception as exc:
                if not transient(exc):
                    raise
                log.warning("cannot ask who leads: %s", _brief(exc))
                found = False
            if found:
                await self._lead(lead)
            await asyncio.sleep(self._pace * random.uniform(0.8, 1.2))  # noqa: S311 - apart from each other

    async def seek(self) -> bool:
        """Take the lease if nobody has it. One or two statements. Raises what the database raises."""
        sent = clock()
        standing, taken = await self._ask(look, self._holder, self._name)
        self._contact.note(sent, standing)
        return (standing.leads or not taken) and await self._hold()

    async def release(self) -> None:
        """Let another process lead at once."""
        if not self._until:
            return
        self._until = 0.0
        with suppress(Exception):  # it ends by itself soon
            async with asyncio.timeout(MARGIN):
                await self._ask(release, self._holder, self._name)

    async def _lead(self, lead: Callable[[], Awaitable[None]]) -> None:
        log.info("%s leads maintenance, term %d", self._holder, self.term)
        task = asyncio.ensure_future(lead())
        try:
            await self._keep(task)
        finally:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _keep(self, task: asyncio.Future[None]) -> None:
        """Until the lease is lost, or the task has ended."""
        pause = self._pace
        while not task.done() and (left := self._until - clock()) > 0:
            await asyncio.wait([task], timeout=min(pause, left))
            try:
                async with asyncio.timeout(max(self._until - clock(), 0.001)):
                    if not await self._hold():
                        log.warning("another process leads maintenance now")
                        return
                pause = self._pace
            except Exception as exc:
                if not transient(exc):
                    raise
                pause = min(AGAIN, self._pace)
                if self.leading():
                    log.warning("the lease of maintenance is not renewed yet: %s", _brief(exc))
        if not task.done():
            log.warning("the lease of maintenance could not be renewed: another process may lead")

    async def _hold(self) -> bool:
        sent = clock()
        standing = await self._ask(hold, self._holder, LEASE, self._name)
        if standing is None:
            self._until = 0.0
            return False
        self._contact.note(sent, standing)
        self._until, self.term = sent + LEASE.total_seconds() - MARGIN, standing.term
        return True

    async def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        async with self._engine.connect() as connection:
            return await connection.run_sync(question, *arguments)


def _brief(exc: BaseException) -> str:
    return str(getattr(exc, "orig", exc)).partition("\n")[0] or type(exc).__name__
