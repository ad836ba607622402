"""Promotion, rescue and the dispatch of obligations, one pass at a time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import (
    Attempt,
    Backoff,
    DeadLetter,
    Exhausted,
    FollowUps,
    Job,
    JobArgs,
    JobRecord,
    Outcome,
    Rescued,
    RescueReason,
    ScheduledJob,
    StaleJobError,
    claim,
    complete,
    enqueue,
    fail,
    set_progress,
)
from awa_sqla.maintenance import any_due, dispatch_obligation, next_due, promote, rescue
from awa_sqla.models import FollowUpSpec, Obligation
from awa_sqla.session import catalogue

STALE = timedelta(seconds=60)


class Work(JobArgs, kind="lane_work", max_attempts=2, backoff=Backoff(base=timedelta(minutes=1), factor=1, jitter=0)):
    text: str = ""


class Tell(JobArgs):
    text: str = ""


@pytest.fixture
def follow_ups() -> Iterator[FollowUps]:
    registry = FollowUps()
    yield registry
    registry._specs.clear()


@pytest.fixture
def maker(engine: Engine, follow_ups: FollowUps) -> sessionmaker[Session]:
    catalogue.forget_cache()
    maker = sessionmaker(engine)
    follow_ups.attach(maker)
    return maker


def running(maker: sessionmaker[Session], *, silent: timedelta = timedelta(0), **options: Any) -> Attempt:
    """A claimed job whose worker has been silent for a while."""
    with maker.begin() as session:
        enqueue(session, Work(), **options)
        session.flush()
        (job,) = claim(session, options.get("queue", "default"), limit=1)
        attempt = Attempt.of(job)
        set_progress(session, job, 40)
    with maker.begin() as session:
        session.connection().execute(
            text("UPDATE awa.jobs_hot SET heartbeat_at = heartbeat_at - :silent WHERE id = :id"),
            {"silent": silent, "id": attempt.id},
        )
    return attempt


def record(maker: sessionmaker[Session], job_id: int) -> JobRecord:
    with maker() as session:
        return session.get_one(JobRecord, job_id)


# ------------------------------------------------------------- promotion


def test_due_jobs_become_available_and_the_next_due_time_is_told(maker):
    with maker.begin() as session:
        enqueue(session, Work(), run_at=datetime(2020, 1, 1, tzinfo=UTC), queue="a")
        enqueue(session, Work(), run_at=datetime(2020, 1, 1, tzinfo=UTC), queue="b")
        enqueue(session, Work(), delay=timedelta(hours=1))
    with maker.begin() as session:
        done = promote(session)
    assert (done.jobs, done.queues) == (2, {"a", "b"})
    assert timedelta(minutes=59) < done.next_due <= timedelta(hours=1)
    with maker() as session:
        assert sorted(job.queue for job in session.scalars(select(Job))) == ["a", "b"]
        assert session.scalars(select(ScheduledJob)).one().state == "scheduled"


def test_promotion_keeps_what_the_job_has_been_through(maker):
    attempt = running(maker)
    with maker.begin() as session:
        before = fail(session, attempt, "boom")
        session.flush()
        kept = {
            key: getattr(before, key) for key in ("attempt", "run_lease", "progress", "errors", "args", "created_at")
        }
    with maker.begin() as session:
        session.connection().execute(text("UPDATE awa.scheduled_jobs SET run_at = now()"))
        assert promote(session).jobs == 1
    after = record(maker, attempt.id)
    assert {key: getattr(after, key) for key in kept} == kept
    assert (after.state, after.finalized_at) == ("available", None)


def test_promotion_passes_over_rows_that_others_hold_and_keeps_to_its_limit(maker):
    with maker.begin() as session:
        for _ in range(5):
            enqueue(session, Work(), run_at=datetime(2020, 1, 1, tzinfo=UTC))
    with maker() as holder, maker() as session:
        holder.scalars(select(ScheduledJob).order_by(ScheduledJob.id).limit(2).with_for_update()).all()
        assert promote(session, limit=2).jobs == 2
        assert promote(session, limit=2).jobs == 1
        assert promote(session, limit=2) == (0, frozenset(), timedelta(0))


def test_nothing_to_promote_is_said_so(maker):
    with maker.begin() as session:
        assert promote(session) == (0, frozenset(), None)


def test_a_look_says_how_long_until_the_next_job_is_due(maker, engine):
    with engine.connect() as connection:
        assert next_due(connection) is None
    with maker.begin() as session:
        enqueue(session, Work(), delay=timedelta(hours=2))
        enqueue(session, Work(), delay=timedelta(hours=1))
    with engine.connect() as connection:
        assert timedelta(minutes=59) < next_due(connection) <= timedelta(hours=1)
    with maker.begin() as session:
        enqueue(session, Work(), delay=timedelta(microseconds=1))
    with engine.connect() as connection:
        assert next_due(connection) == timedelta(0)


# ---------------------------------------------------------------- rescue


@pytest.mark.case(15)
def test_a_silent_workers_attempt_is_retried_after_its_backoff(maker):
    attempt = running(maker, silent=timedelta(minutes=2))
    with maker.begin() as session:
        assert rescue(session, stale_after=STALE) == [attempt]
    job = record(maker, attempt.id)
    assert (job.state, job.attempt, job.progress["percent"]) == ("retryable", 1, 40)
    assert abs(job.run_at - job.finalized_at - timedelta(minutes=1)) < timedelta(milliseconds=50)  # two readings
    assert job.errors[0]["error"] == "heartbeat stale: worker presumed dead"
    assert job.heartbeat_at is job.deadline_at is None


@pytest.mark.case(28)
def test_a_worker_that_beats_keeps_its_attempt_however_long_it_takes(maker):
    attempt = running(maker)
    with maker.begin() as session:
        session.connection().execute(text("UPDATE awa.jobs_hot SET attempted_at = now() - interval '9 days'"))
        assert rescue(session, stale_after=STALE) == []
    assert record(maker, attempt.id).state == "running"


def test_an_overdue_attempt_is_taken_although_its_worker_beats(maker):
    attempt = running(maker, deadline=timedelta(seconds=5))
    with maker.begin() as session:
        session.connection().execute(text("UPDATE awa.jobs_hot SET deadline_at = now() - interval '1 s'"))
        assert rescue(session, stale_after=STALE) == [attempt]
    assert record(maker, attempt.id).errors[0]["error"] == "hard deadline exceeded"


@pytest.mark.parametrize("dead_letters", [False, True])
@pytest.mark.case(24)
def test_a_rescue_at_the_last_attempt_ends_the_job(maker, dead_letters):
    attempt = running(maker, silent=timedelta(minutes=2), max_attempts=1)
    with maker.begin() as session:
        session.connection().execute(
            text("INSERT INTO awa.queue_meta (queue, declared_dead_letters) VALUES ('default', :keep)"),
            {"keep": dead_letters},
        )
    with maker.begin() as session:
        rescue(session, stale_after=STALE)
    job = record(maker, attempt.id)
    assert (job.state, job.stored_in) == ("failed", "dead" if dead_letters else "hot")
    with maker() as session:
        assert [letter.dlq_reason for letter in session.scalars(select(DeadLetter))] == [
            "heartbeat_stale"
        ] * dead_letters


@pytest.mark.case(28)
def test_a_dead_attempt_behind_many_healthy_ones_is_found(maker):
    with maker.begin() as session:
        for _ in range(600):
            enqueue(session, Work())
        session.flush()
        claim(session, "default", limit=600)
    dead = running(maker, silent=timedelta(minutes=2))
    with maker.begin() as session:
        assert rescue(session, stale_after=STALE, limit=500) == [dead]


@pytest.mark.case(15)
def test_a_row_that_somebody_holds_is_left_to_its_holder(maker):
    attempt = running(maker, silent=timedelta(minutes=2))
    with maker() as holder, maker() as session:
        complete(holder, attempt)
        assert rescue(session, stale_after=STALE) == []
        holder.commit()
        assert rescue(session, stale_after=STALE) == []
    job = record(maker, attempt.id)
    assert (job.state, job.errors, job.attempt) == ("completed", [], 1)


def test_a_rescued_attempt_is_stale(maker):
    attempt = running(maker, silent=timedelta(minutes=2))
    with maker.begin() as session:
        rescue(session, stale_after=STALE)
    with maker.begin() as session, pytest.raises(StaleJobError):
        complete(session, attempt)


@pytest.mark.case(24)
def test_rescue_calls_no_spec_and_owes_each_of_them(maker, follow_ups):
    def raises(event: Rescued[Work]) -> Tell:
        raise AssertionError("user code in a rescue")

    follow_ups.on_rescued(Work, name="r")(raises)
    follow_ups.on_exhausted(Work, name="e")(lambda event: Tell(text=event.error))
    follow_ups.on_retried(Work, name="never")(lambda event: Tell())
    attempt = running(maker, silent=timedelta(minutes=2), max_attempts=1)
    with maker.begin() as session:
        session.add(FollowUpSpec(kind="lane_work", outcome="rescued", name="elsewhere"))
        session.flush()
        session.connection().execute(text("UPDATE awa.follow_up_specs SET created_at = now() - interval '1 m'"))
    catalogue.forget_cache()
    with maker.begin() as session:
        rescue(session, stale_after=STALE)
    with maker() as session:
        owed = session.scalars(select(Obligation).order_by(Obligation.id)).all()
        assert [(o.outcome, o.spec, o.context) for o in owed] == [
            ("rescued", "r", {"reason": "stale_heartbeat"}),
            ("rescued", "elsewhere", {"reason": "stale_heartbeat"}),
            ("exhausted", "e", {"error": "heartbeat stale: worker presumed dead", "attempt": 1}),
        ]
        assert {o.job_id for o in owed} == {attempt.id}
        assert owed[0].snapshot["state"] == "failed"


# ----------------------------------------------------------- obligations


def owe(maker: sessionmaker[Session], follow_ups: FollowUps) -> int:
    """A rescued job whose follow-ups are owed; its id."""
    attempt = running(maker, silent=timedelta(minutes=2), max_attempts=1)
    with maker.begin() as session:
        rescue(session, stale_after=STALE)
    return attempt.id


def test_a_dispatch_enqueues_and_forgets_the_debt_in_one_transaction(maker, follow_ups):
    events: list[Any] = []

    def spec(event: Rescued[Work]) -> Tell:
        events.append((event.reason, event.args, event.job.state, event.job.id))
        return Tell(text="rescued")

    follow_ups.on_rescued(Work, name="r")(spec)
    job_id = owe(maker, follow_ups)
    with maker() as session:
        assert dispatch_obligation(session, follow_ups.specs).error is None
        session.rollback()
    with maker() as session:
        assert session.scalars(select(JobRecord).where(JobRecord.kind == "tell")).all() == []
        assert dispatch_obligation(session, follow_ups.specs).error is None
        session.commit()
        assert dispatch_obligation(session, follow_ups.specs) is None
        (told,) = session.scalars(select(JobRecord).where(JobRecord.kind == "tell"))
        assert (told.parent_id, told.root_id, told.parent_outcome) == (job_id, job_id, "rescued")
    assert events == [(RescueReason.STALE_HEARTBEAT, Work(), "failed", job_id)] * 2


def test_a_dispatch_takes_only_what_its_process_can_settle(maker, follow_ups):
    follow_ups.on_rescued(Work, name="r")(lambda event: Tell())
    owe(maker, follow_ups)
    other = FollowUps()
    other.on_rescued(Work, name="another name")(lambda event: Tell())
    with maker.begin() as session:
        assert dispatch_obligation(session, other.specs) is None
        assert dispatch_obligation(session, ()) is None
    with maker() as holder, maker() as session:
        assert dispatch_obligation(holder, follow_ups.specs) is not None
        assert dispatch_obligation(session, follow_ups.specs) is None  # held by the other


def test_a_look_says_whether_this_process_can_settle_something(maker, follow_ups, engine):
    follow_ups.on_rescued(Work, name="r")(lambda event: Tell())
    other = FollowUps()
    other.on_rescued(Work, name="another name")(lambda event: Tell())
    with engine.connect() as connection:
        assert not any_due(connection, follow_ups.specs)
    owe(maker, follow_ups)
    with engine.connect() as connection:
        assert any_due(connection, follow_ups.specs)
        assert not any_due(connection, other.specs)
        assert not any_due(connection, ())
        connection.execute(text("UPDATE awa.follow_up_obligations SET next_attempt_at = now() + interval '1 hour'"))
        assert not any_due(connection, follow_ups.specs)


def test_a_failing_dispatch_waits_longer_each_time_and_gives_up_after_25_tries(maker, follow_ups):
    def spec(event: Exhausted[Work]) -> Tell:
        raise ValueError("bad \x00 spec")

    follow_ups.on_exhausted(Work, name="e")(spec)
    owe(maker, follow_ups)
    waits: list[float] = []
    for _ in range(25):
        with maker.begin() as session:
            done = dispatch_obligation(session, follow_ups.specs)
            assert done is not None
            assert done.error is not None
            assert "ValueError: bad" in done.error
        with maker.begin() as session:
            owed = session.scalars(select(Obligation)).one()
            attempts, due = owed.attempts, owed.next_attempt_at
            if due is not None:
                waits.append((due - datetime.now(UTC)).total_seconds())
            session.connection().execute(
                text("UPDATE awa.follow_up_obligations SET next_attempt_at = now() WHERE next_attempt_at IS NOT NULL")
            )
    assert (attempts, due, len(waits)) == (25, None, 24)
    assert waits[0] < waits[4] < waits[9] < 12.1 * 3600
    with maker.begin() as session:
        assert dispatch_obligation(session, follow_ups.specs) is None


def test_a_process_that_stands_still_in_its_heartbeat_holds_up_no_other(maker, follow_ups):
    specs = [("lane_work", Outcome.RESCUED, "r"), ("lane_work", Outcome.RETRIED, "r")]
    with maker.begin() as session:
        catalogue.publish(session, specs[:1])
    with maker() as frozen, maker.begin() as other:
        catalogue.publish(frozen, specs[:1])
        other.execute(text("SET LOCAL lock_timeout = '1s'"))
        catalogue.publish(other, specs)
    with maker() as session:
        assert len(session.scalars(select(FollowUpSpec)).all()) == 2


def test_a_connection_that_is_lost_in_a_dispatch_is_no_try(maker, follow_ups):
    dispatching: list[int] = []

    def spec(event: Exhausted[Work]) -> Tell:
        if dispatching:
            with maker() as other:
                other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": dispatching.pop()})
        return Tell()

    follow_ups.on_exhausted(Work, name="e")(spec)
    owe(maker, follow_ups)
    with maker() as session:
        dispatching.append(session.scalar(text("SELECT pg_backend_pid()")))
        with pytest.raises(OperationalError) as caught:
            dispatch_obligation(session, follow_ups.specs)
        assert caught.value.connection_invalidated
    with maker.begin() as session:
        assert session.scalars(select(Obligation)).one().attempts == 0
        assert dispatch_obligation(session, follow_ups.specs).error is None


def test_an_old_obligation_is_given_up_after_7_days(maker, follow_ups):
    def spec(event: Exhausted[Work]) -> Tell:
        raise ValueError

    follow_ups.on_exhausted(Work, name="e")(spec)
    owe(maker, follow_ups)
    with maker.begin() as session:
        session.connection().execute(
            text("UPDATE awa.follow_up_obligations SET created_at = now() - interval '8 days'")
        )
    with maker.begin() as session:
        dispatch_obligation(session, follow_ups.specs)
    with maker() as session:
        assert session.scalars(select(Obligation)).one().next_attempt_at is None


def test_a_row_that_no_longer_fits_its_class_stands_on_the_obligation(maker, follow_ups):
    follow_ups.on_rescued(Work, name="r")(lambda event: Tell(text=event.args.text))
    owe(maker, follow_ups)
    with maker.begin() as session:
        session.connection().execute(
            text("UPDATE awa.follow_up_obligations SET snapshot = jsonb_set(snapshot, '{args}', '{\"text\": [1]}')")
        )
    with maker.begin() as session:
        done = dispatch_obligation(session, follow_ups.specs)
    assert done is not None
    assert "ValidationError" in (done.error or "")
