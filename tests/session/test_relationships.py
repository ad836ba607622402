"""An application's rows and their jobs: a viewonly relationship to `JobRecord`, wherever the job's row lives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import BigInteger, delete, insert, select, update
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    backref,
    foreign,
    joinedload,
    mapped_column,
    relationship,
    selectinload,
)

from awa_sqla import JobRecord, UnmanagedWriteError, cancel, claim, complete, enqueue, fail, snooze
from awa_sqla import asyncio as awa_async
from tests.app import Signup
from tests.session.steps import HOUR, due_again, rolled_back
from tests.worlds import Database, World, in_async_worlds, in_one_world


class ShopBase(DeclarativeBase):
    """The application's own base, with no connection to ours."""


class Parcel(ShopBase):
    """A row of the application that remembers which job sends it."""

    __tablename__ = "parcel"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int | None] = mapped_column(BigInteger, index=True)

    job: Mapped[JobRecord | None] = relationship(
        JobRecord,
        primaryjoin=lambda: foreign(Parcel.job_id) == JobRecord.id,
        viewonly=True,
        backref=backref("parcels", viewonly=True),
    )


def parcels_of(record: JobRecord) -> list[Parcel]:
    """The other direction: an attribute that the application's mapping has given to `JobRecord`."""
    return list(record.parcels)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def parcels(world: World, database: Database) -> Iterator[None]:
    """The application's table, for the length of a test."""
    database.execute("CREATE TABLE public.parcel (id serial PRIMARY KEY, job_id bigint)")
    yield
    world.call(world._forget)  # an open transaction would keep the table
    database.execute("DROP TABLE public.parcel")


@pytest.fixture
def parcel(world: World, session: Session) -> Parcel:
    """A committed parcel with its job, still available."""

    def make() -> Parcel:
        job = enqueue(session, Signup())
        session.flush()
        made = Parcel(job_id=job.id)
        session.add(made)
        session.commit()
        return made

    return world.call(make)


# ------------------------------------------------------------------------------------------------------ from a row
def test_a_row_leads_to_its_job(session: Session, parcel: Parcel) -> None:
    assert parcel.job is not None
    assert (parcel.job.kind, parcel.job.state, parcel.job.stored_in) == ("signup", "available", "hot")
    assert parcel.job.args_as(Signup) == Signup()


def test_a_row_without_a_job_or_whose_job_was_pruned_leads_to_none(session: Session, database: Database) -> None:
    session.add_all([Parcel(), Parcel(job_id=2**40)])
    session.commit()
    assert [parcel.job for parcel in session.scalars(select(Parcel))] == [None, None]


@pytest.mark.parametrize("load", [selectinload, joinedload])
def test_eager_loading_brings_the_jobs_along(world: World, session: Session, load: Any) -> None:
    jobs = [enqueue(session, Signup()), enqueue(session, Signup(), delay=HOUR)]
    session.flush()
    session.add_all(Parcel(job_id=job.id) for job in jobs)
    session.commit()
    session.expunge_all()
    with world.counting() as sent:
        found = session.scalars(select(Parcel).options(load(Parcel.job)).order_by(Parcel.id)).all()
        assert [parcel.job.stored_in for parcel in found if parcel.job] == ["hot", "scheduled"]
    assert len(sent) == (2 if load is selectinload else 1)


def test_rows_are_found_by_the_state_of_their_jobs(session: Session, parcel: Parcel) -> None:
    record = aliased(JobRecord)
    waiting = select(Parcel).join(Parcel.job.of_type(record)).where(record.state == "available")
    assert session.scalars(waiting).all() == [parcel]
    assert session.scalars(select(Parcel).where(Parcel.job.has(JobRecord.state == "completed"))).all() == []


def test_a_row_is_followed_over_every_move_of_its_job(session: Session, parcel: Parcel, database: Database) -> None:
    assert parcel.job is not None
    seen = []

    def look() -> None:
        session.commit()
        assert parcel.job is not None
        seen.append((parcel.job.state, parcel.job.stored_in))

    look()
    [job] = claim(session, "default", limit=1)
    look()
    snooze(session, job, HOUR)
    look()
    due_again(database, session, parcel.job.id, look=False)
    database.keep_dead_letters("default")
    [job] = claim(session, "default", limit=1)
    fail(session, job, "no", terminal=True)
    look()
    assert seen == [("available", "hot"), ("running", "hot"), ("scheduled", "scheduled"), ("failed", "dead")]


@pytest.mark.case(17)
def test_a_loaded_record_is_fresh_after_the_flush_of_a_transition(session: Session, parcel: Parcel) -> None:
    [job] = claim(session, "default", limit=1)
    assert parcel.job is not None
    record = parcel.job
    assert record.state == "running"
    complete(session, job, result=3)
    session.flush()
    assert (record.state, record.result) == ("completed", 3)
    assert parcel.job is record


