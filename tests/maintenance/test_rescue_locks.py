"""The three rescues under concurrency: whether a row is late is asked again under its lock, at any isolation level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    FollowUps,
)
from awa_sqla.sqlstates import sqlstate
from tests.app import NotifyOps, Signup
from tests.maintenance.lateness import TAKES, Lane, in_each_lane
from tests.session.steps import MINUTE
from tests.worlds import Database, World, in_one_world, in_two_worlds

# ------------------------------------------------------------------------------------------------------ under the lock
_DAWDLE = "pg_advisory_xact_lock_shared(1) IS NOT NULL"


@pytest.fixture
def dawdling(world: World, database: Database) -> Iterator[Database]:
    """A rescue that has its snapshot, and not yet its locks, until this connection gives up the one of its own."""
    holder = database.another()
    holder.execute("SELECT pg_advisory_lock(1)")

    def dawdle(conn: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> tuple[str, Any]:
        if statement.startswith("SELECT") and "SKIP LOCKED" in statement:
            statement = statement.replace("WHERE ", f"WHERE {_DAWDLE} AND ", 1)
        return statement, parameters

    event.listen(Engine, "before_cursor_execute", dawdle, retval=True)
    try:
        yield holder
    finally:
        event.remove(Engine, "before_cursor_execute", dawdle)
        holder.close()


#: What may come of a row while a rescue looks at it.
MEANWHILE = {
    "its time is not up any more": "UPDATE jobs_hot SET heartbeat_at = heartbeat_at + interval '1 hour', "
    "deadline_at = now() + interval '1 hour', callback_timeout_at = now() + interval '1 hour'",
    "it has ended": "UPDATE jobs_hot SET state = 'cancelled', callback_id = NULL, callback_timeout_at = NULL, "
    "heartbeat_at = NULL, deadline_at = NULL, finalized_at = now()",
}


@in_each_lane
@in_one_world
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_whether_a_row_is_late_is_asked_again_under_its_lock(
    world: World, session: Session, database: Database, dawdling: Database, lane: Lane, meanwhile: str
) -> None:
    """It was when the statement began: what another transaction has committed since then counts."""
    TAKES[lane](session, database)
    rescuing = world.meanwhile(lambda session: lane(session, stale_after=MINUTE))
    database.wait_until_one_is_blocked()
    database.execute(MEANWHILE[meanwhile])
    left = database.jobs()
    dawdling.execute("SELECT pg_advisory_unlock(1)")
    assert rescuing.result() == []
    assert database.jobs() == left


@in_each_lane
@in_one_world
def test_of_two_that_look_at_the_same_time_one_takes_the_row(
    world: World, session: Session, database: Database, dawdling: Database, lane: Lane
) -> None:
    held = [TAKES[lane](session, database, max_attempts=1) for _ in range(5)]
    both = [world.meanwhile(lambda session: lane(session, stale_after=MINUTE)) for _ in range(2)]
    database.wait_until_one_is_blocked(2)
    dawdling.execute("SELECT pg_advisory_unlock(1)")
    one, two = (rescuing.result() for rescuing in both)
    assert sorted(one + two) == held
    assert [len(database.job(attempt.id).errors) for attempt in held] == [1] * 5


# ------------------------------------------------------------------------------------------------------------ isolation
@pytest.fixture
def repeatable(database: Database) -> Iterator[None]:
    """A database whose transactions keep their first snapshot, unless they ask for something else."""
    name = database.value("SELECT current_database()")
    database.execute(f"ALTER DATABASE {name} SET default_transaction_isolation TO 'repeatable read'")
    yield
    database.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")


@in_each_lane
@in_two_worlds
def test_it_works_where_transactions_keep_their_snapshot(
    repeatable: None, world: World, session: Session, database: Database, follow_ups: FollowUps, lane: Lane
) -> None:
    follow_ups.on_rescued(Signup, name="r")(lambda event: NotifyOps(job_id=event.job.id))
    held = [TAKES[lane](session, database) for _ in range(2)]

    def rescuing(session: Session) -> list[Attempt]:
        assert session.scalar(text("SHOW transaction_isolation")) == "repeatable read"
        return lane(session, stale_after=MINUTE)

    assert world.meanwhile(rescuing).result() == held
    assert [one.job_id for one in database.obligations()] == [attempt.id for attempt in held]
    assert [database.job(attempt.id).state for attempt in held] == ["retryable"] * 2


@in_each_lane
@in_one_world
def test_where_a_row_has_changed_since_the_snapshot_the_next_pass_is_right(
    repeatable: None, world: World, session: Session, database: Database, dawdling: Database, lane: Lane
) -> None:
    """Nothing is done in a pass that PostgreSQL refuses; workers and maintenance take it up again."""
    one, two = (TAKES[lane](session, database) for _ in range(2))
    rescuing = world.meanwhile(lambda session: lane(session, stale_after=MINUTE))
    database.wait_until_one_is_blocked()
    database.execute(MEANWHILE["its time is not up any more"] + f" WHERE id = {two.id}")
    dawdling.execute("SELECT pg_advisory_unlock(1)")
    with pytest.raises(OperationalError) as caught:
        rescuing.result()
    assert sqlstate(caught.value) == "40001"
    assert [job.errors for job in database.jobs()] == [[], []]
    assert world.meanwhile(lambda session: lane(session, stale_after=MINUTE)).result() == [one]
