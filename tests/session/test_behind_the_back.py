"""Savepoints on the raw connection, and two-phase transactions: what the session cannot see, or PostgreSQL forbids."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from awa_sqla import ConfigurationError, claim, complete, enqueue
from tests.app import Order, Signup, Welcome
from tests.session.steps import available, rolled_back, running
from tests.worlds import in_one_world, in_sync_worlds


@pytest.mark.case(8)
def test_a_verb_inside_a_savepoint_of_the_raw_connection_is_refused(session, database):
    job = running(session)
    session.add(Order(note="kept"))
    session.flush()
    savepoint = session.connection().begin_nested()
    with pytest.raises(ConfigurationError, match=r"session\.begin_nested\(\)"):
        complete(session, job)
    savepoint.rollback()
    session.commit()
    assert database.job(job.id).state == "running"
    assert database.value("SELECT note FROM app_order") == "kept"


@pytest.mark.case(8)
def test_a_flush_of_our_rows_inside_such_a_savepoint_is_refused(session, follow_ups, database):
    follow_ups.on_completed(Signup, name="next")(lambda event: Welcome())
    job = running(session)
    complete(session, job)
    savepoint = session.connection().begin_nested()
    with pytest.raises(ConfigurationError, match="behind its back"):
        session.flush()
    savepoint.rollback()
    session.commit()  # the transition was sent before the savepoint, and its follow-up goes out now
    assert database.kinds() == ["signup", "welcome"]


def test_the_sessions_own_savepoints_are_its_business(session, database):
    job = running(session)
    with session.begin_nested(), session.begin_nested():
        complete(session, job)
    session.commit()
    assert database.job(job.id).state == "completed"


@in_sync_worlds
@pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only", "control_fully", "conditional_savepoint"])
@pytest.mark.case(34)
def test_joining_an_outer_transaction_is_no_savepoint_behind_the_back(world, database, mode):
    with world.engine.connect() as connection:
        outer = connection.begin()
        session = world.session(bind=connection, join_transaction_mode=mode)
        enqueue(session, Signup())
        session.flush()
        (job,) = claim(session, "default", limit=1)
        with session.begin_nested():
            complete(session, job)
        session.commit() if mode != "control_fully" else session.flush()
        assert connection.scalar(text("SELECT state FROM awa.jobs_hot")) == "completed"
        session.close()
        if outer.is_active:
            outer.rollback()
    assert database.jobs() == []


@in_sync_worlds
@pytest.mark.case(61)
def test_a_two_phase_session_sends_no_wake_up_and_can_be_prepared(world, follow_ups, database):
    follow_ups.on_completed(Signup, name="next")(lambda event: Welcome())
    session = world.session(twophase=True)
    with database.listening() as listener:
        enqueue(session, Signup())
        session.prepare()
        assert database.jobs() == []
        session.commit()
        (job,) = claim(session, "default", limit=1)
        complete(session, job)
        session.prepare()
        session.rollback()
        assert [row.state for row in database.jobs()] == ["available"]
        (job,) = claim(session, "default", limit=1)
        complete(session, job)
        session.prepare()
        session.commit()
        assert database.kinds() == ["signup", "welcome"]
        assert listener.heard() == []


@in_sync_worlds
def test_the_silence_of_a_rolled_back_savepoint_is_said_again(world, database):
    session = world.session(twophase=True)
    with rolled_back(session):
        enqueue(session, Signup())
        session.flush()
    enqueue(session, Signup())
    session.flush()
    assert session.scalar(text("SELECT current_setting('awa.notify')")) == "off"
    session.prepare()
    session.commit()
    assert len(database.jobs()) == 1


@in_sync_worlds
def test_the_silence_costs_one_statement_for_each_transaction(world):
    session = world.session(twophase=True)
    with world.counting() as sent:
        for _ in range(3):
            enqueue(session, Signup())
            session.flush()
        session.rollback()
    assert len([statement for statement in sent if "set_config" in statement]) == 1


@in_one_world
def test_other_sessions_do_wake(session, database):
    with database.listening() as listener:
        available(session)
        assert len(listener.heard()) == 1
