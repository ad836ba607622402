"""Retention: what goes and when, queue by queue, in bounded batches, whoever else is at it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from sqlalchemy import URL, create_engine, select, text
from sqlalchemy.orm import Session

from awa_sqla import Job, JobArgs, JobState, Unique, claim, complete, enqueue, enqueue_unique
from awa_sqla.errors import UniqueConflict
from awa_sqla.maintenance import prune_dead_letters, prune_jobs
from awa_sqla.session.table import TERMINAL
from tests.worlds import Database, World, in_one_world

HOUR = 3600


class Once(JobArgs, unique=Unique(states=JobState)):
    number: int = 0


class Plain(JobArgs):
    number: int = 0


RETRY = text(
    "UPDATE awa.jobs_hot SET state = 'available', finalized_at = NULL WHERE id IN (SELECT id FROM awa.jobs_hot "
    "WHERE state IN ('completed', 'failed') ORDER BY finalized_at LIMIT 3 FOR UPDATE)"
)


#: No live row may go, whoever deletes it.
REFUSE = """
CREATE FUNCTION awa.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'job % was %', OLD.id, OLD.state;
END $$;
CREATE TRIGGER refuse BEFORE DELETE ON awa.jobs_hot FOR EACH ROW
WHEN (OLD.state NOT IN ('completed', 'failed', 'cancelled')) EXECUTE FUNCTION awa.refuse()
"""


def finished(database: Database, state: str, *ages: float | None, queue: str = "default") -> None:
    """One job for each age in seconds, by plain SQL; None has no `finalized_at`."""
    for age in ages:
        database.execute(
            "INSERT INTO jobs_hot (kind, queue, state, finalized_at) "
            "VALUES ('done', %s, %s, clock_timestamp() - %s * interval '1 second')",
            queue,
            state,
            age,
        )


def dead(database: Database, *ages: float, queue: str = "default") -> None:
    """One dead letter for each age in seconds."""
    for age in ages:
        database.execute(
            "INSERT INTO dlq_entries (id, kind, queue, original_run_lease, dlq_reason, dlq_at) VALUES "
            "(nextval('jobs_id_seq'), 'dead', %s, 1, 'manual', clock_timestamp() - %s * interval '1 second')",
            queue,
            age,
        )


def policy(database: Database, queue: str, **columns: float | None) -> None:
    """The queue's settings."""
    names = ["queue", *columns]
    database.execute(
        f"INSERT INTO queue_meta ({', '.join(names)}) VALUES ({', '.join(['%s'] * len(names))})",
        queue,
        *columns.values(),
    )


def left(database: Database, table: str = "jobs_hot") -> dict[tuple[str, str], int]:
    """How many rows of each (queue, state) are still there."""
    rows = database.rows(f"SELECT queue, state, count(*) FROM {table} GROUP BY queue, state")
    return {(queue, state): count for queue, state, count in rows}


# ------------------------------------------------------------------ how long


def test_finished_jobs_go_when_their_time_is_over(session: Session, database: Database) -> None:
    finished(database, "completed", 23 * HOUR, 25 * HOUR, 999 * HOUR)
    finished(database, "failed", 71 * HOUR, 73 * HOUR)
    finished(database, "cancelled", 71 * HOUR, 73 * HOUR)
    assert prune_jobs(session) == 4
    session.commit()
    assert left(database) == dict.fromkeys(
        (("default", "completed"), ("default", "failed"), ("default", "cancelled")), 1
    )
    assert prune_jobs(session) == 0


