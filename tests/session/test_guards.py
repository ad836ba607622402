"""Belts: job rows change through verbs, and every other way is refused before it writes."""

from typing import Any

import pytest
from sqlalchemy import delete, event, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import Session, aliased
from sqlalchemy.orm.attributes import flag_modified

from awa_sqla import (
    DeadLetter,
    Job,
    JobRecord,
    ScheduledJob,
    Unique,
    UnmanagedWriteError,
    complete,
    enqueue,
    fail,
    set_progress,
)
from awa_sqla.models import UniqueClaim
from awa_sqla.models.job import JOB_TABLES
from tests.app import Order, Signup
from tests.session.steps import HOUR, available, running
from tests.worlds import Database, World, in_one_world

pytestmark = in_one_world

TABLES = {cls.__tablename__: cls for cls in JOB_TABLES}


@pytest.fixture
def stored(session: Session, database: Database) -> dict[str, Any]:
    """A stored row of each table, in `session`."""
    database.keep_dead_letters("dead")
    letter = fail(session, running(session, queue="dead", max_attempts=1), "gone")
    rows = {
        "jobs_hot": running(session),
        "scheduled_jobs": enqueue(session, Signup(), delay=HOUR),
        "dlq_entries": letter,
    }
    session.commit()
    return rows


@pytest.fixture
def before(stored: dict[str, Any], database: Database) -> list[Any]:
    return database.jobs()


every_table = pytest.mark.parametrize("table", TABLES)


# --------------------------------------------------------------------------------------------------- attributes
@every_table
def test_no_column_of_a_stored_row_can_be_assigned(stored: dict[str, Any], table: str) -> None:
    row = stored[table]
    for column in type(row).__mapper__.column_attrs:
        with pytest.raises(UnmanagedWriteError) as caught:
            setattr(row, column.key, getattr(row, column.key))
        assert caught.value.table == table


@pytest.mark.parametrize(
    ("column", "verb"),
    [("state", "cancel()"), ("progress", "set_progress()"), ("result", "complete("), ("run_lease", "claim()")],
)
def test_the_refusal_names_the_verb(stored: dict[str, Any], column: str, verb: str) -> None:
    with pytest.raises(UnmanagedWriteError) as caught:
        setattr(stored["jobs_hot"], column, None)
    assert verb in caught.value.verb


@every_table
def test_a_detached_row_is_read_only_too(session: Session, stored: dict[str, Any], table: str) -> None:
    session.expunge_all()
    with pytest.raises(UnmanagedWriteError):
        stored[table].priority = 1


def test_a_pending_row_may_still_be_changed(session: Session, database: Database) -> None:
    job = enqueue(session, Signup())
    job.priority = 1
    session.commit()
    assert database.job(job.id).priority == 1


def test_a_change_inside_a_json_column_is_never_written_back(session: Session, database: Database) -> None:
    job = running(session)
    job.args["email"] = "changed in place"
    set_progress(session, job, 1)
    job.args["email"] = "changed in place"
    session.commit()
    assert database.job(job.id).args == {"email": "ada@example.org"}


# ------------------------------------------------------------------------------------------------- unit of work
@every_table
def test_session_delete_is_refused(
    session: Session, stored: dict[str, Any], before: list[Any], database: Database, table: str
) -> None:
    session.delete(stored[table])
    for attempt in (session.flush, session.commit):
        with pytest.raises(UnmanagedWriteError) as caught:
            attempt()
        assert caught.value.table == table
    session.rollback()
    assert database.jobs() == before


@every_table
def test_session_merge_of_a_changed_copy_is_refused(
    session: Session, other: Session, stored: dict[str, Any], before: list[Any], database: Database, table: str
) -> None:
    row = stored[table]
    copy = type(row)(id=row.id, kind="signup", queue="elsewhere")
    with pytest.raises(UnmanagedWriteError):
        other.merge(copy)
    other.commit()
    assert database.jobs() == before


@every_table
@pytest.mark.parametrize("known", [True, False])
def test_flag_modified_is_refused(
    world: World, stored: dict[str, Any], before: list[Any], database: Database, table: str, known: bool
) -> None:
    session = world.session() if known else world.bare_session()
    row = session.get_one(TABLES[table], stored[table].id)
    flag_modified(row, "args")
    with pytest.raises(UnmanagedWriteError) as caught:
        session.flush()
    assert caught.value.table == table
    session.rollback()
    assert database.jobs() == before


@pytest.mark.parametrize("known", [True, False])
def test_a_delete_by_a_later_listener_is_refused(
    world: World, stored: dict[str, Any], before: list[Any], database: Database, known: bool
) -> None:
    session = world.session() if known else world.bare_session()
    job = session.get_one(Job, stored["jobs_hot"].id)
    event.listen(session, "before_flush", lambda s, *_: s.delete(job))
    session.add(Order(note="x"))
    with pytest.raises(UnmanagedWriteError):
        session.flush()
    session.rollback()
    assert database.jobs() == before


