"""Sessions with several binds: our tables go where the rows they belong to go, and are refused anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Delete, Engine, Insert, Text, Update, create_engine, inspect
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from awa_sqla import ConfigurationError, Job, JobRecord, ScheduledJob, cancel, claim, complete, enqueue, fail, snooze
from awa_sqla.models import AwaBase
from tests.app import Base, Order, Signup
from tests.session.steps import MINUTE, available, running
from tests.worlds import Database


class ElsewhereBase(DeclarativeBase):
    """Rows of the application that live in another database."""


class Visit(ElsewhereBase):
    __tablename__ = "app_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(Text)


@pytest.fixture
def elsewhere(engine: Engine) -> Iterator[Engine]:
    """What stands for another database: a second engine, whose transactions are not those of the first."""
    made = create_engine(engine.url)
    yield made
    made.dispose()


def refused(session: Session) -> None:
    """Neither a verb nor a flush of a job goes through."""
    with pytest.raises(ConfigurationError, match="two transactions"):
        cancel(session, 1, reason="x")
    session.add(Order(note="x"))
    enqueue(session, Signup())
    with pytest.raises(ConfigurationError, match="two transactions"):
        session.commit()
    session.rollback()


# --------------------------------------------------------------------------------------------------------- binds
def test_tables_in_another_database_beside_the_jobs_are_the_applications_business(
    engine: Engine, elsewhere: Engine, database: Database
) -> None:
    session = sessionmaker(binds={Base: engine, AwaBase: engine, ElsewhereBase: elsewhere})()
    session.add_all([Order(note="here"), Visit(note="there")])
    complete(session, running(session))
    session.commit()
    session.close()
    assert [job.state for job in database.jobs()] == ["completed"]


def test_a_default_bind_with_exceptions_for_other_tables_will_do(
    engine: Engine, elsewhere: Engine, database: Database
) -> None:
    session = sessionmaker(engine, binds={ElsewhereBase: elsewhere})()
    session.add(Visit(note="there"))
    complete(session, running(session))
    session.commit()
    session.close()
    assert [job.state for job in database.jobs()] == ["completed"]


@pytest.mark.parametrize("key", [AwaBase, Job, Job.__table__], ids=["base", "class", "table"])
def test_jobs_bound_to_another_engine_than_all_other_rows_are_refused(
    engine: Engine, elsewhere: Engine, database: Database, key: Any
) -> None:
    with sessionmaker(binds={Base: engine, AwaBase: elsewhere, key: elsewhere})() as session:
        refused(session)
    assert database.jobs() == []
    assert database.rows("SELECT * FROM app_order") == []


def test_the_same_engine_with_other_options_is_another_transaction_and_refused(
    engine: Engine, database: Database
) -> None:
    option = engine.execution_options(schema_translate_map={"awa": "awa"})
    with sessionmaker(binds={Base: engine, AwaBase: option})() as session:
        refused(session)
    assert database.jobs() == []


def test_a_session_for_jobs_alone_will_do(engine: Engine, database: Database) -> None:
    with sessionmaker(binds={AwaBase: engine})() as session:
        job = available(session)
        assert session.get_one(JobRecord, job.id).state == "available"
    assert database.kinds() == ["signup"]


def test_binds_to_one_connection_will_do(engine: Engine, database: Database) -> None:
    with engine.connect() as connection, Session(binds={Base: connection, AwaBase: connection}) as session:
        session.add(Order(note="paid"))
        complete(session, running(session))
        session.commit()
    assert [job.state for job in database.jobs()] == ["completed"]


# ------------------------------------------------------------------------------------------------- an own get_bind
class Routed(Session):
    """Reads go to a replica and writes to the primary, as SQLAlchemy's documentation shows it."""

    primary: Engine
    replica: Engine

    def get_bind(self, mapper: Any = None, *, clause: Any = None, **rest: Any) -> Any:
        if mapper is not None and inspect(mapper).class_ is Visit:
            return self.replica
        if self._flushing or isinstance(clause, Insert | Update | Delete) or _locks(clause):
            return self.primary
        return self.replica


def _locks(clause: Any) -> bool:
    """SELECT ... FOR UPDATE is for the primary too, which the documentation's example leaves out."""
    return getattr(clause, "_for_update_arg", None) is not None


@pytest.fixture
def routed(engine: Engine) -> Iterator[sessionmaker[Routed]]:
    replica = create_engine(engine.url, connect_args={"options": "-c default_transaction_read_only=on"})

    class Own(Routed):
        primary = engine

    Own.replica = replica
    yield sessionmaker(class_=Own)
    replica.dispose()


@pytest.mark.parametrize("twophase", [False, True])
def test_every_verb_writes_to_the_primary(
    routed: sessionmaker[Routed], engine: Engine, database: Database, twophase: bool
) -> None:
    with routed(twophase=twophase) as session:
        session.add(Order(note="paid"))
        for queue in ("a", "b", "c", "d"):
            enqueue(session, Signup(), queue=queue)
        session.commit()
        for queue, verb in {
            "a": complete,
            "b": lambda session, job: fail(session, job, "no"),
            "c": lambda session, job: snooze(session, job, MINUTE),
        }.items():
            [job] = claim(session, queue, limit=1)
            verb(session, job)
        cancel(session, database.jobs()[3].id, reason="x")
        session.commit()
    assert [job.state for job in database.jobs()] == ["completed", "retryable", "scheduled", "cancelled"]


def test_an_enqueue_asks_nothing_of_the_replica(routed: sessionmaker[Routed], database: Database) -> None:
    with routed() as session:
        enqueue(session, Signup())
        session.flush()
        assert session.replica.pool.checkedout() == 0  # type: ignore[attr-defined]
        [job] = claim(session, "default", limit=1)
        assert session.replica.pool.checkedout() == 0  # type: ignore[attr-defined]
        assert job.state == "running"


def test_autocommit_of_the_primary_is_seen_behind_the_routing(
    routed: sessionmaker[Routed], engine: Engine, database: Database
) -> None:
    class Own(routed.class_):  # type: ignore[misc, name-defined]
        primary = engine.execution_options(isolation_level="AUTOCOMMIT")

    with sessionmaker(class_=Own)() as session:
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            claim(session, "default", limit=1)
        enqueue(session, Signup(), delay=MINUTE)
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            session.commit()
    assert database.jobs() == []


def test_an_own_get_bind_that_parts_jobs_from_other_rows_is_refused(
    engine: Engine, elsewhere: Engine, database: Database
) -> None:
    class Parted(Session):
        def get_bind(self, mapper: Any = None, **rest: Any) -> Any:
            return elsewhere if mapper is not None and inspect(mapper).class_ in (Job, ScheduledJob) else engine

    with Parted() as session:
        refused(session)
    assert database.jobs() == []