def test_a_queue_keeps_what_it_says_and_an_operators_word_goes_first(session: Session, database: Database) -> None:
    policy(database, "declared", declared_keep_completed_seconds=60, declared_keep_failed_seconds=120)
    policy(database, "override", declared_keep_completed_seconds=60, override_keep_completed_seconds=HOUR)
    policy(database, "at once", override_keep_completed_seconds=0, declared_keep_failed_seconds=0)
    policy(database, "silent", declared_concurrency=1)
    for queue in ("declared", "override", "at once", "silent"):
        finished(database, "completed", 1, 61, HOUR + 1, queue=queue)
        finished(database, "failed", 1, 121, queue=queue)
    assert prune_jobs(session) == 3 + 1 + 5
    session.commit()
    assert left(database) == {
        ("declared", "completed"): 1,
        ("declared", "failed"): 1,
        ("override", "completed"): 2,
        ("override", "failed"): 2,
        ("silent", "completed"): 3,
        ("silent", "failed"): 2,
    }


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, 1e15])
def test_for_ever_is_for_ever(session: Session, database: Database, seconds: float) -> None:
    policy(database, "declared", declared_keep_completed_seconds=seconds, declared_keep_dead_seconds=seconds)
    policy(database, "override", declared_keep_completed_seconds=0, override_keep_completed_seconds=seconds)
    for queue in ("declared", "override", "default"):
        finished(database, "completed", 1e9, queue=queue)
        dead(database, 1e9, queue=queue)
    assert (prune_jobs(session), prune_dead_letters(session)) == (1, 2)
    session.commit()
    assert left(database) == {("declared", "completed"): 1, ("override", "completed"): 1}
    assert left(database, "dlq_entries") == {("declared", "failed"): 1}


@in_one_world
def test_an_operator_can_end_for_ever(session: Session, database: Database) -> None:
    policy(database, "default", declared_keep_completed_seconds=float("inf"), override_keep_completed_seconds=5)
    finished(database, "completed", 4, 6)
    assert prune_jobs(session) == 1


@in_one_world
def test_what_plain_sql_left_without_a_time_stays_and_disturbs_nothing(session: Session, database: Database) -> None:
    finished(database, "completed", None, None, 25 * HOUR, None)
    finished(database, "failed", None, queue="only without")
    database.execute(
        "INSERT INTO jobs_hot (kind, state, finalized_at) VALUES ('k', 'cancelled', '1970-01-01 00:00Z'), "
        "('k', 'cancelled', '9000-01-01 00:00Z')"
    )
    assert prune_jobs(session) == 2
    session.commit()
    assert left(database) == {
        ("default", "completed"): 3,
        ("only without", "failed"): 1,
        ("default", "cancelled"): 1,
    }


@in_one_world
def test_no_live_job_goes_however_old_it_is(session: Session, database: Database) -> None:
    policy(database, "default", override_keep_completed_seconds=0, override_keep_failed_seconds=0)
    for state in JobState:
        table = "scheduled_jobs" if state in ("scheduled", "retryable") else "jobs_hot"
        database.execute(
            f"INSERT INTO {table} (kind, state, run_at, finalized_at, heartbeat_at) "
            "VALUES ('k', %s, '2001-01-01 UTC', '2001-01-01 UTC', '2001-01-01 UTC')",
            state.value,
        )
    assert prune_jobs(session) == len(TERMINAL)
    session.commit()
    assert {job.state for job in database.jobs()} == set(JobState) - TERMINAL


def test_dead_letters_go_after_thirty_days_or_when_their_queue_says(session: Session, database: Database) -> None:
    day = 24 * HOUR
    policy(database, "declared", declared_keep_dead_seconds=60)
    policy(database, "override", declared_keep_dead_seconds=60, override_keep_dead_seconds=40 * day)
    for queue in ("default", "declared", "override"):
        dead(database, 59, 29 * day, 31 * day, queue=queue)
    finished(database, "failed", 1)
    assert prune_dead_letters(session) == 1 + 2 + 0
    session.commit()
    assert left(database, "dlq_entries") == {
        ("default", "failed"): 2,
        ("declared", "failed"): 1,
        ("override", "failed"): 3,
    }
    assert left(database) == {("default", "failed"): 1}


# ------------------------------------------------------- which, and how many


def test_a_batch_is_bounded_and_takes_the_oldest(session: Session, database: Database) -> None:
    finished(database, "completed", *(48 * HOUR + 60 * n for n in range(10)))
    newest = [job.id for job in database.jobs()][:6]
    session.execute(text("SET LOCAL enable_indexscan = off"))  # no plan may change which they are
    assert prune_jobs(session, limit=4) == 4
    session.commit()
    assert [job.id for job in database.jobs()] == newest
    assert [prune_jobs(session, limit=4), prune_jobs(session, limit=4)] == [4, 2]


