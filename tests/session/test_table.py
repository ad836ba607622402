"""The table of transitions, walked as data: every state against every verb.

A legal pair has exactly the effects its row names, on exactly one job, in exactly as many statements; an
illegal pair is answered as documented and changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    CallbackNotFound,
    CallbackToken,
    FollowUps,
    Job,
    JobState,
    StaleJobError,
    cancel,
    claim,
    complete,
    complete_external,
    fail,
    fail_external,
    heartbeat_callback,
    park,
    register_callback,
    resume_external,
    retry_external,
    snooze,
)
from awa_sqla.models.job import SHARED
from awa_sqla.session.attending import attend, go_on
from awa_sqla.session.table import ATTEMPT_COLUMNS, TERMINAL, TRANSITIONS, Guard, Store, Transition
from awa_sqla.session.verbs import cancel_attempt, put_back
from tests.app import Charge, NotifyOps
from tests.session.steps import HOUR, running
from tests.worlds import Database, World, in_two_worlds


@dataclass(frozen=True)
class Walk:
    """How a transition is brought about, and which columns it may change besides those the table names."""

    act: Callable[[Session, Attempt], Any]
    also: str = ""
    prepare: str = ""


KEEP = "INSERT INTO queue_meta (queue, override_dead_letters) VALUES ('payments', true)"
SPENT = "UPDATE jobs_hot SET max_attempts = attempt WHERE kind = 'charge'"
by_id = Walk(lambda session, held: cancel(session, held.id, reason="enough"), "errors")

WALKS = {
    "claim": Walk(
        lambda session, held: next(iter(claim(session, "payments", limit=1)), None),
        "attempt run_lease attempted_at heartbeat_at deadline_at worker_id finalized_at",
    ),
    "complete": Walk(lambda session, held: complete(session, held, result=1), "result"),
    "retry": Walk(lambda session, held: fail(session, held, "no"), "errors run_at"),
    "exhaust": Walk(lambda session, held: fail(session, held, "no"), "errors", SPENT),
    "bury": Walk(lambda session, held: fail(session, held, "no", terminal=True), "errors", KEEP),
    "snooze": Walk(lambda session, held: snooze(session, held, HOUR), "attempt snoozes run_at"),
    "cancel": by_id,
    "cancel_deferred": by_id,
    "cancel_held": Walk(lambda session, held: cancel_attempt(session, held, "enough"), "errors"),
    "postpone_unknown": Walk(lambda session, held: put_back(session, held, HOUR), "attempt run_at"),
}
CALL = UUID("5f0c9a52-0000-4000-8000-000000000001")
TOKEN = CallbackToken(CALL, datetime.now(UTC))


def called(verb: Callable[[Session], Any]) -> Callable[[Session, Attempt], Any]:
    """A verb by callback, which has no row to return where there is nothing to resolve."""

    def act(session: Session, held: Attempt) -> Any:
        try:
            return verb(session)
        except CallbackNotFound:
            return None

    return act


def attended(session: Session, held: Attempt) -> Any:
    """The row that waits."""
    attend(session, held, TOKEN)
    return session.get(Job, held.id)


WAITS = "UPDATE jobs_hot SET attended_at = now() WHERE state = 'waiting_external'"
fail_called = called(lambda session: fail_external(session, CALL, "no"))
WALKS |= {
    "register": Walk(
        lambda session, held: register_callback(session, held) and session.get(Job, held.id),
        " ".join(ATTEMPT_COLUMNS[2:]),
    ),
    "park": Walk(lambda session, held: park(session, held, TOKEN)),
    "complete_external": Walk(called(lambda session: complete_external(session, CALL, 1)), "result"),
    "fail_external": Walk(fail_called, "errors"),
    "bury_external": Walk(fail_called, "errors", KEEP),
    "retry_external": Walk(called(lambda session: retry_external(session, CALL)), "attempt run_at finalized_at"),
    "attend": Walk(attended, "attended_at"),
    "go_on": Walk(go_on, "deadline_at", WAITS),
    "resume_external": Walk(
        called(lambda session: resume_external(session, CALL, 1)), "callback_answer deadline_at", WAITS
    ),
    "prolong": Walk(called(lambda session: heartbeat_callback(session, CALL, timeout=HOUR)), "callback_timeout_at"),
}
#: Lanes of maintenance: walked by its own tests.
SWEEPS = {"promote", "rescue", "rescue_spent", "rescue_dead"}

HOT = [state for state in JobState if state not in (JobState.SCHEDULED, JobState.RETRYABLE)]
PLACES = [*JobState, "dead letter"]


def test_every_transition_is_walked() -> None:
    assert set(WALKS) | SWEEPS == set(TRANSITIONS)


def test_every_walked_transition_says_what_it_costs() -> None:
    assert [name for name in WALKS if TRANSITIONS[name].statements is None] == []


@pytest.fixture
def bystander(world: World, database: Database) -> Any:
    """Another running job, which nothing may touch."""
    job = world.call(running, world.session(), NotifyOps(job_id=0))
    return database.job(job.held_attempt.id)


@pytest.fixture
def held(world: World, bystander: Any) -> Attempt:
    """A running job with something in every column of its attempt."""
    return Attempt.of(world.call(running, world.session(), Charge(order_id=1), metadata={"a": 1}))


def put(database: Database, held: Attempt, place: JobState | str) -> None:
    """Bring the job into a state behind everybody's back."""
    database.execute(
        f"UPDATE jobs_hot SET callback_id = '{CALL}', callback_timeout_at = now(), callback_filter = 'x', "
        "callback_on_complete = 'x', callback_on_fail = 'x', callback_transform = 'x', progress = '{}', "
        "finalized_at = now() WHERE id = %s",
        held.id,
    )
    if place in HOT:
        database.execute("UPDATE jobs_hot SET state = %s WHERE id = %s", place, held.id)
        return
    shared = ", ".join("metadata" if key == "meta" else key for key in SHARED)
    table, extra, values = "scheduled_jobs", "", ""
    if place == "dead letter":
        table, extra, values = "dlq_entries", ", original_run_lease, dlq_reason", ", run_lease, 'manual'"
    state = "failed" if place == "dead letter" else place
    moved = shared.replace(" state,", f" '{state}',")
    database.execute(
        f"WITH gone AS (DELETE FROM jobs_hot WHERE id = {held.id} RETURNING *) "
        f"INSERT INTO {table} ({shared}{extra}) SELECT {moved}{values} FROM gone"
    )


