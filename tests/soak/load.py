"""What is enqueued, and cancelled, while everything is hurt: small transactions of the driver's, some rolled back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import URL, select, text
from sqlalchemy import exc as sa_exc
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from awa_sqla import EnqueueRequest, FollowUpError, FollowUps, JobNotFound, JobRecord, JobState, enqueue
from awa_sqla import asyncio as later
from tests.soak import app
from tests.soak.app import Attend, Park, Plan, Walk, WalkAsync
from tests.soak.tables import Asked, Withdrawn

T = TypeVar("T")
DRIVER = "soak driver"
#: Seconds that the driver itself may be without a database.
PATIENCE = 60.0
_BATCH = 20
#: Jobs and obligations that may be open before the driver waits.
AHEAD = 600

#: Jobs that are not finished, and follow-ups that are owed.
OPEN = (
    f"SELECT (SELECT count(*) FROM awa.{JobRecord.__tablename__} WHERE state NOT IN "
    f"('{JobState.COMPLETED}', '{JobState.FAILED}', '{JobState.CANCELLED}')) "
    "+ (SELECT count(*) FROM awa.follow_up_obligations)"
)
FINISHED = (
    f"SELECT (SELECT count(*) FROM awa.{JobRecord.__tablename__} WHERE state IN "
    f"('{JobState.COMPLETED}', '{JobState.FAILED}', '{JobState.CANCELLED}')) + (SELECT count(*) FROM soak_pruned)"
)


def plan(rng: random.Random, slow_share: float) -> EnqueueRequest:
    """One job: mostly quick and plain, sometimes with trouble of its own."""
    kind = rng.choices(app.ROOTS, (24, 24, 20, 20, 3, 3, 3, 3))[0]
    slow = rng.random() < slow_share
    walks = kind in (Walk, WalkAsync)
    nap = rng.uniform(0.2, 2.0) if slow else rng.choice((0, 0, 0.01, 0.05))
    fields: dict[str, Any] = {"nap": round(nap / 5 if walks else nap, 3), "bucket": rng.randrange(10)}
    if rng.random() < 0.08:
        fields["raises"] = rng.randint(1, 2)
    if rng.random() < 0.05:
        fields["agains"] = rng.randint(1, 2)
    if rng.random() < 0.05:
        fields["snoozes"] = rng.randint(1, 2)
    deadline: timedelta | None = None
    if kind is app.CallAsync and rng.random() < 0.03:
        fields["drags"], deadline = True, timedelta(seconds=2.5)
    fields["end"] = rng.choices(("done", "cancel", "fatal"), (90, 5, 5))[0]
    for field, share in (("child", 0.25), ("tells", 0.25), ("balks", 0.03)):
        fields[field] = rng.random() < share
    if kind in (Park, Attend):
        fields["balks"] = False  # it would be in the way of whoever answers
    if rng.random() < 0.04:  # spent after two attempts, whatever ends them; kept as a dead letter
        return EnqueueRequest(kind(**fields | {"raises": 1000}), queue="doomed", max_attempts=2)
    delay = timedelta(seconds=rng.uniform(0.1, 2)) if rng.random() < 0.05 else None
    queue = "slow" if slow else app.BRIEF if rng.random() < 0.1 else "quick"
    priority = rng.randint(1, 4)
    own = {"priority": priority}
    return EnqueueRequest(kind(**fields), queue=queue, priority=priority, delay=delay, deadline=deadline, metadata=own)


class Driver:
    """The driver's own sessions, over connections that no proxy cuts; a restart of the server does."""

    def __init__(self, url: URL) -> None:
        settings = {
            "application_name": DRIVER,
            "options": "-c default_transaction_read_only=off -c lock_timeout=3s",
        }
        self.engine = create_async_engine(url, pool_pre_ping=True, connect_args=settings)
        #: Its sessions know the application's specs.
        self.knowing = async_sessionmaker(self.engine, expire_on_commit=False)
        app.awa.attach(self.knowing)
        #: Those of a process that has none: what follows on its cancels is owed.
        self.ignorant = async_sessionmaker(self.engine, expire_on_commit=False)
        FollowUps().attach(self.ignorant)

    async def surely(self, once: Callable[[], Awaitable[T]]) -> T:
        """Await `once()`, again and again while there is no database."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return await once()
            except (sa_exc.OperationalError, sa_exc.InterfaceError, OSError):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)

    async def scalar(self, sql: str, **parameters: Any) -> Any:
        """One value of one query."""

        async def once() -> Any:
            async with self.engine.connect() as connection:
                return await connection.scalar(text(sql), parameters)

        return await self.surely(once)

    async def close(self) -> None:
        app.awa.detach(self.knowing)
        await self.engine.dispose()


class Load:
    """Enqueues `jobs` jobs over `seconds`, and cancels a few."""

    def __init__(self, driver: Driver, jobs: int, seed: int, slow: float) -> None:
        self._driver = driver
        self._jobs = jobs
        self._slow = slow
        self._plans = random.Random(f"{seed} plans")
        self._rng = random.Random(f"{seed} load")
        self._batch = 0
        self._cancellable: list[int] = []
        self.enqueued = 0
        self.rolled_back = 0
        self.withdrawn = 0
        self.refused = 0

    @property
    def progress(self) -> float:
        """How much is enqueued, from 0 to 1."""
        return self.enqueued / self._jobs

    async def enqueue_all(self, seconds: float) -> None:
        """Evenly over the time; later, while the workers cannot keep up."""
        began = time.monotonic()
        while self.enqueued < self._jobs:
            due = max(self._jobs * (time.monotonic() - began) / seconds, AHEAD / 4)
            while await self._driver.scalar(OPEN) < AHEAD and self.enqueued < min(due, self._jobs):
                for _ in range(5):
                    await self._enqueue_some(min(self._rng.randint(1, _BATCH), self._jobs - self.enqueued))
            await asyncio.sleep(0.1)

    async def _enqueue_some(self, size: int) -> None:
        requests = [plan(self._plans, self._slow) for _ in range(size)]
        self._batch += 1
        if self._rng.random() < 0.1:
            await self._driver.surely(lambda: self._send(requests, ghost=True))
            self.rolled_back += size
        ids = await self._driver.surely(lambda: self._send(requests, ghost=False)) if requests else []
        self.enqueued += size
        self._cancellable += ids[:1]

    async def _send(self, requests: list[EnqueueRequest], *, ghost: bool) -> list[int]:
        """One transaction. When the answer to an earlier COMMIT was lost, the rows tell whether it happened."""
        batch = self._batch
        async with self._driver.knowing() as session:
            known = await session.scalars(select(Asked.job_id).where(Asked.batch == batch))
            if ids := list(known):
                return ids
            if self._rng.random() < 0.5:
                many = [_ghostly(request) for request in requests] if ghost else requests
                ids = [job_id for job_id in await later.enqueue_many(session, many) if job_id is not None]
            else:
                ids = await _one_by_one(session, [_ghostly(one) for one in requests] if ghost else requests)
            session.add_all(Asked(job_id=job_id, batch=batch) for job_id in ids)
            if ghost:
                await session.flush()
                await session.rollback()
            else:
                await session.commit()
            return ids

    async def cancel_some(self, pause: float) -> None:
        """Cancel jobs by id, wherever they are by then: with the specs at hand and without, committed or not."""
        while True:
            await asyncio.sleep(self._rng.uniform(0, 2 * pause))
            if not self._cancellable:
                continue
            # The last ones are about to run, others wait for their next attempt.
            job_id = self._cancellable.pop(
                self._rng.randrange(max(len(self._cancellable) - 10, 0), len(self._cancellable))
            )
            maker = self._rng.choice((self._driver.knowing, self._driver.ignorant))
            keep = self._rng.random() < 0.8
            try:
                await self._cancel(maker, job_id, keep=keep)
            except FollowUpError:
                self.refused += 1  # its spec balks: nothing is committed
            except JobNotFound:
                pass  # it is deleted by now; if it was not kept long enough, or is lost, the audit says so
            except (sa_exc.OperationalError, sa_exc.InterfaceError, OSError):
                pass  # a frozen worker holds the row, or there is no database: never mind

    async def _cancel(self, maker: async_sessionmaker[AsyncSession], job_id: int, *, keep: bool) -> None:
        async with maker() as session:
            if await later.cancel(session, job_id, reason="withdrawn") is None:
                return
            session.add(Withdrawn(job_id=job_id, by="knowing" if maker is self._driver.knowing else "ignorant"))
            if keep:
                await session.commit()
                self.withdrawn += 1
            else:
                await session.rollback()


def _ghostly(request: EnqueueRequest) -> EnqueueRequest:
    args: Any = request.args
    assert isinstance(args, Plan)
    return EnqueueRequest(args.model_copy(update={"ghost": True}), queue=request.queue, priority=request.priority)


async def _one_by_one(session: AsyncSession, requests: list[EnqueueRequest]) -> list[int]:
    jobs = [
        enqueue(
            session,
            request.args,
            queue=request.queue,
            priority=request.priority,
            max_attempts=request.max_attempts,
            delay=request.delay,
            deadline=request.deadline,
            metadata=request.metadata,
        )
        for request in requests
    ]
    await session.flush()
    return [job.id for job in jobs]
