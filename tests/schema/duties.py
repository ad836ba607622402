"""What each role is for, done for real: small programs that run as that role alone.

Each duty arranges what it needs as the owner and then works as the role. All of them together take every privilege of
the role to get through: `test_roles` takes one after the other away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import (
    Attempt,
    Awa,
    CallbackPolicy,
    CallbackToken,
    Cancel,
    Completed,
    DeadLetter,
    DefaultAction,
    EnqueueRequest,
    Exhausted,
    FollowUps,
    Job,
    JobArgs,
    JobContext,
    JobRecord,
    JobState,
    QueueConfig,
    RetryAfter,
    ScheduledJob,
    Snooze,
    TerminalError,
    Unique,
    UniqueConflict,
    WaitForCallback,
    admin,
    cancel,
    claim,
    complete,
    complete_external,
    complete_many,
    enqueue,
    enqueue_many,
    fail,
    fail_external,
    heartbeat_callback,
    park,
    register_callback,
    resolve_callback,
    resume_external,
    retry_external,
    set_progress,
    snooze,
    wait_for,
)
from awa_sqla.models import CronSchedule, metadata
from awa_sqla.models.base import ViewBase
from awa_sqla.session import catalogue
from awa_sqla.web.callbacks import router
from tests.schema.least import DRIVERS, Place

HOUR = timedelta(hours=1)
PENDING = Unique(states=[JobState.AVAILABLE, JobState.RUNNING])


class Plain(JobArgs):
    number: int = 0


class Keyed(JobArgs, unique=Unique()):
    number: int = 0


class Buried(JobArgs, queue="buried"):
    number: int = 0


class Note(JobArgs):
    about: int


class Later(JobArgs):
    about: int


Duty = Callable[[Place, str], None]


def owed(place: Place, outcome: str, kind: str = "plain", name: str = "elsewhere") -> None:
    """A follow-up that some other process has: this one can only owe it."""
    place.sql(
        "INSERT INTO {awa}.follow_up_specs (kind, outcome, name, created_at) VALUES (:kind, :outcome, :name, "
        "now() - interval '1 minute') ON CONFLICT DO NOTHING",
        kind=kind,
        outcome=outcome,
        name=name,
    )
    catalogue.forget_cache()


def given(place: Place, *jobs: JobArgs | EnqueueRequest) -> list[int]:
    """Committed jobs, by the owner."""
    found = place.run("owner", lambda session: enqueue_many(session, jobs))
    return [job_id for job_id in found if job_id is not None]


def bury(place: Place) -> None:
    """The queue `buried` keeps dead letters."""
    place.sql(
        "INSERT INTO {awa}.queue_meta (queue, override_dead_letters) VALUES ('buried', true) ON CONFLICT DO NOTHING"
    )


async def until(place: Place, condition: Callable[[], object]) -> None:
    """Wait until `condition()` holds, or the role is refused something."""
    while not (place.refused or condition()):  # noqa: ASYNC110 - what is waited for happens in the database
        await asyncio.sleep(0.02)


# ------------------------------------------------------------------------------------------------------ producer
def enqueues(place: Place, role: str, driver: str = "psycopg") -> None:
    """One by one: now and later, with arguments that are bound late, unique ones and their duplicates."""

    def work(session: Session) -> None:
        enqueue(session, Plain())
        enqueue(session, Plain(), delay=HOUR, priority=1, tags=["t"], metadata={"m": 1})
        enqueue(session, lambda: Plain(number=1))
        first = enqueue(session, Keyed())
        session.flush()
        twin = enqueue(session, Keyed(), on_conflict="skip")
        session.flush()
        assert twin.duplicate_of == first.id
        enqueue(session, Keyed())
        with pytest.raises(UniqueConflict):
            session.flush()
        enqueue(session, Keyed(number=1), delay=HOUR)

    place.run(role, work, driver)
    assert place.sql("SELECT count(*), count(unique_key) FROM {awa}.jobs") == [(5, 2)]


def enqueues_many(place: Place, role: str, driver: str = "psycopg") -> None:
    """By COPY: few that are unique, and so many that a savepoint is worth it."""

    def work(session: Session) -> None:
        few = enqueue_many(session, [Keyed(number=n // 2) for n in range(4)], on_conflict="skip")
        assert [job_id is None for job_id in few] == [False, True, False, True]
        request = EnqueueRequest(Plain(), delay=HOUR)
        assert len(enqueue_many(session, [*(Plain(number=n) for n in range(1000)), request])) == 1001

    place.run(role, work, driver)
    assert place.sql("SELECT count(*) FROM {awa}.jobs") == [(1003,)]


def cancels(place: Place, role: str, driver: str = "psycopg") -> None:
    """Jobs that wait, run and are scheduled; unique ones give their keys back, and follow-ups are owed."""
    owed(place, "cancelled")
    plain, keyed = given(place, Plain(), Keyed())
    plain_later, keyed_later = given(
        place, EnqueueRequest(Plain(), delay=HOUR), EnqueueRequest(Keyed(number=1), delay=HOUR)
    )
    place.run("owner", lambda session: claim(session, "default", limit=1))

    def work(session: Session) -> None:
        for job_id in (plain, keyed, plain_later, keyed_later):
            assert cancel(session, job_id, reason="no more") is not None
            session.flush()

    place.run(role, work, driver)
    assert place.sql("SELECT count(*) FROM {awa}.jobs WHERE state = 'cancelled'") == [(4,)]
    assert place.sql("SELECT count(*) FROM {awa}.job_unique_claims") == [(0,)]
    assert place.sql("SELECT job_id FROM {awa}.follow_up_obligations ORDER BY 1") == [(plain,), (plain_later,)]


def reads(place: Place, role: str) -> None:
    """Jobs wherever they are, and the result of one that has ended."""
    (ended,) = given(place, Plain())
    (later,) = given(place, EnqueueRequest(Plain(), delay=HOUR))
    place.run("owner", lambda session: complete(session, claim(session, "default", limit=1)[0], result={"a": 1}))

    def work(session: Session) -> None:
        assert session.get_one(Job, ended).result == {"a": 1}
        assert session.get_one(ScheduledJob, later).kind == "plain"
        assert len(session.scalars(select(JobRecord)).all()) == 2

    place.run(role, work)
    assert wait_for(sessionmaker(place.engine(role)), ended) == {"a": 1}


# -------------------------------------------------------------------------------------------------------- worker
def handles(place: Place, role: str, driver: str = "psycopg") -> None:
    """Claims and every outcome, by the verbs."""
    bury(place)
    owed(place, "exhausted", "buried")
    given(place, *(Plain(number=n) for n in range(8)), *(Keyed(number=n) for n in range(3)), Buried(), Buried())
    registry = follow_ups()

    def work(session: Session) -> None:
        done, retried, put_off, given_up, *rest = claim(session, "default", limit=20)
        complete(session, done)
        fail(session, retried, "again")
        snooze(session, put_off, HOUR)
        cancel(session, given_up.id, reason="no more")
        fail(session, rest[0], "never", terminal=True)
        park(session, rest[1], register_callback(session, rest[1], timeout=HOUR))
        set_progress(session, rest[2], 50)
        for job in rest[4:6]:  # unique ones
            fail(session, job, "again")
        complete_many(session, [rest[2], rest[6]])
        buried, called = claim(session, "buried", limit=2)
        fail(session, buried, "never", terminal=True)
        token = register_callback(session, called, timeout=HOUR)
        fail_external(session, token.id, "no")
        session.flush()
        session.expunge_all()
        assert isinstance(park(session, Attempt(called.id, called.run_lease), token), DeadLetter)

    place.run(role, work, driver, registry)
    found = place.sql("SELECT state, count(*) FROM {awa}.jobs WHERE kind IN ('plain', 'keyed') GROUP BY 1 ORDER BY 1")
    assert dict(map(tuple, found)) == {
        "cancelled": 1,
        "completed": 3,
        "failed": 1,
        "retryable": 3,
        "running": 1,
        "scheduled": 1,
        "waiting_external": 1,
    }
    assert place.sql("SELECT kind, state FROM {awa}.jobs WHERE kind IN ('note', 'later') ORDER BY 1, 2") == [
        ("later", "scheduled"),
        ("later", "scheduled"),
        ("note", "available"),
        ("note", "available"),
    ]
    assert place.sql("SELECT spec FROM {awa}.follow_up_obligations") == [("elsewhere",), ("elsewhere",)]


def follow_ups() -> FollowUps:
    """A follow-up at once, and one for later."""
    registry = FollowUps()

    @registry.on_completed(Plain, name="note")
    def note(event: Completed[Plain]) -> list[Note | EnqueueRequest]:
        return [Note(about=event.job.id), EnqueueRequest(Later(about=event.job.id), delay=HOUR)]

    @registry.on_exhausted(Buried, name="bury")
    def bury(event: Exhausted[Buried]) -> list[Note]:
        return []

    return registry


def app() -> Awa:
    """Handlers for all outcomes, by the number of the job."""
    awa = Awa(queues={"buried": QueueConfig(dead_letters=True, concurrency=2), "default": QueueConfig(concurrency=5)})
    awa.periodic("monthly", "0 0 1 * *", Plain(number=9))
    awa.follow_ups = follow_ups()

    @awa.task(Plain)
    async def plain(ctx: JobContext[Plain]) -> Any:
        await ctx.set_progress(10)
        match ctx.args.number:
            case 1:
                return RetryAfter(HOUR)
            case 2:
                return Snooze(HOUR)
            case 3:
                return Cancel("no more")
            case 4:
                raise TerminalError("never")
            case 5:
                return WaitForCallback(await ctx.register_callback(timeout=HOUR))
            case 6:
                raise RuntimeError("again")
        return {"done": True}

    @awa.task(Keyed, transactional=True)
    def keyed(ctx: JobContext[Keyed]) -> None:
        enqueue(ctx.session, Note(about=1), delay=HOUR)

    @awa.task(Buried)
    def buried(ctx: JobContext[Buried]) -> None:
        raise TerminalError("never")

    return awa


def runs(place: Place, role: str, driver: str = "psycopg", *, maintenance: bool = False) -> None:
    """A worker: its start, its heart, its listener, jobs of all outcomes, one of an unknown kind, and its stop."""
    owed(place, "exhausted", "buried")
    given(place, *(Plain(number=n) for n in range(7)), Keyed(), Buried())
    given(place, Note(about=0))  # nobody has a task for it
    awa = app()
    mode, _, name = driver.rpartition(" ")

    async def run() -> None:
        engine = place.async_engine(role, name) if mode else place.engine(role, name)
        worker = awa.worker(engine, maintenance=maintenance, heartbeat=timedelta(seconds=0.1))
        async with worker, asyncio.timeout(20):
            await until(place, lambda: not place.sql("SELECT FROM {awa}.jobs WHERE state IN ('available', 'running')"))

    asyncio.run(run())
    assert place.sql("SELECT state, count(*) FROM {awa}.jobs WHERE kind = 'plain' GROUP BY 1 ORDER BY 1") == [
        ("cancelled", 1),
        ("completed", 1),
        ("failed", 1),
        ("retryable", 2),
        ("scheduled", 1),
        ("waiting_external", 1),
    ]
    assert place.sql("SELECT dlq_reason FROM {awa}.dlq_entries") == [("terminal_error",)]
    assert place.sql("SELECT name FROM {awa}.cron_jobs") == [("monthly",)]
    assert place.sql("SELECT FROM {awa}.runtime_instances") == []


# --------------------------------------------------------------------------------------------------- maintenance
def late(place: Place) -> None:
    """Something for every lane: what is due, stale, overdue, expired, owed, waiting, finished, old and scheduled."""
    bury(place)
    given(place, *(EnqueueRequest(Plain(), delay=HOUR) for _ in range(2)))
    given(place, EnqueueRequest(Plain(number=1), delay=HOUR, unique=PENDING))
    place.sql("UPDATE {awa}.scheduled_jobs SET run_at = now() - interval '1 second'")
    given(place, *(Plain(number=n) for n in range(7)), Keyed(), Buried())
    given(place, EnqueueRequest(Buried(), max_attempts=1), Plain())

    def work(session: Session) -> None:
        jobs = claim(session, "default", limit=8, worker_id="gone")
        complete(session, jobs[0])
        park(session, jobs[1], register_callback(session, jobs[1], timeout=HOUR))
        (buried, _) = claim(session, "buried", limit=2, worker_id="gone")
        fail(session, buried, "never", terminal=True)

    registry = follow_ups()
    place.run("owner", work, follow_ups=registry)
    registry.__init__()  # type: ignore[misc]
    owed(place, "rescued")
    owed(place, "completed", name="note")
    place.run("owner", lambda session: complete(session, claim(session, "default", limit=1)[0]))
    place.sql(
        "UPDATE {awa}.jobs_hot SET heartbeat_at = now() - interval '1 day' WHERE state = 'running' AND id % 2 = 0"
    )
    place.sql("UPDATE {awa}.jobs_hot SET deadline_at = now() - interval '1 day' WHERE state = 'running' AND id % 2 = 1")
    place.sql("UPDATE {awa}.jobs_hot SET callback_timeout_at = now() - interval '1 day' WHERE callback_id IS NOT NULL")
    place.sql("UPDATE {awa}.jobs_hot SET finalized_at = now() - interval '9 days' WHERE finalized_at IS NOT NULL")
    place.sql("UPDATE {awa}.dlq_entries SET dlq_at = now() - interval '99 days'")
    given(place, Plain(), Buried())
    place.sql("UPDATE {awa}.jobs_hot SET run_at = now() - interval '1 day' WHERE state = 'available'")
    place.sql("INSERT INTO {awa}.audit_log (at, source, verb, target) VALUES ('2001-01-01', 'cli', 'v', 't')")
    place.sql("INSERT INTO {awa}.callback_receipts VALUES ('', gen_random_uuid(), 'fail', '{}', '2001-01-01')")
    place.sql("INSERT INTO {awa}.follow_up_specs VALUES ('k', 'o', 'old', '2001-01-01', '2001-01-01')")
    place.sql("INSERT INTO {awa}.leaders VALUES ('old', 'gone', 1, '2001-01-01', '2001-01-01')")
    place.sql("INSERT INTO {awa}.job_counts VALUES ('old', 'failed', 1, '2001-01-01')")
    place.sql(
        "INSERT INTO {awa}.runtime_instances (id, role, hostname, pid, version, last_seen) "
        "VALUES ('old', 'worker', 'h', 1, 'v', '2001-01-01')"
    )
    place.sql(
        "INSERT INTO {awa}.follow_up_obligations (job_id, kind, outcome, spec, snapshot) "
        "VALUES (1, 'plain', 'completed', 'note', '{}')"
    )
    place.sql(
        "INSERT INTO {awa}.cron_jobs (name, cron_expr, kind, queue, args, counts_from) "
        "VALUES ('each', '* * * * *', 'note', 'default', '{\"about\": 1}', now() - interval '1 hour')"
    )


def maintains(place: Place, role: str, driver: str = "psycopg") -> None:
    """Every lane once, on a database in which each has something to do."""
    late(place)
    awa = Awa()
    awa.follow_ups = follow_ups()
    awa.periodic("mine", "* * * * *", lambda: Keyed(number=7))
    mode, _, name = driver.rpartition(" ")

    async def once() -> Any:
        engine = place.async_engine(role, name) if mode else place.engine(role, name)
        return await awa.maintenance(engine, stale_after=timedelta(seconds=30)).once()

    fares = asyncio.run(once())
    assert {name: fare["error"] for name, fare in fares.items() if fare["error"]} == {}
    assert {name for name, fare in fares.items() if not fare["done"]} == set()


def stands_by(place: Place, role: str) -> None:
    """A maintenance process: its row, its heart, its lease, and its stop."""
    awa = Awa()
    awa.follow_ups = follow_ups()

    async def run() -> None:
        async with awa.maintenance(place.engine(role)) as process, asyncio.timeout(20):
            await until(place, lambda: process.leads and place.sql("SELECT FROM {awa}.job_counts"))

    given(place, Plain())
    place.run("owner", lambda session: complete(session, claim(session, "default", limit=1)[0]))
    asyncio.run(run())
    assert place.sql("SELECT FROM {awa}.runtime_instances") == []
    assert place.sql("SELECT FROM {awa}.leaders WHERE expires_at > now()") == []


# ------------------------------------------------------------------------------------------------------ callback
def parked(place: Place, *jobs: JobArgs | EnqueueRequest, policy: CallbackPolicy | None = None) -> list[CallbackToken]:
    """The tokens of jobs that wait for their callbacks."""
    given(place, *jobs)

    def work(session: Session) -> list[CallbackToken]:
        tokens = []
        for job in claim(session, "default", limit=9) + claim(session, "buried", limit=9):
            tokens.append(register_callback(session, job, timeout=HOUR, policy=policy))
            park(session, job, tokens[-1])
        return tokens

    found: list[CallbackToken] = place.run("owner", work)
    return found


def resolves(place: Place, role: str, driver: str = "psycopg") -> None:
    """Every answer that there is, in the app's own transaction, also of unique jobs and dead letters."""
    bury(place)
    owed(place, "completed", "keyed")
    grave = EnqueueRequest(Buried(), unique=Unique())
    back = EnqueueRequest(Plain(number=5), unique=Unique(states=[JobState.AVAILABLE]))
    tokens = parked(place, *(Plain(number=n) for n in range(3)), Keyed(), back, grave)
    (decided,) = parked(place, Plain(number=6), policy=CallbackPolicy(on_complete="payload.ok"))

    def work(session: Session) -> None:
        complete_external(session, tokens[0].id, {"a": 1})
        fail_external(session, tokens[1].id, "no")
        heartbeat_callback(session, tokens[2].id, timeout=HOUR)
        retry_external(session, tokens[2].id)
        complete_external(session, tokens[3].id)
        retry_external(session, tokens[4].id)
        fail_external(session, tokens[5].id, "no")
        resolve_callback(session, decided.id, {"ok": True}, default=DefaultAction.FAIL)

    place.run(role, work, driver, follow_ups())
    assert place.sql("SELECT state, count(*) FROM {awa}.jobs GROUP BY 1 ORDER BY 1") == [
        ("available", 4),
        ("completed", 3),
        ("failed", 2),
        ("scheduled", 2),
    ]
    assert place.sql("SELECT dlq_reason FROM {awa}.dlq_entries") == [("callback_failed",)]