@in_one_world
def test_a_queue_with_very_many_leaves_the_others_their_share(session: Session, database: Database) -> None:
    finished(database, "completed", *(99 * HOUR + n for n in range(100)), queue="many")
    finished(database, "failed", *(90 * HOUR + n for n in range(8)), queue="many")
    finished(database, "completed", *(30 * HOUR + n for n in range(8)), queue="few")
    finished(database, "completed", 29 * HOUR, queue="one")
    assert prune_jobs(session, limit=20) == 20
    session.commit()
    # A share of five; what two of them leave over goes to one that has more.
    found = left(database)
    assert 100 - found["many", "completed"] >= 5
    assert 8 - found.get(("many", "failed"), 0) >= 5
    assert 8 - found.get(("few", "completed"), 0) >= 5
    assert ("one", "completed") not in found
    assert sum(found.values()) == 117 - 20


@in_one_world
def test_what_the_others_leave_over_is_used(session: Session, database: Database) -> None:
    finished(database, "completed", *(99 * HOUR + n for n in range(30)), queue="many")
    finished(database, "completed", 98 * HOUR, queue="a")
    finished(database, "completed", 97 * HOUR, queue="b")
    assert prune_jobs(session, limit=20) == 20
    session.commit()
    assert left(database) == {("many", "completed"): 12}


@in_one_world
def test_more_queues_than_a_batch_has_rows_come_in_turn(session: Session, database: Database) -> None:
    for number in range(7):
        finished(database, "completed", *(50 * HOUR + number + n / 10 for n in range(3)), queue=f"q{number}")
    assert prune_jobs(session, limit=3) == 3
    session.commit()
    assert left(database) == {(f"q{n}", "completed"): 2 if n > 3 else 3 for n in range(7)}
    while prune_jobs(session, limit=3) == 3:
        session.commit()
    assert left(database) == {}


@in_one_world
def test_many_that_ended_at_the_same_moment_are_taken_batch_by_batch(session: Session, database: Database) -> None:
    for queue in ("a", "b"):
        database.execute(
            "INSERT INTO jobs_hot (kind, queue, state, finalized_at) "
            "SELECT 'k', %s, 'completed', '2001-01-01 UTC' FROM generate_series(1, 50)",
            queue,
        )
    finished(database, "completed", 99 * HOUR, queue="c")
    counts = [prune_jobs(session, limit=30) for _ in range(5)]
    assert counts == [30, 30, 30, 11, 0]


@in_one_world
def test_rows_that_others_hold_are_passed_over(session: Session, other: Session, database: Database) -> None:
    finished(database, "completed", *(48 * HOUR + n for n in range(5)))
    oldest = [job.id for job in database.jobs()][-2:]
    other.execute(select(Job.id).where(Job.id.in_(oldest)).with_for_update(read=True))
    assert prune_jobs(session, limit=2) == 2
    assert prune_jobs(session, limit=9) == 1
    session.commit()
    assert [job.id for job in database.jobs()] == oldest
    other.rollback()
    assert prune_jobs(session, limit=9) == 2


def test_two_at_once_delete_each_row_once(world: World, session: Session, database: Database) -> None:
    finished(database, "completed", *(48 * HOUR + n for n in range(6)))
    dead(database, *(999 * HOUR + n for n in range(6)))
    rival = world.session()
    assert [prune_jobs(one, limit=4) for one in (session, rival)] == [4, 2]
    assert [prune_dead_letters(one, limit=4) for one in (session, rival)] == [4, 2]
    session.commit()
    rival.commit()
    assert database.jobs() == []


@in_one_world
def test_a_job_that_is_coming_back_is_not_deleted(session: Session, other: Session, database: Database) -> None:
    finished(database, "failed", 99 * HOUR, 98 * HOUR)
    back = database.jobs()[0].id
    other.connection().execute(text("UPDATE awa.jobs_hot SET state = 'available' WHERE id = :id"), {"id": back})
    assert prune_jobs(session) == 1
    other.commit()
    assert prune_jobs(session) == 0
    session.commit()
    assert [(job.id, job.state) for job in database.jobs()] == [(back, "available")]


