"""The public API as type checkers see it: checked by mypy --strict and pyright strict, and run for good measure."""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import (
    Attempt,
    Awa,
    Backoff,
    Cancel,
    Completed,
    CompletedBatch,
    DeadLetter,
    EnqueueRequest,
    Exhausted,
    FollowUps,
    Job,
    JobArgs,
    JobContext,
    JobSnapshot,
    QueueConfig,
    RetryAfter,
    ScheduledJob,
    Unique,
    admin,
    cancel,
    claim,
    complete,
    complete_many,
    enqueue,
    fail,
    retry_after,
    set_progress,
    snooze,
    wait_for,
)
from awa_sqla import asyncio as awa_async
from awa_sqla.asyncio import admin as async_admin
from awa_sqla.models import CronSchedule
from awa_sqla.periodic import Periodic


class SendEmail(JobArgs):
    to: str
    subject: str


class Charge(
    JobArgs,
    kind="charge_card",
    queue="payments",
    priority=1,
    max_attempts=5,
    deadline=timedelta(minutes=2),
    tags=("billing",),
    backoff=Backoff(base=timedelta(seconds=5), factor=3, max=timedelta(hours=1), jitter=0.25),
):
    order_id: int
    cents: int


class Base(JobArgs, abstract=True):
    tenant: str


class Report(Base):
    pages: int = 1


def sync_verbs(session: Session) -> None:
    assert_type(enqueue(session, SendEmail(to="a", subject="b")), Job)
    assert_type(enqueue(session, SendEmail(to="a", subject="b"), queue="x", priority=1, tags=["t"]), Job)
    assert_type(enqueue(session, Charge(order_id=1, cents=2), delay=timedelta(hours=1)), ScheduledJob)
    assert_type(enqueue(session, Charge(order_id=1, cents=2), run_at=datetime.now(UTC)), ScheduledJob)
    jobs = claim(session, ["a", "b"], limit=1)
    assert_type(jobs, list[Job])
    job = jobs[0]
    assert_type(complete(session, job, result={"a": 1}), Job)
    assert_type(complete(session, Attempt.of(job)), Job)
    assert_type(fail(session, job, ValueError(), terminal=True), ScheduledJob | Job | DeadLetter)
    assert_type(retry_after(session, job, timedelta(seconds=1), error="x"), ScheduledJob | Job | DeadLetter)
    assert_type(snooze(session, job, timedelta(seconds=1)), ScheduledJob)
    assert_type(cancel(session, job.id, reason="x"), Job | None)
    assert_type(set_progress(session, job, 50, message="half", metadata={"page": 1}), Job)
    assert_type(complete_many(session, jobs), CompletedBatch)
    assert_type(job.args_as(SendEmail), SendEmail)


async def async_verbs(session: AsyncSession) -> None:
    assert_type(enqueue(session, Report(tenant="t")), Job)
    jobs = await awa_async.claim(session, "a", limit=1)
    assert_type(jobs, list[Job])
    assert_type(await awa_async.complete(session, jobs[0], result=1), Job)
    assert_type(await awa_async.cancel(session, 5, reason="x"), Job | None)
    assert_type(await awa_async.complete_many(session, jobs), CompletedBatch)


def waits(makers: sessionmaker[Session]) -> None:
    assert_type(wait_for(makers, 1), Any)


async def async_waits(makers: async_sessionmaker[AsyncSession]) -> None:
    later = assert_type(wait_for(makers, 1), Coroutine[Any, Any, Any])
    assert_type(await later, Any)
    assert_type(await wait_for(makers, 1, timeout=timedelta(seconds=5)), Any)


follow_ups = FollowUps()


@follow_ups.on_completed(Charge)
def receipt(event: Completed[Charge]) -> SendEmail:
    assert_type(event.args, Charge)
    assert_type(event.job, JobSnapshot)
    return SendEmail(to=str(event.args.order_id), subject="Thanks")


@follow_ups.on_exhausted(Charge, name="tell ops")
def tell_ops(event: Exhausted[Charge]) -> list[EnqueueRequest | JobArgs]:
    return [EnqueueRequest(SendEmail(to="ops", subject=event.error), queue="ops", priority=1)]


awa = Awa(queues={"payments": QueueConfig(concurrency=5, dead_letters=True)})


@awa.task(SendEmail, retry_on=(OSError,), discard_on=(KeyError,))
async def send_email(ctx: JobContext[SendEmail]) -> RetryAfter | Cancel | None:
    assert_type(ctx.args, SendEmail)
    assert_type(ctx.attempt, int)
    await ctx.set_progress(50, "half")
    return RetryAfter(timedelta(seconds=5), "later") if ctx.is_cancelled() else None


@awa.task(Charge, transactional=True)
def charge(ctx: JobContext[Charge]) -> dict[str, Any]:
    ctx.checkpoint({"charged": ctx.args.cents})
    return {"cents": ctx.args.cents}


@awa.on_completed(Charge)
def thanks(event: Completed[Charge]) -> SendEmail:
    return receipt(event)


def at(tick: datetime) -> EnqueueRequest:
    return EnqueueRequest(Report(tenant=f"{tick:%Y}"), queue="reports")


nightly = awa.periodic(
    "nightly",
    "0 3 * * *",
    Report(tenant="t"),
    timezone="Pacific/Auckland",
    missed_fires="catch_up",
    most_missed=10,
    queue="reports",
    unique=Unique(),
)
assert_type(nightly, Periodic)
awa.periodic("ticks", "*/5 * * * *", at)
awa.periodic("plain", "*/5 * * * *", lambda: Report(tenant="t"))


def operators(session: Session) -> None:
    schedules = admin.list_schedules(session)
    assert_type(schedules, list[CronSchedule])
    assert_type(admin.next_fires(schedules[0]), list[datetime])
    assert_type(admin.pause_schedule(session, "nightly", actor="ada", reason="r"), CronSchedule)
    assert_type(admin.resume_schedule(session, "nightly"), CronSchedule)
    assert_type(admin.trigger_schedule(session, "nightly", args=Report(tenant="t")), Job | ScheduledJob)
    assert_type(admin.delete_schedule(session, "nightly"), bool)


async def async_operators(session: AsyncSession) -> None:
    assert_type(await async_admin.list_schedules(session), list[CronSchedule])
    assert_type(await async_admin.trigger_schedule(session, "nightly"), Job | ScheduledJob)
    assert_type(await async_admin.delete_schedule(session, "nightly"), bool)


def test_what_is_checked_here_also_runs() -> None:
    snapshot = JobSnapshot(
        id=1,
        kind="charge_card",
        state=Job.of(Charge(order_id=1, cents=2)).state,
        run_at=datetime.now(UTC),
        created_at=datetime.now(UTC),
        args={"order_id": 1, "cents": 2},
        meta={},
        tags=[],
        errors=[],
    )
    event = Completed(Charge(order_id=1, cents=2), snapshot, result=None)
    assert receipt(event) == SendEmail(to="1", subject="Thanks")
    assert [spec.name for spec in awa.follow_ups.specs] == [f"{__name__}:thanks"]