def resumes(place: Place, role: str) -> None:
    """The answer for a handler that waits."""
    given(place, Plain())

    def waits(session: Session) -> CallbackToken:
        (job,) = claim(session, "default", limit=1)
        return register_callback(session, job, timeout=HOUR)

    token = place.run("owner", waits)
    place.run(role, lambda session: resume_external(session, token.id, {"a": 1}))
    assert place.sql("SELECT callback_answer->'payload' FROM {awa}.jobs_hot") == [({"a": 1},)]


def receives(place: Place, role: str, driver: str = "psycopg") -> None:
    """The ingress: a callback, the same once more, and an old receipt that it sweeps."""
    (token,) = parked(place, Plain())
    place.sql("INSERT INTO {awa}.callback_receipts VALUES ('', gen_random_uuid(), 'fail', '{}', '2001-01-01')")
    registry = follow_ups()
    mode, _, name = driver.rpartition(" ")

    async def send() -> list[int]:
        made: Any = (
            async_sessionmaker(place.async_engine(role, name), class_=AsyncSession)
            if mode
            else sessionmaker(place.engine(role, name))
        )
        registry.attach(made)
        transport = httpx.ASGITransport(router(made, allow_unsigned=True))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            answers = [await client.post(f"/{token.id}/complete", json={"payload": 1}) for _ in range(2)]
        return [answer.status_code for answer in answers]

    assert asyncio.run(send()) == [200, 200]
    assert place.sql("SELECT count(*) FROM {awa}.callback_receipts") == [(1,)]
    assert place.sql("SELECT count(*) FROM {awa}.jobs WHERE kind = 'note'") == [(1,)]


