"""The application under test: what its jobs do is written in their arguments, what follows on them in its specs.

A job's next step is read from its own history, so it is the same in whichever process the next attempt runs: first it
raises `raises` times, then it returns `RetryAfter` `agains` times, then it snoozes `snoozes` times, then it ends.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Engine, create_engine, func, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from awa_sqla import (
    Awa,
    Backoff,
    Cancel,
    EnqueueRequest,
    JobArgs,
    JobContext,
    QueueConfig,
    Retention,
    RetryAfter,
    Snooze,
    TerminalError,
    Unique,
    WaitForCallback,
    enqueue,
)
from tests.soak.tables import Base, Effect, Present, Step, Try

SOON = timedelta(milliseconds=50)
#: How many attempts a process runs at a time.
SLOTS = {"quick": 8, "slow": 12, "doomed": 4, "brief": 4}
#: The queue that keeps no finished job for longer than `KEPT`, and what a job of any waits for one level more.
BRIEF, KEPT, AGEING = "brief", timedelta(seconds=1), timedelta(seconds=1)
#: How long specs that balk do so.
BALKING = timedelta(seconds=1)


@dataclass(frozen=True)
class Store:
    """Engines of the handlers' own, for what must be durable before the attempt ends."""

    engine: Engine
    later: AsyncEngine


@asynccontextmanager
async def lifespan(app: Awa) -> AsyncIterator[Store]:
    """What handlers get as `ctx.state`."""
    assert app.database_url is not None
    engine = create_engine(app.database_url, pool_size=20, isolation_level="AUTOCOMMIT")
    later = create_async_engine(app.database_url, pool_size=20, isolation_level="AUTOCOMMIT")
    yield Store(engine, later)
    await later.dispose()
    engine.dispose()


def _queue(name: str) -> QueueConfig:
    kept = Retention(completed=KEPT, failed=KEPT) if name == BRIEF else Retention()
    dead_letters = name == "doomed"
    return QueueConfig(concurrency=SLOTS[name], dead_letters=dead_letters, retention=kept, priority_aging=AGEING)


awa = Awa(queues={name: _queue(name) for name in SLOTS}, lifespan=lifespan)


class Plan(JobArgs, abstract=True, queue="quick", max_attempts=200, backoff=Backoff(SOON, 1.5, timedelta(seconds=2))):
    """What a job is to do.

    `child`: its outcomes come with a `Leaf` each, if it is transactional; `tells`: its completion is followed by notes;
    `balks`: specs about it do not work at first; `ghost`: it was enqueued in a transaction that was rolled back;
    `drags`: its first attempt takes longer than its deadline.
    """

    nap: float = 0
    raises: int = 0
    agains: int = 0
    snoozes: int = 0
    end: Literal["done", "cancel", "fatal"] = "done"
    child: bool = False
    tells: bool = False
    balks: bool = False
    bucket: int = 0
    ghost: bool = False
    drags: bool = False


class Write(Plan):
    """Transactional, `def`."""


class WriteAsync(Plan):
    """Transactional, `async def`."""


class Call(Plan):
    """Not transactional, `def`."""


class CallAsync(Plan):
    """Not transactional, `async def`."""


class Walk(Plan):
    """Step by step, with a checkpoint after each; `def`."""

    steps: int = 5


class WalkAsync(Plan):
    """The same, `async def`."""

    steps: int = 5


class Park(Plan):
    """Ends its attempt by waiting for a callback."""


class Attend(Plan):
    """Waits for a callback in its handler."""


class Leaf(Plan):
    """Enqueued by a transactional handler, for each outcome that it returns."""

    mark: str


class Note(Plan):
    """The follow-up of one spec on one outcome."""

    outcome: str
    spec: str
    attempt: int


class Tally(Plan, unique=Unique()):
    """A follow-up of many jobs, of which one is enough at a time."""


class Probe(Plan):
    """Waits until `slots` of its kind and queue run at the same time."""

    slots: int


