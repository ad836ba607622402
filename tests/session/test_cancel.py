"""`cancel()`: by id or by object, in whatever state and table the job is, and while it moves."""

from typing import Any

import pytest
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    Cancelled,
    FollowUps,
    InvalidJob,
    Job,
    JobNotFound,
    JobRecord,
    JobSnapshot,
    JobState,
    StaleJobError,
    cancel,
    complete,
    enqueue,
    fail,
)
from tests.app import NotifyOps, Signup
from tests.session.steps import HOUR, available, due_again, running
from tests.worlds import Database, World, in_one_world


@pytest.fixture
def reasons(follow_ups: FollowUps) -> list[str]:
    """Operations hear of every cancelled signup; the reasons are noted."""
    heard: list[str] = []

    @follow_ups.on_cancelled(Signup, name="tell")
    def tell(event: Cancelled[Signup]) -> NotifyOps:
        heard.append(event.reason)
        assert event.job.state is JobState.CANCELLED
        return NotifyOps(job_id=event.job.id)

    return heard


def test_an_available_job_is_cancelled_with_its_reason(
    session: Session, database: Database, reasons: list[str]
) -> None:
    job = available(session)
    assert cancel(session, job.id, reason="changed my mind") is job
    session.commit()
    row = database.job(job.id)
    assert (row.state, row.stored_in) == ("cancelled", "hot")
    assert [(e["error"], e["type"], e["attempt"]) for e in row.errors] == [
        ("cancelled: changed my mind", "cancelled", 0)
    ]
    assert row.finalized_at is not None
    assert reasons == ["changed my mind"]
    assert database.kinds() == ["signup", "notify_ops"]


@pytest.mark.case(26)
def test_a_running_job_is_cancelled_and_its_attempt_has_ended(
    session: Session, other: Session, database: Database, reasons: list[str]
) -> None:
    job = running(session)
    cancel(other, job.id, reason="enough")
    other.commit()
    with pytest.raises(StaleJobError) as caught:
        complete(session, job)
    assert caught.value.state == "cancelled"
    session.rollback()
    assert database.kinds() == ["signup", "notify_ops"]


@pytest.mark.case(60)
def test_a_cancel_wins_over_the_retry_of_a_handler_that_raised(
    session: Session, other: Session, database: Database, reasons: list[str]
) -> None:
    job = running(session)
    cancel(other, job.id, reason="enough")
    other.commit()
    with pytest.raises(StaleJobError):
        fail(session, job, "raised")
    session.commit()
    assert database.job(job.id).state == "cancelled"
    assert reasons == ["enough"]


def test_a_scheduled_job_is_cancelled_in_the_table_of_live_jobs(
    session: Session, database: Database, reasons: list[str]
) -> None:
    scheduled = enqueue(session, Signup(), delay=HOUR)
    session.commit()
    row = cancel(session, scheduled.id, reason="enough")
    assert isinstance(row, Job)
    assert scheduled not in session
    session.commit()
    assert (database.job(row.id).state, database.job(row.id).stored_in) == ("cancelled", "hot")
    assert reasons == ["enough"]


def test_a_retryable_job_is_cancelled_with_its_history(session: Session, database: Database) -> None:
    retried = fail(session, running(session), "no")
    session.commit()
    row = cancel(session, retried, reason="enough")
    session.commit()
    assert row is not None
    assert [entry["error"] for entry in database.job(row.id).errors] == ["no", "cancelled: enough"]


def test_a_job_that_has_ended_is_left_alone(session: Session, database: Database, reasons: list[str]) -> None:
    job = running(session)
    complete(session, job)
    session.commit()
    before = database.jobs()
    assert cancel(session, job.id, reason="late") is None
    session.commit()
    assert database.jobs() == before
    assert reasons == []


