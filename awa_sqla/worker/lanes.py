"""The maintenance lanes that a worker runs beside its queues, each at its own pace."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from awa_sqla.maintenance import Dispatched, Promoted, dispatch_obligation, promote, rescue
from awa_sqla.models.job import Attempt
from awa_sqla.worker.application import Application
from awa_sqla.worker.finalize import insisting

log = logging.getLogger("awa_sqla.maintenance")

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
        app: Application,
        stale_after: timedelta,
        woken: Callable[[frozenset[str]], None],
    ) -> None:
        self._maker = maker
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
            done = await insisting(self._promote_once)
            self._woken(done.queues)
            await asyncio.sleep(BREATH)
            wait = PROMOTION if done.next_due is None else min(done.next_due.total_seconds(), PROMOTION)
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
            done = await insisting(self._dispatch_once)
            if done is None:
                await asyncio.sleep(OBLIGATIONS)
            elif done.error is not None:
                log.error("obligation %s: %s", done.obligation_id, done.error)

    async def _dispatch_once(self) -> Dispatched | None:
        async with self._maker.begin() as session:
            return await session.run_sync(dispatch_obligation, self._app.follow_ups.specs)
