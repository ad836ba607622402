"""Periodic schedules: look at them, pause and resume, trigger, delete."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, case, delete, func, null, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session, make_transient_to_detached

from awa_sqla import limits
from awa_sqla.admin.audit import Deed
from awa_sqla.args import JobArgs
from awa_sqla.cron import Schedule
from awa_sqla.errors import InvalidJob
from awa_sqla.models.job import Job, ScheduledJob
from awa_sqla.models.upkeep import CronSchedule
from awa_sqla.periodic import from_stored, metadata_of
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session import lineage, rows
from awa_sqla.session.periodic import job_of
from awa_sqla.session.statements import NOW
from awa_sqla.session.steps import entered
from awa_sqla.session.target import SyncSession, sync_session

_KEYS = tuple(column.key for column in CronSchedule.__mapper__.column_attrs)
_COLUMNS: tuple[InstrumentedAttribute[Any], ...] = tuple(getattr(CronSchedule, key) for key in _KEYS)


def list_schedules(session: SyncSession, /) -> list[CronSchedule]:
    """All periodic schedules, by name. One statement. Raises `UnsupportedSession`."""
    target = sync_session(session, "admin.list_schedules")
    return list(_detached(target.execute(select(*_COLUMNS).order_by(CronSchedule.name))))


def pause_schedule(
    session: SyncSession, name: str, /, *, actor: str | None = None, reason: str | None = None
) -> CronSchedule:
    """Let a schedule not fire from the commit on, until it is resumed; it can still be triggered.

    Returns the schedule as it is then; one that was paused before keeps its `paused_at` and `paused_by`. Raises
    `InvalidJob` naming `name` for a schedule that is not there, `actor` or `reason`; `UnsupportedSession`.
    """
    deed, target = Deed(actor, reason), entered(session, "admin.pause_schedule")
    paused = CronSchedule.paused_at.is_not(None)
    return _change(
        target,
        name,
        deed,
        "pause_schedule",
        paused_at=func.coalesce(CronSchedule.paused_at, NOW),
        paused_by=case((paused, CronSchedule.paused_by), else_=actor),
    )


def resume_schedule(
    session: SyncSession, name: str, /, *, actor: str | None = None, reason: str | None = None
) -> CronSchedule:
    """Let a paused schedule fire again: from now on, what it has missed meanwhile does not fire.

    Returns the schedule as it is then; one that was not paused stays as it was. Raises what `pause_schedule` raises.
    """
    deed, target = Deed(actor, reason), entered(session, "admin.resume_schedule")
    paused = CronSchedule.paused_at.is_not(None)
    return _change(
        target,
        name,
        deed,
        "resume_schedule",
        counts_from=case((paused, NOW), else_=CronSchedule.counts_from),
        paused_at=null(),
        paused_by=null(),
    )


def trigger_schedule(
    session: SyncSession,
    name: str,
    /,
    *,
    args: JobArgs | None = None,
    actor: str | None = None,
    reason: str | None = None,
) -> Job | ScheduledJob:
    """Enqueue the job of a schedule now, also of a paused one; when it fires next does not change.

    `args` are for a schedule whose arguments the app builds, or to use others than it has. The job's metadata say
    `triggered_manually`. Flushes; returns this session's new job. Raises `InvalidJob` naming `name` for a schedule
    that is not there, `args` where they are missing or of another kind, `actor` or `reason`; `UniqueConflict` when its
    unique job is there already; `UnsupportedSession`.
    """
    deed, target = Deed(actor, reason), entered(session, "admin.trigger_schedule")
    schedule = _found(target, name)
    mark = {**metadata_of(name, _clock(target)), "triggered_manually": True}
    parent = lineage.running()
    if args is not None:
        job = rows.build(_request(schedule, args, mark), parent)
    elif schedule.args is not None:
        job = job_of(schedule, mark)
        for key, value in (parent.columns() if parent else {}).items():
            setattr(job, key, value)
    else:
        raise InvalidJob("args", f"schedule {name!r} has its arguments built by its app when it fires: pass args=...")
    target.flush()
    target.add(job)
    try:
        target.flush()
    except BaseException:
        if job in target:
            target.expunge(job)
        raise
    deed.record(target, "trigger_schedule", name)
    return job


def delete_schedule(session: SyncSession, name: str, /, *, actor: str | None = None, reason: str | None = None) -> bool:
    """Delete a schedule; False when it is not there. A process whose app declares it writes it again at its next start.

    Raises `InvalidJob` naming `actor` or `reason`, `UnsupportedSession`.
    """
    deed, target = Deed(actor, reason), entered(session, "admin.delete_schedule")
    statement = delete(CronSchedule).where(CronSchedule.name == name).returning(CronSchedule.name)
    gone = target.scalars(statement.execution_options(synchronize_session="fetch")).all()
    if gone:
        deed.record(target, "delete_schedule", name)
    return bool(gone)


def next_fires(
    schedule: CronSchedule | Schedule, count: int = 5, /, *, after: datetime | None = None
) -> list[datetime]:
    """The next ticks of a schedule after a moment (default: now), in its own zone. Does no I/O.

    A pause does not show. Raises `InvalidJob` for an expression or a zone that is none.
    """
    if isinstance(schedule, CronSchedule):
        schedule = Schedule(schedule.cron_expr, schedule.timezone)
    moment = datetime.now(UTC) if after is None else limits.moment("after", after)
    return [schedule.local(tick) for tick in islice(schedule.after(moment), count)]


def _change(session: Session, name: str, deed: Deed, verb: str, **values: ColumnElement[Any]) -> CronSchedule:
    statement: Any = update(CronSchedule).where(CronSchedule.name == name)
    changed = statement.values(**values).returning(*_COLUMNS).execution_options(synchronize_session="fetch")
    schedule = next(_detached(session.execute(changed)), None)
    if schedule is None:
        raise _unknown(session, name)
    deed.record(session, verb, name)
    return schedule


def _found(session: Session, name: str) -> CronSchedule:
    schedule = next(_detached(session.execute(select(*_COLUMNS).where(CronSchedule.name == name))), None)
    if schedule is None:
        raise _unknown(session, name)
    return schedule


def _unknown(session: Session, name: str) -> InvalidJob:
    known = list(session.scalars(select(CronSchedule.name).order_by(CronSchedule.name)))
    close = get_close_matches(str(name), known, 3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return InvalidJob("name", f"there is no schedule {name!r}{hint}")


def _detached(found: Any) -> Iterator[CronSchedule]:
    """Objects of these rows that no session knows: one that holds a schedule of the caller's keeps it as it is."""
    for row in found:
        schedule = CronSchedule(**dict(zip(_KEYS, row, strict=True)))
        make_transient_to_detached(schedule)
        yield schedule


def _clock(session: Session) -> datetime:
    clock: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return clock.astimezone(UTC)


def _request(schedule: CronSchedule, args: JobArgs, mark: dict[str, Any]) -> EnqueueRequest:
    """A job with these arguments and the schedule's options."""
    request = EnqueueRequest(
        args,
        queue=schedule.queue,
        priority=schedule.priority,
        max_attempts=schedule.max_attempts,
        deadline=None if schedule.deadline_seconds is None else timedelta(seconds=schedule.deadline_seconds),
        tags=schedule.tags or None,
        metadata={**schedule.meta, **mark},
        unique=None if schedule.uniqueness is None else from_stored(schedule.uniqueness),
    )
    kind = type(args).__awa__.kind
    if schedule.kind not in (None, kind):
        raise InvalidJob("args", f"are of kind {kind!r}, and schedule {schedule.name!r} is of kind {schedule.kind!r}")
    return request
