"""Waits that a handler attends: begun, answered, given up; and everything else that may happen to the row meanwhile."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    CallbackNotFound,
    CallbackToken,
    Completion,
    FollowUps,
    Job,
    JobArgs,
    JobState,
    StaleJobError,
    Unique,
    UniqueConflict,
    cancel,
    cancel_callback,
    claim,
    complete,
    complete_many,
    enqueue,
    fail,
    heartbeat_callback,
    park,
    register_callback,
    resume_external,
    retry_after,
    retry_external,
    set_progress,
    snooze,
)
from awa_sqla.maintenance import promote, rescue
from awa_sqla.session.attending import Answer, attend, go_on, look
from awa_sqla.session.verbs import cancel_attempt, put_back
from awa_sqla.worker.heartbeat import BEAT, LOST
from tests.app import NotifyOps, Order, Signup
from tests.session.steps import HOUR, MINUTE, again, running
from tests.session.test_callbacks import OUTCOMES
from tests.session.test_unique import holders
from tests.worlds import Database, World, in_two_worlds

pytestmark = in_two_worlds

PAYLOADS = [None, 0, [], {"amount": [5, {"of": None}]}, [[1], [2, [3]]]]


@pytest.fixture
def follow_all(follow_ups: FollowUps) -> None:
    for outcome in OUTCOMES:
        on: Any = getattr(follow_ups, f"on_{outcome}")
        on(Signup, name=outcome)(lambda event: NotifyOps(job_id=event.job.id))


def registered(session: Session, args: JobArgs | None = None, **options: Any) -> tuple[Attempt, CallbackToken]:
    """A committed running attempt with a committed callback."""
    held = Attempt.of(running(session, args, **options))
    token = register_callback(session, held, timeout=HOUR)
    session.commit()
    return held, token


def attended(session: Session, args: JobArgs | None = None, **options: Any) -> tuple[Attempt, CallbackToken]:
    """A committed attempt whose handler waits for its callback."""
    held, token = registered(session, args, **options)
    assert attend(session, held, token) is None
    session.commit()
    return held, token


def parked(session: Session, **options: Any) -> tuple[Attempt, CallbackToken]:
    """A committed job that waits for its callback, and whose attempt has ended."""
    held, token = registered(session, **options)
    park(session, held, token)
    session.commit()
    return held, token


STARTS: dict[str, Callable[..., tuple[Attempt, CallbackToken]]] = {"running": registered, "attended": attended}
in_both = pytest.mark.parametrize("start", STARTS)


def is_usable(session: Session, database: Database) -> None:
    """The caller's transaction is as good as before: what it writes is stored."""
    session.add(Order(note="mine"))
    session.commit()
    assert database.value("SELECT note FROM app_order") == "mine"


def outcomes(database: Database, held: Attempt) -> list[str]:
    """The outcomes that brought follow-ups."""
    return [child.parent_outcome for child in database.children(held.id)]


# ----------------------------------------------------------------------------------------------------- the wait itself
def test_an_attended_job_stays_its_attempts(session: Session, database: Database, follow_all: None) -> None:
    held, token = registered(session, deadline=HOUR)
    before = database.job(held.id)
    assert attend(session, held, token) is None
    session.commit()
    after = database.job(held.id)
    changed = {key for key, value in after._asdict().items() if value != getattr(before, key)}
    assert changed == {"state", "attended_at"}
    assert (after.state, after.worker_id, after.callback_id) == ("waiting_external", "w1", token.id)
    assert database.value(
        "SELECT attended_at BETWEEN now() - interval '1 min' AND clock_timestamp() FROM jobs WHERE id = %s", held.id
    )
    assert outcomes(database, held) == ["waiting_for_callback"]


