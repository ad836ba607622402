"""Transition and follow-up are inseparable: whatever a session does between the verb and the commit.

Every test here ends the same way: as many follow-ups as committed outcomes, each once.
"""

from typing import Any

import pytest
from sqlalchemy import Connection, event, select, text
from sqlalchemy.orm import Session

from awa_sqla import (
    Completed,
    EnqueueRequest,
    FollowUpError,
    FollowUps,
    Job,
    JobRecord,
    JobState,
    ScheduledJob,
    complete,
    complete_many,
    enqueue,
    fail,
    snooze,
)
from awa_sqla.session import ledger
from tests.app import NotifyOps, Order, Signup, Welcome
from tests.session.steps import HOUR, MINUTE, rolled_back, running
from tests.worlds import Database, World, in_sync_worlds

both_expiries = pytest.mark.parametrize("expire_on_commit", [True, False])


@pytest.fixture
def calls(follow_ups: FollowUps) -> list[Completed[Signup]]:
    """A completed signup is welcomed; every call of the spec is noted."""
    seen: list[Completed[Signup]] = []

    @follow_ups.on_completed(Signup, name="welcome")
    def welcome(event: Completed[Signup]) -> Welcome:
        seen.append(event)
        return Welcome(email=event.args.email)

    @follow_ups.on_retried(Signup, name="tell")
    def tell(event: Any) -> NotifyOps:
        return NotifyOps(job_id=event.job.id)

    return seen


@pytest.fixture
def job(session: Session, calls: list[Any]) -> Job:
    """A running signup, claimed by `session`."""
    return session.info["world"].call(running, session)


@pytest.fixture(autouse=True)
def _know_the_world(world: World, session: Session) -> None:
    session.info["world"] = world


# ---------------------------------------------------------------------------------------- flushes and commits
@pytest.mark.case(7)
def test_a_commit_alone_brings_the_follow_up(session: Session, job: Job, database: Database) -> None:
    complete(session, job)
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


@pytest.mark.case(7)
def test_two_flushes_bring_one_follow_up(session: Session, job: Job, database: Database, calls: list[Any]) -> None:
    complete(session, job)
    session.flush()
    session.flush()
    session.scalars(select(Job)).all()
    session.commit()
    assert database.kinds() == ["signup", "welcome"]
    assert len(calls) == 1


def test_the_flush_of_the_next_query_brings_it(session: Session, job: Job) -> None:
    complete(session, job)
    assert [found.kind for found in session.scalars(select(Job).order_by(Job.id))] == ["signup", "welcome"]


@pytest.mark.parametrize("options", [{"autoflush": False}, {"expire_on_commit": False}, {}])
def test_it_comes_in_sessions_of_every_option(
    world: World, calls: list[Any], database: Database, options: dict[str, Any]
) -> None:
    session = world.session(**options)
    complete(session, running(session))
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_a_transition_that_was_not_committed_brings_nothing(session: Session, job: Job, database: Database) -> None:
    complete(session, job)
    session.flush()
    session.rollback()
    session.commit()
    assert [row.state for row in database.jobs()] == ["running"]
    assert job.state is JobState.RUNNING


def test_a_rolled_back_transition_can_be_made_again(session: Session, job: Job, database: Database) -> None:
    complete(session, job)
    session.rollback()
    complete(session, job)
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


@pytest.mark.case(1)
def test_close_without_rollback_forgets_everything(session: Session, job: Job, database: Database) -> None:
    complete(session, job)
    session.close()
    session.add(Order(note="later"))
    session.commit()
    assert database.kinds() == ["signup"]


# --------------------------------------------------------------------- what a session may do to the job meanwhile
MEDDLING = {
    "expunge": lambda session, job: session.expunge(job),
    "expunge_all": lambda session, job: session.expunge_all(),
    "expire": lambda session, job: session.expire(job),
    "expire_all": lambda session, job: session.expire_all(),
    "refresh": lambda session, job: session.refresh(job),
    "expire, expunge": lambda session, job: (session.expire(job), session.expunge(job)),
}
meddle = pytest.mark.parametrize("meddle", MEDDLING.values(), ids=list(MEDDLING))