def test_a_loaded_record_is_fresh_after_the_flush_of_a_move(session: Session, parcel: Parcel) -> None:
    [job] = claim(session, "default", limit=1)
    assert parcel.job is not None
    record = parcel.job
    assert record.stored_in == "hot"
    snooze(session, job, HOUR)
    session.flush()
    assert (record.state, record.stored_in) == ("scheduled", "scheduled")


def test_a_loaded_record_is_fresh_after_a_cancel_by_id(session: Session, parcel: Parcel) -> None:
    assert parcel.job is not None
    record = parcel.job
    cancel(session, record.id, reason="x")
    session.flush()
    assert record.state == "cancelled"


def test_a_record_is_as_it_was_after_a_savepoint_is_rolled_back(session: Session, parcel: Parcel) -> None:
    [job] = claim(session, "default", limit=1)
    assert parcel.job is not None
    record = parcel.job
    with rolled_back(session):
        complete(session, job)
        session.flush()
        assert record.state == "completed"
    assert record.state == "running"


def test_a_record_of_another_session_is_what_it_was_when_it_was_read(
    session: Session, other: Session, parcel: Parcel
) -> None:
    record = other.get_one(JobRecord, parcel.job_id)
    assert record.state == "available"
    cancel(session, record.id, reason="x")
    session.commit()
    assert record.state == "available"
    other.refresh(record)
    assert record.state == "cancelled"


# ----------------------------------------------------------------------------------------------------- from a job
def test_a_record_leads_back_to_the_rows(session: Session, parcel: Parcel) -> None:
    record = session.get_one(JobRecord, parcel.job_id)
    assert parcels_of(record) == [parcel]
    assert session.scalars(select(Parcel).where(Parcel.job_id == record.id)).all() == [parcel]


@pytest.mark.parametrize("load", [selectinload, joinedload])
def test_the_rows_of_many_records_are_loaded_at_once(world: World, session: Session, parcel: Parcel, load: Any) -> None:
    session.add(Parcel(job_id=parcel.job_id))
    session.commit()
    session.expunge_all()
    with world.counting() as sent:
        [record] = session.scalars(select(JobRecord).options(load(JobRecord.parcels))).unique()  # type: ignore[attr-defined]
        assert len(parcels_of(record)) == 2
    assert len(sent) == (2 if load is selectinload else 1)


def test_assigning_to_the_relationship_writes_nothing(session: Session, parcel: Parcel) -> None:
    stranger = Parcel(job=session.get_one(JobRecord, parcel.job_id))
    session.add(stranger)
    session.commit()
    assert (stranger.job_id, stranger.job) == (None, None)


# ---------------------------------------------------------------------------------------------------------- async
@in_async_worlds
async def test_an_async_session_loads_the_jobs_of_its_rows(world: Any) -> None:
    async with world.maker(expire_on_commit=False)() as session:
        job = enqueue(session, Signup())
        await session.flush()
        session.add(Parcel(job_id=job.id))
        await session.commit()
        session.expunge_all()
        [one] = await session.scalars(select(Parcel).options(selectinload(Parcel.job)))
        assert one.job.state == "available"
        session.expunge_all()
        [two] = await session.scalars(select(Parcel).options(joinedload(Parcel.job)))
        assert two.job.state == "available"


@in_async_worlds
async def test_an_async_session_reads_a_changed_record_when_it_is_refreshed(world: Any) -> None:
    async with world.maker(expire_on_commit=False)() as session:
        job = enqueue(session, Signup())
        await session.flush()
        session.add(Parcel(job_id=job.id))
        await session.commit()
        [parcel] = await session.scalars(select(Parcel).options(selectinload(Parcel.job)))
        await awa_async.cancel(session, job, reason="x")
        await session.commit()
        await session.refresh(parcel.job)
        assert parcel.job.state == "cancelled"
        record = await session.get(JobRecord, job.id)
        assert record is parcel.job


# ------------------------------------------------------------------------------------------------------- read-only
WRITES = {
    "add": lambda session, record: (session.add(JobRecord(kind="signup")), session.flush()),
    "assign": lambda session, record: (setattr(record, "queue", "x"), session.flush()),
    "delete": lambda session, record: (session.delete(record), session.flush()),
    "merge": lambda session, record: (session.merge(JobRecord(id=record.id, queue="x")), session.flush()),
    "insert": lambda session, record: session.execute(insert(JobRecord).values(kind="signup")),
    "update": lambda session, record: session.execute(update(JobRecord).values(queue="x")),
    "delete statement": lambda session, record: session.execute(delete(JobRecord)),
}


@in_one_world
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_record_cannot_be_written(session: Session, parcel: Parcel, database: Database, write: Any) -> None:
    before = database.jobs()
    record = session.get_one(JobRecord, parcel.job_id)
    with pytest.raises(UnmanagedWriteError, match="jobs: "):
        write(session, record)
    session.rollback()
    assert database.jobs() == before
