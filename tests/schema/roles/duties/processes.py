"""What processes of ours do: a worker, and maintenance."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    Awa,
    Cancel,
    DeadLetter,
    EnqueueRequest,
    JobContext,
    QueueConfig,
    RetryAfter,
    Snooze,
    TerminalError,
    WaitForCallback,
    cancel,
    claim,
    complete,
    complete_many,
    enqueue,
    fail,
    fail_external,
    park,
    register_callback,
    set_progress,
    snooze,
)
from tests.schema.roles.duties.given import (
    HOUR,
    PENDING,
    Buried,
    Keyed,
    Note,
    Plain,
    bury,
    follow_ups,
    given,
    owed,
    until,
)
from tests.schema.roles.least import Place


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


# ------------------------------------------------------------------------------------------------- maintenance
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