def legal(transition: Transition, place: JobState | str) -> bool:
    return place in transition.sources


PAIRS = [(name, place) for name in WALKS for place in PLACES]
LEGAL = [(name, place) for name, place in PAIRS if legal(TRANSITIONS[name], place)]
ILLEGAL = [
    (name, place)
    for name, place in PAIRS
    if not any(legal(TRANSITIONS[other], place) for other, walk in WALKS.items() if walk is WALKS[name])
]


@pytest.mark.parametrize(("name", "place"), LEGAL)
def test_a_legal_transition_has_exactly_its_effects(
    world: World, session: Session, database: Database, held: Attempt, bystander: Any, name: str, place: Any
) -> None:
    transition, walk = TRANSITIONS[name], WALKS[name]
    put(database, held, place)
    if walk.prepare:
        database.execute(walk.prepare)
    before = database.job(held.id)
    world.warm(session)
    with world.counting() as sent:
        row = walk.act(session, held)
        session.flush()
    assert len(sent) == transition.statements
    assert row.id == held.id
    session.commit()

    after = database.job(held.id)
    assert (after.state, after.stored_in) == (transition.target, transition.store)
    assert [column for column in transition.clears if getattr(after, column) is not None] == []
    if transition.finalizes:
        assert after.finalized_at > before.finalized_at
    changed = {key for key, value in after._asdict().items() if value != getattr(before, key)}
    named = {"state", "stored_in", *transition.clears} | ({"finalized_at"} if transition.finalizes else set())
    assert changed - named - set(walk.also.split()) == set()
    assert database.job(bystander.id) == bystander
    assert len(database.jobs()) == 2


@pytest.mark.parametrize(("name", "place"), LEGAL)
def test_a_legal_transition_brings_exactly_the_follow_ups_of_its_outcomes(
    session: Session, follow_ups: FollowUps, database: Database, held: Attempt, name: str, place: Any
) -> None:
    for on in ("completed", "retried", "exhausted", "cancelled", "waiting_for_callback", "rescued"):
        getattr(follow_ups, f"on_{on}")(Charge, name=on)(lambda event: NotifyOps(job_id=event.job.id))
    put(database, held, place)
    if WALKS[name].prepare:
        database.execute(WALKS[name].prepare)
    WALKS[name].act(session, held)
    session.commit()
    brought = [child.parent_outcome for child in database.children(held.id)]
    assert brought == [outcome.value for outcome in TRANSITIONS[name].outcomes]


@in_two_worlds
@pytest.mark.parametrize(("name", "place"), ILLEGAL)
def test_an_illegal_transition_changes_nothing(
    session: Session, database: Database, held: Attempt, name: str, place: Any
) -> None:
    transition, walk = TRANSITIONS[name], WALKS[name]
    put(database, held, place)
    if walk.prepare:
        database.execute(walk.prepare)
    before = database.jobs()
    if name == "park" and place in (JobState.COMPLETED, JobState.FAILED, "dead letter"):
        assert walk.act(session, held).id == held.id  # a callback was quicker
    elif transition.guard is Guard.LEASE:
        with pytest.raises(StaleJobError) as caught:
            walk.act(session, held)
        stored = database.job(held.id)
        assert caught.value.state == (stored.state if stored.stored_in == Store.HOT else None)
    else:
        assert walk.act(session, held) is None
        assert transition.guard in (Guard.DUE, Guard.CALLBACK) or place in TERMINAL or place == "dead letter"
    session.commit()
    assert database.jobs() == before


@pytest.mark.parametrize("name", [name for name in WALKS if TRANSITIONS[name].guard is Guard.LEASE])
def test_every_transition_of_an_attempt_is_fenced_by_its_lease(
    session: Session, database: Database, held: Attempt, name: str
) -> None:
    database.move_on(held.id)
    before = database.jobs()
    with pytest.raises(StaleJobError):
        WALKS[name].act(session, held)
    session.commit()
    assert database.jobs() == before
