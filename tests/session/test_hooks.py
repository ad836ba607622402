"""Hooks are told after the root commit, of what was committed, and can harm nothing."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from awa_sqla import (
    Cancelled,
    Completed,
    ConfigurationError,
    Exhausted,
    Hooks,
    InvalidJob,
    JobArgs,
    JobSnapshot,
    Outcome,
    Retried,
    Started,
    cancel,
    claim,
    complete,
    complete_many,
    enqueue,
    fail,
    retry_after,
)
from tests.app import Charge, Signup
from tests.session.steps import available, rolled_back, running
from tests.worlds import Database, World, in_one_world, in_sync_worlds


@pytest.fixture
def told() -> list[Any]:
    """The events that hooks were told."""
    return []


@pytest.fixture
def hooks(session: Session, told: list[Any]) -> Hooks:
    """Hooks of this session that write down what they are told of `Signup`."""
    hooks = Hooks()
    for event in (Started, Completed, Retried, Exhausted, Cancelled):
        hooks.on(event, Signup)(told.append)
    hooks.attach(session)
    return hooks


def names(told: list[Any]) -> list[str]:
    return [type(event).__name__ for event in told]


@pytest.mark.case(9)
def test_a_hook_is_told_after_the_commit_and_not_before(session, hooks, told, database):
    job = running(session)
    told.clear()
    complete(session, job, result=7)
    session.flush()
    assert told == []
    session.commit()
    (event,) = told
    assert (type(event), event.result, event.args, event.job.state) == (Completed, 7, Signup(), "completed")
    assert timedelta(0) < event.duration < timedelta(minutes=1)
    session.commit()
    assert len(told) == 1


def test_a_claim_is_told_as_started(session, hooks, told):
    available(session)
    (job,) = claim(session, "default", limit=1)
    assert told == []
    session.commit()
    assert names(told) == ["Started"]
    assert (told[0].job.attempt, told[0].job.lease) == (1, job.held_attempt)


def test_each_outcome_has_its_event(session, hooks, told):
    retry_after(session, running(session, max_attempts=2), timedelta(0), error="busy")
    session.commit()
    fail(session, running(session, max_attempts=1), "no")
    session.commit()
    cancel(session, running(session), reason="enough")
    session.commit()
    events = [event for event in told if type(event) is not Started]
    assert names(events) == ["Retried", "Exhausted", "Cancelled"]
    assert [events[0].error, events[1].error, events[2].reason] == ["busy", "no", "enough"]


@pytest.mark.case(2)
def test_a_savepoint_tells_nothing_by_itself(session, hooks, told):
    kept, dropped = running(session), running(session)
    told.clear()
    with session.begin_nested():
        complete(session, kept)
    with rolled_back(session):
        complete(session, dropped)
    assert told == []
    session.commit()
    assert [event.job.id for event in told] == [kept.id]


def test_savepoints_in_savepoints_hand_over_to_the_root(session, hooks, told):
    first, second, third = running(session), running(session), running(session)
    told.clear()
    with session.begin_nested():
        complete(session, first)
        with session.begin_nested():
            complete(session, second)
        with rolled_back(session):
            complete(session, third)
    session.commit()
    assert [event.job.id for event in told] == [first.id, second.id]


@pytest.mark.parametrize("end", ["rollback", "close"])
def test_what_is_rolled_back_was_never_told(session, hooks, told, end):
    job = running(session)
    told.clear()
    complete(session, job)
    session.flush()
    getattr(session, end)()
    session.execute(text("SELECT 1"))
    session.commit()
    assert told == []


@pytest.mark.case(9)
def test_a_hook_that_fails_is_logged_and_harms_neither_commit_nor_the_next_hook(session, hooks, told, caplog, database):
    def broken(event: Any) -> None:
        raise SystemExit("from a hook")

    first = Hooks()
    first.on(Completed, Signup)(broken)
    first.include(hooks)
    hooks.detach(session)
    first.attach(session)
    job = running(session)
    told.clear()
    complete(session, job)
    with caplog.at_level(logging.ERROR, "awa_sqla.hooks"):
        session.commit()
    assert names(told) == ["Completed"]
    assert "broken" in caplog.text
    assert database.job(job.id).state == "completed"
    session.execute(text("SELECT 1"))
    session.commit()


@pytest.mark.case(9)
def test_a_hook_that_runs_sql_on_the_session_is_refused_and_the_commit_stands(session, hooks, caplog, database):
    hooks.on(Completed, Signup)(lambda event: session.execute(text("SELECT 1")))
    job = running(session)
    complete(session, job)
    with caplog.at_level(logging.ERROR, "awa_sqla.hooks"):
        session.commit()
    assert "committed" in caplog.text
    assert database.job(job.id).state == "completed"


def test_arguments_that_do_not_decode_are_the_hooks_own_trouble(session, hooks, database, caplog):
    hooks.on(Completed, Signup)(lambda event: event.args.email)
    job = running(session)
    database.execute("UPDATE jobs_hot SET args = '{\"email\": 5}'")
    complete(session, job)
    with caplog.at_level(logging.ERROR, "awa_sqla.hooks"):
        session.commit()
    assert "ValidationError" in caplog.text


def test_a_batch_tells_each_of_its_jobs(session, hooks, told):
    available(session)
    available(session)
    jobs = claim(session, "default", limit=2)
    session.commit()
    told.clear()
    complete_many(session, jobs)
    session.commit()
    assert sorted(event.job.id for event in told) == sorted(job.id for job in jobs)


def test_kinds_without_a_hook_are_not_told(session, hooks, told):
    complete(session, running(session, Charge(order_id=1)))
    session.commit()
    assert told == []


def test_an_async_hook_runs_to_its_end(world: World, session, hooks, told):
    async def later(event: Any) -> None:
        await asyncio.sleep(0)
        told.append("later")

    hooks.on(Completed, Signup)(later)
    complete(session, running(session))
    session.commit()
    if world.name.startswith("async"):
        assert "later" not in told  # a task of the loop that runs this very test
    else:
        assert told[-1] == "later"


def test_an_async_hook_that_fails_is_logged(session, hooks, caplog, world):
    async def later(event: Any) -> None:
        raise ValueError("from an async hook")

    hooks.on(Completed, Signup)(later)
    complete(session, running(session))
    with caplog.at_level(logging.ERROR, "awa_sqla.hooks"):
        session.commit()
    assert world.name.startswith("async") or "from an async hook" in caplog.text


@in_sync_worlds
@pytest.mark.case(61)
def test_a_two_phase_commit_tells_at_its_second_phase(world: World, told):
    session = world.session(twophase=True)
    hooks = Hooks()
    hooks.on(Completed, Signup)(told.append)
    hooks.attach(session)
    session.execute(text("SET LOCAL awa.notify = 'off'"))
    available_job = _quiet(session)
    complete(session, available_job)
    session.prepare()
    assert told == []
    session.commit()
    assert names(told) == ["Completed"]


def _quiet(session: Session) -> Any:
    """A running job in a session that must not NOTIFY."""
    enqueue(session, Signup())
    session.commit()
    session.execute(text("SET LOCAL awa.notify = 'off'"))
    (job,) = claim(session, "default", limit=1)
    return job


@in_one_world
def test_hooks_and_follow_ups_are_attached_each_on_their_own(session, follow_ups, hooks, told, database):
    follow_ups.on_completed(Signup, name="next")(lambda event: Charge(order_id=1))
    complete(session, running(session))
    session.commit()
    assert names(told) == ["Started", "Completed"]
    assert database.kinds() == ["signup", "charge"]
    with pytest.raises(ConfigurationError, match="another Hooks"):
        Hooks().attach(session)


@in_one_world
def test_attached_holds_inside_its_block_only(session, told):
    hooks = Hooks()
    hooks.on(Completed, Signup)(told.append)
    first, second = running(session), running(session)
    with hooks.attached(session):
        complete(session, first)
        session.commit()
    complete(session, second)
    session.commit()
    assert len(told) == 1


def test_what_cannot_be_observed_is_refused():
    class Abstract(JobArgs, abstract=True):
        pass

    with pytest.raises(ConfigurationError, match="hooks are told of Started"):
        Hooks().on(Outcome.COMPLETED, Signup)  # type: ignore[call-overload]
    with pytest.raises(InvalidJob, match="abstract"):
        Hooks().on(Completed, Abstract)


def test_a_completion_by_nobody_took_no_time(database: Database):
    now = datetime.now(UTC)
    snapshot = JobSnapshot(
        id=1, kind="signup", state="completed", run_at=now, created_at=now, args={}, meta={}, tags=[], errors=[]
    )
    assert Completed(Signup(), snapshot).duration == timedelta(0)