# -------------------------------------------------------------------------------------------------------- viewer
def looks(place: Place, role: str, driver: str = "psycopg") -> None:
    """Every table and view."""

    def work(session: Session) -> None:
        for found in (metadata, ViewBase.metadata):
            for table in found.tables.values():
                session.execute(select(table)).all()
        session.scalars(select(JobRecord)).all()
        assert [schedule.name for schedule in admin.list_schedules(session)] == ["each"]

    place.run("owner", lambda session: session.add(CronSchedule(name="each", cron_expr="* * * * *")))
    place.run(role, work, driver)


DUTIES: dict[str, tuple[Duty, ...]] = {
    "producer": (enqueues, enqueues_many, cancels, reads),
    "worker": (handles, runs, enqueues, enqueues_many, cancels),
    "maintenance": (maintains, stands_by),
    "callback": (resolves, resumes, receives),
    "viewer": (looks,),
}
#: With the drivers in which they may differ: processes send the same statements as sessions, over two of them.
EACH: list[tuple[str, Callable[..., None], str]] = [
    *(("producer", duty, driver) for duty in (enqueues, enqueues_many, cancels) for driver in DRIVERS),
    *(("worker", handles, driver) for driver in DRIVERS),
    *(("worker", runs, driver) for driver in DRIVERS[::3]),
    *(("maintenance", maintains, driver) for driver in DRIVERS[::3]),
    *(("callback", resolves, driver) for driver in DRIVERS),
    *(("callback", receives, driver) for driver in DRIVERS[::3]),
    *(("viewer", looks, driver) for driver in DRIVERS),
]