def test_a_wait_begun_twice_has_begun_once(session: Session, database: Database, follow_all: None) -> None:
    """The worker says it again where the answer to its COMMIT was lost."""
    held, token = attended(session)
    before = database.job(held.id)
    assert attend(session, held, token) is None
    session.commit()
    assert database.job(held.id) == before
    assert outcomes(database, held) == ["waiting_for_callback"]
    resume_external(session, token.id, 5)
    session.commit()
    assert attend(session, held, token) == Answer(5)
    session.commit()
    assert database.job(held.id).state == "running"
    assert outcomes(database, held) == ["waiting_for_callback"]


def test_a_wait_that_was_rolled_back_has_not_begun(session: Session, database: Database, follow_all: None) -> None:
    held, token = registered(session)
    before = database.job(held.id)
    savepoint = session.begin_nested()
    attend(session, held, token)
    savepoint.rollback()
    session.commit()
    assert database.job(held.id) == before
    attend(session, held, token)
    session.rollback()
    assert (database.job(held.id), outcomes(database, held)) == (before, [])
    attend(session, held, token)
    session.commit()
    assert outcomes(database, held) == ["waiting_for_callback"]


def test_a_handler_waits_for_the_last_token_only(session: Session, database: Database) -> None:
    held, first = registered(session)
    second = register_callback(session, held, timeout=HOUR)
    session.commit()
    before = database.job(held.id)
    stranger = CallbackToken(uuid.uuid4(), second.expires_at)
    for token in (first, stranger):
        with pytest.raises(CallbackNotFound) as caught:
            attend(session, held, token)
        assert caught.value.callback_id == str(token.id)
        with pytest.raises(CallbackNotFound):
            look(session, held, token)
    session.commit()
    assert database.job(held.id) == before
    assert attend(session, held, second) is None
    with pytest.raises(CallbackNotFound):
        attend(session, held, first)
    is_usable(session, database)


def test_a_new_token_ends_the_wait_for_the_old_one(session: Session, database: Database) -> None:
    held, first = attended(session)
    second = register_callback(session, held, timeout=HOUR)
    session.commit()
    with pytest.raises(CallbackNotFound):
        look(session, held, first)
    with pytest.raises(CallbackNotFound):
        resume_external(session, first.id, 1)
    assert attend(session, held, second) is None
    resume_external(session, second.id, 2)
    session.commit()
    assert look(session, held, second) == Answer(2)
    assert database.job(held.id).attended_at is None


def test_a_withdrawn_token_ends_the_wait(session: Session, database: Database) -> None:
    held, token = attended(session)
    assert cancel_callback(session, held) is True
    assert cancel_callback(session, held) is False
    session.commit()
    with pytest.raises(CallbackNotFound):
        look(session, held, token)
    with pytest.raises(CallbackNotFound):
        resume_external(session, token.id)
    assert go_on(session, held).state == "running"
    session.commit()
    row = database.job(held.id)
    assert (row.attended_at, row.callback_id, row.callback_timeout_at) == (None, None, None)


ENDED: dict[str, Callable[[Session, Database, Attempt, CallbackToken], Any]] = {
    "parked": lambda session, database, held, token: park(session, held, token),
    "completed": lambda session, database, held, token: complete(session, held),
    "cancelled": lambda session, database, held, token: cancel(session, held.id, reason="enough"),
    "retried": lambda session, database, held, token: fail(session, held, "no"),
    "run by another": lambda session, database, held, token: database.move_on(held.id),
}


@in_both
@pytest.mark.parametrize("how", ENDED)
def test_an_attempt_that_has_ended_waits_for_nothing(
    session: Session, database: Database, start: str, how: str
) -> None:
    held, token = STARTS[start](session)
    ENDED[how](session, database, held, token)
    session.commit()
    before = database.jobs()
    for act in (
        lambda: attend(session, held, token),
        lambda: look(session, held, token),
        lambda: go_on(session, held),
    ):
        with pytest.raises(StaleJobError) as caught:
            act()
        assert (caught.value.job_id, caught.value.run_lease) == held
    is_usable(session, database)
    assert database.jobs() == before


