"""`enqueue()`: a row of the caller's unit of work, and of nothing else."""

from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, inspect, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, scoped_session

from awa_sqla import Job, JobRecord, JobState, ScheduledJob, UnsupportedSession, claim, enqueue
from awa_sqla.session import lineage
from awa_sqla.session.lineage import Parent
from tests.app import Charge, Order, Signup, Welcome
from tests.session.steps import HOUR, MINUTE, available, rolled_back, running
from tests.worlds import Database, World


# -------------------------------------------------------------------------------------------- the transaction
@pytest.mark.case(11)
def test_a_job_exists_when_the_callers_transaction_commits(session: Session, database: Database) -> None:
    session.add(Order(note="coffee"))
    enqueue(session, Signup())
    session.flush()
    assert database.jobs() == []
    session.commit()
    assert database.kinds() == ["signup"]
    assert database.value("SELECT note FROM app_order") == "coffee"


@pytest.mark.case(1)
def test_a_rollback_forgets_the_job_for_good(session: Session, database: Database) -> None:
    enqueue(session, Signup())
    session.rollback()
    session.add(Order(note="later"))
    session.commit()
    assert database.jobs() == []


@pytest.mark.case(2)
def test_a_savepoint_takes_exactly_its_own_jobs_along(session: Session, database: Database) -> None:
    enqueue(session, Signup(email="outer"))
    with rolled_back(session):
        enqueue(session, Signup(email="dropped"))
    with session.begin_nested():
        enqueue(session, Signup(email="kept"))
    assert database.jobs() == []
    session.commit()
    assert [job.args["email"] for job in database.jobs()] == ["outer", "kept"]


def test_enqueue_sends_nothing(world: World, session: Session) -> None:
    with world.counting() as sent:
        enqueue(session, Signup())
    assert sent == []
    assert len(session.new) == 1


@pytest.mark.case(11)
def test_the_library_begins_and_ends_no_transaction(world: World, session: Session) -> None:
    with world.noting("begin", "commit", "rollback") as seen:
        enqueue(session, Signup())
        session.flush()
        claim(session, "default", limit=1)
        assert seen == ["begin"]
        session.commit()
    assert seen == ["begin", "commit"]


def test_a_plain_job_is_one_insert(world: World, session: Session) -> None:
    enqueue(session, Signup())
    with world.counting() as sent:
        session.flush()
    assert len(sent) == 1


@pytest.mark.case(46)
def test_the_id_is_there_after_the_flush(session: Session) -> None:
    job = enqueue(session, Signup())
    assert job.id is None
    session.flush()
    assert session.get(Job, job.id) is job


def test_job_of_is_the_same_without_a_verb(session: Session, database: Database) -> None:
    session.add(Job.of(Charge(order_id=1)))
    enqueue(session, Charge(order_id=1))
    session.commit()
    first, second = database.jobs()
    differing = {"id", "created_at", "run_at"}
    assert {k: v for k, v in first._asdict().items() if k not in differing} == {
        k: v for k, v in second._asdict().items() if k not in differing
    }


@pytest.mark.case(12)
def test_a_failed_flush_of_the_app_is_the_apps_own_affair(session: Session, database: Database) -> None:
    savepoint = session.begin_nested()
    enqueue(session, Signup())
    session.add(Order(note=None))  # type: ignore[arg-type]
    with pytest.raises(IntegrityError):
        session.flush()
    savepoint.rollback()
    enqueue(session, Welcome())
    session.commit()
    assert database.kinds() == ["welcome"]


