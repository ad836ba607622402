"""Promotion: scheduled and retryable jobs that are due become available."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Executable,
    Integer,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    text,
)
from sqlalchemy.orm import Session

from awa_sqla.maintenance.duplicates import may_come_in
from awa_sqla.models.base import JobState, StateText
from awa_sqla.models.job import CLAIMS_AT_PROMOTION, SHARED, Job, ScheduledJob
from awa_sqla.session import listeners
from awa_sqla.session.guards import MANAGED
from awa_sqla.session.statements import AS_OF, by_key
from awa_sqla.session.table import TRANSITIONS
from awa_sqla.session.target import require_transaction

_target = literal_column(f"'{TRANSITIONS['promote'].target.value}'", StateText)

_due = (
    select(ScheduledJob.id)
    .where(ScheduledJob.run_at <= AS_OF, text(f"({CLAIMS_AT_PROMOTION}) IS NOT TRUE"))
    .order_by(ScheduledJob.run_at, ScheduledJob.id)
    .limit(bindparam("most", type_=Integer))
    .with_for_update(skip_locked=True)
    .cte("due")
    .prefix_with("MATERIALIZED")
)

_columns = {key: Job.__table__.c["metadata" if key == "meta" else key] for key in SHARED}
_overrides = {"state": _target, **dict.fromkeys(TRANSITIONS["promote"].clears, null()), "finalized_at": null()}


def _promotion(chosen: ColumnElement[bool]) -> Executable:
    gone = delete(ScheduledJob).where(chosen).returning(*(getattr(ScheduledJob, key) for key in SHARED)).cte("gone")
    return (
        insert(Job.__table__)
        .from_select(
            [column.name for column in _columns.values()],
            select(*(_overrides.get(key, gone.c[key]) for key in _columns)),
        )
        .returning(Job.__table__.c.queue)
        .execution_options(**{MANAGED: True})
    )


_PROMOTE = _promotion(by_key(ScheduledJob.id, _due))

# Jobs that are unique when available and were not before: they claim their keys first, one by one.
_claiming = and_(ScheduledJob.run_at <= AS_OF, text(CLAIMS_AT_PROMOTION))
_CLAIMING = (
    select(ScheduledJob)
    .where(_claiming)
    .order_by(ScheduledJob.run_at, ScheduledJob.id)
    .limit(bindparam("most", type_=Integer))
    .with_for_update(skip_locked=True)
    .execution_options(populate_existing=True)
)
_PROMOTE_ONE = _promotion(ScheduledJob.id == bindparam("job_id", type_=BigInteger))

_wait = func.extract("epoch", func.min(ScheduledJob.run_at) - func.clock_timestamp())
_WAIT: Executable = select(_wait)
_NEXT: Executable = select(_wait, select(ScheduledJob.id).where(_claiming).exists())


#: How many jobs may claim their keys in one pass; the others that it has promoted wait for its commit meanwhile.
CLAIMING = 100


class Promoted(NamedTuple):
    """What one pass did: how many jobs, into which queues, and how long until the next is due (None: none)."""

    jobs: int
    queues: frozenset[str]
    next_due: timedelta | None


def next_due(connection: Connection) -> timedelta | None:
    """How long until the next job is due: zero when one is, None when there is none. One statement that only reads."""
    return _until(connection.scalar(_WAIT))


def _until(wait: Any) -> timedelta | None:
    return None if wait is None else timedelta(seconds=max(float(wait), 0))


def promote(session: Session, *, limit: int = 4096) -> Promoted:
    """Make up to `limit` due jobs available, oldest due time first; rows that others hold are passed over.

    Attempt, lease and progress are kept. A job that finds its unique key taken is cancelled. Two statements, and more
    where there are such keys to claim. The trigger wakes workers at commit.
    """
    queues: list[str] = list(session.scalars(_PROMOTE, {"most": limit}))
    wait, claiming = session.execute(_NEXT).one()
    if claiming:
        queues += _promote_claiming(session, limit)
    return Promoted(len(queues), frozenset(queues), _until(wait))


def _promote_claiming(session: Session, limit: int) -> list[str]:
    listeners.install(session, "promote")
    require_transaction(session)
    queues: list[str] = []
    for job in session.scalars(_CLAIMING, {"most": min(limit, CLAIMING)}).all():
        if may_come_in(session, job, JobState.AVAILABLE):
            queues += session.scalars(_PROMOTE_ONE, {"job_id": job.id})
            session.expunge(job)
    return queues