def test_a_running_attempt_has_no_wait_to_give_up(session: Session, database: Database) -> None:
    held, token = registered(session)
    before = database.job(held.id)
    with pytest.raises(StaleJobError):
        go_on(session, held)
    session.commit()
    assert database.job(held.id) == before
    resume_external(session, token.id)
    with pytest.raises(StaleJobError):
        go_on(session, held)


# ------------------------------------------------------------------------------------------------------- the answer
@in_both
@pytest.mark.parametrize("payload", PAYLOADS, ids=repr)
def test_the_answer_is_kept_for_the_attempt(session: Session, database: Database, start: str, payload: Any) -> None:
    held, token = STARTS[start](session)
    row = resume_external(session, str(token.id), payload)
    assert (row.id, row.run_lease, row.state) == (*held, "running")
    session.commit()
    stored = database.job(held.id)
    assert stored.callback_answer == {"callback": str(token.id), "payload": payload}
    assert (stored.state, stored.callback_id, stored.callback_timeout_at, stored.attended_at) == (
        "running",
        None,
        None,
        None,
    )
    for ask in (attend, look, attend):  # it stays until the next callback
        assert ask(session, held, token) == Answer(payload)
    session.commit()
    assert database.job(held.id) == stored
    register_callback(session, held, timeout=HOUR)
    session.commit()
    assert database.job(held.id).callback_answer is None
    with pytest.raises(CallbackNotFound):
        attend(session, held, token)


@in_both
def test_an_answer_is_no_outcome(session: Session, database: Database, follow_all: None, start: str) -> None:
    held, token = STARTS[start](session)
    told = outcomes(database, held)
    resume_external(session, token.id)
    session.commit()
    assert outcomes(database, held) == told
    assert database.obligations() == []
    complete(session, held)
    session.commit()
    assert outcomes(database, held) == [*told, "completed"]


@pytest.mark.case(14)
def test_an_answer_before_the_wait_is_no_answer_to_a_parked_job(session: Session, database: Database) -> None:
    held, token = registered(session)
    resume_external(session, token.id, 5)
    session.commit()
    before = database.job(held.id)
    with pytest.raises(CallbackNotFound):
        park(session, held, token)
    is_usable(session, database)
    assert database.job(held.id) == before


def twice(session: Session, database: Database) -> tuple[uuid.UUID, dict[str, Any]]:
    _, token = attended(session)
    resume_external(session, token.id, 1)
    session.commit()
    return token.id, {}


def twice_early(session: Session, database: Database) -> tuple[uuid.UUID, dict[str, Any]]:
    _, token = registered(session)
    resume_external(session, token.id, 1)
    session.commit()
    return token.id, {}


def with_another_lease(session: Session, database: Database) -> tuple[uuid.UUID, dict[str, Any]]:
    held, token = attended(session)
    return token.id, {"run_lease": held.run_lease + 1}


def of_a_parked_job(session: Session, database: Database) -> tuple[uuid.UUID, dict[str, Any]]:
    return parked(session)[1].id, {}


def of_an_earlier_attempt(session: Session, database: Database) -> tuple[uuid.UUID, dict[str, Any]]:
    held, token = attended(session)
    database.execute("UPDATE jobs_hot SET heartbeat_at = now() - interval '1 hour'")
    assert rescue(session, stale_after=MINUTE) == [held]
    session.commit()
    database.execute("UPDATE scheduled_jobs SET run_at = now()")
    promote(session)
    session.commit()
    [job] = claim(session, "default", limit=1)
    second = register_callback(session, job, timeout=HOUR)
    attend(session, Attempt.of(job), second)
    session.commit()
    return token.id, {}


