"""A stale attempt changes nothing: the lease is the one of the claim, whatever the row says now."""

from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, load_only

from awa_sqla import (
    Attempt,
    CompletedBatch,
    FollowUps,
    InvalidJob,
    Job,
    JobRecord,
    JobState,
    StaleJobError,
    cancel,
    claim,
    complete,
    complete_many,
    enqueue,
    fail,
    snooze,
)
from tests.app import NotifyOps, Order, Signup, Welcome
from tests.session.steps import HOUR, MINUTE, available, running
from tests.session.test_verbs import every_verb
from tests.worlds import Database, World, in_two_worlds

both_expiries = pytest.mark.parametrize("expire_on_commit", [True, False])


@pytest.fixture(autouse=True)
def _followed(follow_ups: FollowUps) -> None:
    """Every outcome of a signup has a follow-up that would show."""
    for on in (follow_ups.on_completed, follow_ups.on_retried, follow_ups.on_cancelled, follow_ups.on_exhausted):
        on(Signup, name="shows")(lambda event: Welcome())  # type: ignore[arg-type]


@in_two_worlds
@every_verb
def test_a_stolen_lease_is_stale_and_changes_nothing(session: Session, database: Database, verb: Any) -> None:
    job = running(session)
    held = Attempt.of(job)
    database.move_on(job.id)
    before = database.jobs()
    with pytest.raises(StaleJobError) as caught:
        verb(session, job)
    assert (caught.value.job_id, caught.value.run_lease) == held
    assert caught.value.state == "running"
    assert caught.value.found_lease == before[0].run_lease
    session.commit()
    assert database.jobs() == before


@in_two_worlds
@every_verb
@both_expiries
def test_attempt_1_never_ends_the_run_of_attempt_2(
    world: World, database: Database, verb: Any, expire_on_commit: bool
) -> None:
    session = world.session(expire_on_commit=expire_on_commit)
    job = running(session)
    database.move_on(job.id)
    session.refresh(job)
    assert job.attempt == 2
    with pytest.raises(StaleJobError):
        verb(session, job)
    session.commit()
    assert [(row.state, row.attempt) for row in database.jobs()] == [("running", 2)]


@pytest.mark.parametrize("end", ["rollback", "close", "savepoint"])
@both_expiries
def test_a_claim_that_was_rolled_back_cannot_end_the_next_ones_run(
    world: World, database: Database, other: Session, end: str, expire_on_commit: bool
) -> None:
    session = world.session(expire_on_commit=expire_on_commit)
    available(session)
    savepoint = session.begin_nested() if end == "savepoint" else None
    [mine] = claim(session, "default", limit=1)
    if savepoint is not None:
        savepoint.rollback()
        session.commit()
    else:
        getattr(session, end)()
    [theirs] = claim(other, "default", limit=1)
    other.commit()
    with pytest.raises(StaleJobError):
        complete(session, mine)
    session.commit()
    assert database.job(theirs.id).state == "running"
    complete(other, theirs)
    other.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_a_row_loaded_again_keeps_the_attempt_of_its_first_load(
    session: Session, other: Session, database: Database
) -> None:
    job = running(session)
    seen = other.get_one(Job, job.id)
    database.move_on(job.id)
    other.expire_all()
    other.scalars(select(Job).execution_options(populate_existing=True)).all()
    assert seen.attempt == 2
    with pytest.raises(StaleJobError):
        complete(other, seen)


def test_a_job_loaded_while_running_can_be_completed(session: Session, other: Session, database: Database) -> None:
    job = running(session)
    complete(other, other.get_one(Job, job.id))
    other.commit()
    assert database.job(job.id).state == "completed"


def test_the_next_claim_in_the_same_session_brings_its_own_lease(session: Session, database: Database) -> None:
    job = running(session)
    database.execute("UPDATE jobs_hot SET state = 'available'")
    [again] = claim(session, "default", limit=1)
    assert again is job
    complete(session, again)
    session.commit()
    assert database.job(job.id).state == "completed"


def test_a_stale_job_is_what_it_is_now_in_memory(session: Session, database: Database) -> None:
    job = running(session)
    database.execute("UPDATE jobs_hot SET state = 'cancelled'")
    with pytest.raises(StaleJobError):
        complete(session, job)
    assert job.state is JobState.CANCELLED
    assert job in session


def test_a_stale_job_that_has_moved_away_leaves_the_session(session: Session, database: Database) -> None:
    job = running(session)
    held = Attempt.of(job)
    database.execute("DELETE FROM jobs_hot")
    with pytest.raises(StaleJobError) as caught:
        complete(session, job)
    assert job not in session
    assert (caught.value.job_id, caught.value.run_lease) == held
    assert (caught.value.state, caught.value.found_lease) == (None, None)


