"""The operator verbs for `AsyncSession`: same names, same arguments, same behaviour, awaited."""

from __future__ import annotations

from awa_sqla.admin import schedules
from awa_sqla.admin.schedules import next_fires
from awa_sqla.args import JobArgs
from awa_sqla.models.job import Job, ScheduledJob
from awa_sqla.models.upkeep import CronSchedule
from awa_sqla.session.target import AnyAsyncSession, async_session

__all__ = [
    "delete_schedule",
    "list_schedules",
    "next_fires",
    "pause_schedule",
    "resume_schedule",
    "trigger_schedule",
]


async def list_schedules(session: AnyAsyncSession, /) -> list[CronSchedule]:
    """See `awa_sqla.admin.list_schedules`."""
    return await async_session(session, "admin.list_schedules").run_sync(schedules.list_schedules)


async def pause_schedule(
    session: AnyAsyncSession, name: str, /, *, actor: str | None = None, reason: str | None = None
) -> CronSchedule:
    """See `awa_sqla.admin.pause_schedule`."""
    target = async_session(session, "admin.pause_schedule")
    return await target.run_sync(schedules.pause_schedule, name, actor=actor, reason=reason)


async def resume_schedule(
    session: AnyAsyncSession, name: str, /, *, actor: str | None = None, reason: str | None = None
) -> CronSchedule:
    """See `awa_sqla.admin.resume_schedule`."""
    target = async_session(session, "admin.resume_schedule")
    return await target.run_sync(schedules.resume_schedule, name, actor=actor, reason=reason)


async def trigger_schedule(
    session: AnyAsyncSession,
    name: str,
    /,
    *,
    args: JobArgs | None = None,
    actor: str | None = None,
    reason: str | None = None,
) -> Job | ScheduledJob:
    """See `awa_sqla.admin.trigger_schedule`."""
    target = async_session(session, "admin.trigger_schedule")
    return await target.run_sync(schedules.trigger_schedule, name, args=args, actor=actor, reason=reason)


async def delete_schedule(
    session: AnyAsyncSession, name: str, /, *, actor: str | None = None, reason: str | None = None
) -> bool:
    """See `awa_sqla.admin.delete_schedule`."""
    target = async_session(session, "admin.delete_schedule")
    return await target.run_sync(schedules.delete_schedule, name, actor=actor, reason=reason)
