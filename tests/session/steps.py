"""The steps that tests begin with: a job in some state, brought there by the verbs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy.orm import Session

from awa_sqla import Job, JobArgs, claim, enqueue
from tests.app import Signup

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
