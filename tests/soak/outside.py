"""Those who answer callbacks: soon, late, again, or not at all; in a transaction that is rolled back now and then."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from uuid import UUID

from sqlalchemy import exc as sa_exc
from sqlalchemy import select

from awa_sqla import CallbackNotFound, Job, JobState
from awa_sqla import asyncio as later
from tests.soak.load import Driver
from tests.soak.tables import Answered

_WAITING = select(Job.id, Job.run_lease, Job.callback_id, Job.kind, Job.state).where(Job.callback_id.is_not(None))
#: Seconds between two looks.
PAUSE = 0.3


class Outside:
    """Answers whatever callback is registered, also of jobs that still run."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self._driver = driver
        self._rng = random.Random(f"{seed} outside")
        #: Callbacks that have been answered, have come too late, or nobody waits for any more.
        self._old: list[tuple[int, int, UUID]] = []
        self.in_vain = 0

    async def answer_all(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(PAUSE)
            try:
                async with self._driver.ignorant() as session:
                    waiting = (await session.execute(_WAITING)).all()
                for job_id, lease, callback_id, kind, state in waiting:
                    if self._rng.random() < (0.5 if state is JobState.WAITING_EXTERNAL else 0.1):
                        await self._answer(job_id, lease, callback_id, attended=kind == "attend")
                    self._old.append((job_id, lease, callback_id))
                    old = self._old.pop(self._rng.randrange(len(self._old)))
                    await self._answer(*old, attended=self._rng.random() < 0.5)  # again, or late
                    del self._old[:-200]
            except (sa_exc.OperationalError, sa_exc.InterfaceError, OSError):
                pass  # the server is just restarting, or a frozen worker holds the row

    async def _answer(self, job_id: int, lease: int, callback_id: UUID, *, attended: bool) -> None:
        how = self._rng.choices(("resume", "complete", "fail"), (8, 1, 1) if attended else (0, 8, 2))[0]
        payload: dict[str, Any] = {"answer": str(callback_id)}
        maker = self._rng.choice((self._driver.knowing, self._driver.ignorant))
        async with maker() as session:
            try:
                if how == "resume":
                    await later.resume_external(session, callback_id, payload)
                elif how == "complete":
                    await later.complete_external(session, callback_id, payload)
                else:
                    await later.fail_external(session, callback_id, "refused")
            except CallbackNotFound:
                self.in_vain += 1
                return
            session.add(Answered(job_id=job_id, run_lease=lease, callback_id=callback_id, how=how))
            if self._rng.random() < 0.1:
                await session.rollback()
            else:
                await session.commit()
