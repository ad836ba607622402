"""Obligations: a spec that only the catalogue lists is owed in the same flush."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy.orm import Session

from awa_sqla import (
    Completed,
    FollowUps,
    JobSnapshot,
    JobState,
    Outcome,
    cancel,
    complete,
    complete_many,
    fail,
)
from awa_sqla.session import catalogue, ledger
from awa_sqla.session.events import EVENTS
from tests.app import Charge, Signup, Welcome
from tests.session.steps import rolled_back, running
from tests.worlds import Database, World

Catalogued = Callable[..., None]


@pytest.fixture
def catalogued(database: Database) -> Catalogued:
    """Some other process can dispatch this spec, and has said so."""

    def write(
        name: str, outcome: str = "completed", kind: str = "signup", *, age: str = "1 min", seen: str = "0"
    ) -> None:
        database.execute(
            "INSERT INTO follow_up_specs (kind, outcome, name, created_at, last_seen) "
            "VALUES (%s, %s, %s, now() - %s::interval, now() - %s::interval)",
            kind,
            outcome,
            name,
            age,
            seen,
        )
        catalogue.forget_cache()

    return write


def test_a_catalogued_spec_is_owed_in_the_same_flush(
    session: Session, catalogued: Catalogued, database: Database
) -> None:
    catalogued("app:welcome")
    job = running(session)
    complete(session, job, result={"n": 1})
    session.flush()
    assert database.obligations() == []
    session.commit()
    [owed] = database.obligations()
    assert (owed.job_id, owed.kind, owed.outcome, owed.spec) == (job.id, "signup", "completed", "app:welcome")
    assert owed.context == {"result": {"n": 1}}
    assert (owed.attempts, owed.last_error) == (0, None)
    assert owed.next_attempt_at is not None
    snapshot = JobSnapshot.from_json(owed.snapshot)
    assert (snapshot.id, snapshot.state, snapshot.result) == (job.id, JobState.COMPLETED, {"n": 1})


def test_an_obligation_holds_all_that_its_event_needs(
    session: Session, catalogued: Catalogued, database: Database
) -> None:
    for outcome in Outcome:
        catalogued("far", outcome.value)
    complete(session, running(session, queue="a"), result=[1])
    retried = fail(session, running(session, queue="b"), "no")
    fail(session, running(session, queue="c", max_attempts=1), "gone")
    cancel(session, running(session, queue="d"), reason="enough")
    session.commit()
    events: dict[str, Any] = {
        owed.outcome: EVENTS[Outcome(owed.outcome)].load(Signup, JobSnapshot.from_json(owed.snapshot), owed.context)
        for owed in database.obligations()
    }
    assert set(events) == {"completed", "retried", "exhausted", "cancelled"}
    assert events["completed"].result == [1]
    assert (events["retried"].error, events["retried"].attempt) == ("no", 1)
    assert isinstance(events["retried"].next_run_at, datetime)
    assert events["retried"].next_run_at == retried.run_at
    assert (events["exhausted"].error, events["exhausted"].attempt) == ("gone", 1)
    assert events["cancelled"].reason == "enough"
    assert all(event.args == Signup() for event in events.values())


def test_a_local_spec_runs_and_only_the_others_are_owed(
    session: Session, follow_ups: FollowUps, catalogued: Catalogued, database: Database
) -> None:
    follow_ups.on_completed(Signup, name="here")(lambda event: Welcome())
    catalogued("here")
    catalogued("there")
    complete(session, running(session))
    session.commit()
    assert database.kinds() == ["signup", "welcome"]
    assert [owed.spec for owed in database.obligations()] == ["there"]


def test_a_session_without_a_registry_owes_too(world: World, catalogued: Catalogued, database: Database) -> None:
    catalogued("there")
    session = world.bare_session()
    complete(session, running(session))
    session.commit()
    assert [owed.spec for owed in database.obligations()] == ["there"]


def test_other_kinds_and_outcomes_are_not_owed(session: Session, catalogued: Catalogued, database: Database) -> None:
    catalogued("x", "cancelled")
    catalogued("x", "completed", "charge")
    complete(session, running(session))
    session.commit()
    assert database.obligations() == []


@pytest.mark.parametrize(
    ("age", "seen", "counts"),
    [("1 min", "0", True), ("1 s", "0", False), ("30 days", "6 days", True), ("30 days", "8 days", False)],
)
def test_a_spec_counts_from_10_seconds_after_its_row_until_7_days_after_it_was_seen(
    session: Session, catalogued: Catalogued, database: Database, age: str, seen: str, counts: bool
) -> None:
    catalogued("x", age=age, seen=seen)
    complete(session, running(session))
    session.commit()
    assert len(database.obligations()) == counts


def test_the_catalogue_is_read_once_in_a_while(world: World, session: Session, catalogued: Catalogued) -> None:
    catalogued("x", "cancelled")
    jobs = [running(session, queue=str(n)) for n in range(3)]
    with world.counting() as sent:
        for job in jobs:
            complete(session, job)
        session.commit()
    assert len([statement for statement in sent if "follow_up_specs" in statement]) == 1
    assert len(sent) == 4


def test_a_rolled_back_transition_owes_nothing(session: Session, catalogued: Catalogued, database: Database) -> None:
    catalogued("x")
    job = running(session)
    with rolled_back(session):
        complete(session, job)
        session.flush()
    session.commit()
    assert database.obligations() == []


def test_an_obligation_cannot_be_expunged_away(session: Session, catalogued: Catalogued, database: Database) -> None:
    catalogued("x")
    complete(session, running(session))
    session.expunge_all()
    session.commit()
    assert len(database.obligations()) == 1


def test_a_batch_owes_for_each_job(session: Session, catalogued: Catalogued, database: Database) -> None:
    catalogued("x")
    jobs = [running(session, queue=str(n)) for n in range(3)]
    held = [job.held_attempt for job in jobs]
    session.expunge_all()
    complete_many(session, held)  # type: ignore[arg-type]
    session.commit()
    assert [owed.job_id for owed in database.obligations()] == [attempt.id for attempt in held if attempt]


def test_a_transaction_that_defers_calls_no_spec_and_owes_them_all(
    session: Session, follow_ups: FollowUps, catalogued: Catalogued, database: Database
) -> None:
    follow_ups.on_completed(Signup, name="here")(lambda event: 1 / 0)
    catalogued("there")
    job = running(session)
    ledger.defer_all(session, error="it raised before")
    complete(session, job)
    session.commit()
    owed = database.obligations()
    assert [row.spec for row in owed] == ["here", "there"]
    assert {row.last_error for row in owed} == {"it raised before"}
    assert database.job(job.id).state == "completed"


def test_deferring_ends_with_its_transaction(session: Session, follow_ups: FollowUps, database: Database) -> None:
    follow_ups.on_completed(Signup, name="here")(lambda event: Welcome())
    job = running(session)
    ledger.defer_all(session)
    session.rollback()
    complete(session, job)
    session.commit()
    assert database.obligations() == []
    assert database.kinds() == ["signup", "welcome"]


def test_publishing_writes_each_spec_once_and_says_it_was_seen(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    @follow_ups.on_completed(Charge, name="x")
    def spec(event: Completed[Charge]) -> list[Any]:
        return []

    published = [(spec.kind, spec.outcome, spec.name) for spec in follow_ups.specs]
    catalogue.publish(session, published)
    session.commit()
    [first] = database.rows("SELECT * FROM follow_up_specs")
    catalogue.publish(session, published)
    session.commit()
    [second] = database.rows("SELECT * FROM follow_up_specs")
    assert (first.kind, first.outcome, first.name) == ("charge", "completed", "x")
    assert second.created_at == first.created_at
    assert second.last_seen > first.last_seen
