"""What the model has found, each history made small."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from awa_sqla import Attempt, Completion, Job, ScheduledJob, cancel, claim, complete_many, enqueue, fail, snooze
from awa_sqla.maintenance import promote
from tests.model.application import DEAD, Plain
from tests.worlds import WORLDS, Database, World

in_all_worlds = pytest.mark.parametrize("world", list(WORLDS), indirect=True)


@in_all_worlds
@pytest.mark.parametrize("results", [([1, "two"],), ([1], [2]), ([], {"n": 1}), ([[1, 2]], None, [3])])
def test_results_that_are_lists_stay_whole_in_a_batch(
    world: World, database: Database, results: tuple[Any, ...]
) -> None:
    """The driver was given one array of arrays, and each job got an element of another one's result."""
    session = world.session()
    for n, _ in enumerate(results):
        enqueue(session, Plain(n=str(n)))
    session.flush()
    jobs = claim(session, "b", limit=len(results))
    pairs = zip(jobs, results, strict=True)
    done = complete_many(session, [Completion(Attempt.of(job), result) for job, result in pairs])
    session.commit()
    assert len(done.completed) == len(results)
    assert tuple(row.result for row in database.jobs()) == results


def held(session: Session, queue: str = "b", **options: Any) -> Job:
    """A committed job that this session has claimed."""
    enqueue(session, Plain(n="1"), queue=queue, **options)
    session.flush()
    [job] = claim(session, queue, limit=1)
    session.commit()
    return job


def again(session: Session) -> Job:
    """The snoozed job, claimed by this session."""
    promote(session)
    [job] = claim(session, ["b", DEAD], limit=1)
    session.commit()
    return job


@in_all_worlds
@pytest.mark.parametrize("expires", [True, False])
def test_a_job_that_left_by_another_session_comes_back_to_one_that_still_holds_it(
    world: World, database: Database, expires: bool
) -> None:
    """The old object was in the way of the new one, with a warning that two instances have one identity."""
    session, other = world.session(expire_on_commit=expires), world.session()
    job = held(session)
    attempt = Attempt.of(job)
    fail(other, attempt, "no")
    other.commit()
    row = cancel(session, attempt.id, reason="enough")
    session.commit()
    assert row is not job
    assert row in session
    assert job not in session
    assert database.job(row.id).state == row.state == "cancelled"


@in_all_worlds
def test_the_object_of_an_earlier_snooze_is_not_in_the_way_of_the_next(world: World, database: Database) -> None:
    session, other = world.session(expire_on_commit=False), world.session()
    first = snooze(session, held(session), timedelta(0))
    session.commit()
    again(other)
    second = snooze(session, Attempt(first.id, database.job(first.id).run_lease), timedelta(0))
    session.commit()
    assert isinstance(first, ScheduledJob)
    assert (first in session, second in session) == (False, True)
    assert (second.snoozes, database.job(second.id).snoozes) == (2, 2)


@in_all_worlds
@pytest.mark.parametrize("nested", [False, True])
def test_a_job_whose_row_of_a_move_was_expunged_can_be_cancelled(
    world: World, database: Database, nested: bool
) -> None:
    """The row came back with the commit; until then `cancel()` said that there was no such job."""
    session = world.session()
    attempt = Attempt.of(held(session))
    fail(session, attempt, "no")
    session.expunge_all()
    if nested:
        session.begin_nested()
    assert cancel(session, attempt.id, reason="enough") is not None
    session.commit()
    assert [(row.state, len(row.errors)) for row in database.jobs()] == [("cancelled", 2)]
