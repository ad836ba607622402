"""Ids have 64 bits, in every column, sequence and verb."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine, select, text
from sqlalchemy.orm import Session

from awa_sqla import DeadLetter, FollowUps, Job, JobRecord, ScheduledJob, cancel, claim, complete, enqueue, fail
from awa_sqla.models import Obligation, Outcome, Queue
from tests.app import Welcome

#: Beyond what 32 bits hold.
BEYOND = 2**33

pytestmark = pytest.mark.case(45)


@pytest.fixture
def session(fresh_db_url: URL) -> Iterator[Session]:
    """A session whose database has already used all ids of 32 bits."""
    engine = create_engine(fresh_db_url)
    with Session(engine) as session:
        for sequence in ("awa.jobs_id_seq", "awa.run_lease_seq", "awa.follow_up_obligations_id_seq"):
            session.execute(text("SELECT setval(:sequence, :value)"), {"sequence": sequence, "value": BEYOND})
        session.commit()
        FollowUps().attach(session)
        yield session
    engine.dispose()


def test_every_id_and_lease_column_is_a_bigint(engine: Engine) -> None:
    query = (
        "SELECT table_name || '.' || column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = 'awa' AND (column_name ~ '(^|_)(id|lease)$') AND data_type NOT IN ('text', 'uuid')"
    )
    with engine.connect() as connection:
        found = {row[0]: row[1] for row in connection.execute(text(query))}
    assert set(found.values()) == {"bigint"}
    assert {"jobs_hot.id", "scheduled_jobs.root_id", "dlq_entries.original_run_lease"} <= found.keys()
    assert {"follow_up_obligations.id", "follow_up_obligations.job_id", "jobs.parent_id"} <= found.keys()


def test_every_sequence_counts_to_the_end_of_bigint_and_stops_there(engine: Engine) -> None:
    query = "SELECT sequencename, data_type::text, max_value, cycle FROM pg_sequences WHERE schemaname = 'awa'"
    with engine.connect() as connection:
        found = connection.execute(text(query)).all()
    assert {name for name, *_ in found} == {
        "jobs_id_seq",
        "run_lease_seq",
        "follow_up_obligations_id_seq",
        "audit_log_id_seq",
    }
    assert {tuple(rest) for _, *rest in found} == {("bigint", 2**63 - 1, False)}


def test_large_ids_go_through_enqueue_claim_and_complete(session: Session) -> None:
    job = enqueue(session, Welcome())
    session.flush()
    assert job.id == BEYOND + 1
    (claimed,) = claim(session, "default", limit=1)
    assert (claimed.id, claimed.run_lease) == (BEYOND + 1, BEYOND + 1)
    complete(session, claimed)
    session.commit()
    assert session.get_one(JobRecord, BEYOND + 1).state == "completed"


def test_large_ids_go_through_a_retry(session: Session) -> None:
    enqueue(session, Welcome())
    session.flush()
    (claimed,) = claim(session, "default", limit=1)
    retried = fail(session, claimed, "not yet")
    session.commit()
    assert isinstance(retried, ScheduledJob)
    assert (retried.id, retried.run_lease) == (BEYOND + 1, BEYOND + 1)


def test_large_ids_go_through_the_dead_letters(session: Session) -> None:
    session.add(Queue(queue="default", override_dead_letters=True))
    enqueue(session, Welcome())
    session.flush()
    (claimed,) = claim(session, "default", limit=1)
    dead = fail(session, claimed, "never", terminal=True)
    session.commit()
    assert isinstance(dead, DeadLetter)
    assert (dead.id, dead.original_run_lease) == (BEYOND + 1, BEYOND + 1)


def test_large_ids_go_through_cancel(session: Session) -> None:
    job = enqueue(session, Welcome())
    session.flush()
    cancel(session, job.id, reason="large")
    session.commit()
    assert session.get_one(Job, BEYOND + 1).state == "cancelled"


def test_large_ids_go_into_obligations(session: Session) -> None:
    obligation = Obligation(
        job_id=BEYOND + 1, kind="welcome", outcome=Outcome.COMPLETED, spec="mail", snapshot={"id": BEYOND + 1}
    )
    session.add(obligation)
    session.commit()
    assert session.scalars(select(Obligation)).one().id == BEYOND + 1
    assert session.scalars(select(Obligation.job_id)).one() == BEYOND + 1
