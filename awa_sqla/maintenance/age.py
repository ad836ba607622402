"""Ageing: the longer an available job has waited, the higher its priority.

One level for each whole interval of its queue since `run_at`, and no higher than 1. How far it has risen follows from
how long it has waited and is written in `aged`: however many run this, and however often, a job rises once for each
interval. A claim and a cancellation give it its own priority back. Jobs of paused queues age too.

Rows are found without reading any that stay. At each level, the newest row that has risen k levels is a mark: what is
newer, and has waited k intervals, has not risen so far yet. This holds because a lower level's rows move up only when
there is nothing left to do at the levels above. A job that arrives behind the mark, because it became available more
than an interval after its due time, is found once it has waited so long that every job at its level has to rise: three
intervals after its due time at the latest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    CTE,
    Boolean,
    ColumnElement,
    DateTime,
    Double,
    Executable,
    Integer,
    Select,
    case,
    cast,
    column,
    func,
    literal_column,
    select,
    true,
    update,
    values,
)
from sqlalchemy.orm import Session

from awa_sqla import defaults, limits
from awa_sqla.maintenance.groups import ONE, ago, fairly, groups, in_force, plain
from awa_sqla.models.base import JobState
from awa_sqla.models.job import Job
from awa_sqla.models.records import Queue
from awa_sqla.session.guards import MANAGED
from awa_sqla.session.statements import AS_OF, among, by_key, given_priority, still_available

_OPTIONS: dict[str, Any] = {"synchronize_session": False, MANAGED: True}
_available = among(Job.state, (JobState.AVAILABLE,))
# In the text, so that it matches the partial index.
_has_risen = Job.aged > literal_column("0", Integer)
_interval = in_force("aging", defaults.PRIORITY_AGING)

# ------------------------------------------------------------------- rising

_LEVELS = len(limits.PRIORITIES)
#: What is looked for, in this order: at each priority, rows that are to have risen k levels; those that have waited
#: longest first. Rows that have waited for the last k, or longer, rise whatever they were.
_WINDOWS = [
    (priority, k, k == _LEVELS + 1 - priority)
    for priority in limits.PRIORITIES[1:]
    for k in range(_LEVELS + 1 - priority, 0, -1)
]
_window = values(
    column("priority", Integer), column("k", Integer), column("last", Boolean), name="windows", literal_binds=True
).data(_WINDOWS)

_EVER = literal_column("'-infinity'::timestamptz", DateTime(timezone=True))
_MICROSECOND = literal_column("1e-6", Double)


def _due() -> CTE:
    """The queues in which some job that can rise has waited for an interval, with that interval."""
    found = groups("found", (Job.queue, Job.priority), Job.run_at, _available)
    oldest = (
        select(found.c.queue, _interval.label("seconds"), func.min(found.c.run_at).label("run_at"))
        .outerjoin(Queue, Queue.queue == found.c.queue)
        .where(found.c.priority > limits.PRIORITIES[0])
        .group_by(found.c.queue, _interval)
        .cte("oldest")
    )
    return (
        select(oldest.c.queue, oldest.c.seconds)
        .where(oldest.c.run_at <= ago(oldest.c.seconds))
        .order_by(oldest.c.run_at)
        .cte("due")
        .prefix_with("MATERIALIZED")
    )


def _rising(of: CTE, most: ColumnElement[int], others: Sequence[ColumnElement[bool]]) -> Select[Any]:
    """At most `most` rows of each queue that have not risen as far as they should."""
    at_level = (_available, Job.queue == of.c.queue, Job.priority == _window.c.priority)
    mark = (
        select(Job.run_at)
        .where(*at_level, _has_risen, Job.aged == _window.c.k, ~_window.c.last)
        .order_by(Job.run_at.desc())
        .limit(ONE)
        .correlate(of, _window)
        .lateral("mark")
    )
    before = case((~_window.c.last, ago(of.c.seconds * (_window.c.k + 1))))
    beyond = func.coalesce(func.greatest(before, mark.c.run_at), _EVER)
    job = (
        select(Job.id)
        .where(
            *at_level,
            Job.run_at > beyond,
            Job.run_at <= ago(of.c.seconds * _window.c.k),
            Job.aged < _window.c.k,
            *others,
        )
        .order_by(Job.run_at, Job.id)
        .limit(most)
        .with_for_update(skip_locked=True, key_share=True)
        .correlate(of, _window, mark)
        .lateral("job")
    )
    sources = _window.outerjoin(mark, true()).join(job, true())
    return select(job.c.id).select_from(sources).limit(most).correlate(of)


# Of the row itself, once more: it may have changed, and so may its queue.
_seconds = (
    select(func.coalesce(Queue.override_aging_seconds, Queue.declared_aging_seconds))
    .where(Queue.queue == Job.queue)
    .scalar_subquery()
)
_waited = cast(func.extract("epoch", AS_OF - Job.run_at), Double)
# The database's clock has no smaller interval, and nothing can overflow.
_intervals = _waited / func.greatest(func.coalesce(_seconds, plain(defaults.PRIORITY_AGING)), _MICROSECOND)
_risen = func.least(cast(func.floor(func.least(_intervals, _LEVELS)), Integer), Job.priority + Job.aged - 1)
_RISE: Executable = (
    update(Job)
    .where(by_key(Job.id, fairly(_due(), Job.id, _rising)), still_available, Job.aged < _risen)
    .values(priority=Job.priority + Job.aged - _risen, aged=_risen)
    .returning(Job.queue)
    .execution_options(**_OPTIONS)
)

# ------------------------------------------------------------ ageing is off


def _off() -> CTE:
    """The queues that have risen rows and no ageing."""
    found = groups("found", (Job.queue,), Job.priority, _available, _has_risen)
    return (
        select(found.c.queue)
        .outerjoin(Queue, Queue.queue == found.c.queue)
        .where(ago(_interval).is_(None))
        .cte("due")
        .prefix_with("MATERIALIZED")
    )


def _risen_once(of: CTE, most: ColumnElement[int], others: Sequence[ColumnElement[bool]]) -> Select[Any]:
    return (
        select(Job.id)
        .where(_available, _has_risen, Job.queue == of.c.queue, *others)
        .order_by(Job.priority, Job.aged, Job.run_at)
        .limit(most)
        .with_for_update(skip_locked=True, key_share=True)
        .correlate(of)
    )


_GO_BACK: Executable = (
    update(Job)
    .where(by_key(Job.id, fairly(_off(), Job.id, _risen_once)), still_available, _has_risen)
    .values(**given_priority)
    .returning(Job.queue)
    .execution_options(**_OPTIONS)
)


def age(session: Session, *, limit: int = 1000) -> int:
    """Let up to `limit` available jobs rise as far as they have waited for; how many rows were changed.

    Those that have waited longest first, each queue its share. Jobs of queues whose ageing was switched off get their
    own priority back; a longer interval takes nothing back. Two statements; rows that others hold are passed over.
    """
    risen = len(session.scalars(_RISE, {"most": limit}).all())
    if risen < limit:
        risen += len(session.scalars(_GO_BACK, {"most": limit - risen}).all())
    return risen
