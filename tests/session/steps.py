"""The steps that tests begin with: a job in some state, brought there by the verbs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import inspect
from sqlalchemy.orm import Session

from awa_sqla import Job, JobArgs, claim, enqueue
from tests.app import Signup
from tests.worlds import Database

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


def available(session: Session, args: JobArgs | None = None, **options: Any) -> Job:
    """A committed job that waits for a worker."""
    job = enqueue(session, args or Signup(), **options)
    session.commit()
    assert isinstance(job, Job)
    return job


def running(session: Session, args: JobArgs | None = None, **options: Any) -> Job:
    """A committed job that this session has claimed."""
    job = available(session, args, **options)
    return again(session, job)


def again(session: Session, job: Job) -> Job:
    """Claim an available job, and commit the claim."""
    [claimed] = claim(session, job.queue, limit=1, worker_id="w1")
    assert claimed.id == job.id, "another job of this queue came first"
    session.commit()
    return claimed


def due_again(database: Database, session: Session, job_id: int, *, look: bool = True) -> Any:
    """What promotion does, at once: the scheduled job is available."""
    columns = "id, " + ", ".join(
        c.name for c in inspect(Job).columns if c.name not in ("id", "state", "run_at", "aged")
    )
    database.execute(
        f"WITH gone AS (DELETE FROM scheduled_jobs WHERE id = {job_id} RETURNING *) "
        f"INSERT INTO jobs_hot ({columns}, state, run_at) SELECT {columns}, 'available', now() FROM gone"
    )
    return session.get_one(Job, job_id) if look else None


@contextmanager
def rolled_back(session: Session) -> Iterator[None]:
    """What happens in a savepoint that is rolled back."""
    savepoint = session.begin_nested()
    yield
    savepoint.rollback()


def wait_of(row: Any) -> timedelta:
    """From the end of the attempt to the next one's due time, which are two readings of one clock."""
    return timedelta(milliseconds=round((row.run_at - row.finalized_at) / timedelta(milliseconds=1)))