class PlannedError(Exception):
    """A handler raises as its job says."""


class BalkError(Exception):
    """A spec does not work for a while."""


def next_step(ctx: JobContext[Any], snoozed: int) -> tuple[str, Any]:
    """The mark and the outcome of this attempt; an outcome that is an exception is to be raised."""
    plan, errors = ctx.args, ctx.job.errors
    raised = sum(entry["error"].startswith("planned error") for entry in errors)
    again = sum(entry["error"].startswith("planned again") for entry in errors)
    if raised < plan.raises:
        return "void", PlannedError(f"planned error {raised + 1} lease {ctx.lease.run_lease}")
    if again < plan.agains:
        return f"again {again + 1}", RetryAfter(SOON, f"planned again {again + 1} lease {ctx.lease.run_lease}")
    if snoozed < plan.snoozes:
        return f"snooze {snoozed + 1}", Snooze(SOON)
    if plan.end == "cancel":
        return "cancel", Cancel("planned")
    if plan.end == "fatal":
        return "void", TerminalError(f"planned end lease {ctx.lease.run_lease}")
    return "done", {"lease": ctx.lease.run_lease}


def trace(ctx: JobContext[Any]) -> dict[str, Any]:
    return {"job_id": ctx.lease.id, "run_lease": ctx.lease.run_lease, "attempt": ctx.attempt, "pid": os.getpid()}


def _snoozed(ctx: JobContext[Any]) -> Any:
    """How many snoozes have left an effect."""
    return select(func.count()).where(Effect.job_id == ctx.lease.id, Effect.mark.startswith("snooze"))


def _write(ctx: JobContext[Any], session: Session | AsyncSession, snoozed: int) -> tuple[str, Any]:
    mark, outcome = next_step(ctx, snoozed)
    session.add(Effect(**trace(ctx), mark=mark))
    if ctx.args.child:
        enqueue(session, Leaf(mark=mark))
    return mark, outcome


