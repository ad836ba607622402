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
from awa_sqla.sqlstates import INSUFFICIENT_PRIVILEGE, driver_sqlstate

log = logging.getLogger("awa_sqla.maintenance")

#: How many seconds a lease lasts, at the most and at the least: a sixth of the time after which a worker is dead.
LEASE, SHORTEST, PART = 15.0, 1.0, 6
#: It is renewed three times while it lasts, and its holder stops a seventh of it before it ends.
RENEWALS, MARGIN = 3, 1 / 7
#: Seconds until a renewal that failed is tried again, and the longest pause after questions that failed.
AGAIN, LONGEST_PAUSE = 1.0, 30.0
#: By how many seconds the database's clock may move against ours between two looks.
DRIFT = 3.0


def clock() -> float:
    """Seconds that also count while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def cancelled() -> bool:
    """Whether this task has been cancelled, also when a driver has made an error or a result of it since."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


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
        """The database has just answered a question that was sent at `sent`."""
        if self._last is None:
            self._since = sent - standing.up.total_seconds()
        else:
            drift = (standing.now - self._last[1]).total_seconds() - (clock() - self._last[0])
            if sent - self._last[0] > self._most:
                self._since = sent
            elif drift > DRIFT:
                log.warning("the database's clock has jumped by %.0f s: rescue waits for the hearts", drift)
                self._since = sent
            self._since = max(self._since, sent - standing.up.total_seconds())
        self._last = (sent, standing.now)

    def lasted(self) -> float:
        """Seconds since when there was no gap."""
        return clock() - self._since


class Leadership:
    """One candidate. `engine` is in AUTOCOMMIT mode, so that no lease is lost to an open transaction."""

    def __init__(self, engine: AsyncEngine, holder: str, stale_after: timedelta, *, name: str = NAME) -> None:
        self._engine = engine
        self._holder = holder
        self._name = name
        self._lease = min(max(stale_after.total_seconds() / PART, SHORTEST), LEASE)
        self._pace = self._lease / RENEWALS
        self._until = 0.0
        #: Whether it may be ours, also when a cancellation came before the answer.
        self._asked = False
        #: For how long the database could be reached.
        self.contact = Contact(2 * self._lease)
        #: How often the lease has changed hands, when it is ours.
        self.term = 0
        self._resigned = False
        self._lanes: asyncio.Future[None] | None = None

    def leading(self) -> bool:
        """Whether the lease is ours, with a margin. Asks nobody."""
        return clock() < self._until

    async def serve(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Until it resigns: whenever the lease can be had, run `lead()` until it is lost."""
        pause = self._pace
        while not self._resigned:
            try:
                if await self.seek() and not self._resigned:
                    await self._lead(lead)
                pause = self._pace
            except Exception as exc:  # noqa: BLE001 - lanes that need no lead go on
                level = logging.WARNING if transient(exc) else logging.ERROR
                log.log(level, "cannot find out who leads maintenance: %s%s", _brief(exc), _advice(exc))
                pause = min(pause * 2, LONGEST_PAUSE)
            if self._resigned:
                break
            if cancelled():
                return
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - apart from each other
        await self.release()

    def resign(self) -> None:
        """Lead no more: what runs is cut, and another process may lead at once. From the loop's thread."""
        self._resigned = True
        if self._lanes is not None:
            self._lanes.cancel()

    async def seek(self) -> bool:
        """Take the lease if nobody has it. One or two statements. Raises what the database raises."""
        sent = clock()
        standing, taken = await self._ask(look, self._holder, self._name)
        self.contact.note(sent, standing)
        return (standing.leads or not taken) and await self._hold()

    async def release(self) -> None:
        """Let another process lead at once."""
        if not self._asked:
            return
        self._asked, self._until = False, 0.0
        with suppress(Exception):  # it ends by itself soon
            async with asyncio.timeout(AGAIN):
                await self._ask(release, self._holder, self._name)

    async def _lead(self, lead: Callable[[], Awaitable[None]]) -> None:
        log.info("%s leads maintenance, term %d", self._holder, self.term)
        self._lanes = task = asyncio.ensure_future(lead())
        try:
            await self._keep(task)
        finally:
            self._lanes = None
            task.cancel()
            await asyncio.wait([task])
            log.info("%s no longer leads maintenance, term %d", self._holder, self.term)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _keep(self, task: asyncio.Future[None]) -> None:
        """Until the lease is lost, or the task has ended."""
        pause = self._pace
        while not (task.done() or cancelled()) and (left := self._until - clock()) > 0:
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
        if not (task.done() or cancelled()):
            log.warning("the lease of maintenance could not be renewed: another process may lead")

    async def _hold(self) -> bool:
        sent, self._asked = clock(), True
        standing = await self._ask(hold, self._holder, timedelta(seconds=self._lease), self._name)
        if standing is None:
            self._asked, self._until = False, 0.0
            return False
        self.contact.note(sent, standing)
        self._until, self.term = sent + self._lease * (1 - MARGIN), standing.term
        return True

    async def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        async with self._engine.connect() as connection:
            return await connection.run_sync(question, *arguments)


def _brief(exc: BaseException) -> str:
    return str(getattr(exc, "orig", exc)).partition("\n")[0] or type(exc).__name__


def _advice(exc: BaseException) -> str:
    if driver_sqlstate(getattr(exc, "orig", exc)) != INSUFFICIENT_PRIVILEGE:
        return ""
    return (
        ". Until it may, nothing is promoted or rescued here: grant what `awa-sqla grants --role maintenance "
        "--to NAME` prints, or leave maintenance to others (--no-maintenance)"
    )