@pytest.mark.case(14)
@pytest.mark.parametrize(
    "prepare",
    [
        lambda session, database: (uuid.uuid4(), {}),
        twice,
        twice_early,
        with_another_lease,
        of_a_parked_job,
        of_an_earlier_attempt,
    ],
    ids=["unknown", "twice", "twice early", "another lease", "parked", "earlier attempt"],
)
def test_nobody_is_resumed_by_what_is_not_his(session: Session, database: Database, prepare: Any) -> None:
    callback, options = prepare(session, database)
    before = database.jobs()
    with database.listening() as listener:
        with pytest.raises(CallbackNotFound) as caught:
            resume_external(session, callback, 2, **options)
        assert caught.value.callback_id == str(callback)
        is_usable(session, database)
        assert listener.heard() == []
    assert database.jobs() == before


@in_both
def test_a_resolver_may_insist_on_the_attempt(session: Session, database: Database, start: str) -> None:
    held, token = STARTS[start](session)
    assert resume_external(session, token.id, 1, run_lease=held.run_lease).state == "running"
    session.commit()
    assert look(session, held, token) == Answer(1)


@in_both
@pytest.mark.parametrize("how", ["rollback", "savepoint", "commit", "silenced"])
def test_the_handler_is_woken_by_the_commit(
    session: Session, other: Session, database: Database, start: str, how: str
) -> None:
    held, token = STARTS[start](session)
    before = database.job(held.id)
    with database.listening() as listener:
        if how == "silenced":
            other.connection().exec_driver_sql("SET LOCAL awa.notify = 'off'")
        savepoint = other.begin_nested()
        resume_external(other, token.id, 5)
        other.flush()
        assert listener.heard() == []
        assert database.job(held.id) == before
        if how == "rollback":
            other.rollback()
        else:
            (savepoint.rollback if how == "savepoint" else savepoint.commit)()
            other.commit()
        assert listener.heard() == ([f"w:{held.id}"] if how == "commit" else [])
    if how in ("rollback", "savepoint"):
        assert database.job(held.id) == before
        resume_external(other, token.id, 6)
        other.commit()
    assert look(session, held, token) == Answer(6 if how in ("rollback", "savepoint") else 5)


# ----------------------------------------------------------------------------------------------------- the deadline
def ways_back(session: Session, held: Attempt, token: CallbackToken, how: str) -> None:
    if how == "answered":
        resume_external(session, token.id)
    else:
        go_on(session, held)


@pytest.mark.parametrize("how", ["answered", "given up"])
def test_the_deadline_stands_still_while_the_handler_waits(session: Session, database: Database, how: str) -> None:
    held, token = attended(session, deadline=HOUR)
    database.execute(
        "UPDATE jobs_hot SET attended_at = attended_at - interval '30 min', deadline_at = deadline_at - interval '2 h'"
    )
    before = database.job(held.id)
    assert database.value("SELECT deadline_at < now() FROM jobs_hot")
    assert rescue(session, stale_after=MINUTE) == []  # it is past, and does not count
    session.commit()
    earliest = database.value("SELECT clock_timestamp()")
    ways_back(session, held, token, how)
    session.commit()
    latest = database.value("SELECT clock_timestamp()")
    after = database.job(held.id)
    waited = after.deadline_at - before.deadline_at
    assert earliest - before.attended_at <= waited <= latest - before.attended_at
    assert waited >= timedelta(minutes=30)
    assert [ended.id for ended in rescue(session, stale_after=MINUTE)] == [held.id]  # it runs again, and it is late


def test_an_answer_before_the_wait_leaves_the_deadline_alone(session: Session, database: Database) -> None:
    held, token = registered(session, deadline=HOUR)
    before = database.job(held.id).deadline_at
    resume_external(session, token.id)
    session.commit()
    assert database.job(held.id).deadline_at == before is not None


@pytest.mark.parametrize("how", ["answered", "given up"])
def test_what_has_no_deadline_gets_none(session: Session, database: Database, how: str) -> None:
    held, token = attended(session)
    ways_back(session, held, token, how)
    session.commit()
    assert database.job(held.id).deadline_at is None


