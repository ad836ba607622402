"""What single changes of the code have shown to be held by no other test (`tests/mutants.py`)."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.orm import Session

from awa_sqla import Completed, InvalidJob, JobSnapshot, JobState, claim, complete_many, enqueue
from tests.app import Signup, Welcome
from tests.worlds import in_one_world


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