# ----------------------------------------------------------------------------------------------- what is stored
def test_every_option_is_stored(session: Session, database: Database) -> None:
    enqueue(
        session,
        Charge(order_id=7, cents=5),
        queue="slow",
        priority=4,
        max_attempts=9,
        deadline=timedelta(seconds=1.5),
        tags=["a", "b"],
        metadata={"trace": {"x": [1, None]}},
    )
    session.commit()
    [job] = database.jobs()
    assert (job.kind, job.args) == ("charge", {"order_id": 7, "cents": 5})
    assert (job.queue, job.priority, job.max_attempts, job.deadline_seconds) == ("slow", 4, 9, 1.5)
    assert (job.tags, job.metadata) == (["a", "b"], {"trace": {"x": [1, None]}})
    assert (job.state, job.attempt, job.run_lease, job.stored_in) == ("available", 0, 0, "hot")
    assert (job.parent_id, job.root_id, job.parent_outcome) == (None, None, None)
    assert (job.progress, job.result, job.errors, job.snoozes) == (None, None, [], 0)


@pytest.mark.case(60)
def test_the_default_number_of_attempts_is_stored_on_the_row(session: Session, database: Database) -> None:
    available(session)
    assert database.jobs()[0].max_attempts == 25


def test_a_large_job_with_a_long_queue_name_is_stored_and_announced(session: Session, database: Database) -> None:
    with database.listening() as listener:
        available(session, Signup(email="x" * (1 << 20)), queue="q" * 200)
        assert [len(payload) for payload in listener.heard()] == [16]


@pytest.mark.case(45)
def test_ids_leave_the_32_bits_without_notice(session: Session, database: Database) -> None:
    ids, leases = (database.value(f"SELECT last_value FROM {name}_seq") for name in ("jobs_id", "run_lease"))
    try:
        database.restart_sequences(5_000_000_000, 6_000_000_000)
        job = running(session)
        assert (job.id, job.run_lease) == (5000000001, 6000000001)
    finally:
        database.restart_sequences(ids, leases)


@pytest.mark.case(45)
def test_every_id_in_the_schema_has_64_bits(database: Database) -> None:
    columns = database.rows(
        "SELECT table_name, column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = 'awa' AND (column_name LIKE '%%id' OR column_name LIKE '%%lease')"
        " AND (table_name, column_name) NOT IN (('runtime_instances', 'id'), ('runtime_instances', 'pid'))"
    )
    odd = {(c.table_name, c.column_name) for c in columns if c.data_type not in ("bigint", "uuid", "text")}
    assert odd == set()
    types = database.rows("SELECT data_type::text FROM pg_sequences WHERE schemaname = 'awa'")
    assert {row.data_type for row in types} == {"bigint"}


HOT = [s for s in JobState if s not in (JobState.SCHEDULED, JobState.RETRYABLE)]


@pytest.mark.case(47)
@pytest.mark.parametrize("state", JobState)
def test_states_are_stored_by_value_on_every_road(session: Session, database: Database, state: JobState) -> None:
    cls = Job if state in HOT else ScheduledJob
    session.add(cls(kind="k", args={}, state=state, run_at=datetime.now(UTC)))
    session.commit()
    database.execute(f"INSERT INTO {cls.__tablename__} (kind, state, run_at) VALUES ('raw', %s, now())", state.value)
    assert [job.state for job in database.jobs()] == [state.value] * 2
    assert session.scalars(select(JobRecord.state)).all() == [state, state]
    assert session.scalars(select(cls).where(cls.state == state)).all() != []


# ---------------------------------------------------------------------------------------------------- schedule
def test_run_at_makes_a_scheduled_job(session: Session, database: Database) -> None:
    when = datetime(2030, 1, 1, 12, tzinfo=UTC)
    job = enqueue(session, Signup(), run_at=when)
    session.commit()
    assert isinstance(job, ScheduledJob)
    stored = database.job(job.id)
    assert (stored.stored_in, stored.state, stored.run_at) == ("scheduled", "scheduled", when)


def test_a_past_run_at_makes_a_scheduled_job_too(session: Session, database: Database) -> None:
    job = enqueue(session, Signup(), run_at=datetime(2000, 1, 1, tzinfo=UTC))
    session.commit()
    assert database.job(job.id).stored_in == "scheduled"


