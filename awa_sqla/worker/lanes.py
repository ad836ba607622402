"""The maintenance lanes that a worker runs beside its queues, each at its own pace.

Promotion and obligations first look, in one statement that needs no transaction, whether there is anything to do: an
idle worker sends three statements in five seconds for the two, instead of twelve.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from awa_sqla.maintenance import Dispatched, Promoted, any_due, dispatch_obligation, next_due, promote, rescue
from awa_sqla.models.job import Attempt
from awa_sqla.worker.application import Application
from awa_sqla.worker.finalize import insisting

log = logging.getLogger("awa_sqla.maintenance")
T = TypeVar("T")

#: Seconds: the longest and the shortest sleep of promotion, and between looks for obligations and stale attempts.
PROMOTION, BREATH, OBLIGATIONS, RESCUE = 2.0, 0.05, 5.0, 30.0
#: Jobs of one rescue, about 5 ms each. It holds all their rows until it ends, and an outcome that came late after all
#: waits for a second.
RESCUES = 100


class Lanes:
    """Promotion, rescue and obligations over one session factory."""

    def __init__(
        self,
        maker: async_sessionmaker[AsyncSession],
        alone: AsyncEngine,
        app: Application,
        stale_after: timedelta,
        woken: Callable[[frozenset[str]], None],
    ) -> None:
        self._maker = maker
        self._alone = alone
        self._app = app
        self._stale_after = stale_after
        self._woken = woken
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        """This process has put a job back: its due time may be earlier than promotion thinks."""
        self._nudged.set()

    async def promote(self) -> None:
        """Promote for ever, sleeping until the next due row, a nudge, and at most 2 s."""
        while True:
            due = await insisting(lambda: self._look(next_due))
            if due is not None and not due:
                done = await insisting(self._promote_once)
                self._woken(done.queues)
                due = done.next_due
            await asyncio.sleep(BREATH)
            wait = PROMOTION if due is None else min(due.total_seconds(), PROMOTION)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(wait - BREATH, 0)):
                    await self._nudged.wait()
            self._nudged.clear()

    async def _promote_once(self) -> Promoted:
        async with self._maker.begin() as session:
            return await session.run_sync(promote)

    async def rescue(self) -> None:
        """Look for stale and overdue attempts for ever, three times in `stale_after` and at least every 30 s."""
        pause = min(self._stale_after.total_seconds() / 3, RESCUE)
        while True:
            ended = await insisting(self._rescue_once)
            if ended:
                log.warning("rescued jobs %s from attempts that were dead or overdue", [a.id for a in ended])
            if len(ended) < RESCUES:
                await asyncio.sleep(pause)

    async def _rescue_once(self) -> list[Attempt]:
        async with self._maker.begin() as session:
            return await session.run_sync(
                lambda s: rescue(s, stale_after=self._stale_after, limit=RESCUES, backoff=self._app.tasks.backoff)
            )

    async def obligations(self) -> None:
        """Dispatch what is owed for ever."""
        while True:
            if await insisting(lambda: self._look(any_due, self._app.follow_ups.specs)):
                while (done := await insisting(self._dispatch_once)) is not None:
                    if done.error is not None:
                        log.error("obligation %s: %s", done.obligation_id, done.error)
            await asyncio.sleep(OBLIGATIONS)

    async def _dispatch_once(self) -> Dispatched | None:
        async with self._maker.begin() as session:
            return await session.run_sync(dispatch_obligation, self._app.follow_ups.specs)

    async def _look(self, look: Callable[..., T], *arguments: Any) -> T:
        """What a look at the tables finds, outside of any transaction."""
        async with self._alone.connect() as connection:
            return await connection.run_sync(look, *arguments)
