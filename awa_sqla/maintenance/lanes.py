"""What each lane does in one pass, and when it wants the next.

A pass is one bounded piece of work in a transaction of its own. Promotion and obligations first look, in one statement
that needs no transaction, whether there is anything to do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from awa_sqla.args import Backoff, backoff_of
from awa_sqla.maintenance.age import age
from awa_sqla.maintenance.cron import Cron
from awa_sqla.maintenance.leadership import Leadership
from awa_sqla.maintenance.obligations import any_due, dispatch_obligation
from awa_sqla.maintenance.promote import next_due, promote
from awa_sqla.maintenance.prune import prune_dead_letters, prune_jobs, prune_records
from awa_sqla.maintenance.rescue import rescue_callbacks, rescue_overdue, rescue_stale
from awa_sqla.maintenance.rollup import count_finished
from awa_sqla.models.job import Attempt
from awa_sqla.periodic import Periodic
from awa_sqla.session.specs import Spec

log = logging.getLogger("awa_sqla.maintenance")
T = TypeVar("T")

#: Their names.
LANES = (
    "promote",
    "rescue_stale",
    "rescue_overdue",
    "rescue_callbacks",
    "obligations",
    "age",
    "prune",
    "rollup",
    "cron",
)

#: Seconds between passes: the longest sleep of promotion, between looks for obligations and for lost attempts, ageing,
#: retention, and the least between two counts.
PROMOTION, OBLIGATIONS, RESCUE, AGEING, RETENTION, COUNTS = 2.0, 5.0, 30.0, 30.0, 60.0, 60.0
#: Jobs of one rescue, about 5 ms each. It holds all their rows until it ends, and an outcome that came late after all
#: waits for a second.
RESCUES = 100
#: Rows of each table that one pass of retention deletes at the most. An old snapshot makes each pass step over all that
#: were deleted since: with 1,000 at a time, two and a half times as few went in two minutes.
PRUNED = 10_000
#: Rows that one pass of ageing changes.
AGED = 1000
#: What is logged of a rescue.
TOLD = {
    "rescue_stale": "rescued jobs %s: their workers have not been heard of",
    "rescue_overdue": "rescued jobs %s: their deadlines have passed",
    "rescue_callbacks": "rescued jobs %s: their callbacks did not come in time",
}
#: Seconds until the next look at due jobs that somebody holds.
HELD = 0.5
#: Seconds after which a pass over obligations ends, whatever more is owed.
SETTLING = 10.0
#: The part of its time that counting may take.
SHARE = 0.01


class Pass(NamedTuple):
    """What a pass did, and in how many seconds the next should come: 0 when there is more to do, None at a nudge."""

    done: int
    pause: float | None


@dataclass(frozen=True, slots=True)
class Means:
    """What lanes work with.

    `maker` makes the sessions of their transactions, `alone` is an engine in AUTOCOMMIT mode for single statements, and
    `call` runs a function that does not raise in a thread.
    """

    maker: async_sessionmaker[AsyncSession]
    alone: AsyncEngine
    call: Callable[[Callable[[], Any]], Awaitable[Any]]

    async def within(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """What `work(session, ...)` returns, in a transaction of its own."""
        async with self.maker.begin() as session:
            return await session.run_sync(work, *arguments, **options)

    async def look(self, look: Callable[..., T], *arguments: Any) -> T:
        """What a look at the tables finds, outside of any transaction."""
        async with self.alone.connect() as connection:
            return await connection.run_sync(look, *arguments)


@dataclass(frozen=True, slots=True)
class Duties:
    """What an app adds to maintenance; a process without one has none of it."""

    backoff: Callable[[str], Backoff] = backoff_of
    specs: Sequence[Spec] = ()
    periodics: Sequence[Periodic] = ()


class Lanes:
    """The passes, over one set of means."""

    def __init__(
        self,
        means: Means,
        duties: Duties,
        stale_after: timedelta,
        leadership: Leadership,
        woken: Callable[[frozenset[str]], None] | None = None,
    ) -> None:
        self._means = means
        self._duties = duties
        self._stale_after = stale_after
        self._leadership = leadership
        self._woken = woken
        self._told = 0
        self._cron = Cron(means.maker, duties.periodics, leading=leadership.leading, call=means.call)

    async def close(self) -> None:
        """Give up what still runs in threads."""
        await self._cron.close()

    @property
    def owes(self) -> bool:
        """Whether this process can settle any obligation."""
        return bool(self._duties.specs)

    @property
    def builds(self) -> bool:
        """Whether only this app can build what some of its schedules enqueue."""
        return any(periodic.builds for periodic in self._duties.periodics)

    @property
    def building(self) -> bool:
        """Whether the app is building what a schedule enqueues."""
        return self._cron.building

    async def promote(self) -> Pass:
        """Make due jobs available; the next pass is when the next one is due, but of a standby when it put one back."""
        due, promoted = await self._means.look(next_due), 0
        if due is not None and not due:
            done = await self._means.within(promote)
            if self._woken is not None:
                self._woken(done.queues)
            due, promoted = done.next_due, done.jobs
        wait = None if due is None else due.total_seconds()
        if wait == 0 and not promoted:  # somebody holds what is due
            wait = HELD
        if self._leadership.leading():
            return Pass(promoted, PROMOTION if wait is None else min(wait, PROMOTION))
        return Pass(promoted, wait if wait is not None and wait < PROMOTION else None)

    async def rescue_stale(self) -> Pass:
        """Take attempts away from workers that are gone, unless the database itself was away until just now."""
        missing = self._stale_after.total_seconds() / 2 - self._leadership.contact.lasted()
        return Pass(0, missing) if missing > 0 else await self._rescue(rescue_stale)

    async def rescue_overdue(self) -> Pass:
        """End attempts whose deadline has passed."""
        return await self._rescue(rescue_overdue)

    async def rescue_callbacks(self) -> Pass:
        """End waits whose callback did not come in time."""
        return await self._rescue(rescue_callbacks)

    async def _rescue(self, lane: Callable[..., list[Attempt]]) -> Pass:
        options = {"stale_after": self._stale_after, "limit": RESCUES, "backoff": self._duties.backoff}
        ended = await self._means.within(lane, **options)
        if ended:
            log.warning(TOLD[lane.__name__], [attempt.id for attempt in ended])
        return Pass(len(ended), 0 if len(ended) >= RESCUES else min(self._stale_after.total_seconds() / 3, RESCUE))

    async def prune(self) -> Pass:
        """Delete what has been kept long enough."""
        jobs = await self._means.within(prune_jobs, limit=PRUNED)
        dead = await self._means.within(prune_dead_letters, limit=PRUNED)
        records = await self._means.within(prune_records, limit=PRUNED)
        done = (jobs, dead, *records)
        return Pass(sum(done), 0 if max(done) >= PRUNED else RETENTION)

    async def age(self) -> Pass:
        """Let jobs rise that have waited long."""
        done = await self._means.within(age, limit=AGED)
        return Pass(done, 0 if done >= AGED else AGEING)

    async def rollup(self) -> Pass:
        """Count what has ended."""
        counted = await self._means.within(count_finished)
        return Pass(counted.rows, max(COUNTS, counted.seconds / SHARE))

    async def cron(self) -> Pass:
        """Fire the schedules that are due."""
        wait = await self._cron.look()
        told, self._told = self._told, self._cron.fired
        return Pass(self._told - told, wait)

    async def obligations(self) -> Pass:
        """Dispatch what is owed."""
        done, ends = 0, time.monotonic() + SETTLING
        if await self._means.look(any_due, self._duties.specs):
            while (one := await self._means.within(dispatch_obligation, self._duties.specs)) is not None:
                done += 1
                if one.error is not None:
                    log.error("obligation %s: %s", one.obligation_id, one.error)
                if time.monotonic() > ends:
                    return Pass(done, 0)
                await asyncio.sleep(0)
        return Pass(done, OBLIGATIONS)