def test_a_second_cancel_changes_nothing(session: Session, database: Database, reasons: list[str]) -> None:
    job = available(session)
    cancel(session, job, reason="first")
    assert cancel(session, job, reason="second") is None
    session.commit()
    assert reasons == ["first"]
    assert len(database.job(job.id).errors) == 1


@pytest.mark.case(12)
def test_an_unknown_id_is_not_found_and_the_session_goes_on(session: Session, database: Database) -> None:
    enqueue(session, Signup())
    with pytest.raises(JobNotFound) as caught:
        cancel(session, 2**62, reason="x")
    assert caught.value.job_id == 2**62
    session.commit()
    assert database.kinds() == ["signup"]


def test_a_job_of_this_very_transaction_can_be_cancelled(world: World, database: Database) -> None:
    for autoflush in (True, False):
        session = world.session(autoflush=autoflush)
        pending, scheduled = enqueue(session, Signup()), enqueue(session, Signup(), delay=HOUR)
        moved = fail(session, running(world.session(), queue=f"q{autoflush}"), "no")
        for job in (pending, scheduled, moved):
            assert cancel(session, job, reason="x") is not None
        session.commit()
    assert {row.state for row in database.jobs()} == {"cancelled"}


def test_every_object_that_stands_for_a_job_will_do(session: Session, other: Session) -> None:
    jobs = [available(session) for _ in range(3)]
    record = other.get_one(JobRecord, jobs[0].id)
    snapshot = JobSnapshot.of(other.get_one(Job, jobs[1].id))
    for thing in (record, snapshot, jobs[2]):
        cancelled = cancel(other, thing, reason="x")
        assert cancelled is not None
        assert cancelled.state is JobState.CANCELLED
    other.commit()


@in_one_world
@pytest.mark.parametrize("wrong", [None, "7", True, 0, -1, 2**63, Attempt(1, 1), Signup(), Job.of(Signup())])
def test_what_is_no_job_is_refused(session: Session, wrong: Any) -> None:
    with pytest.raises(InvalidJob) as caught:
        cancel(session, wrong, reason="x")
    assert caught.value.field == "job"


@in_one_world
@pytest.mark.parametrize("wrong", [None, "", "  ", 5, "a\0b", "x" * ((1 << 16) + 1)])
def test_a_reason_is_text_that_says_something(session: Session, wrong: Any) -> None:
    job = available(session)
    with pytest.raises(InvalidJob) as caught:
        cancel(session, job, reason=wrong)
    assert caught.value.field == "reason"


def test_a_job_that_is_promoted_in_between_is_found(world: World, session: Session, database: Database) -> None:
    """The promotion is held open: its row is in neither table for the one who looks first."""
    scheduled = enqueue(session, Signup(), delay=HOUR)
    session.commit()
    job_id = scheduled.id
    promoter = database.another()
    promoter.execute("BEGIN")
    due_again(promoter, session, job_id, look=False)
    thread = world.meanwhile(lambda session: cancel(session, job_id, reason="enough"))
    database.wait_until_one_is_blocked()
    promoter.execute("COMMIT")
    assert thread.result() is not None
    promoter.close()
    row = database.job(job_id)
    assert (row.state, row.stored_in) == ("cancelled", "hot")


def test_a_job_that_is_moved_away_in_between_is_found(world: World, session: Session, database: Database) -> None:
    job = running(session)
    job_id = job.id
    fail(session, job, "no")
    session.flush()
    thread = world.meanwhile(lambda session: cancel(session, job_id, reason="enough"))
    database.wait_until_one_is_blocked()
    session.commit()
    assert thread.result() is not None
    assert database.job(job_id).state == "cancelled"


@pytest.mark.case(6)
def test_several_cancels_bring_a_follow_up_each(session: Session, database: Database, reasons: list[str]) -> None:
    jobs = [available(session) for _ in range(3)]
    for number, job in enumerate(jobs):
        cancel(session, job, reason=str(number))
    session.commit()
    assert reasons == ["0", "1", "2"]
    assert database.kinds().count("notify_ops") == 3
