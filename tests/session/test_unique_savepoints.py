"""Unique and late-bound jobs where savepoints, expunged rows and refused commits come together."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy.orm import Session

from awa_sqla import FollowUps, UniqueConflict, claim, complete, enqueue, snooze
from tests.app import Signup
from tests.session.test_unique import Report, holders
from tests.worlds import Database

HOUR = timedelta(hours=1)


@pytest.mark.parametrize("how", ["expunge_all", "expire_all"])
def test_a_follow_up_left_out_in_a_savepoint_that_is_rolled_back_comes_after_all(
    session: Session, follow_ups: FollowUps, database: Database, how: str
) -> None:
    follow_ups.on_completed(Signup, name="report")(lambda event: Report(day=1))
    enqueue(session, Signup(), queue="work")
    session.commit()
    [job] = claim(session, "work", limit=1)
    session.commit()
    complete(session, job)
    getattr(session, how)()  # the session is clean now: begin_nested() does not flush
    savepoint = session.begin_nested()
    enqueue(session, Report(day=1))
    session.flush()
    claim(session, "nothing", limit=1)  # any verb drains the outer transaction too
    session.flush()
    savepoint.rollback()
    session.commit()
    assert sorted(database.kinds()) == ["report", "signup"]
    assert len(holders(database)) == 1


def test_a_follow_up_left_out_in_a_savepoint_that_is_released_stays_out(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_completed(Signup, name="report")(lambda event: Report(day=1))
    enqueue(session, Signup(), queue="work")
    session.commit()
    [job] = claim(session, "work", limit=1)
    session.commit()
    complete(session, job)
    session.expunge_all()
    with session.begin_nested():
        kept = enqueue(session, Report(day=1))
        session.flush()
        claim(session, "nothing", limit=1)
    session.commit()
    assert holders(database) == [kept.id]


def test_the_row_of_a_move_keeps_its_key_while_it_is_expunged(session: Session, database: Database) -> None:
    enqueue(session, Report(day=1))
    session.commit()
    [job] = claim(session, "default", limit=1)
    session.commit()
    job_id = snooze(session, job, HOUR).id
    session.expunge_all()
    with session.begin_nested():
        duplicate = enqueue(session, Report(day=1), on_conflict="skip")
        session.flush()
        assert duplicate.duplicate_of == job_id
    session.commit()
    assert holders(database) == [job_id]


def test_the_row_of_a_move_comes_before_a_new_job_of_the_same_flush(session: Session, database: Database) -> None:
    enqueue(session, Report(day=1))
    session.commit()
    [job] = claim(session, "default", limit=1)
    session.commit()
    with session.no_autoflush:
        duplicate = enqueue(session, Report(day=1), on_conflict="skip")
        job_id = snooze(session, job, HOUR).id
    session.commit()
    assert duplicate.duplicate_of == job_id
    assert holders(database) == [job_id]


def test_a_late_bound_job_of_an_outer_savepoint_does_not_go_with_an_inner_one(
    session: Session, database: Database
) -> None:
    outer = session.begin_nested()
    calls: list[int] = []
    enqueue(session, lambda: calls.append(1) or Signup(email="outer"))  # type: ignore[func-returns-value]
    inner = session.begin_nested()

    def bad() -> Signup:
        raise ValueError("no")

    enqueue(session, bad)
    with pytest.raises(ValueError, match="no"):
        outer.commit()
    inner.rollback()
    outer.commit()
    session.commit()
    assert database.kinds() == ["signup"]
    assert calls == [1]


def test_a_late_bound_job_of_the_root_outlives_a_refused_commit_and_the_rollback_of_a_savepoint(
    session: Session, database: Database
) -> None:
    first = enqueue(session, Report(day=1))
    session.commit()
    root = enqueue(session, lambda: Signup(email="root"))
    savepoint = session.begin_nested()
    enqueue(session, lambda: Report(day=1))
    with pytest.raises(UniqueConflict):
        session.commit()
    savepoint.rollback()
    session.commit()
    assert [job.id for job in database.jobs()] == [first.id, root.id]


def test_a_late_bound_duplicate_raises_once(session: Session, database: Database) -> None:
    first = enqueue(session, Report(day=1))
    session.commit()
    enqueue(session, lambda: Report(day=1))
    with pytest.raises(UniqueConflict):
        session.commit()
    session.commit()
    assert holders(database) == [first.id]
