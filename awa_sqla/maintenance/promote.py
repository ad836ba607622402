"""Promotion: scheduled and retryable jobs that are due become available."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Integer, bindparam, delete, func, insert, literal_column, null, select
from sqlalchemy.orm import Session

from awa_sqla.models.base import StateText
from awa_sqla.models.job import SHARED, Job, ScheduledJob
from awa_sqla.session.guards import MANAGED
from awa_sqla.session.statements import AS_OF, by_key
from awa_sqla.session.table import TRANSITIONS

_target = literal_column(f"'{TRANSITIONS['promote'].target.value}'", StateText)

_due = (
    select(ScheduledJob.id)
    .where(ScheduledJob.run_at <= AS_OF)
    .order_by(ScheduledJob.run_at, ScheduledJob.id)
    .limit(bindparam("most", type_=Integer))
    .with_for_update(skip_locked=True)
    .cte("due")
    .prefix_with("MATERIALIZED")
)

_gone = (
    delete(ScheduledJob)
    .where(by_key(ScheduledJob.id, _due))
    .returning(*(getattr(ScheduledJob, key) for key in SHARED))
    .cte("gone")
)

_columns = {key: Job.__table__.c["metadata" if key == "meta" else key] for key in SHARED}
_overrides = {"state": _target, **dict.fromkeys(TRANSITIONS["promote"].clears, null()), "finalized_at": null()}

_PROMOTE = (
    insert(Job.__table__)
    .from_select(
        [column.name for column in _columns.values()],
        select(*(_overrides.get(key, _gone.c[key]) for key in _columns)),
    )
    .returning(Job.__table__.c.queue)
    .execution_options(**{MANAGED: True})
)

_NEXT = select(func.extract("epoch", func.min(ScheduledJob.run_at) - func.clock_timestamp()))


class Promoted(NamedTuple):
    """What one pass did: how many jobs, into which queues, and how long until the next is due (None: none)."""

    jobs: int
    queues: frozenset[str]
    next_due: timedelta | None


def promote(session: Session, *, limit: int = 4096) -> Promoted:
    """Make up to `limit` due jobs available, oldest due time first; rows that others hold are passed over.

    Attempt, lease and progress are kept. Two statements. The trigger wakes workers at commit.
    """
    queues: list[str] = list(session.scalars(_PROMOTE, {"most": limit}))
    wait = session.scalar(_NEXT)
    next_due = None if wait is None else timedelta(seconds=max(float(wait), 0))
    return Promoted(len(queues), frozenset(queues), next_due)
