"""Sessions in which transition and follow-up could not commit together are refused, and nothing else is."""

from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    ConfigurationError,
    InvalidJob,
    Job,
    JobState,
    StaleJobError,
    cancel,
    claim,
    complete,
    complete_many,
    enqueue,
    fail,
    retry_after,
    set_progress,
    snooze,
)
from awa_sqla.models.base import AwaBase
from tests.app import Base, Order, Signup
from tests.session.steps import MINUTE, available, running
from tests.worlds import Database, World, in_one_world, in_sync_worlds

VERBS: dict[str, Any] = {
    "claim": lambda session, held: claim(session, "default", limit=1),
    "complete": complete,
    "fail": lambda session, held: fail(session, held, "no"),
    "retry_after": lambda session, held: retry_after(session, held, MINUTE),
    "snooze": lambda session, held: snooze(session, held, MINUTE),
    "set_progress": lambda session, held: set_progress(session, held, 1),
    "cancel": lambda session, held: cancel(session, held.id, reason="x"),
    "complete_many": lambda session, held: complete_many(session, [held]),
}


@pytest.fixture
def held(world: World) -> Attempt:
    return Attempt.of(world.call(running, world.session()))


@pytest.fixture(params=["engine", "connection"])
def autocommit(request: pytest.FixtureRequest, world: World) -> Session:
    """A session whose statements are durable one by one."""
    if request.param == "engine":
        return world.session(bind=world.engine_with(isolation_level="AUTOCOMMIT"))
    session = world.session()
    world.call(session.connection, execution_options={"isolation_level": "AUTOCOMMIT"})
    return session


@pytest.mark.case(33)
def test_no_verb_runs_in_autocommit_mode(world: World, autocommit: Session, held: Attempt, database: Database) -> None:
    before = database.jobs()
    for act in VERBS.values():
        with world.counting() as sent, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            act(autocommit, held)
        assert sent == []
    assert database.jobs() == before


@pytest.mark.case(33)
@pytest.mark.parametrize("scheduled", [True, False])
def test_no_job_is_inserted_in_autocommit_mode(
    world: World, autocommit: Session, database: Database, scheduled: bool
) -> None:
    autocommit.add(Order(note="x"))
    enqueue(autocommit, Signup(), delay=MINUTE) if scheduled else enqueue(autocommit, Signup())
    with world.counting() as sent, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        autocommit.commit()
    assert sent == []
    autocommit.rollback()
    assert database.jobs() == []


@pytest.mark.case(33)
def test_nor_by_a_row_that_was_added_without_a_verb(world: World, database: Database) -> None:
    session = world.bare_session(bind=world.engine_with(isolation_level="AUTOCOMMIT"))
    session.add(Job.of(Signup()))
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        session.commit()
    session.rollback()
    assert database.jobs() == []


@pytest.mark.case(33)
def test_nor_by_a_later_listener(autocommit: Session, database: Database) -> None:
    event.listen(autocommit, "before_flush", lambda s, *_: s.add(Job.of(Signup())))
    autocommit.add(Order(note="x"))
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        autocommit.commit()
    autocommit.rollback()
    assert database.jobs() == []


def test_an_app_may_use_autocommit_for_its_own_rows(autocommit: Session, database: Database) -> None:
    autocommit.add(Order(note="x"))
    autocommit.commit()
    assert database.value("SELECT note FROM app_order") == "x"


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_transactional_isolation_levels_will_do(world: World, database: Database, level: str) -> None:
    session = world.session(bind=world.engine_with(isolation_level=level))
    complete(session, running(session))
    session.commit()
    assert [row.state for row in database.jobs()] == ["completed"]


@in_one_world
def test_job_tables_in_another_database_than_the_apps_are_refused(
    world: World, held: Attempt, database: Database
) -> None:
    elsewhere = create_engine(world.url)
    session = world.session(binds={Job: elsewhere})
    for act in VERBS.values():
        with pytest.raises(ConfigurationError, match="two transactions"):
            act(session, held)
    enqueue(session, Signup())
    with pytest.raises(ConfigurationError, match="two transactions"):
        session.flush()
    session.rollback()
    elsewhere.dispose()


@in_one_world
def test_a_session_of_one_engine_by_binds_will_do(world: World, database: Database) -> None:
    session = world.session(bind=None, binds={Base: world.engine, AwaBase: world.engine})
    session.add(Order(note="x"))
    enqueue(session, Signup())
    [job] = claim(session, "default", limit=1)
    complete(session, job)
    session.commit()
    assert [row.state for row in database.jobs()] == ["completed"]


def test_a_session_on_a_connection_will_do(world: World, database: Database) -> None:
    with world.engine.connect() as connection:
        session = Session(bind=connection)
        world.follow_ups.attach(session)
        complete(session, running(session))
        session.commit()
        session.close()
    assert [row.state for row in database.jobs()] == ["completed"]


@pytest.mark.case(12)
def test_no_error_of_ours_rolls_the_callers_transaction_back(
    world: World, session: Session, held: Attempt, database: Database
) -> None:
    database.move_on(held.id)
    session.add(Order(note="kept"))
    with world.noting("rollback", "savepoint", "rollback_savepoint") as seen:
        for name, act in VERBS.items():
            if name not in ("claim", "cancel", "complete_many"):
                with pytest.raises(StaleJobError):
                    act(session, held)
                with pytest.raises(InvalidJob):
                    act(session, None)
        with pytest.raises(LookupError):
            cancel(session, 2**62, reason="x")
    assert seen == []
    session.commit()
    assert database.value("SELECT note FROM app_order") == "kept"


@pytest.mark.case(12)
def test_no_verb_opens_a_savepoint_or_ends_a_transaction(world: World, session: Session, database: Database) -> None:
    jobs = {name: running(session, queue=name) for name in VERBS if name != "claim"}
    available(session)
    with world.noting("commit", "rollback", "savepoint", "release_savepoint") as seen:
        claim(session, "default", limit=1)
        for name, job in jobs.items():
            VERBS[name](session, Attempt.of(job))
        session.flush()
    assert seen == []
    session.rollback()
    assert {row.state for row in database.jobs()} == {"running", "available"}


@in_sync_worlds
@pytest.mark.case(61)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_jobs_of_a_two_phase_transaction_exist_when_it_is_committed(world: World, database: Database, end: str) -> None:
    session = world.session(twophase=True)
    session.execute(text("SET LOCAL awa.notify = 'off'"))
    enqueue(session, Signup())
    session.prepare()
    assert database.jobs() == []
    getattr(session, end)()
    assert database.kinds() == (["signup"] if end == "commit" else [])


@pytest.mark.case(34)
def test_claims_and_verbs_work_inside_a_fixtures_outer_transaction(world: World, database: Database) -> None:
    connection = world.engine.connect()
    outer = connection.begin()
    session = Session(bind=connection, join_transaction_mode="create_savepoint")
    world.follow_ups.attach(session)
    job = running(session)
    assert isinstance(fail(session, job, "no").id, int)
    session.commit()
    again = Session(bind=connection, join_transaction_mode="create_savepoint")
    world.follow_ups.attach(again)
    job = running(again, queue="q")
    complete(again, job)
    again.commit()
    assert job.state is JobState.COMPLETED
    for each in (session, again):
        each.close()
    assert outer.is_active
    outer.rollback()
    connection.close()
    assert database.jobs() == []