@meddle
def test_no_meddling_with_the_job_loses_the_follow_up(
    session: Session, job: Job, database: Database, meddle: Any, calls: list[Any]
) -> None:
    complete(session, job, result=5)
    meddle(session, job)
    session.commit()
    assert database.kinds() == ["signup", "welcome"]
    [seen] = calls
    assert (seen.job.state, seen.job.result, seen.result) == (JobState.COMPLETED, 5, 5)


@meddle
def test_no_meddling_with_the_job_loses_it_in_a_savepoint(
    session: Session, job: Job, database: Database, meddle: Any
) -> None:
    with session.begin_nested():
        complete(session, job)
        meddle(session, job)
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_a_savepoint_opened_after_expunge_all_does_not_lose_it(session: Session, job: Job, database: Database) -> None:
    complete(session, job)
    session.expunge_all()
    session.begin_nested()
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_a_root_that_commits_over_an_open_savepoint_does_not_lose_it(
    session: Session, job: Job, database: Database
) -> None:
    with session.begin():
        complete(session, job)
        session.expunge_all()
        session.begin_nested()
    assert database.kinds() == ["signup", "welcome"]


def test_a_savepoint_rolled_back_after_expunge_all_does_not_lose_it(
    session: Session, job: Job, database: Database
) -> None:
    with session.begin():
        complete(session, job)
        session.expunge_all()
        savepoint = session.begin_nested()
        session.add(Order(note="dropped"))
        session.flush()
        savepoint.rollback()
    assert database.kinds() == ["signup", "welcome"]


def test_the_row_of_a_move_cannot_be_expunged_away(session: Session, job: Job, database: Database) -> None:
    moved = fail(session, job, "no")
    session.expunge(moved)
    session.commit()
    assert [(row.kind, row.state) for row in database.jobs()] == [
        ("signup", "retryable"),
        ("notify_ops", "available"),
    ]


def test_the_row_of_a_snooze_cannot_be_expunged_away(session: Session, job: Job, database: Database) -> None:
    snooze(session, job, MINUTE)
    session.expunge_all()
    session.commit()
    [row] = database.jobs()
    assert (row.state, row.attempt, row.snoozes) == ("scheduled", 0, 1)


def test_a_pending_follow_up_cannot_be_expunged_away(session: Session, job: Job, database: Database) -> None:
    complete(session, job)
    vetoes = iter([True, False, False])

    @event.listens_for(session, "before_flush")
    def veto(session: Session, *_: Any) -> None:
        if next(vetoes, False):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session.flush()
    assert [row.kind for row in session.new] == ["welcome"]
    session.expunge_all()
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_a_vetoed_flush_doubles_nothing(session: Session, job: Job, database: Database, calls: list[Any]) -> None:
    vetoes = iter([True, True, False])

    @event.listens_for(session, "before_flush")
    def veto(*_: Any) -> None:
        if next(vetoes, False):
            raise ZeroDivisionError

    complete(session, job)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            session.flush()
    session.commit()
    assert database.kinds() == ["signup", "welcome"]
    assert len(calls) == 1


# --------------------------------------------------------------------------------------------------- savepoints
@pytest.mark.case(2)
def test_a_rolled_back_savepoint_takes_the_transition_and_its_follow_up_along(
    session: Session, job: Job, database: Database
) -> None:
    session.add(Order(note="kept"))
    with rolled_back(session):
        complete(session, job)
    session.commit()
    assert [row.state for row in database.jobs()] == ["running"]
    assert database.value("SELECT note FROM app_order") == "kept"
    assert job.state is JobState.RUNNING


