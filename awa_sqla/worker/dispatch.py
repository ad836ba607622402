"""Claiming: one loop for each queue, with capacity taken before the claim.

A queue's loop sleeps until it is woken: by a notification, by the poller, by freed capacity, or by itself when the
last claim was full. Claims are plain rows on a connection, committed before any handler starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from awa_sqla.session.statements import CLAIM_ROWS, RUNNING_ROWS
from awa_sqla.worker.claimed import Claimed
from awa_sqla.worker.config import QueueConfig
from awa_sqla.worker.finalize import insisting
from awa_sqla.worker.pace import Pace
from awa_sqla.worker.survey import Settings

#: Seconds that a busy queue waits for more free slots before it claims again.
GATHER = 0.005


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims, the same for all queues of a worker: over which engine, as whom, how many at a time at the most."""

    engine: AsyncEngine
    worker_id: str
    batch: int


class QueueLoop:
    """Claims for one queue and starts what it claimed."""

    def __init__(self, name: str, config: QueueConfig, claimant: Claimant) -> None:
        self.name = name
        self._claimant = claimant
        self._pace = Pace(config.rate_limit)
        self._refill: asyncio.TimerHandle | None = None
        #: How many attempts at a time, and how many there are.
        self.capacity, self.busy = config.concurrency, 0
        self.poll_interval = config.poll_interval.total_seconds()
        #: The latest lease that was begun here.
        self._latest = 0
        self._wake = asyncio.Event()
        self._wake.set()
        self._stopping = False

    def stop(self) -> None:
        """Claim no more. A claim in flight is not cut: its COMMIT may have happened already."""
        self._stopping = True
        self._wake.set()

    def follow(self, settings: Settings, capacity: int) -> None:
        """Go on under other settings. Attempts that run beyond a lower capacity end by themselves."""
        if capacity > self.capacity:
            self._wake.set()
        self.capacity, self.poll_interval = capacity, settings.poll_interval
        self._pace.change(settings.rate_limit)

    def wake(self) -> None:
        """Look for work now."""
        self._wake.set()

    def release(self) -> None:
        """One attempt is acknowledged: its slot is free."""
        self.busy -= 1
        self._wake.set()

    async def serve(self, start: Callable[[Claimed], None]) -> None:
        """Claim and start until told to stop."""
        while True:
            await self._wake.wait()
            if self._stopping:
                return
            if self.busy > self.capacity * 3 // 4:
                await asyncio.sleep(GATHER)  # a claim for each freed slot would cost a transaction for each job
            self._wake.clear()
            if self._stopping:
                return
            wanted = min(self.capacity - self.busy, self._claimant.batch)
            if wanted <= 0:
                continue  # the next release wakes us
            allowed = self._pace.take(wanted)
            if allowed == 0:
                self._wake_later(self._pace.wait())
                continue
            rows: list[Claimed] = []
            try:
                rows = await self._claim_surely(allowed)
            finally:
                self._pace.give_back(max(allowed - len(rows), 0))
            self.busy += len(rows)
            for row in rows:
                start(row)
            if len(rows) >= allowed:
                self._wake.set()

    def _wake_later(self, seconds: float) -> None:
        if self._refill is not None:
            self._refill.cancel()
        self._refill = asyncio.get_running_loop().call_later(seconds, self._wake.set)

    async def _claim_surely(self, limit: int) -> list[Claimed]:
        """Claim, over lost connections; a COMMIT whose answer was lost may have given us jobs all the same.

        Those have later leases than all that was begun before. Whether a job is in flight would not tell: it may have
        been when the database was asked, and be acknowledged by now.
        """
        in_doubt = False

        async def once() -> list[Claimed]:
            nonlocal in_doubt
            try:
                return await self._claim(limit)
            except Exception:
                in_doubt = True
                raise

        claimed = await insisting(once)
        if in_doubt:
            known = {one.attempt for one in claimed}
            ours = await insisting(self._ours)
            claimed += [one for one in ours if one.attempt not in known and one.attempt.run_lease > self._latest]
        self._latest = max([self._latest, *(one.attempt.run_lease for one in claimed)])
        return claimed

    async def _ours(self) -> list[Claimed]:
        parameters: dict[str, Any] = {"in_queue": self.name, "by_worker": self._claimant.worker_id}
        async with self._claimant.engine.begin() as connection:
            rows: Sequence[Sequence[Any]] = (await connection.execute(RUNNING_ROWS, parameters)).all()
        return list(map(Claimed, rows))

    async def _claim(self, limit: int) -> list[Claimed]:
        parameters: dict[str, Any] = {"in_queue": self.name, "limit": limit, "by_worker": self._claimant.worker_id}
        async with self._claimant.engine.begin() as connection:
            rows: Sequence[Sequence[Any]] = (await connection.execute(CLAIM_ROWS, parameters)).all()
        return sorted(map(Claimed, rows), key=lambda claimed: claimed.urgency)