def test_a_wait_that_is_given_up_keeps_its_token(session: Session, database: Database, follow_all: None) -> None:
    held, token = attended(session)
    go_on(session, held)
    session.commit()
    row = database.job(held.id)
    assert (row.state, row.attended_at, row.callback_id) == ("running", None, token.id)
    assert row.callback_timeout_at == token.expires_at
    attend(session, held, token)
    session.commit()
    assert outcomes(database, held) == ["waiting_for_callback"] * 2
    resume_external(session, token.id, 1)
    session.commit()
    assert look(session, held, token) == Answer(1)


# -------------------------------------------------------------------------------------- the other verbs of the attempt
ENDS: dict[str, tuple[Callable[[Session, Attempt], Any], str, list[str]]] = {
    "complete": (lambda session, held: complete(session, held, result=1), "completed", ["completed"]),
    "complete_many": (
        lambda session, held: complete_many(session, [Completion(held, 1)]).completed == [held.id],
        "completed",
        ["completed"],
    ),
    "fail": (lambda session, held: fail(session, held, "no"), "retryable", ["retried"]),
    "fail for good": (lambda session, held: fail(session, held, "no", terminal=True), "failed", ["exhausted"]),
    "retry_after": (lambda session, held: retry_after(session, held, MINUTE), "retryable", ["retried"]),
    "snooze": (lambda session, held: snooze(session, held, MINUTE), "scheduled", []),
    "put_back": (lambda session, held: put_back(session, held, MINUTE), "scheduled", []),
    "cancel_attempt": (lambda session, held: cancel_attempt(session, held, "enough"), "cancelled", ["cancelled"]),
    "cancel": (lambda session, held: cancel(session, held.id, reason="enough"), "cancelled", ["cancelled"]),
}
LEFT = ("heartbeat_at", "deadline_at", "callback_id", "callback_timeout_at", "callback_answer", "attended_at")


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize(("end", "dead_letters"), [*((end, False) for end in ENDS), ("fail for good", True)])
def test_whatever_ends_the_attempt_leaves_nothing_of_the_wait(
    session: Session, database: Database, follow_all: None, end: str, answered: bool, dead_letters: bool
) -> None:
    if dead_letters:
        database.keep_dead_letters("default")
    held, token = attended(session, deadline=HOUR)
    if answered:
        resume_external(session, token.id, 1)
    act, state, told = ENDS[end]
    assert act(session, held)
    session.commit()
    row = database.job(held.id)
    assert row.state == state
    assert (row.stored_in == "dead") is (dead_letters and state == "failed")
    assert [name for name in LEFT if getattr(row, name) is not None] == []
    assert outcomes(database, held) == ["waiting_for_callback", *told]
    before = database.jobs()
    with pytest.raises(CallbackNotFound):
        resume_external(session, token.id)
    with pytest.raises(StaleJobError):
        attend(session, held, token)
    session.commit()
    assert database.jobs() == before


def test_progress_is_written_while_the_handler_waits(session: Session, database: Database) -> None:
    held, token = attended(session)
    set_progress(session, held, 50, message="half")
    session.commit()
    row = database.job(held.id)
    assert (row.state, row.progress["percent"], row.callback_id) == ("waiting_external", 50, token.id)
    assert row.attended_at is not None


def test_a_handler_that_has_waited_may_park(session: Session, database: Database, follow_all: None) -> None:
    held, _ = attended(session, deadline=HOUR)
    token = register_callback(session, held, timeout=HOUR)
    park(session, held, token)
    session.commit()
    row = database.job(held.id)
    assert (row.state, row.callback_id) == ("waiting_external", token.id)
    assert (row.attended_at, row.heartbeat_at, row.deadline_at, row.callback_answer) == (None, None, None, None)
    assert outcomes(database, held) == ["waiting_for_callback"] * 2
    with pytest.raises(StaleJobError):
        attend(session, held, token)
    with pytest.raises(CallbackNotFound):
        resume_external(session, token.id)


