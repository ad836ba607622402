"""`claim()`: due jobs of a queue, each for one transaction alone."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from awa_sqla import InvalidJob, Job, JobState, claim, enqueue
from tests.app import Charge, Signup
from tests.session.steps import available, rolled_back
from tests.worlds import Database, World, in_one_world


def test_a_claim_starts_an_attempt(session: Session, database: Database) -> None:
    job = available(session)
    [claimed] = claim(session, "default", limit=10, worker_id="w1")
    assert claimed is job
    session.commit()
    row = database.job(job.id)
    assert (row.state, row.attempt, row.worker_id) == ("running", 1, "w1")
    assert row.run_lease > 0
    assert row.attempted_at is not None
    assert row.heartbeat_at is not None
    assert row.finalized_at is None
    assert row.deadline_at is None


def test_a_claim_is_one_statement_for_each_queue(world: World, session: Session) -> None:
    available(session)
    with world.counting() as sent:
        claim(session, ["default", "mail"], limit=5)
    assert len(sent) == 2


def test_a_queue_that_is_not_needed_any_more_is_not_asked(world: World, session: Session) -> None:
    available(session)
    with world.counting() as sent:
        claim(session, ["default", "mail"], limit=1)
    assert len(sent) == 1


def test_the_most_urgent_and_the_oldest_come_first(session: Session) -> None:
    for n, priority in enumerate([3, 1, 2, 1]):
        enqueue(session, Charge(order_id=n), queue="q", priority=priority)
        session.flush()
    claimed = claim(session, "q", limit=3)
    assert [job.args["order_id"] for job in claimed] == [1, 3, 2]


def test_several_queues_are_served_in_the_order_given(session: Session) -> None:
    enqueue(session, Signup(), queue="a", priority=4)
    enqueue(session, Signup(), queue="b", priority=1)
    session.flush()
    assert [job.queue for job in claim(session, ["a", "b", "a"], limit=9)] == ["a", "b"]


def test_no_more_than_the_limit_are_taken(session: Session, database: Database) -> None:
    session.add_all(Job.of(Signup()) for _ in range(50))
    session.flush()
    assert len(claim(session, "default", limit=7)) == 7
    session.commit()
    assert database.value("SELECT count(*) FROM jobs_hot WHERE state = 'running'") == 7


def test_a_job_that_is_not_due_stays(session: Session, database: Database) -> None:
    job = available(session)
    database.execute("UPDATE jobs_hot SET run_at = now() + interval '1 hour' WHERE id = %s", job.id)
    assert claim(session, "default", limit=1) == []


@pytest.mark.parametrize(
    ("paused_until", "found"), [(None, 0), ("now() + interval '1 hour'", 0), ("now() - interval '1 s'", 1)]
)
def test_a_paused_queue_gives_nothing_until_its_time(
    session: Session, database: Database, paused_until: str | None, found: int
) -> None:
    available(session)
    database.execute(
        f"INSERT INTO queue_meta (queue, paused_at, paused_until) VALUES ('default', now(), {paused_until or 'NULL'})"
    )
    try:
        assert len(claim(session, "default", limit=1)) == found
    finally:
        session.rollback()


def test_what_another_transaction_holds_is_passed_over(session: Session, other: Session) -> None:
    for _ in range(3):
        available(session)
    first = claim(session, "default", limit=2)
    second = claim(other, "default", limit=2)
    assert len(second) == 1
    assert {job.id for job in first}.isdisjoint(job.id for job in second)


def test_a_claim_that_is_rolled_back_leaves_the_job_available(session: Session, other: Session) -> None:
    job = available(session)
    claim(session, "default", limit=1)
    session.rollback()
    assert (job.state, job.attempt, job.run_lease) == (JobState.AVAILABLE, 0, 0)
    assert len(claim(other, "default", limit=1)) == 1


def test_a_savepoint_that_is_rolled_back_restores_what_is_in_memory(session: Session) -> None:
    available(session)
    session.expunge_all()  # so that the job is first seen through the claim itself
    with rolled_back(session):
        [job] = claim(session, "default", limit=1)
    assert (job.state, job.attempt, job.run_lease) == (JobState.AVAILABLE, 0, 0)


def test_the_lease_of_a_claim_that_was_rolled_back_is_never_issued_again(session: Session) -> None:
    available(session)
    [first] = claim(session, "default", limit=1)
    lost = first.run_lease
    session.rollback()
    [second] = claim(session, "default", limit=1)
    assert second.run_lease > lost


@pytest.mark.parametrize(
    ("own", "override", "declared", "seconds"),
    [(None, None, None, None), (None, None, 30, 30), (None, 20, 30, 20), (10, 20, 30, 10)],
)
def test_the_deadline_is_the_jobs_own_or_else_that_of_its_queue(
    session: Session, database: Database, own: Any, override: Any, declared: Any, seconds: Any
) -> None:
    database.execute(
        "INSERT INTO queue_meta (queue, override_deadline_seconds, declared_deadline_seconds) "
        "VALUES ('default', %s, %s)",
        override,
        declared,
    )
    available(session, deadline=None if own is None else timedelta(seconds=own))
    [job] = claim(session, "default", limit=1)
    given = None if job.deadline_at is None else round((job.deadline_at - job.attempted_at).total_seconds())
    assert given == seconds


@pytest.mark.case(58)
def test_the_times_of_a_claim_are_not_those_of_the_start_of_the_transaction(session: Session) -> None:
    available(session)
    session.execute(text("SELECT pg_sleep(0.3)"))
    started = session.scalar(text("SELECT now()"))
    [job] = claim(session, "default", limit=1)
    assert job.attempted_at is not None
    assert job.attempted_at - started >= timedelta(seconds=0.3)


def test_a_claim_sends_pending_jobs_first_whatever_autoflush_says(world: World) -> None:
    for autoflush in (True, False):
        session = world.session(autoflush=autoflush)
        enqueue(session, Signup())
        assert len(claim(session, "default", limit=5)) == 1
        session.rollback()


@in_one_world
@pytest.mark.parametrize(
    ("queues", "options", "field"),
    [
        ("default", {"limit": 0}, "limit"),
        ("default", {"limit": -1}, "limit"),
        ("default", {"limit": 1.5}, "limit"),
        ([], {"limit": 1}, "queues"),
        (None, {"limit": 1}, "queues"),
        (5, {"limit": 1}, "queues"),
        ("", {"limit": 1}, "queue"),
        (["a", ""], {"limit": 1}, "queue"),
        ([b"a"], {"limit": 1}, "queue"),
        ("default", {"limit": 1, "worker_id": ""}, "worker_id"),
        ("default", {"limit": 1, "worker_id": 7}, "worker_id"),
    ],
)
def test_a_wrong_argument_is_refused_and_named(
    world: World, session: Session, queues: Any, options: Any, field: str
) -> None:
    with world.counting() as sent, pytest.raises(InvalidJob) as caught:
        claim(session, queues, **options)
    assert caught.value.field == field
    assert sent == []


@pytest.mark.case(41)
def test_claims_go_on_after_a_migration_added_a_column(session: Session, database: Database) -> None:
    available(session)
    claim(session, "default", limit=1)
    session.rollback()
    database.execute("ALTER TABLE jobs_hot ADD COLUMN later integer")
    try:
        [job] = claim(session, "default", limit=1)
        assert job.state is JobState.RUNNING
        session.commit()
    finally:
        session.rollback()
        database.execute("ALTER TABLE jobs_hot DROP COLUMN later")
