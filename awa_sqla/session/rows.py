"""From a request to a transient row, and the record that a changed row leaves out of date."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, event, func, inspect, select
from sqlalchemy.orm import Mapper, Session
from sqlalchemy.orm.attributes import flag_dirty

from awa_sqla.models.job import Job, JobRecord, ScheduledJob
from awa_sqla.requests import EnqueueRequest, Options
from awa_sqla.session.lineage import Parent


def empty(options: Options) -> Job | ScheduledJob:
    """The transient row that a request with these options will fill."""
    if not options.scheduled:
        return Job()
    job = ScheduledJob()
    job.pending_delay = options.delay
    return job


def fill(job: Job | ScheduledJob, request: EnqueueRequest, parent: Parent | None) -> Job | ScheduledJob:
    """Give a transient row its values."""
    values = request.columns()
    if parent is not None:
        values |= parent.columns()
    for key, value in values.items():
        setattr(job, key, value)
    job.on_conflict = request.on_conflict or "raise"
    return job


def build(request: EnqueueRequest, parent: Parent | None) -> Job | ScheduledJob:
    """The transient row of a request."""
    return fill(empty(request), request, parent)


_CLOCK = select(func.clock_timestamp())


def set_due_times(session: Session) -> None:
    """In `before_flush`: `delay` becomes `run_at` by the database's clock, one reading for all of a flush."""
    waiting = [row for row in session.new if isinstance(row, ScheduledJob) and row.pending_delay is not None]
    if waiting:
        clock: Any = session.scalar(_CLOCK)
        for row in waiting:
            row.run_at = clock + row.pending_delay


def _late_due_time(mapper: Mapper[Any], connection: Connection, row: ScheduledJob) -> None:  # noqa: ARG001
    """The same for a row that was added by a `before_flush` listener after ours."""
    if row.pending_delay is not None and inspect(row).dict.get("run_at") is None:
        row.run_at = connection.execute(_CLOCK).scalar_one() + row.pending_delay


event.listen(ScheduledJob, "before_insert", _late_due_time)


def expire_record(session: Session, job_id: int) -> None:
    """The view's row of this job, if it was loaded, is out of date."""
    record = session.identity_map.get(inspect(JobRecord).identity_key_from_primary_key((job_id,)))
    if record is not None:
        session.expire(record)
        flag_dirty(record)  # so that a savepoint's rollback expires what is read of it meanwhile