@in_two_worlds
@every_verb
def test_after_a_stale_verb_the_session_is_usable(session: Session, database: Database, verb: Any) -> None:
    job = running(session)
    database.move_on(job.id)
    session.add(Order(note="mine"))
    with pytest.raises(StaleJobError):
        verb(session, job)
    assert session.is_active
    enqueue(session, NotifyOps(job_id=1))
    session.commit()
    assert database.value("SELECT note FROM app_order") == "mine"
    assert database.kinds() == ["signup", "notify_ops"]


@in_two_worlds
@every_verb
def test_a_stale_verb_costs_one_statement_more(world: World, session: Session, database: Database, verb: Any) -> None:
    job = running(session)
    database.move_on(job.id)
    with world.counting() as sent, pytest.raises(StaleJobError):
        verb(session, job)
    assert len(sent) == 2


def test_an_attempt_cannot_end_twice(session: Session, database: Database) -> None:
    job = running(session)
    complete(session, job)
    with pytest.raises(StaleJobError):
        fail(session, job, "late")
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_the_attempt_of_a_job_survives_everything_without_io(world: World, session: Session) -> None:
    job = running(session)
    session.expire_all()
    with world.counting() as sent:
        held = Attempt.of(job)
    assert sent == []
    session.close()
    assert Attempt.of(job) == held == Attempt.of(held)


# ------------------------------------------------------------------------------------------ what holds no attempt
def test_an_available_job_holds_no_attempt(session: Session) -> None:
    with pytest.raises(InvalidJob, match="was not claimed"):
        complete(session, available(session))


def test_a_job_loaded_when_it_was_over_holds_no_attempt(session: Session, other: Session) -> None:
    job = running(session)
    complete(session, job)
    session.commit()
    with pytest.raises(InvalidJob) as caught:
        complete(other, other.get_one(Job, job.id))
    assert caught.value.field == "job"


def test_rows_of_other_tables_hold_no_attempt(session: Session, database: Database) -> None:
    database.keep_dead_letters("dead")
    scheduled = enqueue(session, Signup(), delay=HOUR)
    letter = fail(session, running(session, queue="dead", max_attempts=1), "gone")
    session.commit()
    record = session.get_one(JobRecord, scheduled.id)
    for row in (scheduled, letter, record):
        with pytest.raises(InvalidJob):
            complete(session, row)  # type: ignore[arg-type]


def test_a_job_loaded_without_state_and_lease_holds_no_attempt(session: Session, other: Session) -> None:
    running(session)
    [partial] = other.scalars(select(Job).options(load_only(Job.id, Job.kind)))
    with pytest.raises(InvalidJob):
        complete(other, partial)


def test_a_job_loaded_with_state_and_lease_alone_is_enough(world: World, session: Session, other: Session) -> None:
    running(session)
    [partial] = other.scalars(select(Job).options(load_only(Job.state, Job.run_lease)))
    row = complete(other, partial, result=1)
    with world.counting() as sent:
        assert (row.kind, row.result, row.args) == ("signup", 1, {"email": "ada@example.org"})
    assert sent == []


# --------------------------------------------------------------------------------------------------------- races
ACTS = {
    "complete": complete,
    "complete_many": lambda session, held: complete_many(session, [held]),
    "cancel": lambda session, held: cancel(session, held.id, reason="enough"),
    "fail": lambda session, held: fail(session, held, "no"),
    "snooze": lambda session, held: snooze(session, held, MINUTE),
}
STATES = dict.fromkeys(ACTS, "completed") | {"cancel": "cancelled", "fail": "retryable", "snooze": "scheduled"}
OUTCOMES = dict.fromkeys(ACTS, "completed") | {"cancel": "cancelled", "fail": "retried", "snooze": None}


@pytest.mark.case(26)
@in_two_worlds
@pytest.mark.parametrize("first_commits", [True, False])
@pytest.mark.parametrize("rival", ACTS)
@pytest.mark.parametrize("first", ACTS)
def test_of_two_that_race_exactly_one_wins(
    world: World, session: Session, database: Database, first: str, rival: str, first_commits: bool
) -> None:
    held = Attempt.of(running(session))
    ACTS[first](session, held)
    session.flush()
    thread = world.meanwhile(lambda session: ACTS[rival](session, held))
    database.wait_until_one_is_blocked()
    session.commit() if first_commits else session.rollback()
    committed = [first if first_commits else rival]
    if not first_commits:
        assert thread.result() is not None
    elif rival == "cancel" and first in ("fail", "snooze"):
        assert thread.result() is not None  # the job lives on in the other table, and is cancelled there
        committed.append(rival)
    elif rival == "cancel":
        assert thread.result() is None
    elif rival == "complete_many":
        assert thread.result() == CompletedBatch(completed=[], stale=[held.id])
    else:
        with pytest.raises(StaleJobError):
            thread.result()
    assert database.job(held.id).state == STATES[committed[-1]]
    follow_ups = [child.parent_outcome for child in database.children(held.id)]
    assert follow_ups == [OUTCOMES[act] for act in committed if OUTCOMES[act]]