def test_a_batch_takes_attended_attempts_and_no_parked_ones(session: Session, database: Database) -> None:
    waits, left, runs = attended(session)[0], parked(session)[0], registered(session)[0]
    done = complete_many(session, [waits, left, runs])
    session.commit()
    assert (done.completed, done.stale) == ([waits.id, runs.id], [left.id])
    assert [job.state for job in database.jobs()] == ["completed", "waiting_external", "completed"]


def test_follow_ups_of_a_batch_come_with_the_next_flush_though_some_are_stale(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    called: list[int] = []
    follow_ups.on_completed(Signup, name="seen")(lambda event: called.append(event.job.id) or [])  # type: ignore[func-returns-value]
    runs, left = registered(session)[0], parked(session)[0]
    waits, _ = attended(session, Active(day=1))
    done = complete_many(session, [left, waits, runs])
    assert (done.completed, done.stale, called) == ([waits.id, runs.id], [left.id], [])
    session.commit()
    assert called == [runs.id]


@pytest.mark.parametrize("verb", ["retry", "prolong"])
def test_the_outside_may_do_with_an_attended_job_what_it_does_with_a_parked_one(
    session: Session, database: Database, verb: str
) -> None:
    held, token = attended(session)
    if verb == "prolong":
        heartbeat_callback(session, token.id, timeout=3 * HOUR)
        session.commit()
        row = database.job(held.id)
        assert (row.state, row.attended_at is None) == ("waiting_external", False)
        assert row.callback_timeout_at > token.expires_at + HOUR
        return
    retry_external(session, token.id)
    session.commit()
    row = database.job(held.id)
    assert row.state == "available"
    assert [name for name in LEFT if getattr(row, name) is not None] == []
    with pytest.raises(StaleJobError):
        look(session, held, token)
    assert again(session, session.get_one(Job, held.id)).run_lease > held.run_lease


# ---------------------------------------------------------------------------------------------------- the heartbeat
def test_attended_rows_are_kept_alive_and_parked_ones_are_let_go(session: Session, database: Database) -> None:
    waits, left, runs = attended(session)[0], parked(session)[0], registered(session)[0]
    database.execute("UPDATE jobs_hot SET heartbeat_at = heartbeat_at - interval '1 hour'")
    flight = sorted([waits, left, runs])
    parameters = {"ids": [held.id for held in flight], "leases": [held.run_lease for held in flight]}
    session.execute(BEAT, parameters)
    lost = [Attempt(*row) for row in session.execute(LOST, parameters)]
    session.commit()
    fresh = database.rows("SELECT id FROM jobs_hot WHERE heartbeat_at > now() - interval '1 min' ORDER BY id")
    assert [row.id for row in fresh] == [waits.id, runs.id]
    assert database.job(left.id).heartbeat_at is None
    assert lost == [left]
    assert rescue(session, stale_after=MINUTE) == []


def test_an_attended_job_of_another_attempt_is_lost(session: Session, database: Database) -> None:
    held, _ = attended(session)
    database.execute("UPDATE jobs_hot SET heartbeat_at = heartbeat_at - interval '1 hour'")
    database.move_on(held.id)
    before = database.job(held.id)
    parameters = {"ids": [held.id], "leases": [held.run_lease]}
    session.execute(BEAT, parameters)
    assert [Attempt(*row) for row in session.execute(LOST, parameters)] == [held]
    session.commit()
    assert database.job(held.id) == before


# -------------------------------------------------------------------------------------------------------- the rescue
def fall_silent(database: Database) -> None:
    database.execute("UPDATE jobs_hot SET heartbeat_at = now() - interval '1 hour' WHERE heartbeat_at IS NOT NULL")


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize(
    ("spent", "dead_letters", "state"), [(False, True, "retryable"), (True, False, "failed"), (True, True, "failed")]
)
def test_a_handler_that_dies_while_it_waits_is_rescued_once(
    session: Session,
    database: Database,
    follow_all: None,
    spent: bool,
    dead_letters: bool,
    state: str,
    expired: bool,
) -> None:
    if dead_letters:
        database.keep_dead_letters("default")
    parked_one, _ = parked(session, args=NotifyOps(job_id=0), queue="other")
    held, token = attended(session, max_attempts=1 if spent else 2, deadline=HOUR)
    fall_silent(database)
    if expired:
        database.execute("UPDATE jobs_hot SET callback_timeout_at = now() - interval '1 s' WHERE id = %s", held.id)
    assert rescue(session, stale_after=MINUTE) == [held]
    assert rescue(session, stale_after=MINUTE) == []
    session.commit()
    assert rescue(session, stale_after=MINUTE) == []
    session.commit()
    row = database.job(held.id)
    assert (row.state, row.stored_in == "dead") == (state, dead_letters and spent)
    assert [entry["error"] for entry in row.errors] == ["heartbeat stale: worker presumed dead"]
    assert [name for name in LEFT if getattr(row, name) is not None] == []
    owed = [(one.job_id, one.outcome, one.context.get("reason")) for one in database.obligations()]
    rescued = (held.id, "rescued", "stale_heartbeat")
    assert sorted(owed) == sorted([rescued] + ([(held.id, "exhausted", None)] if spent else []))
    assert outcomes(database, held) == ["waiting_for_callback"]
    assert database.job(parked_one.id).state == "waiting_external"
    if dead_letters and spent:
        assert database.value("SELECT dlq_reason FROM dlq_entries") == "heartbeat_stale"
    with pytest.raises(CallbackNotFound):
        resume_external(session, token.id)
    with pytest.raises(StaleJobError):
        go_on(session, held)


def test_a_wait_that_takes_too_long_ends_though_its_worker_lives(session: Session, database: Database) -> None:
    held, token = attended(session)
    database.execute("UPDATE jobs_hot SET callback_timeout_at = now() - interval '1 s'")
    assert rescue(session, stale_after=MINUTE) == [held]
    session.commit()
    row = database.job(held.id)
    assert (row.state, row.errors[0]["error"]) == ("retryable", "callback timed out")
    with pytest.raises(StaleJobError):
        look(session, held, token)


def test_a_row_that_somebody_holds_is_passed_over(session: Session, other: Session, database: Database) -> None:
    held, token = attended(session)
    fall_silent(database)
    resume_external(session, token.id, 1)
    assert rescue(other, stale_after=MINUTE) == []
    other.commit()
    session.commit()
    assert rescue(other, stale_after=MINUTE) == [held]


# ------------------------------------------------------------------------------------------------------ unique jobs
class Active(
    JobArgs,
    unique=Unique(states={JobState.SCHEDULED, JobState.AVAILABLE, JobState.RUNNING, JobState.COMPLETED}),
):
    """While one waits for somebody, the next may run."""

    day: int


@pytest.mark.parametrize("how", ["answered", "given up"])
def test_a_job_that_runs_again_claims_its_key(session: Session, database: Database, how: str) -> None:
    held, token = attended(session, Active(day=1))
    assert holders(database) == []
    twin = enqueue(session, Active(day=1))
    session.commit()
    before, twin_id = database.job(held.id), twin.id
    with database.listening() as listener:
        with pytest.raises(UniqueConflict) as caught:
            ways_back(session, held, token, how)
        assert caught.value.existing_id == twin_id
        is_usable(session, database)
        assert listener.heard() == []
    assert (database.job(held.id), holders(database)) == (before, [twin_id])
    cancel(session, twin_id, reason="enough")
    ways_back(session, held, token, how)
    session.commit()
    assert (database.job(held.id).state, holders(database)) == ("running", [held.id])


def test_an_answer_that_was_rolled_back_holds_no_key(session: Session, database: Database) -> None:
    _, token = attended(session, Active(day=1))
    savepoint = session.begin_nested()
    resume_external(session, token.id)
    savepoint.rollback()
    twin = enqueue(session, Active(day=1))
    session.commit()
    assert holders(database) == [twin.id]


def test_a_refused_answer_takes_no_key(session: Session, database: Database) -> None:
    held, _ = registered(session, Active(day=1))
    token = register_callback(session, held, timeout=HOUR)
    park(session, held, token)
    session.commit()
    with pytest.raises(CallbackNotFound):
        resume_external(session, token.id)
    twin = enqueue(session, Active(day=1), on_conflict="skip")
    session.commit()
    assert (twin.duplicate_of, holders(database)) == (None, [twin.id])


INTO: dict[str, Callable[[Session, Attempt], Any]] = {
    name: ENDS[name][0] for name in ("complete", "complete_many", "snooze", "put_back")
}


@pytest.mark.parametrize("end", INTO)
def test_an_attended_job_that_ends_in_its_unique_states_claims_its_key(
    session: Session, database: Database, end: str
) -> None:
    held, _ = attended(session, Active(day=1))
    twin = enqueue(session, Active(day=1))
    session.commit()
    before, twin_id = database.job(held.id), twin.id
    with pytest.raises(UniqueConflict) as caught:
        INTO[end](session, held)
    assert caught.value.existing_id == twin_id
    is_usable(session, database)
    assert (database.job(held.id), holders(database)) == (before, [twin_id])
    cancel(session, twin_id, reason="enough")
    assert INTO[end](session, held)
    session.commit()
    assert holders(database) == [held.id]


def test_a_batch_that_was_refused_for_a_key_can_be_rolled_back_and_done_one_by_one(
    session: Session, database: Database
) -> None:
    waits, _ = attended(session, Active(day=1))
    runs, _ = registered(session)
    twin = enqueue(session, Active(day=1))
    session.commit()
    twin_id = twin.id
    savepoint = session.begin_nested()
    with pytest.raises(UniqueConflict):
        complete_many(session, [waits, runs])
    savepoint.rollback()
    complete(session, runs)
    session.commit()
    assert [job.state for job in database.jobs()] == ["waiting_external", "completed", "available"]
    assert holders(database) == [twin_id]


@pytest.mark.parametrize("way", ["go_on", "complete", "snooze"])
def test_an_answer_and_the_attempt_do_not_wait_for_each_other(
    world: World, session: Session, database: Database, way: str
) -> None:
    """Each would have what the other wants: the row the one, the key the other."""
    held, token = attended(session, Active(day=1))
    verbs: dict[str, Callable[[Session], Any]] = {
        "go_on": lambda other: go_on(other, held),
        "complete": lambda other: complete(other, held),
        "snooze": lambda other: snooze(other, held, MINUTE),
    }
    started: list[Any] = []

    def act(other: Session) -> str:
        try:
            return str(verbs[way](other).state)
        except StaleJobError:
            return "stale"

    def before(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "claim_keys" in statement and not started:
            started.append(world.meanwhile(act))
            database.wait_until_one_is_blocked()

    event.listen(world.engine, "before_cursor_execute", before)
    try:
        resume_external(session, token.id)
    finally:
        event.remove(world.engine, "before_cursor_execute", before)
    session.commit()
    [meanwhile] = started
    assert meanwhile.result() == {"go_on": "stale", "complete": "completed", "snooze": "scheduled"}[way]


# ------------------------------------------------------------------------------------------- while another is at it
@in_both
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_of_two_answers_one_is_kept(world: World, session: Session, database: Database, start: str, end: str) -> None:
    held, token = STARTS[start](session)

    def late(session: Session) -> Any:
        try:
            return resume_external(session, token.id, 2).callback_answer["payload"]  # type: ignore[index]
        except CallbackNotFound as exc:
            return exc.callback_id

    resume_external(session, token.id, 1)
    meanwhile = world.meanwhile(late)
    database.wait_until_one_is_blocked()
    getattr(session, end)()
    assert meanwhile.result() == (str(token.id) if end == "commit" else 2)
    assert look(session, held, token) == Answer(1 if end == "commit" else 2)
