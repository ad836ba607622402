"""Wake-ups: a hint that comes with the commit, never before it and never without it."""

from collections.abc import Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from awa_sqla import Completed, FollowUps, cancel, claim, complete, complete_many, enqueue, fail, snooze
from awa_sqla.models.wakeups import cancel_payload, channel, queue_payload
from tests.app import Charge, Signup, Welcome
from tests.session.steps import HOUR, MINUTE, available, rolled_back, running
from tests.worlds import Database, Listener, World


@pytest.fixture
def listener(database: Database) -> Iterator[Listener]:
    with database.listening() as made:
        yield made


def test_the_channel_and_the_payloads_have_one_size() -> None:
    assert len(channel("awa")) == len(channel("x" * 63)) == 20
    assert len(queue_payload("q")) == len(queue_payload("q" * 200)) == 16
    assert channel("awa") != channel("other")


@pytest.mark.case(43)
def test_the_queue_is_told_at_the_commit_and_not_before(session: Session, listener: Listener) -> None:
    enqueue(session, Charge(order_id=1))
    session.flush()
    assert listener.heard() == []
    session.commit()
    assert listener.heard() == [queue_payload("payments")]


@pytest.mark.case(43)
def test_a_rollback_tells_nobody(session: Session, listener: Listener) -> None:
    enqueue(session, Signup())
    session.flush()
    session.rollback()
    session.commit()
    assert listener.heard() == []


@pytest.mark.case(2)
def test_a_savepoint_that_is_rolled_back_tells_nobody(session: Session, listener: Listener) -> None:
    with rolled_back(session):
        enqueue(session, Signup())
        session.flush()
    with session.begin_nested():
        enqueue(session, Charge(order_id=1))
    assert listener.heard() == []
    session.commit()
    assert listener.heard() == [queue_payload("payments")]


def test_many_jobs_of_a_queue_are_one_wake_up(session: Session, listener: Listener) -> None:
    for _ in range(20):
        enqueue(session, Signup())
    session.commit()
    assert listener.heard() == [queue_payload("default")]


def test_each_queue_is_told(session: Session, listener: Listener) -> None:
    enqueue(session, Signup())
    enqueue(session, Signup(), queue="ü")
    session.commit()
    assert sorted(listener.heard()) == sorted([queue_payload("default"), queue_payload("ü")])


@pytest.mark.parametrize("switch", ["SET LOCAL awa.notify = 'off'", "SELECT set_config('awa.notify', 'off', true)"])
def test_the_switch_silences_a_transaction_and_only_that(session: Session, listener: Listener, switch: str) -> None:
    job = running(session)
    listener.heard()
    session.execute(text(switch))
    enqueue(session, Signup())
    cancel(session, job, reason="x")
    session.commit()
    assert listener.heard() == []
    available(session)
    assert listener.heard() == [queue_payload("default")]


def test_a_job_for_later_wakes_nobody(session: Session, listener: Listener) -> None:
    enqueue(session, Signup(), delay=HOUR)
    session.commit()
    assert listener.heard() == []


def test_a_follow_up_wakes_its_queue(session: Session, follow_ups: FollowUps, listener: Listener) -> None:
    @follow_ups.on_completed(Signup, name="x")
    def charge(event: Completed[Signup]) -> Charge:
        return Charge(order_id=1)

    job = running(session)
    listener.heard()
    complete(session, job)
    session.commit()
    assert listener.heard() == [queue_payload("payments")]


def test_a_running_attempt_is_told_of_its_cancel(session: Session, other: Session, listener: Listener) -> None:
    job = running(session)
    told = cancel_payload(job.id, job.run_lease)
    session.commit()
    listener.heard()
    cancel(other, job.held_attempt.id, reason="x")  # type: ignore[union-attr]
    other.flush()
    assert listener.heard() == []
    other.commit()
    assert listener.heard() == [told]
    assert told.startswith("c:")


def test_a_cancel_that_is_rolled_back_tells_nobody(session: Session, listener: Listener) -> None:
    job = running(session)
    listener.heard()
    cancel(session, job, reason="x")
    session.rollback()
    session.commit()
    assert listener.heard() == []


def test_the_end_of_an_attempt_wakes_nobody(world: World, session: Session, listener: Listener) -> None:
    jobs = [running(session, queue=str(n)) for n in range(4)]
    listener.heard()
    complete(session, jobs[0])
    fail(session, jobs[1], "no")
    snooze(session, jobs[2], MINUTE)
    complete_many(session, [jobs[3]])
    claim(session, "nothing", limit=1)
    session.commit()
    assert listener.heard() == []


@pytest.mark.case(42)
def test_a_wake_up_cannot_grow_past_what_notify_takes(session: Session, listener: Listener) -> None:
    for n in range(300):
        enqueue(session, Welcome(email="x" * 1000), queue=f"{n:0200}")
    session.commit()
    heard = listener.heard()
    assert len(heard) == 300
    assert {len(payload) for payload in heard} == {16}


@pytest.mark.case(9)
def test_nothing_runs_after_the_commit(world: World, session: Session) -> None:
    enqueue(session, Signup())
    with world.noting("commit", "before_cursor_execute") as seen:
        session.commit()
    assert seen[-1] == "commit"