@pytest.mark.case(2)
def test_a_flushed_and_rolled_back_savepoint_leaves_nothing_behind(
    session: Session, job: Job, database: Database
) -> None:
    with rolled_back(session):
        complete(session, job)
        session.flush()
    complete(session, job)
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_a_moved_job_is_back_after_the_savepoint(session: Session, job: Job, database: Database) -> None:
    with rolled_back(session):
        fail(session, job, "no")
        session.flush()
    assert job in session
    assert job.state is JobState.RUNNING
    complete(session, job)
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_a_released_savepoint_keeps_both(session: Session, job: Job, database: Database) -> None:
    with session.begin_nested(), session.begin_nested():
        complete(session, job)
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_an_outer_savepoint_takes_what_an_inner_one_released(session: Session, job: Job, database: Database) -> None:
    with rolled_back(session), session.begin_nested():
        complete(session, job)
    session.commit()
    assert [row.state for row in database.jobs()] == ["running"]


def test_what_was_staged_before_a_savepoint_survives_its_rollback(
    session: Session, job: Job, database: Database
) -> None:
    complete(session, job)
    with rolled_back(session):
        session.flush()
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


# ---------------------------------------------------------------------------------------------- foreign listeners
def test_an_apps_before_flush_sees_the_follow_up(session: Session, job: Job) -> None:
    seen: list[str] = []
    event.listen(session, "before_flush", lambda s, *_: seen.extend(row.kind for row in s.new))
    complete(session, job)
    session.flush()
    assert seen == ["welcome"]


def test_it_sees_it_even_when_it_was_there_first(world: World, calls: list[Any]) -> None:
    session = world.bare_session()
    seen: list[str] = []
    event.listen(session, "before_flush", lambda s, *_: seen.extend(row.kind for row in s.new))
    world.follow_ups.attach(session)
    job = running(session)
    seen.clear()
    complete(session, job)
    session.flush()
    assert seen == ["welcome"]


def once(act: Any) -> Any:
    """A listener that acts the first time only."""
    done: list[bool] = []

    def listener(session: Session, *_: Any) -> None:
        if not done:
            done.append(True)
            act(session)

    return listener


