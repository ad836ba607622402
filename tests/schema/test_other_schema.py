"""Our tables in a schema of another name: an engine's `schema_translate_map` is all that an app needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sqlalchemy import URL, Engine, NullPool, create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from awa_sqla import (
    Awa,
    Completed,
    DeadLetter,
    FollowUps,
    JobRecord,
    ScheduledJob,
    StaleJobError,
    Unique,
    admin,
    cancel,
    claim,
    complete,
    complete_many,
    enqueue,
    fail,
    snooze,
)
from awa_sqla.maintenance import age, count_finished, finished_counts, prune_dead_letters, prune_jobs, prune_records
from awa_sqla.maintenance.firing import fire
from awa_sqla.maintenance.schedules import schedules, seen, sync
from awa_sqla.models import AuditEntry, Queue
from awa_sqla.models.wakeups import cancel_payload, channel
from awa_sqla.schema import create_all
from tests.app import NotifyOps, Welcome
from tests.databases import libpq_url

OTHER = "other"
TRANSLATED = {"schema_translate_map": {"awa": OTHER}}

Run = Callable[[Callable[[Session], None]], None]

follow_ups = FollowUps()


@follow_ups.on_completed(Welcome)
def tell_ops(event: Completed[Welcome]) -> NotifyOps:
    return NotifyOps(job_id=event.job.id)


@pytest.fixture
def other_url(empty_db_url: URL, empty_engine: Engine) -> URL:
    """A database with our tables in the schema `other`, and no schema `awa` that a slip could use."""
    with empty_engine.begin() as connection:
        create_all(connection, OTHER)
    return empty_db_url


BESIDE = [pytest.param(driver, marks=pytest.mark.beside) for driver in ("psycopg2", "async psycopg")]


@pytest.fixture(params=["psycopg", "async asyncpg", *BESIDE])
def run(other_url: URL, request: pytest.FixtureRequest) -> Run:
    """Runs a function of a session in a transaction, with one driver."""
    mode, _, driver = str(request.param).rpartition(" ")
    url = other_url.set(drivername=f"postgresql+{driver}")

    def run_sync(work: Callable[[Session], None]) -> None:
        engine = create_engine(url, poolclass=NullPool, execution_options=TRANSLATED)
        with Session(engine) as session, session.begin(), follow_ups.attached(session):
            work(session)

    async def run_async(work: Callable[[Session], None]) -> None:
        engine = create_async_engine(url, poolclass=NullPool, execution_options=TRANSLATED)
        async with AsyncSession(engine) as session, session.begin():
            with follow_ups.attached(session):
                await session.run_sync(work)

    return (lambda work: asyncio.run(run_async(work))) if mode else run_sync


def enqueued(session: Session, count: int = 1) -> None:
    for _ in range(count):
        enqueue(session, Welcome())
    session.flush()


def test_complete_and_its_follow_up_find_the_other_schema(run: Run) -> None:
    def work(session: Session) -> None:
        enqueued(session)
        (job,) = claim(session, "default", limit=1)
        complete(session, job, result={"sent": True})
        session.flush()
        kinds = session.execute(select(JobRecord.kind, JobRecord.state).order_by(JobRecord.id)).all()
        assert [tuple(row) for row in kinds] == [("welcome", "completed"), ("notify_ops", "available")]

    run(work)


def test_fail_finds_the_other_schema(run: Run) -> None:
    def work(session: Session) -> None:
        session.add(Queue(queue="default", override_dead_letters=True))
        enqueued(session, 2)
        first, second = claim(session, "default", limit=2)
        fail(session, first, "again")
        fail(session, second, "never", terminal=True)
        session.flush()
        assert session.scalars(select(ScheduledJob.id)).all() == [first.id]
        assert session.scalars(select(DeadLetter.id)).all() == [second.id]

    run(work)


def test_complete_many_finds_the_other_schema(run: Run) -> None:
    def work(session: Session) -> None:
        enqueued(session, 3)
        batch = complete_many(session, claim(session, "default", limit=3))
        assert (len(batch.completed), batch.stale) == (3, [])

    run(work)


def test_cancel_and_snooze_and_delay_find_the_other_schema(run: Run) -> None:
    def work(session: Session) -> None:
        later = enqueue(session, Welcome(), delay=timedelta(hours=1))
        enqueued(session, 2)
        first, second = claim(session, "default", limit=2)
        snooze(session, first, timedelta(minutes=1))
        for job_id in (later.id, first.id, second.id):
            session.flush()
            cancel(session, job_id, reason="no more")
        session.flush()
        assert set(session.scalars(select(JobRecord.state)).all()) == {"cancelled"}

    run(work)


def test_a_stale_attempt_is_found_out_in_the_other_schema(run: Run) -> None:
    def work(session: Session) -> None:
        enqueued(session)
        (job,) = claim(session, "default", limit=1)
        attempt = job.held_attempt
        assert attempt is not None
        cancel(session, job.id, reason="no more")
        with pytest.raises(StaleJobError) as caught:
            complete(session, attempt)
        assert caught.value.state == "cancelled"

    run(work)


def test_wake_ups_go_to_the_channel_of_the_other_schema(run: Run, other_url: URL) -> None:
    sent: list[str] = []

    def work(session: Session) -> None:
        enqueued(session)
        (job,) = claim(session, "default", limit=1)
        sent.append(cancel_payload(job.id, job.run_lease))
        cancel(session, job.id, reason="no more")

    with psycopg.connect(libpq_url(other_url), autocommit=True) as listening:
        listening.execute(f"LISTEN {channel('awa')}")
        listening.execute(f"LISTEN {channel(OTHER)}")
        run(work)
        heard = list(listening.notifies(timeout=10, stop_after=2))
    assert {note.channel for note in heard} == {channel(OTHER)}
    assert sent[0] in {note.payload for note in heard}


def test_retention_finds_the_other_schema(run: Run) -> None:
    def work(session: Session) -> None:
        session.add(Queue(queue="default", override_keep_completed_seconds=0, declared_keep_dead_seconds=0))
        session.add(AuditEntry(at=datetime(2001, 1, 1, tzinfo=UTC), source="cli", verb="v", target="t"))
        enqueued(session, 2)
        done, failed = claim(session, "default", limit=2)
        session.merge(Queue(queue="default", override_dead_letters=True))
        complete(session, done)
        fail(session, failed, "never", terminal=True)
        session.flush()
        assert (prune_jobs(session), prune_dead_letters(session), prune_records(session).audit_log) == (1, 1, 1)
        assert [job.kind for job in session.scalars(select(JobRecord))] == ["notify_ops"]

    run(work)


def test_ageing_and_counts_find_the_other_schema(run: Run) -> None:
    def work(session: Session) -> None:
        session.add(Queue(queue="default", override_aging_seconds=1e-6))
        enqueued(session, 3)
        cancel(session, claim(session, "default", limit=1)[0].id, reason="no more")
        session.flush()
        assert age(session) == 2
        session.merge(Queue(queue="default", override_aging_seconds=float("inf")))
        session.flush()
        assert age(session) == 2
        assert count_finished(session).rows == 1
        assert [(key, jobs) for key, (jobs, _) in finished_counts(session).items()] == [(("default", "cancelled"), 1)]

    run(work)


@pytest.mark.parametrize("unique", [None, Unique()])
@pytest.mark.parametrize("built", [False, True])
def test_schedules_fire_in_the_other_schema(other_url: URL, unique: Unique | None, built: bool) -> None:
    awa = Awa()
    awa.periodic("x", "* * * * *", (lambda: Welcome(email="b")) if built else Welcome(), unique=unique)
    engine = create_engine(other_url, execution_options=TRANSLATED, poolclass=NullPool)
    with Session(engine) as session, session.begin():
        sync(session, awa.schedules.values())
        admin.resume_schedule(session, "x")
        now, (row,) = schedules(session)
        assert now is not None
        tick = now.replace(microsecond=0)
        fired = fire(session, row, tick, awa.schedules["x"].request(tick) if built else None)
        assert fired is not None
        assert admin.list_schedules(session)[0].last_job_id == fired.job_id
        seen(session, ["x"])
