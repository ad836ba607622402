"""What single changes of the code have shown to be held by no other test (`tests/mutants.py`)."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from awa_sqla import (
    Backoff,
    Completed,
    InvalidJob,
    JobRecord,
    JobSnapshot,
    JobState,
    cancel,
    claim,
    complete_many,
    enqueue,
    fail,
    lineage,
    set_progress,
)
from awa_sqla.models.job import SHARED
from awa_sqla.session.statements import CLAIM_ROWS
from awa_sqla.session.verbs import cancel_attempt, fail_with
from tests.app import Charge, Signup, Welcome
from tests.session.steps import HOUR, available, running, wait_of
from tests.worlds import Database, in_one_world


def test_a_batch_of_jobs_claimed_in_the_same_transaction_brings_them_up_to_date(session: Session) -> None:
    enqueue(session, Welcome())
    session.flush()
    jobs = claim(session, "default", limit=1)
    complete_many(session, jobs)
    assert [(job.state, job.heartbeat_at) for job in jobs] == [(JobState.COMPLETED, None)]


@in_one_world
def test_a_claim_takes_a_million_jobs_at_most(session: Session) -> None:
    enqueue(session, Signup())
    with pytest.raises(InvalidJob) as caught:
        claim(session, "default", limit=1_000_001)
    assert caught.value.field == "limit"
    assert len(claim(session, "default", limit=1_000_000)) == 1


def test_a_completion_without_a_claim_took_no_time() -> None:
    now = datetime.now(UTC)
    snapshot = JobSnapshot(
        id=1,
        kind="signup",
        state="completed",
        run_at=now,
        created_at=now,
        finalized_at=now,
        args={},
        meta={},
        tags=[],
        errors=[],
    )
    assert Completed(Signup(), snapshot).duration == timedelta(0)


def test_a_pause_stops_its_own_queue_alone(session: Session, database: Database) -> None:
    database.execute("INSERT INTO queue_meta (queue, paused_at) VALUES ('another', now())")
    available(session)
    assert len(claim(session, "default", limit=1)) == 1


def test_the_deadline_of_a_queue_is_for_its_own_jobs_alone(session: Session, database: Database) -> None:
    database.execute("INSERT INTO queue_meta (queue, override_deadline_seconds) VALUES ('another', 60)")
    assert running(session).deadline_at is None


@in_one_world
def test_progress_goes_from_0_to_100(session: Session) -> None:
    job = running(session)
    for percent in (0, 100):
        progress = set_progress(session, job, percent).progress
        assert progress is not None
        assert progress["percent"] == percent


def test_among_equally_urgent_jobs_the_first_id_is_claimed_first(session: Session, database: Database) -> None:
    jobs = [available(session) for _ in range(3)]
    ids = [job.id for job in jobs]
    database.execute("UPDATE jobs_hot SET run_at = '2020-01-01Z'")
    database.execute("UPDATE jobs_hot SET tags = '{moved}' WHERE id = %s", ids[0])  # the last one in the table's file
    for way in ("indexscan", "indexonlyscan", "bitmapscan"):  # whose order would be the right one by itself
        session.execute(text(f"SET LOCAL enable_{way} = off"))
    [claimed] = claim(session, "default", limit=1)
    assert claimed.id == ids[0]


def test_a_job_that_is_not_even_flushed_can_be_cancelled_at_once(session: Session, database: Database) -> None:
    job = cancel(session, enqueue(session, Signup()), reason="x")
    session.commit()
    assert job is not None
    assert database.job(job.id).state == "cancelled"


@in_one_world
def test_a_cancel_by_the_attempt_leaves_an_entry_of_its_own_type(session: Session) -> None:
    [entry] = cancel_attempt(session, running(session), "enough").errors
    assert (entry["error"], entry["type"]) == ("cancelled: enough", "cancelled")


def test_a_failure_may_bring_the_backoff_of_the_callers_registry(session: Session, database: Database) -> None:
    job = running(session)
    fail_with(session, job, "no", backoff=Backoff(base=HOUR, jitter=0))
    session.commit()
    assert wait_of(database.job(job.id)) == HOUR


def test_a_failure_is_judged_by_the_row_as_it_is_now(session: Session, database: Database) -> None:
    job = running(session)
    allowed = job.max_attempts  # loaded: the session's own picture of the row
    assert job.attempt < allowed
    database.execute("UPDATE jobs_hot SET max_attempts = attempt")
    fail(session, job, "no")
    session.commit()
    assert database.job(job.id).state == "failed"


def test_a_claim_in_plain_rows_has_the_values_of_every_sort_of_column(session: Session) -> None:
    job = available(session, Charge(order_id=1))
    parameters = {"in_queue": "payments", "limit": 1, "by_worker": "w1"}
    [row] = session.connection().execute(CLAIM_ROWS, parameters).all()
    found = dict(zip(SHARED, row, strict=True))
    assert (found["id"], found["kind"], found["tags"]) == (job.id, "charge", ["billing"])
    assert [json.loads(found[name]) for name in ("args", "errors")] == [{"order_id": 1, "cents": 100}, []]


def test_a_loaded_record_tells_the_progress_too(session: Session) -> None:
    job = running(session)
    record = session.get_one(JobRecord, job.id)
    assert record.progress is None
    set_progress(session, job, 50)
    assert record.progress == job.progress


def test_a_lineage_holds_no_other_tree(session: Session) -> None:
    available(session)
    job = available(session)
    assert [record.id for record in lineage(session, job)] == [job.id]
