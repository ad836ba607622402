"""Counts of finished jobs: exact, whole, and the same whoever counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from awa_sqla.maintenance import count_finished, finished_counts
from tests.maintenance.test_prune import dead, finished
from tests.worlds import Database, World, in_one_world


def counts(session: Session) -> dict[tuple[str, str], int]:
    return {key: jobs for key, (jobs, _) in finished_counts(session).items()}


def test_finished_jobs_and_dead_letters_are_counted_by_queue_and_state(session: Session, database: Database) -> None:
    finished(database, "completed", 1, 2, None)
    finished(database, "failed", 1)
    finished(database, "cancelled", 1, 2, queue="b")
    dead(database, 1, 2, 3, queue="only dead")
    for state in ("available", "running", "waiting_external"):
        database.execute("INSERT INTO jobs_hot (kind, state) VALUES ('live', %s)", state)
    database.execute("INSERT INTO scheduled_jobs (kind, run_at) VALUES ('live', now())")
    before = datetime.now(UTC)
    done = count_finished(session)
    session.commit()
    assert counts(session) == {
        ("default", "completed"): 3,
        ("default", "failed"): 1,
        ("b", "cancelled"): 2,
        ("only dead", "dead"): 3,
    }
    assert done.rows == 9
    assert 0 < done.seconds < 5
    moments = {at for _, at in finished_counts(session).values()}
    assert len(moments) == 1
    assert abs(moments.pop() - before) < timedelta(seconds=5)


def test_counting_again_changes_what_has_changed_and_drops_what_is_gone(session: Session, database: Database) -> None:
    finished(database, "completed", 1, 2)
    finished(database, "completed", 1, queue="gone")
    dead(database, 1)
    count_finished(session)
    session.commit()
    first = finished_counts(session)
    count_finished(session)
    session.commit()
    again = finished_counts(session)
    assert {key: jobs for key, (jobs, _) in again.items()} == {key: jobs for key, (jobs, _) in first.items()}
    assert all(again[key][1] > first[key][1] for key in first)
    database.execute("DELETE FROM jobs_hot WHERE queue = 'gone'")
    database.execute("DELETE FROM dlq_entries")
    finished(database, "completed", 1)
    finished(database, "failed", 1, queue="new")
    assert count_finished(session).rows == 4
    session.commit()
    assert counts(session) == {("default", "completed"): 3, ("new", "failed"): 1}


def test_nothing_to_count_is_counted_too(session: Session, database: Database) -> None:
    assert count_finished(session).rows == 0
    finished(database, "failed", 1)
    count_finished(session)
    database.execute("DELETE FROM jobs_hot")
    session.commit()
    assert count_finished(session).rows == 0
    session.commit()
    assert counts(session) == {}


@in_one_world
def test_a_count_that_was_overtaken_changes_nothing(session: Session, database: Database) -> None:
    finished(database, "completed", 1)
    database.execute(
        "INSERT INTO job_counts (queue, state, jobs, counted_at) VALUES "
        "('default', 'completed', 7, now() + interval '1 hour'), ('later', 'failed', 7, now() + interval '1 hour')"
    )
    count_finished(session)
    session.commit()
    assert counts(session) == {("default", "completed"): 7, ("later", "failed"): 7}


def test_two_at_once_wait_for_each_other_and_count_once(world: World, session: Session, database: Database) -> None:
    for queue in "abcdef":
        finished(database, "completed", 1, 2, queue=queue)
        database.execute("INSERT INTO job_counts (queue, state, jobs) VALUES (%s, 'gone', 1)", queue)
    count_finished(session)
    rival = world.meanwhile(count_finished)
    database.execute("DELETE FROM jobs_hot WHERE queue = 'a'")
    finished(database, "failed", 1, queue="g")
    session.commit()
    assert rival.result().rows in (11, 12, 13)
    count_finished(session)
    session.commit()
    assert counts(session) == {(queue, "completed"): 2 for queue in "bcdef"} | {("g", "failed"): 1}


@in_one_world
def test_many_at_once_never_deadlock(engine: Engine, session: Session, database: Database) -> None:
    """Each sees other queues come and go."""
    for queue in "abcdefgh":
        finished(database, "completed", 1, queue=queue)

    def counting() -> None:
        for _ in range(30):
            with Session(engine) as one, one.begin():
                count_finished(one)

    with ThreadPoolExecutor(3) as threads:
        rivals = [threads.submit(counting) for _ in range(3)]
        for number in range(40):
            database.execute("DELETE FROM jobs_hot WHERE queue = %s", "abcdefgh"[number % 8])
            finished(database, "completed", 1, queue="hgfedcba"[number % 8])
        for rival in rivals:
            rival.result()
    count_finished(session)
    session.commit()
    rows = database.rows("SELECT queue, count(*) FROM jobs_hot GROUP BY 1")
    assert counts(session) == {(queue, "completed"): count for queue, count in rows}


@in_one_world
def test_a_count_is_two_statements(world: World, session: Session, database: Database) -> None:
    finished(database, "completed", 1)
    session.connection()
    with world.counting() as sent:
        count_finished(session)
    assert len(sent) == 2
    with world.counting() as sent:
        finished_counts(session)
    assert len(sent) == 1