def test_the_apps_own_rows_are_no_business_of_ours(session: Session, database: Database) -> None:
    order = Order(note="x")
    session.add(order)
    session.flush()
    order.note = "y"
    session.flush()
    session.execute(update(Order).values(note="z"))
    session.delete(order)
    session.commit()
    assert database.rows("SELECT * FROM app_order") == []


def test_the_verbs_pass_their_own_belts(session: Session, database: Database) -> None:
    job = running(session)
    set_progress(session, job, 5)
    session.flush()
    complete(session, job)
    session.commit()
    assert database.job(job.id).state == "completed"


# --------------------------------------------------------------------------------------------------- statements
def core(cls: Any) -> dict[str, Any]:
    """DML on a table, in every form a session takes."""
    table, alias = cls.__table__, aliased(cls)
    new = {"kind": "signup", "queue": "default"}
    return {
        "update": update(cls).where(cls.id > 0).values(queue="x"),
        "update of the table": update(table).values(queue="x"),
        "update of an alias": update(table.alias()).values(queue="x"),
        "update of an aliased class": update(alias).values(queue="x"),
        "delete": delete(cls).where(cls.id > 0),
        "delete of the table": delete(table),
        "delete of an alias": delete(table.alias()),
        "insert": insert(cls).values(**new),
        "insert of the table": insert(table).values(**new),
        "insert from select": insert(cls).from_select(["kind"], select(JobRecord.kind)),
        "upsert": upsert(cls).values(**new).on_conflict_do_nothing(),
        "returning": update(cls).values(queue="x").returning(cls.id),
    }


@pytest.mark.case(6)
@every_table
@pytest.mark.parametrize("form", core(Job))
def test_dml_through_a_session_is_refused(
    session: Session, before: list[Any], database: Database, table: str, form: str
) -> None:
    with pytest.raises(UnmanagedWriteError) as caught:
        session.execute(core(TABLES[table])[form])
    assert caught.value.table == table
    session.commit()
    assert database.jobs() == before


@every_table
def test_legacy_query_dml_is_refused(session: Session, before: list[Any], database: Database, table: str) -> None:
    cls = TABLES[table]
    for attempt in (lambda q: q.update({"queue": "x"}), lambda q: q.delete()):
        with pytest.raises(UnmanagedWriteError):
            attempt(session.query(cls))
    session.commit()
    assert database.jobs() == before


@every_table
def test_bulk_update_by_primary_key_is_refused(
    session: Session, stored: dict[str, Any], before: list[Any], database: Database, table: str
) -> None:
    with pytest.raises(UnmanagedWriteError):
        session.execute(update(TABLES[table]), [{"id": stored[table].id, "queue": "x"}])
    session.commit()
    assert database.jobs() == before


def test_reading_is_free(session: Session, stored: dict[str, Any]) -> None:
    assert len(session.scalars(select(JobRecord)).all()) == 3
    for cls in (Job, ScheduledJob, DeadLetter):
        assert session.query(cls).count() == 1
    assert session.scalars(select(Job).with_for_update(skip_locked=True)).one() is stored["jobs_hot"]


def test_a_session_that_only_enqueued_refuses_too(world: World, database: Database) -> None:
    session = world.bare_session()
    available(session)
    with pytest.raises(UnmanagedWriteError):
        session.execute(update(Job).values(queue="x"))


# ----------------------------------------------------------------------------------------------------------- view
WRITES = {
    "assign": lambda session, record: (setattr(record, "queue", "x"), session.flush()),
    "delete": lambda session, record: (session.delete(record), session.flush()),
    "update": lambda session, record: session.execute(update(JobRecord).values(queue="x")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_the_view_is_read_only(session: Session, stored: dict[str, Any], database: Database, write: Any) -> None:
    before = database.jobs()
    record = session.get_one(JobRecord, stored["jobs_hot"].id)
    with pytest.raises(UnmanagedWriteError, match="jobs: "):
        write(session, record)
    session.rollback()
    assert database.jobs() == before


def test_claims_on_unique_keys_are_nobodys_to_write(session: Session) -> None:
    enqueue(session, Signup(), unique=Unique())
    session.commit()
    claim = session.scalars(select(UniqueClaim)).one()
    with pytest.raises(UnmanagedWriteError, match="job_unique_claims"):
        claim.job_id = 7
    with pytest.raises(UnmanagedWriteError, match="job_unique_claims"):
        session.execute(delete(UniqueClaim))
    session.add(UniqueClaim(unique_key=b"x", job_id=1))
    with pytest.raises(UnmanagedWriteError, match="job_unique_claims"):
        session.flush()
    session.rollback()
    session.delete(session.scalars(select(UniqueClaim)).one())
    with pytest.raises(UnmanagedWriteError, match="job_unique_claims"):
        session.flush()
    session.rollback()
