"""From a request to a transient row, and the record that a changed row leaves out of date."""

from __future__ import annotations

from sqlalchemy import inspect
from sqlalchemy.orm import Session

from awa_sqla.models.job import Job, JobRecord, ScheduledJob
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session.lineage import Parent


def build(request: EnqueueRequest, parent: Parent | None) -> Job | ScheduledJob:
    """The transient row of a request."""
    values = request.columns()
    if parent is not None:
        values["parent_id"], values["root_id"] = parent.id, parent.root_id
        values["parent_outcome"] = None if parent.outcome is None else parent.outcome.value
    if not request.scheduled:
        return Job(**values)
    job = ScheduledJob(**values)
    job.pending_delay = request.delay
    return job


def expire_record(session: Session, job_id: int) -> None:
    """The view's row of this job, if it was loaded, is out of date."""
    record = session.identity_map.get(inspect(JobRecord).identity_key_from_primary_key((job_id,)))
    if record is not None:
        session.expire(record)