def _ended(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@awa.task(Write, transactional=True)
@awa.task(Leaf, transactional=True)
def write(ctx: JobContext[Any]) -> Any:
    _, outcome = _write(ctx, ctx.session, ctx.session.scalar(_snoozed(ctx)) if ctx.args.snoozes else 0)
    ctx.session.flush()
    time.sleep(ctx.args.nap)
    return _ended(outcome)


@awa.task(WriteAsync, transactional=True)
@awa.task(Note, transactional=True)
async def write_async(ctx: JobContext[Any]) -> Any:
    _, outcome = _write(ctx, ctx.session, await ctx.session.scalar(_snoozed(ctx)) if ctx.args.snoozes else 0)
    await ctx.session.flush()
    await asyncio.sleep(ctx.args.nap)
    return _ended(outcome)


def _record(ctx: JobContext[Any], table: type[Base], **values: Any) -> None:
    with ctx.state.engine.connect() as connection:
        connection.execute(insert(table), trace(ctx) | values)


async def _record_async(ctx: JobContext[Any], table: type[Base], **values: Any) -> None:
    async with ctx.state.later.connect() as connection:
        await connection.execute(insert(table), trace(ctx) | values)


@awa.task(Call)
def call(ctx: JobContext[Any]) -> Any:
    _record(ctx, Try)
    time.sleep(ctx.args.nap)
    return _ended(next_step(ctx, ctx.job.snoozes)[1])


@awa.task(CallAsync)
@awa.task(Tally)
async def call_async(ctx: JobContext[Any]) -> Any:
    await _record_async(ctx, Try)
    await asyncio.sleep(ctx.args.nap if not ctx.args.drags or ctx.attempt > 1 else 30)
    return _ended(next_step(ctx, ctx.job.snoozes)[1])


def _reached(ctx: JobContext[Any]) -> int:
    step: int = ctx.progress.get("metadata", {}).get("step", 0)
    return step


@awa.task(Walk)
def walk(ctx: JobContext[Walk]) -> Any:
    reached = _reached(ctx)
    _record(ctx, Step, mark="begin", step=reached)
    for step in range(reached + 1, ctx.args.steps + 1):
        time.sleep(ctx.args.nap)
        ctx.checkpoint({"step": step})
        _record(ctx, Step, mark="reached", step=step)
    return _ended(next_step(ctx, ctx.job.snoozes)[1])


@awa.task(WalkAsync)
async def walk_async(ctx: JobContext[WalkAsync]) -> Any:
    reached = _reached(ctx)
    await _record_async(ctx, Step, mark="begin", step=reached)
    for step in range(reached + 1, ctx.args.steps + 1):
        await asyncio.sleep(ctx.args.nap)
        await ctx.checkpoint({"step": step})
        await _record_async(ctx, Step, mark="reached", step=step)
    return _ended(next_step(ctx, ctx.job.snoozes)[1])


def _timeout(ctx: JobContext[Any]) -> timedelta:
    """For how long a callback is good: the first one of some jobs hardly ever comes in time."""
    return timedelta(seconds=0.5 if ctx.attempt == 1 and ctx.args.bucket < 3 else 60)


@awa.task(Park)
def park(ctx: JobContext[Park]) -> Any:
    mark, outcome = next_step(ctx, ctx.job.snoozes)
    if mark != "done":
        return _ended(outcome)
    return WaitForCallback(ctx.register_callback(timeout=_timeout(ctx)))


@awa.task(Attend)
async def attend(ctx: JobContext[Attend]) -> Any:
    mark, outcome = next_step(ctx, ctx.job.snoozes)
    if mark != "done":
        return _ended(outcome)
    token = await ctx.register_callback(timeout=_timeout(ctx))
    return {"lease": ctx.lease.run_lease} | await ctx.wait_for_callback(token)


@awa.task(Probe)
async def probe(ctx: JobContext[Probe]) -> None:
    await _record_async(ctx, Present, queue=ctx.job.queue)
    there = select(func.count(Present.job_id.distinct())).where(Present.queue == ctx.job.queue)
    for _ in range(60):
        async with ctx.state.later.connect() as connection:
            if await connection.scalar(there) == ctx.args.slots:
                return
        await asyncio.sleep(0.5)
    raise TerminalError("some slots of this queue are never free")


# ------------------------------------------------------------------------------------------------ what follows
ROOTS: Sequence[type[Plan]] = (Write, WriteAsync, Call, CallAsync, Walk, WalkAsync, Park, Attend)
OUTCOMES = ("completed", "retried", "exhausted", "cancelled", "rescued")


def _balks(event: Any) -> bool:
    """For the first second after the transition, and for a transactional handler once."""
    known = any("BalkError" in entry["error"] for entry in event.job.errors)
    return event.args.balks and not known and datetime.now(UTC) - event.job.finalized_at < BALKING


def _noting(outcome: str, name: str) -> Any:
    def spec(event: Any) -> Any:
        if _balks(event):
            raise BalkError("this spec does not work yet")
        if outcome == "completed" and not event.args.tells:
            return []
        return Note(outcome=outcome, spec=name, attempt=event.job.attempt, nap=event.args.nap / 10)

    return spec


def _tally(event: Any) -> EnqueueRequest:
    return EnqueueRequest(Tally(bucket=event.args.bucket))


def _register() -> None:
    for kind in ROOTS:
        for outcome in OUTCOMES:
            name = f"{outcome}_{kind.__awa__.kind}"
            getattr(awa, f"on_{outcome}")(kind, name=name)(_noting(outcome, name))
    awa.on_completed(WriteAsync, name="second")(_noting("completed", "second"))
    awa.on_completed(CallAsync, name="tally")(_tally)
    awa.on_completed(Write, name="tally")(_tally)


_register()
#: (kind, outcome, spec) that send a note for each outcome.
NOTING = [(spec.kind, spec.outcome.value, spec.name) for spec in awa.follow_ups.specs if spec.name != "tally"]