def test_beside_claims_completions_and_retries_nothing_is_lost(fresh_db_url: URL) -> None:
    """Rows change between the moment they are found and the moment they are locked."""
    database, engine = Database(fresh_db_url), create_engine(fresh_db_url)
    database.execute(REFUSE)
    policy(database, "default", override_keep_completed_seconds=0, override_keep_failed_seconds=0)
    finished(database, "failed", *range(300))
    over = Event()

    def working() -> int:
        for _ in range(60):
            with Session(engine) as session, session.begin():
                enqueue(session, Plain())
                enqueue(session, Plain())
            with Session(engine) as session, session.begin():
                for job in claim(session, "default", limit=5):
                    complete(session, job)
        return 120

    def retrying() -> int:
        """As operators do: failed and completed jobs come back."""
        while not over.is_set():
            with engine.begin() as connection:
                connection.execute(RETRY)
        return 0

    def pruning() -> int:
        rows = 0
        while not over.is_set():
            with Session(engine) as session, session.begin():
                rows += prune_jobs(session, limit=7)
        return rows

    with ThreadPoolExecutor(5) as threads:
        prunes = [threads.submit(pruning) for _ in range(2)]
        retries = threads.submit(retrying)
        works = [threads.submit(working) for _ in range(2)]
        made = 300 + sum(work.result() for work in works)
        over.set()
        retries.result()
        gone = sum(prune.result() for prune in prunes)
    assert gone > 0
    assert gone + len(database.jobs()) == made
    engine.dispose()
    database.close()


# -------------------------------------------------------------- what follows


def test_a_unique_key_becomes_free(session: Session, database: Database) -> None:
    session.execute(text("SELECT 1"))
    first = enqueue_unique(session, Once()).id
    session.commit()
    database.execute("UPDATE jobs_hot SET state = 'completed', finalized_at = clock_timestamp() - interval '25 hours'")
    enqueue(session, Once(), on_conflict="raise")
    with pytest.raises(UniqueConflict):
        session.flush()
    session.rollback()
    assert database.value("SELECT job_id FROM job_unique_claims") == first
    assert prune_jobs(session) == 1
    session.commit()
    assert database.rows("SELECT * FROM job_unique_claims") == []
    assert enqueue_unique(session, Once()).created
    session.commit()


@in_one_world
def test_follow_ups_and_what_is_owed_stay(session: Session, database: Database) -> None:
    finished(database, "completed", 99 * HOUR)
    parent = database.jobs()[0].id
    database.execute("INSERT INTO jobs_hot (kind, parent_id, root_id) VALUES ('child', %s, %s)", parent, parent)
    database.execute(
        "INSERT INTO follow_up_obligations (job_id, kind, outcome, spec, snapshot) "
        "VALUES (%s, 'done', 'completed', 's', '{}')",
        parent,
    )
    assert prune_jobs(session) == 1
    session.commit()
    assert [(job.kind, job.parent_id) for job in database.jobs()] == [("child", parent)]
    assert [owed.job_id for owed in database.obligations()] == [parent]


@in_one_world
def test_a_batch_is_one_statement_also_where_follow_ups_are_attached(
    world: World, session: Session, database: Database
) -> None:
    finished(database, "completed", *(48 * HOUR + n for n in range(5)))
    dead(database, 999 * HOUR)
    session.connection()
    with world.counting() as sent:
        prune_jobs(session)
    assert len(sent) == 1
    with world.counting() as sent:
        prune_dead_letters(session)
    assert len(sent) == 1


def test_a_finished_attempt_can_be_pruned_in_the_session_that_ended_it(session: Session, database: Database) -> None:
    policy(database, "default", override_keep_completed_seconds=0)
    enqueue(session, Once())
    session.flush()
    (job,) = claim(session, "default", limit=1)
    complete(session, job)
    session.flush()
    assert prune_jobs(session) == 1
    session.commit()
    assert database.jobs() == []