@pytest.mark.case(58)
def test_a_delay_counts_from_the_flush_and_not_from_the_start_of_the_transaction(
    session: Session, database: Database
) -> None:
    session.execute(text("SELECT pg_sleep(0.3)"))
    job = enqueue(session, Signup(), delay=MINUTE)
    session.flush()
    started = session.scalar(text("SELECT now()"))
    session.commit()
    assert timedelta(0, 60.3) <= database.job(job.id).run_at - started < timedelta(0, 75)


@pytest.mark.case(58)
def test_a_plain_job_is_due_when_it_was_inserted(session: Session, database: Database) -> None:
    session.execute(text("SELECT pg_sleep(0.3)"))
    started = session.scalar(text("SELECT now()"))
    job = available(session)
    stored = database.job(job.id)
    assert stored.run_at - started >= timedelta(seconds=0.3)
    assert stored.created_at - started >= timedelta(seconds=0.3)


def test_all_delays_of_a_flush_share_one_reading_of_the_clock(
    world: World, session: Session, database: Database
) -> None:
    jobs = [enqueue(session, Signup(), delay=MINUTE) for _ in range(3)]
    with world.counting() as sent:
        session.flush()
    assert len([statement for statement in sent if "clock_timestamp" in statement and "SELECT" in statement[:6]]) == 1
    session.commit()
    assert len({database.job(job.id).run_at for job in jobs}) == 1


@pytest.mark.case(57)
def test_a_delay_does_not_ask_the_clock_of_the_app(
    session: Session, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 600)
    job = enqueue(session, Signup(), delay=MINUTE)
    session.commit()
    left = database.value("SELECT run_at - clock_timestamp() FROM jobs WHERE id = %s", job.id)
    assert timedelta(seconds=30) < left <= MINUTE


def test_the_delay_of_a_vetoed_flush_counts_from_the_flush_that_succeeds(session: Session, database: Database) -> None:
    job = enqueue(session, Signup(), delay=HOUR)
    vetoed: list[datetime] = []

    @event.listens_for(session, "before_flush")
    def veto(*_: Any) -> None:
        if not vetoed:
            vetoed.append(job.run_at)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session.flush()
    session.commit()
    assert database.job(job.id).run_at > vetoed[0]


# ------------------------------------------------------------------------------------------------------ lineage
def test_a_job_enqueued_in_a_handler_is_a_child_of_the_running_job(session: Session, database: Database) -> None:
    def handler() -> Any:
        lineage.run_under(Parent(7, 3))
        return enqueue(session, Signup())

    inside = copy_context().run(handler)
    outside = enqueue(session, Signup())
    session.commit()
    child = database.job(inside.id)
    assert (child.parent_id, child.root_id, child.parent_outcome) == (7, 3, None)
    assert database.job(outside.id).parent_id is None


# ----------------------------------------------------------------------------------------------------- sessions
def test_a_scoped_session_will_do(world: World, database: Database) -> None:
    session = world.session()
    scoped = scoped_session(lambda: session)
    job = enqueue(scoped, Signup())
    session.commit()
    assert database.job(job.id).kind == "signup"


@pytest.mark.parametrize("wrong", [None, "session", Session, object()])
def test_anything_else_is_no_session(wrong: Any) -> None:
    with pytest.raises(UnsupportedSession, match=r"enqueue\(\) takes a Session"):
        enqueue(wrong, Signup())


def test_an_engine_is_told_what_to_become(world: World) -> None:
    with pytest.raises(UnsupportedSession, match="make a Session"):
        enqueue(world.engine, Signup())  # type: ignore[arg-type]


def test_a_loaded_job_reads_well_and_never_loads(world: World, session: Session) -> None:
    job = available(session)
    session.expire_all()
    with world.counting() as sent:
        assert repr(job) == f"<Job {inspect(job).identity[0]}>"
    assert sent == []
