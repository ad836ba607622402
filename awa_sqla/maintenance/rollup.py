"""Counts: how many finished jobs and dead letters each queue has, written down so that nobody has to count to ask.

Live jobs are few and change all the time: those are counted when somebody asks. Finished ones are many, and a count
that is a minute old will do. They are counted in the index alone, queue by queue, and never estimated.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    DateTime,
    Double,
    Executable,
    Text,
    bindparam,
    cast,
    delete,
    func,
    literal_column,
    select,
    true,
    tuple_,
    union_all,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from awa_sqla.maintenance.groups import groups
from awa_sqla.models.base import JobState
from awa_sqla.models.job import DeadLetter, Job
from awa_sqla.models.upkeep import JobCount
from awa_sqla.session.statements import AS_OF, NOW, among
from awa_sqla.session.table import TERMINAL

#: The state under which dead letters are counted.
DEAD = "dead"

_finished = among(Job.state, tuple(state for state in JobState if state in TERMINAL))


class Counted(NamedTuple):
    """How many rows were counted, and how many seconds that took by the database's clock."""

    rows: int
    seconds: float


def _counted_by(model: type[Job | DeadLetter], found: CTE, state: Any, *where: ColumnElement[bool]) -> Any:
    """(queue, state, how many), each group counted for itself: then the index is all that is read."""
    mine = (*where, *(getattr(model, key) == found.c[key] for key in ("state", "queue") if key in found.c))
    count = select(func.count().label("jobs")).select_from(model).where(*mine).correlate(found).lateral("count")
    return select(found.c.queue, state.label("state"), count.c.jobs).select_from(found.join(count, true()))


_jobs = groups("found", (Job.state, Job.queue), Job.finalized_at, _finished)
_letters = groups("found_dead", (DeadLetter.queue,), DeadLetter.dlq_at)
_counted = (
    union_all(
        _counted_by(Job, _jobs, cast(_jobs.c.state, Text), _finished),
        _counted_by(DeadLetter, _letters, literal_column(f"'{DEAD}'", Text)),
    )
    .cte("counted")
    .prefix_with("MATERIALIZED")
)
_insert = insert(JobCount).from_select(
    ["queue", "state", "jobs", "counted_at"],
    # In this order whoever counts: two at once cannot wait for each other.
    select(*_counted.c, AS_OF).order_by(_counted.c.queue, _counted.c.state),
)
_written = (
    _insert.on_conflict_do_update(
        index_elements=[JobCount.queue, JobCount.state],
        set_={"jobs": _insert.excluded.jobs, "counted_at": _insert.excluded.counted_at},
        where=JobCount.counted_at <= _insert.excluded.counted_at,  # a later count may have been faster
    )
    .returning(JobCount.queue)
    .cte("written")
)
_COUNT: Executable = select(
    cast(func.coalesce(func.sum(_counted.c.jobs), 0), BigInteger),
    AS_OF,
    cast(func.extract("epoch", NOW - AS_OF), Double),
).add_cte(_written)

_key = tuple_(JobCount.queue, JobCount.state)
_vanished = (
    select(JobCount.queue, JobCount.state)
    .where(JobCount.counted_at < bindparam("as_of", type_=DateTime(timezone=True)))
    .with_for_update(skip_locked=True)
    .cte("vanished")
    .prefix_with("MATERIALIZED")
)
_FORGET: Executable = delete(JobCount).where(_key.in_(select(_vanished))).execution_options(synchronize_session=False)


def count_finished(session: Session) -> Counted:
    """Count finished jobs and dead letters by queue and state, and write `job_counts` anew. Two statements.

    The counts are of the moment when the first statement began, which is their `counted_at`; those of a later moment
    are not overwritten. A million rows took 0.3 s, and 0.8 s before they were vacuumed: mind how often.
    """
    rows, as_of, seconds = session.execute(_COUNT).one()
    session.execute(_FORGET, {"as_of": as_of})
    return Counted(rows, seconds)


def finished_counts(session: Session) -> dict[tuple[str, str], tuple[int, datetime]]:
    """By queue and state ("dead" for dead letters), how many jobs there were when they were counted last, and when.

    What is missing there were none of. Nothing of it is counted now: one small read.
    """
    read = select(JobCount.queue, JobCount.state, JobCount.jobs, JobCount.counted_at)
    return {(queue, state): (jobs, counted_at) for queue, state, jobs, counted_at in session.execute(read)}