@pytest.mark.parametrize("autoflush", [True, False])
@pytest.mark.parametrize("name", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
def test_a_transition_made_in_an_apps_own_listener_brings_its_follow_up(
    world: World, calls: list[Any], database: Database, name: str, autoflush: bool
) -> None:
    session = world.session(autoflush=autoflush)
    job = running(session)
    event.listen(session, name, once(lambda s: complete(s, job)))
    session.add(Order(note="x"))
    session.commit()
    assert database.kinds() == ["signup", "welcome"]
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
def test_a_move_made_in_an_apps_own_listener_brings_its_row(
    world: World, calls: list[Any], database: Database, name: str
) -> None:
    session = world.session()
    job = running(session)
    event.listen(session, name, once(lambda s: fail(s, job, "no")))
    session.add(Order(note="x"))
    session.commit()
    assert sorted(database.kinds()) == ["notify_ops", "signup"]


def test_a_listener_may_use_a_verb_over_pending_jobs_without_autoflush(
    world: World, calls: list[Any], database: Database
) -> None:
    session = world.session(autoflush=False)
    job = running(session)
    event.listen(session, "before_flush", once(lambda s: complete(s, job)))
    enqueue(session, NotifyOps(job_id=1))
    session.commit()
    assert sorted(database.kinds()) == ["notify_ops", "signup", "welcome"]


@pytest.mark.parametrize("name", ["before_flush", "after_flush", "before_commit"])
def test_what_a_listener_did_in_a_savepoint_goes_with_the_savepoint(
    session: Session, job: Job, database: Database, name: str
) -> None:
    event.listen(session, name, once(lambda s: complete(s, job)))
    savepoint = session.begin_nested()
    session.add(Order(note="x"))
    session.flush()
    savepoint.rollback()
    session.commit()
    states = [row.state for row in database.jobs() if row.kind == "signup"]
    welcomes = database.kinds().count("welcome")
    assert (states, welcomes) in ((["running"], 0), (["completed"], 1))
    assert job.state.value == states[0]


def test_what_a_savepoint_still_owes_at_its_release_is_its_parents(
    session: Session, job: Job, database: Database
) -> None:
    @once
    def last_minute(session: Session) -> None:
        complete(session, job)
        session.expunge_all()

    event.listen(session, "before_commit", last_minute)
    session.begin_nested().commit()
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_what_is_settled_leaves_the_ledger(session: Session, job: Job) -> None:
    complete(session, job)
    owed = ledger.current(session)
    assert owed is not None
    assert len(owed.staged) == 1
    session.flush()
    assert owed.staged == []


# ------------------------------------------------------------------------------------------------ failing specs
@pytest.fixture
def broken(follow_ups: FollowUps) -> list[str]:
    """A spec that raises for as long as this list holds something."""
    reasons = ["broken"]

    @follow_ups.on_completed(Signup, name="first")
    def first(event: Completed[Signup]) -> Welcome:
        return Welcome()

    @follow_ups.on_completed(Signup, name="broken")
    def raises(event: Completed[Signup]) -> list[Welcome]:
        if reasons:
            raise KeyError(reasons[0])
        return []

    return reasons


@pytest.mark.case(63)
def test_a_spec_that_raises_lets_no_flush_and_no_commit_through(
    session: Session, broken: list[str], database: Database
) -> None:
    job = running(session)
    complete(session, job)
    for attempt in (session.flush, session.commit, session.flush, session.begin_nested, session.commit):
        with pytest.raises(FollowUpError) as caught:
            attempt()
        assert (caught.value.spec, caught.value.job_id, caught.value.kind) == ("broken", job.id, "signup")
        assert caught.value.outcome == "completed"
        assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(FollowUpError):
        session.scalars(select(Order)).all()
    session.rollback()
    session.add(Order(note="later"))
    session.commit()
    assert [row.state for row in database.jobs()] == ["running"]


@pytest.mark.case(63)
def test_not_even_expunging_everything_lets_it_through(session: Session, broken: list[str], database: Database) -> None:
    complete(session, running(session))
    session.expunge_all()
    with pytest.raises(FollowUpError):
        session.commit()
    session.rollback()
    assert [row.state for row in database.jobs()] == ["running"]


def test_a_savepoint_confines_a_spec_that_raises(session: Session, broken: list[str], database: Database) -> None:
    job = running(session)
    session.add(Order(note="kept"))
    with pytest.raises(FollowUpError), session.begin_nested():
        complete(session, job)
    session.commit()
    assert [row.state for row in database.jobs()] == ["running"]
    assert database.value("SELECT note FROM app_order") == "kept"


def test_a_spec_that_is_mended_leaves_no_half_behind(session: Session, broken: list[str], database: Database) -> None:
    complete(session, running(session))
    with pytest.raises(FollowUpError):
        session.flush()
    assert list(session.new) == []
    broken.clear()
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_a_spec_that_queries_runs_once(session: Session, follow_ups: FollowUps, database: Database) -> None:
    counted: list[Any] = []

    @follow_ups.on_completed(Signup, name="counts")
    def counts(event: Completed[Signup]) -> Welcome:
        counted.append(session.scalars(select(Order)).all())
        return Welcome()

    complete(session, running(session))
    session.expunge_all()  # so that before_commit drains
    session.commit()
    assert database.kinds() == ["signup", "welcome"]
    assert len(counted) == 1


def test_a_spec_that_makes_a_transition_brings_that_ones_follow_up_too(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    first = running(session, queue="a")
    second = running(session, Welcome(), queue="b")

    @follow_ups.on_completed(Signup, name="chain")
    def chain(event: Completed[Signup]) -> list[Welcome]:
        complete(session, second)
        return []

    @follow_ups.on_completed(Welcome, name="end")
    def end(event: Completed[Welcome]) -> NotifyOps:
        return NotifyOps(job_id=event.job.id)

    complete(session, first)
    session.commit()
    assert [(row.kind, row.state) for row in database.jobs()] == [
        ("signup", "completed"),
        ("welcome", "completed"),
        ("notify_ops", "available"),
    ]


# ----------------------------------------------------------------------------------------- two-phase and fixtures
@in_sync_worlds
@pytest.mark.case(61)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_prepared_transaction_holds_the_follow_up(
    world: World, calls: list[Any], database: Database, end: str
) -> None:
    job = running(world.session())
    session = world.session(twophase=True)
    session.execute(text("SET LOCAL awa.notify = 'off'"))
    complete(session, job)
    session.prepare()
    assert [row.state for row in database.jobs()] == ["running"]
    getattr(session, end)()
    assert database.kinds() == (["signup", "welcome"] if end == "commit" else ["signup"])


@pytest.mark.case(34)
def test_a_fixture_with_an_outer_transaction_works_and_leaves_nothing(
    world: World, calls: list[Any], database: Database
) -> None:
    connection: Connection = world.engine.connect()
    outer = connection.begin()
    session = Session(bind=connection, join_transaction_mode="create_savepoint")
    world.follow_ups.attach(session)
    job = running(session)
    complete(session, job)
    session.commit()
    assert session.scalars(select(Job.kind).order_by(Job.id)).all() == ["signup", "welcome"]
    complete(session, running(session, queue="two"))
    session.rollback()
    assert session.scalars(select(Job.state).order_by(Job.id)).all() == ["completed", "available", "running"]
    session.close()
    assert outer.is_active
    outer.rollback()
    connection.close()
    assert database.jobs() == []


# ------------------------------------------------------------------------------------------------------ the record
def test_a_loaded_record_tells_the_truth_after_the_flush(session: Session, job: Job) -> None:
    record = session.get_one(JobRecord, job.id)
    assert record.state is JobState.RUNNING
    fail(session, job, "no")
    session.flush()
    assert (record.state, record.stored_in) == (JobState.RETRYABLE, "scheduled")


def test_a_loaded_record_tells_the_truth_after_a_batch(session: Session, follow_ups: FollowUps) -> None:
    job = running(session, Welcome())
    record = session.get_one(JobRecord, job.id)
    assert record.state is JobState.RUNNING
    attempt = job.held_attempt
    session.expunge(job)
    complete_many(session, [attempt])  # type: ignore[list-item]
    session.flush()
    assert record.state is JobState.COMPLETED


# ------------------------------------------------------------------------------------------------- identity map
@both_expiries
def test_memory_and_database_agree_after_every_boundary(
    world: World, calls: list[Any], database: Database, expire_on_commit: bool
) -> None:
    session = world.session(expire_on_commit=expire_on_commit)
    job = running(session)
    complete(session, job)
    assert job.state is JobState.COMPLETED
    session.commit()
    assert job.state is JobState.COMPLETED
    assert database.job(job.id).state == "completed"


def test_a_follow_up_may_be_a_move_of_time(session: Session, follow_ups: FollowUps, database: Database) -> None:
    @follow_ups.on_completed(Signup, name="later")
    def later(event: Completed[Signup]) -> EnqueueRequest:
        return EnqueueRequest(Welcome(), delay=HOUR)

    complete(session, running(session))
    session.flush()
    assert len(session.scalars(select(ScheduledJob)).all()) == 1
    session.commit()


def test_a_pending_job_of_an_unrelated_flush_is_not_touched(session: Session, job: Job, database: Database) -> None:
    enqueue(session, NotifyOps(job_id=1))
    complete(session, job)
    session.commit()
    assert sorted(database.kinds()) == ["notify_ops", "signup", "welcome"]
