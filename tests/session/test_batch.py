"""`complete_many()`: a batch of attempts in one statement, under the same rules."""

from typing import Any

import pytest
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    Completed,
    CompletedBatch,
    Completion,
    FollowUps,
    InvalidJob,
    Job,
    JobState,
    claim,
    complete_many,
    enqueue,
)
from tests.app import Signup, Welcome
from tests.session.steps import rolled_back, running
from tests.worlds import Database, World, in_one_world


def claimed(session: Session, *args: Any) -> list[Job]:
    """Committed and running jobs."""
    for each in args:
        enqueue(session, each)
        session.flush()
    jobs = claim(session, "default", limit=len(args))
    session.commit()
    return jobs


def test_a_batch_is_one_statement(world: World, session: Session, other: Session, database: Database) -> None:
    attempts = [Attempt.of(job) for job in claimed(session, *[Welcome()] * 5)]
    world.warm(other)
    with world.counting() as sent:
        done = complete_many(other, attempts)
        other.commit()
    assert len(sent) == 1
    assert done == CompletedBatch(completed=[held.id for held in attempts], stale=[])
    assert {row.state for row in database.jobs()} == {"completed"}


def test_each_has_its_own_result(session: Session, database: Database) -> None:
    one, two, three = claimed(session, Welcome(), Welcome(), Welcome())
    items = [Completion(Attempt.of(one), {"a": ["ü", None]}), two, Completion(Attempt.of(three), [1.5])]
    complete_many(session, items)
    session.commit()
    assert [row.result for row in database.jobs()] == [{"a": ["ü", None]}, None, [1.5]]
    assert database.value("SELECT count(*) FROM jobs WHERE result IS NULL") == 1


def test_stale_ones_are_listed_in_input_order_and_change_nothing(session: Session, database: Database) -> None:
    jobs = claimed(session, *[Welcome()] * 4)
    held = [Attempt.of(job) for job in jobs]
    database.move_on(held[1].id)
    database.execute("UPDATE jobs_hot SET state = 'cancelled' WHERE id = %s", held[3].id)
    before = [database.job(held[n].id) for n in (1, 3)]
    done = complete_many(session, [held[n] for n in (3, 2, 1, 0)])
    session.commit()
    assert done == CompletedBatch(completed=[held[2].id, held[0].id], stale=[held[3].id, held[1].id])
    assert [database.job(held[n].id) for n in (1, 3)] == before


@pytest.mark.case(6)
def test_follow_ups_come_for_exactly_those_that_were_completed(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    seen: list[Any] = []

    @follow_ups.on_completed(Signup, name="welcome")
    def welcome(event: Completed[Signup]) -> Welcome:
        seen.append((event.args.email, event.result, event.job.state))
        return Welcome(email=event.args.email)

    jobs = claimed(session, Signup(email="a"), Welcome(), Signup(email="b"), Signup(email="stale"))
    held = [Attempt.of(job) for job in jobs]
    database.move_on(held[3].id)
    session.expunge_all()
    complete_many(session, [Completion(held[0], 1), *held[1:]])
    session.commit()
    assert seen == [("a", 1, JobState.COMPLETED), ("b", None, JobState.COMPLETED)]
    assert [row.args["email"] for row in database.jobs() if row.parent_id] == ["a", "b"]


def test_jobs_that_the_session_holds_are_up_to_date(session: Session) -> None:
    jobs = claimed(session, Welcome(), Welcome())
    complete_many(session, jobs)
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    session.rollback()
    assert {job.state for job in jobs} == {JobState.RUNNING}


def test_a_savepoint_takes_the_batch_back(session: Session, follow_ups: FollowUps, database: Database) -> None:
    follow_ups.on_completed(Signup, name="welcome")(lambda event: Welcome())
    jobs = claimed(session, Signup(), Signup())
    with rolled_back(session):
        complete_many(session, [Attempt.of(job) for job in jobs])
    session.commit()
    assert [(row.kind, row.state) for row in database.jobs()] == [("signup", "running")] * 2
    assert {job.state for job in jobs} == {JobState.RUNNING}


def test_nothing_to_do_sends_nothing(world: World, session: Session) -> None:
    with world.counting() as sent:
        assert complete_many(session, []) == CompletedBatch([], [])
    assert sent == []


def test_two_batches_that_overlap_do_not_deadlock(world: World, session: Session, database: Database) -> None:
    held = [Attempt.of(job) for job in claimed(session, *[Welcome()] * 6)]
    complete_many(session, held[:4])
    thread = world.meanwhile(lambda session: complete_many(session, held[::-1]))
    database.wait_until_one_is_blocked()
    session.commit()
    assert thread.result() == CompletedBatch(completed=[held[5].id, held[4].id], stale=[h.id for h in held[3::-1]])


@in_one_world
@pytest.mark.parametrize(
    ("items", "field"),
    [
        (lambda job: [job, job], "items"),
        (lambda job: [job, Attempt.of(job)], "items"),
        (lambda job: [job, None], "job"),
        (lambda job: [Completion(Attempt.of(job), float("nan"))], "result"),
        (lambda job: [Completion(None)], "job"),
        (lambda job: 5, "items"),
    ],
)
def test_wrong_items_are_refused_before_anything_is_sent(
    world: World, session: Session, items: Any, field: str
) -> None:
    job = running(session)
    with world.counting() as sent, pytest.raises(InvalidJob) as caught:
        complete_many(session, items(job))
    assert caught.value.field == field
    assert sent == []
