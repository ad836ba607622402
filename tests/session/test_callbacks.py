"""Callbacks in the caller's transaction: registered, parked, and resolved once."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    CallbackNotFound,
    CallbackToken,
    Completed,
    DeadLetter,
    FollowUps,
    Hooks,
    InvalidJob,
    Job,
    Retried,
    StaleJobError,
    UniqueConflict,
    cancel,
    cancel_callback,
    claim,
    complete,
    complete_external,
    enqueue,
    fail_external,
    heartbeat_callback,
    park,
    register_callback,
    retry_external,
)
from awa_sqla.maintenance import promote, rescue
from awa_sqla.models.wakeups import queue_payload
from tests.app import NotifyOps, Order, Signup
from tests.session.steps import HOUR, MINUTE, again, running
from tests.session.test_unique import Pending, holders
from tests.worlds import Database, World, in_one_world, in_two_worlds

OUTCOMES = ("completed", "retried", "exhausted", "cancelled", "waiting_for_callback", "rescued")


@pytest.fixture
def follow_all(follow_ups: FollowUps) -> None:
    for outcome in OUTCOMES:
        on: Any = getattr(follow_ups, f"on_{outcome}")
        on(Signup, name=outcome)(lambda event: NotifyOps(job_id=event.job.id))


def registered(session: Session, **options: Any) -> tuple[Job, CallbackToken]:
    """A committed running job with a committed callback."""
    job = running(session, **options)
    token = register_callback(session, job, timeout=HOUR)
    session.commit()
    return job, token


def parked(session: Session, **options: Any) -> tuple[int, CallbackToken]:
    """A committed job that waits for its callback."""
    job, token = registered(session, **options)
    park(session, job, token)
    session.commit()
    return job.held_attempt.id, token  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------- register and park
def test_a_token_is_of_the_running_attempt(session: Session, database: Database) -> None:
    job, token = registered(session)
    row = database.job(job.id)
    assert (row.state, row.callback_id, row.callback_timeout_at) == ("running", token.id, token.expires_at)
    assert database.value("SELECT callback_timeout_at - clock_timestamp() < interval '1 hour' FROM jobs_hot")
    assert database.value("SELECT callback_timeout_at - clock_timestamp() > interval '59 min' FROM jobs_hot")


def test_a_second_token_replaces_the_first(session: Session, database: Database) -> None:
    job, first = registered(session)
    second = register_callback(session, job)
    session.commit()
    with pytest.raises(CallbackNotFound):
        complete_external(session, first.id)
    with pytest.raises(CallbackNotFound):
        park(session, job, first)
    park(session, job, second)
    session.commit()
    assert database.job(job.id).callback_id == second.id


def test_parking_ends_the_attempt_and_keeps_what_it_has(session: Session, database: Database, follow_all: None) -> None:
    job, token = registered(session, deadline=HOUR)
    waiting = park(session, job, token)
    assert (waiting.state, waiting.callback_id) == ("waiting_external", token.id)
    session.commit()
    row = database.job(job.id)
    assert (row.state, row.heartbeat_at, row.deadline_at, row.attempt) == ("waiting_external", None, None, 1)
    assert row.callback_timeout_at == token.expires_at
    assert [child.parent_outcome for child in database.children(job.id)] == ["waiting_for_callback"]
    with pytest.raises(StaleJobError):
        complete(session, job)
    with pytest.raises(StaleJobError):
        park(session, job, token)


@pytest.mark.case(14)
@pytest.mark.parametrize("dead_letters", [False, True])
@pytest.mark.parametrize("how", ["complete", "fail"])
def test_a_callback_that_comes_before_the_park_is_not_lost(
    session: Session, other: Session, database: Database, follow_all: None, how: str, dead_letters: bool
) -> None:
    if dead_letters:
        database.keep_dead_letters("default")
    job, token = registered(session)
    if how == "complete":
        complete_external(other, token.id, {"paid": 5})
    else:
        fail_external(other, token.id, "refused")
    other.commit()
    found = park(session, job, token)
    assert found.id == job.held_attempt.id  # type: ignore[union-attr]
    assert found.state == ("completed" if how == "complete" else "failed")
    assert isinstance(found, DeadLetter) is (dead_letters and how == "fail")
    session.commit()
    assert len(database.children(found.id)) == 1


def test_parking_without_a_callback_fails_for_good(session: Session, database: Database, follow_all: None) -> None:
    job, token = registered(session)
    assert cancel_callback(session, job) is True
    assert cancel_callback(session, job) is False
    failed = park(session, job, token)
    session.commit()
    row = database.job(failed.id)
    assert (row.state, row.errors[0]["type"]) == ("failed", "wait_for_callback_contract_violation")
    assert [child.parent_outcome for child in database.children(failed.id)] == ["exhausted"]


def test_a_withdrawn_token_is_nobodys(session: Session, database: Database) -> None:
    job, token = registered(session)
    cancel_callback(session, job)
    session.commit()
    with pytest.raises(CallbackNotFound):
        complete_external(session, token.id)
    assert database.job(job.id).callback_timeout_at is None


@pytest.mark.case(14)
@pytest.mark.parametrize("verb", [complete_external, fail_external, retry_external])
def test_a_token_of_an_earlier_attempt_is_refused(session: Session, database: Database, verb: Any) -> None:
    job, token = registered(session)
    job_id = job.id
    database.execute("UPDATE jobs_hot SET heartbeat_at = now() - interval '1 hour'")
    rescue(session, stale_after=MINUTE)
    session.commit()
    database.execute("UPDATE scheduled_jobs SET run_at = now()")
    promote(session)
    session.commit()
    again(session, session.get_one(Job, job_id))
    before = database.job(job_id)
    with pytest.raises(CallbackNotFound):
        verb(session, token.id, *(["no"] if verb is fail_external else []))
    session.commit()
    assert database.job(job_id) == before


# ------------------------------------------------------------------------------------------------------ resolving
@pytest.mark.parametrize("state", ["running", "waiting"])
def test_completing_stores_the_payload_as_result_with_rows_of_the_app(
    session: Session, other: Session, database: Database, follow_all: None, state: str
) -> None:
    job_id, token = parked(session) if state == "waiting" else (registered(session)[0].id, None)
    token_id = token.id if token else database.job(job_id).callback_id
    other.add(Order(note="paid"))
    done = complete_external(other, str(token_id), {"amount": 5})
    assert (done.id, done.state, done.result) == (job_id, "completed", {"amount": 5})
    other.rollback()
    assert database.job(job_id).callback_id == token_id
    other.add(Order(note="paid"))
    complete_external(other, token_id, {"amount": 5})
    other.commit()
    row = database.job(job_id)
    assert (row.state, row.result, row.callback_id, row.callback_timeout_at) == ("completed", {"amount": 5}, None, None)
    assert database.value("SELECT count(*) FROM app_order") == 1
    assert database.children(job_id)[-1].parent_outcome == "completed"


@pytest.mark.parametrize("dead_letters", [False, True])
def test_failing_follows_the_policy_of_the_queue(
    session: Session, database: Database, follow_all: None, dead_letters: bool
) -> None:
    if dead_letters:
        database.keep_dead_letters("default")
    job_id, token = parked(session)
    failed = fail_external(session, token.id, ValueError("refused"))
    session.commit()
    row = database.job(job_id)
    assert (row.state, row.stored_in) == ("failed", "dead" if dead_letters else "hot")
    assert (row.errors[0]["error"], row.errors[0]["type"], row.errors[0]["terminal"]) == ("refused", "ValueError", True)
    if dead_letters:
        assert isinstance(failed, DeadLetter)
        assert failed.dlq_reason == "callback_failed"
    assert database.children(job_id)[-1].parent_outcome == "exhausted"


def test_retrying_starts_again_and_wakes_the_queue(session: Session, follow_ups: FollowUps, database: Database) -> None:
    seen: list[Retried[Signup]] = []
    follow_ups.on_retried(Signup, name="seen")(lambda event: seen.append(event) or [])  # type: ignore[func-returns-value]
    job_id, token = parked(session)
    with database.listening() as listener:
        job = retry_external(session, token.id)
        assert (job.state, job.attempt) == ("available", 0)
        session.commit()
        assert listener.heard() == [queue_payload("default")]
    row = database.job(job_id)
    assert (row.state, row.attempt, row.callback_id, row.finalized_at, row.errors) == ("available", 0, None, None, [])
    [event] = seen
    assert (event.attempt, event.error, event.next_run_at, event.job.attempt) == (1, "", row.run_at, 0)
    [claimed] = claim(session, "default", limit=1)
    assert claimed.run_lease > event.job.run_lease


def test_only_a_waiting_job_can_be_retried_or_prolonged(session: Session, database: Database) -> None:
    job, token = registered(session)
    for act in (retry_external, lambda s, t: heartbeat_callback(s, t, timeout=HOUR)):
        with pytest.raises(CallbackNotFound):
            act(session, token.id)
    session.commit()
    assert database.job(job.id).state == "running"


def test_the_outside_may_ask_for_more_time(session: Session, database: Database) -> None:
    job_id, token = parked(session)
    row = heartbeat_callback(session, token.id, timeout=3 * HOUR)
    session.commit()
    assert row.callback_timeout_at > token.expires_at + HOUR
    assert database.job(job_id).callback_timeout_at == row.callback_timeout_at


@pytest.mark.case(13)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_of_two_that_resolve_one_wins(world: World, session: Session, database: Database, end: str) -> None:
    job_id, token = parked(session)

    def late(session: Session) -> Any:
        try:
            return complete_external(session, token.id, 2).result
        except CallbackNotFound as exc:
            return exc.callback_id

    complete_external(session, token.id, 1)
    session.flush()
    meanwhile = world.meanwhile(late)
    database.wait_until_one_is_blocked()
    getattr(session, end)()
    assert meanwhile.result() == (str(token.id) if end == "commit" else 2)
    assert database.job(job_id).result == (1 if end == "commit" else 2)


@pytest.mark.parametrize("lease", ["right", "wrong"])
def test_a_resolver_may_insist_on_the_attempt(session: Session, database: Database, lease: str) -> None:
    job_id, token = parked(session)
    run_lease = database.job(job_id).run_lease
    if lease == "right":
        assert complete_external(session, token.id, run_lease=run_lease).state == "completed"
    else:
        for act in (complete_external, retry_external):
            with pytest.raises(CallbackNotFound):
                act(session, token.id, run_lease=run_lease + 1)


def test_a_cancelled_job_waits_for_nobody(session: Session, database: Database) -> None:
    job_id, token = parked(session)
    cancel(session, job_id, reason="enough")
    session.commit()
    with pytest.raises(CallbackNotFound) as caught:
        complete_external(session, token.id)
    assert caught.value.callback_id == str(token.id)
    assert session.connection().exec_driver_sql("SELECT 1").scalar() == 1


def test_hooks_know_that_a_callback_took_no_time(world: World, database: Database) -> None:
    told: list[Completed[Signup]] = []
    hooks = Hooks()
    hooks.on(Completed, Signup)(told.append)
    maker = world.maker(world.follow_ups)
    hooks.attach(maker)
    session = world.from_maker(maker)
    _, token = parked(session)
    complete_external(session, token.id)
    session.commit()
    assert [event.duration for event in told] == [timedelta(0)]


@in_one_world
@pytest.mark.parametrize(
    ("act", "field"),
    [
        (lambda s, j, t: register_callback(s, j, timeout=5), "timeout"),
        (lambda s, j, t: register_callback(s, "job"), "job"),
        (lambda s, j, t: park(s, j, t.id), "token"),
        (lambda s, j, t: complete_external(s, "nonsense"), "callback_id"),
        (lambda s, j, t: complete_external(s, 5), "callback_id"),
        (lambda s, j, t: complete_external(s, t.id, object()), "payload"),
        (lambda s, j, t: complete_external(s, t.id, "x" * (1 << 21)), "payload"),
        (lambda s, j, t: complete_external(s, t.id, run_lease="x"), "run_lease"),
        (lambda s, j, t: heartbeat_callback(s, t.id, timeout=timedelta(0)), "timeout"),
    ],
)
def test_wrong_arguments_are_refused(session: Session, database: Database, act: Any, field: str) -> None:
    job, token = registered(session)
    before = database.jobs()
    with pytest.raises(InvalidJob) as caught:
        act(session, job, token)
    assert caught.value.field == field
    session.commit()
    assert database.jobs() == before


@in_one_world
def test_an_unknown_callback_is_not_found(session: Session) -> None:
    for act in (complete_external, retry_external):
        with pytest.raises(CallbackNotFound):
            act(session, uuid.uuid4())


# -------------------------------------------------------------------------------------------------------- timeouts
@pytest.mark.parametrize("max_attempts", [1, 2])
def test_a_callback_that_does_not_come_is_rescued(
    session: Session, database: Database, follow_all: None, max_attempts: int
) -> None:
    job_id, token = parked(session, max_attempts=max_attempts)
    assert rescue(session, stale_after=MINUTE) == []
    database.execute("UPDATE jobs_hot SET callback_timeout_at = now() - interval '1 s'")
    [ended] = rescue(session, stale_after=MINUTE)
    session.commit()
    row = database.job(job_id)
    assert (ended.id, row.state, row.callback_id) == (job_id, "retryable" if max_attempts == 2 else "failed", None)
    assert row.errors[0]["error"] == "callback timed out"
    owed = {one.outcome: one.context.get("reason") for one in database.obligations()}
    assert owed == {"rescued": "expired_callback"} | ({"exhausted": None} if max_attempts == 1 else {})
    with pytest.raises(CallbackNotFound):
        complete_external(session, token.id)


# ------------------------------------------------------------------------------------------------------ unique jobs
@in_two_worlds
def test_a_job_that_comes_back_by_its_callback_claims_its_key(session: Session, database: Database) -> None:
    enqueue(session, Pending(day=1))
    session.commit()
    [job] = claim(session, "default", limit=1)
    token = register_callback(session, job)
    park(session, job, token)
    twin = enqueue(session, Pending(day=1))
    session.commit()
    twin_id = twin.id
    with pytest.raises(UniqueConflict) as caught:
        retry_external(session, token.id)
    assert caught.value.existing_id == twin_id
    cancel(session, twin_id, reason="enough")
    assert retry_external(session, token.id).state == "available"
    session.commit()
    assert holders(database) == [job.id]


# ------------------------------------------------------------------------------------------- while another is at it
def test_a_registration_that_commits_meanwhile_is_parked_on(world: World, session: Session, database: Database) -> None:
    held = Attempt.of(running(session))
    token = register_callback(session, held, timeout=HOUR)
    meanwhile = world.meanwhile(lambda other: str(park(other, held, token).state))
    database.wait_until_one_is_blocked()
    session.commit()
    assert meanwhile.result() == "waiting_external"
    assert database.job(held.id).errors == []


def test_a_job_that_completes_while_it_is_parked_is_returned_as_it_is(
    world: World, session: Session, database: Database
) -> None:
    job, token = registered(session)
    cancel_callback(session, job)
    session.commit()
    held = Attempt.of(job)
    complete(session, held)
    session.flush()
    meanwhile = world.meanwhile(lambda other: str(park(other, held, token).state))
    database.wait_until_one_is_blocked()
    session.commit()
    assert meanwhile.result() == "completed"


@in_two_worlds
def test_a_refused_retry_leaves_the_key_and_the_row_alone(session: Session, database: Database) -> None:
    enqueue(session, Pending(day=1))
    session.commit()
    [job] = claim(session, "default", limit=1)
    token = register_callback(session, Attempt.of(job), timeout=HOUR)
    session.commit()
    with pytest.raises(CallbackNotFound):
        retry_external(session, token.id)
    assert len(database.rows("SELECT id FROM jobs_hot FOR NO KEY UPDATE SKIP LOCKED")) == 1  # a rescue must see it
    successor = enqueue(session, Pending(day=1), on_conflict="skip")
    session.flush()
    assert successor.duplicate_of is None
    session.commit()
    assert holders(database) == [successor.id]
