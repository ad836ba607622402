"""Firing a tick: the mark on the schedule and its job, in one statement or one transaction.

The mark is a compare-and-set on what was read of the schedule: of any number of processes that see the same tick, one
makes the job, and the others see that they have lost. Nothing waits for a lock: a row that somebody holds is lost, too,
for now.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Executable, Text, and_, bindparam, func, insert, null, select, true, update
from sqlalchemy.orm import Session

from awa_sqla.args import JobArgs
from awa_sqla.maintenance.schedules import Stored
from awa_sqla.models.base import jobs_id_seq
from awa_sqla.models.job import Job, Json, Moment
from awa_sqla.models.upkeep import CronSchedule
from awa_sqla.periodic import metadata_of
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session import listeners, rows
from awa_sqla.session.guards import MANAGED
from awa_sqla.session.periodic import JOB_COLUMNS, job_of
from awa_sqla.session.statements import NOW
from awa_sqla.session.target import require_transaction

_table, _jobs = CronSchedule.__table__, Job.__table__
_c = _table.c

#: The schedule as it was read, and not paused: nobody has fired, changed, resumed or deleted it meanwhile.
_as_read = and_(
    _c.name == bindparam("of_name", type_=Text),
    _c.last_enqueued_at.is_not_distinct_from(bindparam("seen", type_=Moment)),
    _c.counts_from == bindparam("since", type_=Moment),
    _c.cron_expr == bindparam("expr", type_=Text),
    _c.timezone == bindparam("zone", type_=Text),
    _c.paused_at.is_(None),
)


_LEFT_OUT = {name: getattr(JobArgs.__awa__, name) for name in ("priority", "max_attempts")}


def _marking(kind: ColumnElement[bool], **values: Any) -> Any:
    condition = and_(_as_read, kind)
    free = select(_c.name).where(condition).with_for_update(skip_locked=True, key_share=True).cte("free")
    return (
        update(_table)
        .where(_c.name.in_(select(free.prefix_with("MATERIALIZED").c.name)), condition)
        .values(last_enqueued_at=bindparam("tick", type_=Moment), last_error=null(), failed_at=null(), **values)
    )


def _firing(kind: ColumnElement[bool], job: Mapping[str, ColumnElement[Any]] | None = None) -> Executable:
    """The mark, whose row feeds the INSERT of the job: with these values, or those of the schedule itself."""
    marked = (
        _marking(kind, last_job_id=jobs_id_seq.next_value())
        .returning(_c.last_job_id, *(_c[name] for name in JOB_COLUMNS))
        .cte("marked")
    )
    values = {name: marked.c[name] if job is None else job[name] for name in JOB_COLUMNS}
    if job is None:  # schedules that were written by hand may leave these two out
        values |= {name: func.coalesce(values[name], default) for name, default in _LEFT_OUT.items()}
    values["metadata"] = values["metadata"].op("||")(bindparam("mark", type_=Json))
    return (
        insert(_jobs)
        .from_select(["id", *values], select(marked.c.last_job_id, *values.values()))
        .returning(_jobs.c.id)
        .execution_options(**{MANAGED: True})
    )


_stored, _plain = _c.args.is_not(None), _c.uniqueness.is_(None)

FIRE_STORED = _firing(and_(_stored, _plain))
FIRE_BUILT = _firing(
    _c.args.is_(None), {name: bindparam(f"job_{name}", type_=_jobs.c[name].type) for name in JOB_COLUMNS}
)
_MARK_STORED = _marking(and_(_stored, _c.uniqueness.is_not(None))).returning(_c.name)
_MARK_BUILT = _marking(_c.args.is_(None)).returning(_c.name)
_SET_JOB = update(_table).where(_c.name == bindparam("of_name", type_=Text))
_IMPATIENT = select(func.set_config("lock_timeout", bindparam("patience", type_=Text), true()))

#: How long a unique job waits for an open transaction that has claimed its key, before the tick is left for later.
PATIENCE = "100ms"

#: What a job has where its request says nothing.
_DEFAULTS: dict[str, Any] = {"tags": [], "deadline_seconds": None, "meta": {}, "args_version": 1}


class Fired(NamedTuple):
    """A tick that was marked; without a job when that would have been a duplicate."""

    job_id: int | None


def fire(session: Session, row: Stored, tick: datetime, request: EnqueueRequest | None = None) -> Fired | None:
    """Mark a tick of a schedule as it was read, and add its job; None when it is not as it was read any more.

    `request` is the job where the app builds it. One statement for plain jobs. A unique one is marked, claims its key
    and is added in the caller's transaction, which should end then: its locks are not waited for any longer than 100
    ms. A duplicate is left out, and the tick marked. Nothing is marked when the job cannot be added.
    """
    parameters: dict[str, Any] = {
        "of_name": row.name,
        "seen": row.last_enqueued_at,
        "since": row.counts_from,
        "expr": row.cron_expr,
        "zone": row.timezone,
        "tick": tick,
    }
    mark = metadata_of(row.name, tick)
    if request is None and not row.unique:
        return _fired(session.scalar(FIRE_STORED, {**parameters, "mark": mark}))
    if request is not None and request.uniqueness is None and not request.scheduled:
        job = {**_DEFAULTS, **request.columns()}
        job["metadata"] = job["meta"]
        built = {f"job_{name}": job[name] for name in JOB_COLUMNS}
        return _fired(session.scalar(FIRE_BUILT, {**parameters, **built, "mark": mark}))
    return _fire_in_steps(session, parameters, mark, request)


def _fired(job_id: int | None) -> Fired | None:
    return None if job_id is None else Fired(job_id)


def _fire_in_steps(
    session: Session, parameters: dict[str, Any], mark: dict[str, Any], request: EnqueueRequest | None
) -> Fired | None:
    """For jobs that are unique or scheduled: by the road of `enqueue()`."""
    listeners.install(session, "fire")
    require_transaction(session)
    session.execute(_IMPATIENT, {"patience": PATIENCE})
    if session.scalar(_MARK_STORED if request is None else _MARK_BUILT, parameters) is None:
        return None
    if request is None:
        schedule = session.get_one(CronSchedule, parameters["of_name"], populate_existing=True)
        job: Any = job_of(schedule, mark)
    else:
        job = rows.build(request, None)
        job.meta = {**(request.metadata or {}), **mark}
    job.on_conflict = "skip"
    session.add(job)
    session.flush()
    if job.duplicate_of is not None:
        return Fired(None)
    session.execute(_SET_JOB.values(last_job_id=job.id), parameters)
    return Fired(job.id)


_FAILED = (
    update(_table)
    .where(
        _c.name.in_(
            select(_c.name)
            .where(_c.name == bindparam("of_name", type_=Text))
            .with_for_update(skip_locked=True, key_share=True)
        )
    )
    .values(last_error=bindparam("error", type_=Text), failed_at=NOW)
)


def write_failure(session: Session, name: str, error: str) -> None:
    """Keep on a schedule why it does not fire, until it does."""
    session.execute(_FAILED, {"of_name": name, "error": error})
