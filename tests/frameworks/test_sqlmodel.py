"""SQLModel: its sessions read our classes, its models stand beside our tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import selectinload

from awa_sqla import FollowUps, Job, JobRecord, claim, complete, enqueue
from tests.app import Signup
from tests.worlds import Database

sqlmodel = pytest.importorskip("sqlmodel", reason="sqlmodel is not installed")


@pytest.fixture
def session(engine: Engine, follow_ups: FollowUps) -> Iterator[Any]:
    """A `sqlmodel.Session` as the tutorial makes it, with follow-ups on it."""
    with sqlmodel.Session(engine) as made:
        follow_ups.attach(made)
        yield made


def test_exec_reads_jobs_and_records(session: Any, database: Database) -> None:
    enqueue(session, Signup())
    session.commit()
    [job] = claim(session, "default", limit=1)
    complete(session, job)
    session.commit()
    assert session.exec(sqlmodel.select(Job.kind).order_by(Job.id)).all() == ["signup", "welcome"]
    record = session.exec(sqlmodel.select(JobRecord).where(JobRecord.id == job.id)).one()
    assert (record.state, record.stored_in) == ("completed", "hot")


def test_the_metadata_of_the_application_does_not_hold_our_tables(session: Any) -> None:
    assert not [name for name in sqlmodel.SQLModel.metadata.tables if name.startswith("awa.")]


def test_a_model_leads_to_its_job_through_a_viewonly_relationship(session: Any, database: Database) -> None:
    from tests.frameworks.sqlmodel_models import SQLModelLetter

    table = SQLModelLetter.__table__
    table.create(session.get_bind())
    try:
        job = enqueue(session, Signup())
        session.flush()
        session.add(SQLModelLetter(job_id=job.id))
        session.commit()
        statement = sqlmodel.select(SQLModelLetter).options(selectinload(SQLModelLetter.job))
        assert session.exec(statement).one().job.state == "available"
        [claimed] = claim(session, "default", limit=1)
        complete(session, claimed)
        session.commit()
        assert session.exec(statement).one().job.state == "completed"
    finally:
        session.close()
        table.drop(session.get_bind())
