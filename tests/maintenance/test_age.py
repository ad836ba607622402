"""Ageing: a level for each interval waited, once, whoever runs it and however often."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from awa_sqla import Backoff, JobArgs, cancel, claim, fail, snooze
from awa_sqla.maintenance import age, promote
from tests.maintenance.test_prune import policy
from tests.worlds import Database, World, in_one_world

#: The default interval.
MINUTE = 60.0


class Wait(JobArgs, kind="wait", backoff=Backoff(base=timedelta(seconds=1), factor=1, jitter=0)):
    number: int = 0


def waiting(database: Database, *jobs: tuple[int, float], queue: str = "default") -> list[int]:
    """An available job for each (priority, seconds waited); their ids."""
    return [
        database.value(
            "INSERT INTO jobs_hot (kind, queue, priority, run_at) "
            "VALUES ('wait', %s, %s, clock_timestamp() - %s * interval '1 second') RETURNING id",
            queue,
            priority,
            waited,
        )
        for priority, waited in jobs
    ]


def later(database: Database, seconds: float) -> None:
    """Time goes by for all jobs."""
    database.execute("UPDATE jobs_hot SET run_at = run_at - %s * interval '1 second'", seconds)


def levels(database: Database, queue: str = "default") -> list[tuple[int, int]]:
    """(priority, aged) of each job, in the order of their ids."""
    return [
        tuple(row) for row in database.rows("SELECT priority, aged FROM jobs_hot WHERE queue = %s ORDER BY id", queue)
    ]


# ------------------------------------------------------------------ how far


def test_a_job_rises_one_level_for_each_interval_it_has_waited(session: Session, database: Database) -> None:
    expected = []
    for own in (1, 2, 3, 4):
        for waited, steps in ((1, 0), (59, 0), (61, 1), (119, 1), (121, 2), (181, 3), (1e6, 3), (-1e6, 0)):
            waiting(database, (own, waited))
            risen = min(steps, own - 1)
            expected.append((own - risen, risen))
    assert age(session) == sum(risen > 0 for _, risen in expected)
    session.commit()
    assert levels(database) == expected
    assert age(session) == 0  # once for each interval, however often


def test_it_rises_again_when_the_next_interval_is_over(session: Session, database: Database) -> None:
    waiting(database, (4, 1), (3, 1), (2, 1), (1, 1))
    seen = []
    for _ in range(5):
        age(session)
        session.commit()
        seen.append([priority for priority, _ in levels(database)])
        later(database, MINUTE)
    assert seen == [[4, 3, 2, 1], [3, 2, 1, 1], [2, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert levels(database) == [(1, 3), (1, 2), (1, 1), (1, 0)]


def test_each_queue_has_its_interval_and_an_operators_word_goes_first(session: Session, database: Database) -> None:
    policy(database, "declared", declared_aging_seconds=10)
    policy(database, "override", declared_aging_seconds=10, override_aging_seconds=1000)
    policy(database, "silent", declared_concurrency=1)
    policy(database, "never", declared_aging_seconds=float("inf"))
    policy(database, "no more", declared_aging_seconds=1, override_aging_seconds=float("inf"))
    policy(database, "again", declared_aging_seconds=float("inf"), override_aging_seconds=1)
    for queue in ("declared", "override", "silent", "never", "no more", "again", "unknown"):
        waiting(database, (4, 25), (4, 65), queue=queue)
    age(session)
    session.commit()
    assert {queue: [p for p, _ in levels(database, queue)] for queue in ("declared", "override", "silent")} == {
        "declared": [2, 1],
        "override": [4, 4],
        "silent": [4, 3],
    }
    assert levels(database, "never") == levels(database, "no more") == [(4, 0), (4, 0)]
    assert levels(database, "again") == [(1, 3), (1, 3)]
    assert levels(database, "unknown") == [(4, 0), (3, 1)]


@in_one_world
@pytest.mark.parametrize("seconds", [5e-324, 1e-300, 1e11, 1e300, 1.7e308, float("inf"), float("nan")])
def test_no_interval_is_too_short_or_too_long(session: Session, database: Database, seconds: float) -> None:
    policy(database, "default", declared_aging_seconds=seconds)
    waiting(database, (4, 1), (2, 1e9))
    assert age(session) == (2 if seconds < 1 else 0)


@in_one_world
def test_a_paused_queue_ages(session: Session, database: Database) -> None:
    database.execute("INSERT INTO queue_meta (queue, paused_at) VALUES ('default', now())")
    waiting(database, (3, 61))
    assert age(session) == 1


@in_one_world
def test_only_available_jobs_age(session: Session, database: Database) -> None:
    waiting(database, *[(3, 1e6)] * 6)
    states = ("available", "running", "waiting_external", "completed", "failed", "cancelled")
    for job, state in zip(database.jobs(), states, strict=True):
        database.execute("UPDATE jobs_hot SET state = %s WHERE id = %s", state, job.id)
    assert age(session) == 1
    session.commit()
    assert levels(database) == [(1, 2)] + [(3, 0)] * 5


@in_one_world
def test_plain_sql_that_set_too_much_breaks_nothing(session: Session, database: Database) -> None:
    odd = waiting(database, (4, 1e6), (2, 1e6), (4, 1e6))
    database.execute("UPDATE jobs_hot SET aged = 3 WHERE id = %s", odd[0])
    database.execute("UPDATE jobs_hot SET aged = 2 WHERE id = %s", odd[1])
    assert age(session) == 2
    session.commit()
    assert levels(database) == [(4, 3), (1, 3), (1, 3)]


# ------------------------------------------------------------ back to its own


def claimed(session: Session, database: Database, waited: float = 130) -> Any:
    """A job of priority 4 that has risen two levels, claimed."""
    waiting(database, (4, waited))
    age(session)
    session.commit()
    assert levels(database)[-1] == (2, 2)
    (job,) = claim(session, "default", limit=1)
    return job


def test_a_claim_gives_a_job_its_own_priority_back(session: Session, database: Database) -> None:
    job = claimed(session, database)
    assert (job.priority, job.aged) == (4, 0)
    session.commit()
    assert levels(database) == [(4, 0)]


def test_a_retried_job_starts_at_its_own_priority(session: Session, database: Database) -> None:
    job = claimed(session, database)
    fail(session, job, "again")
    session.commit()
    assert database.value("SELECT priority FROM scheduled_jobs") == 4
    database.execute("UPDATE scheduled_jobs SET run_at = clock_timestamp()")
    promote(session)
    session.commit()
    assert (levels(database), age(session)) == ([(4, 0)], 0)


def test_a_snoozed_job_starts_at_its_own_priority(session: Session, database: Database) -> None:
    job = claimed(session, database)
    snooze(session, job, timedelta(hours=1))
    session.commit()
    assert database.value("SELECT priority FROM scheduled_jobs") == 4


@in_one_world
def test_a_cancelled_job_has_its_own_priority(session: Session, database: Database) -> None:
    (job_id,) = waiting(database, (4, 130))
    age(session)
    session.commit()
    cancel(session, job_id, reason="no more")
    session.commit()
    assert levels(database) == [(4, 0)]


def test_what_has_risen_is_claimed_first(session: Session, database: Database) -> None:
    patient, urgent = waiting(database, (4, 185), (2, 5))
    own = waiting(database, (1, 1))[0]
    age(session)
    first = [job.id for _ in range(3) for job in claim(session, "default", limit=1)]
    assert first == [patient, own, urgent]
    session.commit()


@in_one_world
def test_where_ageing_is_switched_off_all_go_back(session: Session, database: Database) -> None:
    for queue in ("off", "slower", "on"):
        waiting(database, (4, 130), (2, 65), queue=queue)
    age(session)
    session.commit()
    policy(database, "off", override_aging_seconds=float("inf"))
    policy(database, "slower", override_aging_seconds=3600)
    waiting(database, (2, 65), queue="another")
    assert age(session, limit=2) == 2  # one rises, one goes back
    assert age(session) == 1
    assert age(session) == 0
    session.commit()
    assert levels(database, "off") == [(4, 0), (2, 0)]
    assert levels(database, "on") == levels(database, "slower") == [(2, 2), (1, 1)]
    database.execute("UPDATE queue_meta SET override_aging_seconds = NULL")
    assert age(session) == 2


# ------------------------------------------------------------------ how many


@in_one_world
def test_a_pass_is_bounded_and_takes_those_that_have_waited_longest(session: Session, database: Database) -> None:
    waiting(database, *((2, 61 + 20 * n) for n in range(10)))
    assert age(session, limit=4) == 4
    session.commit()
    assert levels(database) == [(2, 0)] * 6 + [(1, 1)] * 4
    assert [age(session, limit=4) for _ in range(3)] == [4, 2, 0]


@in_one_world
def test_a_queue_with_very_many_leaves_the_others_their_share(session: Session, database: Database) -> None:
    waiting(database, *((3, 100 + n / 100) for n in range(60)), queue="many")
    waiting(database, *((2, 90 + n / 100) for n in range(5)), queue="few")
    waiting(database, (4, 61), (4, 1), queue="one")
    assert age(session, limit=21) == 21
    session.commit()
    risen = {queue: sum(a > 0 for _, a in levels(database, queue)) for queue in ("many", "few", "one")}
    assert risen == {"many": 15, "few": 5, "one": 1}


@in_one_world
def test_many_that_were_enqueued_at_once_all_rise_batch_by_batch(session: Session, database: Database) -> None:
    """Of the same moment, at all priorities: rows that have risen stand between those that have not."""
    database.execute(
        "INSERT INTO jobs_hot (kind, priority, run_at) SELECT 'wait', n % 4 + 1, now() - interval '1 s' "
        "FROM generate_series(1, 400) AS n"
    )
    for interval in range(1, 4):
        later(database, MINUTE)
        while age(session, limit=37) == 37:
            session.commit()
        session.commit()
        expected = [(own - min(interval, own - 1), min(interval, own - 1)) for own in (2, 3, 4, 1)] * 100
        assert levels(database) == expected


@in_one_world
def test_what_becomes_available_late_rises_when_every_job_at_its_level_does(
    session: Session, database: Database
) -> None:
    waiting(database, *((3, 70 + n) for n in range(5)))
    age(session)
    session.commit()
    (late,) = waiting(database, (2, 72))  # older than what has risen to its level
    seen = []
    for _ in range(3):
        age(session)
        session.commit()
        seen.append(database.job(late).priority)
        later(database, MINUTE)
    assert seen[-1] == 1
    age(session)
    session.commit()
    assert set(levels(database)) == {(1, 2), (1, 1)}


@pytest.mark.beside
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_however_it_is_cut_into_passes_each_job_is_where_its_wait_says(shared: Any, data: st.DataObject) -> None:
    session, database = shared
    database.execute("DELETE FROM jobs_hot")
    jobs = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 110)), min_size=1, max_size=30))
    own = [priority for priority, _ in jobs]
    waited = [float(seconds) for _, seconds in jobs]
    waiting(database, *zip(own, waited, strict=True))
    for _ in range(data.draw(st.integers(1, 4))):
        limit = data.draw(st.integers(1, 12))
        while age(session, limit=limit) == limit:
            session.commit()
        session.commit()
        risen = [min(int(seconds // MINUTE), priority - 1) for seconds, priority in zip(waited, own, strict=True)]
        assert levels(database) == [(p - r, r) for p, r in zip(own, risen, strict=True)]
        step = data.draw(st.integers(5, 75))
        # Stay clear of the edges: this test's clock is not the database's.
        if any((seconds + step) % MINUTE > 55 for seconds in waited):
            step = 60
        later(database, step)
        waited = [seconds + step for seconds in waited]


@pytest.fixture
def shared(engine: Engine, database: Database) -> Any:
    """One session for all examples."""
    with Session(engine) as session:
        yield session, database


# ------------------------------------------------------- beside claims and others


@in_one_world
def test_rows_that_a_claim_holds_are_passed_over_and_keep_their_priority(
    session: Session, other: Session, database: Database
) -> None:
    waiting(database, (3, 61), (3, 62), (3, 63))
    held = [job.id for job in claim(other, "default", limit=2)]
    assert age(session) == 1
    session.commit()
    other.commit()
    assert age(session) == 0
    session.commit()
    assert [(job.id in held, job.priority) for job in database.jobs()] == [(False, 2), (True, 3), (True, 3)]


@in_one_world
def test_a_claim_passes_over_what_is_rising_and_takes_the_rest(
    session: Session, other: Session, database: Database
) -> None:
    old, young = waiting(database, (3, 61), (3, 1))
    assert age(session) == 1
    assert [job.id for job in claim(other, "default", limit=5)] == [young]
    session.commit()
    assert [job.id for job in claim(other, "default", limit=5)] == [old]


def test_two_at_once_let_each_job_rise_once(world: World, session: Session, database: Database) -> None:
    waiting(database, *((4, 61 + n / 10) for n in range(6)))
    rival = world.session()
    assert [age(one, limit=4) for one in (session, rival)] == [4, 2]
    session.commit()
    rival.commit()
    assert levels(database) == [(3, 1)] * 6
    assert age(session) == 0


@in_one_world
def test_a_pass_is_two_statements(world: World, session: Session, database: Database) -> None:
    waiting(database, (3, 61))
    session.connection()
    with world.counting() as sent:
        age(session)
    assert len(sent) == 2


@in_one_world
def test_a_claim_that_was_rolled_back_leaves_a_job_that_rises(
    session: Session, other: Session, database: Database
) -> None:
    waiting(database, (3, 61))
    claim(other, "default", limit=1)
    other.rollback()
    assert age(session) == 1
    assert session.scalar(text("SELECT priority FROM awa.jobs_hot")) == 2
