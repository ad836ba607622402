"""Late-bound arguments: called once, before the transaction ends that they were enqueued in."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, inspect
from sqlalchemy.orm import Session

from awa_sqla import (
    EnqueueRequest,
    FollowUps,
    InvalidJob,
    Job,
    ScheduledJob,
    Unique,
    UniqueConflict,
    claim,
    complete,
    enqueue,
)
from awa_sqla.session.lineage import Parent, run_under
from tests.app import Charge, Order, Signup
from tests.session.steps import HOUR
from tests.session.test_unique import Report
from tests.worlds import Database, World, in_one_world, in_sync_worlds


def order(session: Session, note: str = "mine") -> Order:
    made = Order(note=note)
    session.add(made)
    return made


@pytest.mark.parametrize("flushed", [False, True])
def test_the_arguments_may_name_what_the_database_makes(session: Session, database: Database, flushed: bool) -> None:
    mine = order(session)
    job = enqueue(session, lambda: Charge(order_id=mine.id))
    assert (inspect(job).transient, job.kind) == (True, None)
    if flushed:
        session.flush()
        assert inspect(job).transient
    session.commit()
    stored = database.job(job.id)
    assert stored.args == {"order_id": mine.id, "cents": 100}
    assert (stored.kind, stored.queue, stored.priority, stored.tags) == ("charge", "payments", 1, ["billing"])


def test_options_are_those_of_enqueue(session: Session, database: Database) -> None:
    job = enqueue(
        session, lambda: Signup(email="late"), queue="q", priority=4, tags=["a"], metadata={"m": 1}, deadline=HOUR
    )
    later = enqueue(session, lambda: Signup(email="late"), delay=HOUR)
    session.commit()
    row = database.job(job.id)
    assert (row.queue, row.priority, row.tags, row.metadata, row.deadline_seconds) == ("q", 4, ["a"], {"m": 1}, 3600)
    assert isinstance(later, ScheduledJob)
    assert database.job(later.id).stored_in == "scheduled"


def test_a_callable_is_called_once(session: Session, database: Database) -> None:
    calls: list[int] = []

    def make() -> Signup:
        calls.append(1)
        return Signup()

    enqueue(session, make)
    session.flush()
    session.flush()
    assert calls == []
    session.commit()
    session.commit()
    assert calls == [1]
    assert database.kinds() == ["signup"]


def test_they_are_called_in_order_and_may_enqueue_more(session: Session, database: Database) -> None:
    def make(n: int) -> Signup:
        if n < 3:
            enqueue(session, lambda: make(n + 1))
        return Signup(email=str(n))

    enqueue(session, lambda: make(0))
    enqueue(session, lambda: Signup(email="second"))
    session.commit()
    assert [job.args["email"] for job in database.jobs()] == ["0", "second", "1", "2", "3"]


@pytest.mark.case(1)
def test_a_rollback_forgets_it(session: Session, database: Database) -> None:
    called: list[int] = []
    enqueue(session, lambda: called.append(1) or Signup())  # type: ignore[func-returns-value]
    session.rollback()
    order(session)
    session.commit()
    enqueue(session, lambda: called.append(1) or Signup())  # type: ignore[func-returns-value]
    session.close()
    order(session)
    session.commit()
    assert (called, database.jobs()) == ([], [])


@pytest.mark.case(2)
def test_a_savepoint_calls_its_own_when_it_is_released(session: Session, database: Database) -> None:
    mine = order(session, "outer")
    outer = enqueue(session, lambda: Signup(email=f"outer {mine.id}"))
    with session.begin_nested():
        inner_order = order(session, "inner")
        inner = enqueue(session, lambda: Signup(email=f"inner {inner_order.id}"))
    assert inspect(inner).persistent
    assert inspect(outer).transient
    savepoint = session.begin_nested()
    enqueue(session, lambda: Signup(email="lost"))
    savepoint.rollback()
    session.commit()
    assert {job.args["email"] for job in database.jobs()} == {f"outer {mine.id}", f"inner {inner_order.id}"}


def test_a_commit_over_open_savepoints_calls_them_all(session: Session, database: Database) -> None:
    enqueue(session, lambda: Signup(email="outer"))
    session.begin_nested()
    enqueue(session, lambda: Signup(email="inner"))
    session.begin_nested()
    enqueue(session, lambda: Signup(email="innermost"))
    session.commit()
    assert sorted(job.args["email"] for job in database.jobs()) == ["inner", "innermost", "outer"]


def test_what_the_callable_raises_comes_out_of_every_commit_until_the_rollback(
    session: Session, database: Database
) -> None:
    calls: list[int] = []

    def make() -> Signup:
        calls.append(1)
        raise LookupError("gone")

    first = enqueue(session, lambda: Signup(email="first"))
    enqueue(session, make)
    order(session)
    for _ in range(2):
        with pytest.raises(LookupError, match="gone"):
            session.commit()
        assert session.connection().exec_driver_sql("SELECT 1").scalar() == 1
    assert calls == [1]
    assert inspect(first).persistent or inspect(first).pending
    session.rollback()
    session.commit()
    assert database.jobs() == []
    assert database.value("SELECT count(*) FROM app_order") == 0


def test_one_that_raises_in_a_savepoint_costs_the_savepoint(session: Session, database: Database) -> None:
    kept = enqueue(session, lambda: Signup(email="kept"))

    def make() -> Signup:
        raise LookupError("gone")

    with pytest.raises(LookupError), session.begin_nested():
        enqueue(session, make)
    session.commit()
    assert [job.id for job in database.jobs()] == [kept.id]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: None, "args"),
        (lambda: {"email": "x"}, "args"),
        (lambda: Signup, "args"),
        (lambda: Signup(email=None), "args.email"),  # type: ignore[arg-type]
        (lambda: Signup(email="\x00"), "args.email"),
        (lambda: EnqueueRequest(Signup()), "args"),
    ],
)
def test_what_cannot_be_enqueued_is_refused_in_the_commit(
    session: Session, database: Database, make: Any, field: str
) -> None:
    order(session)
    enqueue(session, make)
    for _ in range(2):
        with pytest.raises(InvalidJob) as caught:
            session.commit()
        assert caught.value.field == field
    session.rollback()
    order(session)
    session.commit()
    assert database.jobs() == []
    assert database.value("SELECT count(*) FROM app_order") == 1


@in_one_world
def test_a_coroutine_function_is_refused_and_leaves_no_coroutine(session: Session) -> None:
    async def make() -> Signup:
        return Signup()

    enqueue(session, make)  # type: ignore[arg-type]
    with pytest.raises(InvalidJob, match="returned a coroutine"):
        session.commit()
    session.rollback()


@in_one_world
@pytest.mark.parametrize(
    ("args", "options", "field"),
    [
        (Signup, {}, "args"),
        (None, {}, "args"),
        ("text", {}, "args"),
        (lambda: Signup(email="late"), {"priority": 9}, "priority"),
        (lambda: Signup(email="late"), {"delay": 5}, "delay"),
        (lambda: Signup(email="late"), {"unique": 5}, "unique"),
    ],
)
def test_wrong_calls_are_refused_at_once(session: Session, args: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        enqueue(session, args, **options)
    assert caught.value.field == field
    session.commit()


def test_a_late_job_may_be_unique(session: Session, database: Database) -> None:
    first = enqueue(session, Report(day=1))
    second = enqueue(session, lambda: Report(day=1), on_conflict="skip")
    third = enqueue(session, lambda: Signup(email="late"), unique=Unique())
    session.commit()
    assert second.duplicate_of == first.id
    assert [job.id for job in database.jobs()] == [first.id, third.id]
    enqueue(session, lambda: Report(day=1))
    order(session)
    with pytest.raises(UniqueConflict):
        session.commit()
    session.commit()
    assert database.value("SELECT count(*) FROM app_order") == 1


def test_follow_ups_of_the_same_transaction_are_there_too(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_completed(Signup, name="x")(lambda event: Charge(order_id=1))
    enqueue(session, Signup())
    session.commit()
    [job] = claim(session, "default", limit=1)
    complete(session, job)
    late = enqueue(session, lambda: Signup(email="late"))
    session.commit()
    assert len(database.children(job.id)) == 1
    assert database.job(late.id).args == {"email": "late"}


def test_a_transition_in_the_callable_commits_with_its_follow_up(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_completed(Signup, name="x")(lambda event: Charge(order_id=1))
    enqueue(session, Signup())
    session.commit()
    [job] = claim(session, "default", limit=1)
    enqueue(session, lambda: complete(session, job) and Signup(email="late"))  # type: ignore[arg-type, return-value]
    session.commit()
    assert database.job(job.id).state == "completed"
    assert len(database.children(job.id)) == 1


@pytest.mark.parametrize("when", ["before_commit", "before_flush", "after_flush"])
def test_listeners_may_enqueue_late(session: Session, database: Database, when: str) -> None:
    mine: list[Order] = []

    def listener(session: Session, *_: Any) -> None:
        if not mine:
            mine.append(order(session, "listener"))
            enqueue(session, lambda: Signup(email="from the listener"))

    event.listen(session, when, listener)
    order(session)
    session.commit()
    assert [job.args["email"] for job in database.jobs()] == ["from the listener"]
    assert database.value("SELECT count(*) FROM app_order") == 2


def test_one_enqueued_as_the_transaction_ends_is_called_at_once(session: Session, database: Database) -> None:
    enqueue(session, lambda: Signup(email="first"))
    ids: list[int] = []

    def at_last(session: Session) -> None:
        mine = order(session, "at last")
        enqueue(session, lambda: ids.append(mine.id) or Signup(email="last"))  # type: ignore[func-returns-value]

    event.listen(session, "before_commit", at_last, once=True)
    session.commit()
    assert len(ids) == 1
    assert ids[0] is not None
    assert [job.args["email"] for job in database.jobs()] == ["first", "last"]


def test_the_parent_is_the_job_that_was_running_at_the_call(session: Session, database: Database) -> None:
    run_under(Parent(5, 3))
    try:
        enqueue(session, lambda: Signup(email="late"))
    finally:
        run_under(None)  # type: ignore[arg-type]
    session.commit()
    [job] = database.jobs()
    assert (job.parent_id, job.root_id) == (5, 3)


@in_sync_worlds
@pytest.mark.case(61)
def test_two_phase_commit_calls_it_in_prepare(world: World, database: Database) -> None:
    session = world.session(twophase=True)
    mine = order(session)
    job = enqueue(session, lambda: Charge(order_id=mine.id))
    session.prepare()
    assert inspect(job).persistent
    session.commit()
    assert len(database.jobs()) == 1


def test_with_begin_blocks_and_without_autoflush(world: World, database: Database) -> None:
    session = world.session(autoflush=False)
    with session.begin():
        mine = order(session)
        enqueue(session, lambda: Charge(order_id=mine.id))
    with session.begin():
        enqueue(session, lambda: Signup(email="late"))
    assert database.kinds() == ["charge", "signup"]
    assert isinstance(session.get(Job, database.jobs()[0].id), Job)
