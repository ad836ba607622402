"""Handlers that wait for a callback: woken by a notification, with one query for all of them behind it.

A wait holds its handler's slot, and its row is kept alive by the heartbeat; the deadline stands still. It ends with the
answer, with the attempt, or when the handler is interrupted or gives up: then the job runs again, if it still can.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import BigInteger, and_, bindparam, column, func, select
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from awa_sqla.errors import StaleJobError
from awa_sqla.models.job import Attempt, Job
from awa_sqla.session.callbacks import CallbackToken
from awa_sqla.worker.books import Books
from awa_sqla.worker.finalize import insisting
from awa_sqla.worker.flight import Flight
from awa_sqla.worker.run import Run, WaitInterruptedError

log = logging.getLogger("awa_sqla.worker")

#: Seconds that an interrupted wait may take to put its row right.
TIDY = 2.0

_asked = (
    func.unnest(bindparam("ids", type_=ARRAY(BigInteger)), bindparam("leases", type_=ARRAY(BigInteger)))
    .table_valued(column("id", BigInteger), column("run_lease", BigInteger), name="asked")
    .render_derived()
)
#: Of these attempts, those that do not wait any longer.
_OVER = (
    select(_asked.c.id)
    .outerjoin(Job, and_(Job.id == _asked.c.id, Job.run_lease == _asked.c.run_lease, Job.attended_at.is_not(None)))
    .where(Job.id.is_(None))
)


class Waits(Books):
    """The books of a worker, and the waits of its handlers. `patience` says how many seconds pass between two looks."""

    def __init__(self, maker: async_sessionmaker[AsyncSession], flight: Flight, patience: Callable[[], float]) -> None:
        super().__init__(maker)
        self._flight = flight
        self._patience = patience
        #: By job: each wait's run, so a run is there once for each of its waits.
        self._waiting: dict[int, list[Run]] = {}

    async def wait_for_callback(self, attempt: Attempt, token: CallbackToken) -> Any:
        """Wait for the callback of `token`; returns its payload.

        Raises `CallbackNotFound`, `StaleJobError`, and `WaitInterruptedError` when the run is asked to stop.
        """
        run = self._flight.get(attempt)
        if run is None:  # a task or thread that the handler has left behind
            raise StaleJobError(attempt.id, attempt.run_lease)
        self.wake(attempt.id)  # an earlier attempt of the job, if that still waits, has ended
        self._waiting.setdefault(attempt.id, []).append(run)
        run.pause()
        try:
            async with run.turning:
                nudged = run.nudged  # before the look, so that none is missed
                answer = await self.attend(attempt, token)
            while answer is None:
                if run.stop_reason is None:
                    await nudged.wait()
                    nudged = run.nudged
                stopping = run.stop_reason  # before the look, which else may have been too early to say why
                answer = await self.look(attempt, token)  # also says when the job has ended, whatever the reason
                if answer is None and stopping is not None:
                    raise WaitInterruptedError(stopping)
        except StaleJobError:
            raise
        except BaseException:
            if run.stop_reason is None and self._waiting[attempt.id].count(run) == 1:
                async with run.turning:  # a wait that begins meanwhile begins after this one's end
                    await self._given_up(attempt)
            raise
        finally:
            if not self._leave(run):
                run.go_on()
        return answer.payload

    def _leave(self, run: Run) -> bool:
        """One wait of the run is over; whether the run has another."""
        waiting = self._waiting[run.attempt.id]
        waiting.remove(run)
        if not waiting:
            del self._waiting[run.attempt.id]
        return run in waiting

    async def _given_up(self, attempt: Attempt) -> None:
        """The handler goes on without an answer; if that cannot be written, its outcome can be all the same."""
        try:
            async with asyncio.timeout(TIDY):
                await self.go_on(attempt)
        except StaleJobError:
            pass  # the answer came just now, or the attempt has ended
        except Exception as exc:  # noqa: BLE001 - the reason why the wait ended is what the handler must see
            log.warning("job %s waits for its callback no longer, but is not marked so: %s", attempt.id, exc)

    def wake(self, job_id: int) -> None:
        """Its callback may have come."""
        for run in self._waiting.get(job_id, ()):
            run.nudge()

    def wake_all(self) -> None:
        """Notifications may have gone unheard."""
        for job_id in self._waiting:
            self.wake(job_id)

    async def serve(self) -> None:
        """Look after all waits, for ever: one query for those that have ended."""
        while True:
            await asyncio.sleep(self._patience())
            if self._waiting:
                for job_id in await insisting(self._over):
                    self.wake(job_id)

    async def _over(self) -> list[int]:
        attempts = {run.attempt for runs in self._waiting.values() for run in runs}
        parameters = {"ids": [a.id for a in attempts], "leases": [a.run_lease for a in attempts]}
        async with self._maker.begin() as session:
            return list((await session.scalars(_OVER, parameters)).all())
