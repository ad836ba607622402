"""What enqueueing went wrong on once: each test is the case that showed it."""

from __future__ import annotations

import enum
import gc
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from awa_sqla import (
    ConfigurationError,
    EnqueueRequest,
    FollowUps,
    InvalidJob,
    Job,
    JobArgs,
    Unique,
    UniqueConflict,
    claim,
    complete,
    enqueue,
    enqueue_many,
    enqueue_unique,
)
from awa_sqla.maintenance import promote
from awa_sqla.schema import LATEST, migrate
from awa_sqla.session import bulk
from awa_sqla.session.trouble import passing
from tests.app import Charge, Order, Signup
from tests.session.test_unique import Report, holders
from tests.worlds import Database, World, in_one_world, in_two_worlds


# ---------------------------------------------------------------------------------------------- what iterates writes
def then(act: Callable[[], Any]) -> Iterator[JobArgs]:
    """Jobs of which the last chunk is wrong, with something done in between."""
    for n in range(4):
        yield Signup(email=str(n))
    act()
    yield Signup(email="\x00")


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MANY", 2)
    monkeypatch.setattr(bulk, "CHUNK", 3)


@pytest.mark.parametrize("road", ["unit of work", "statement", "commit"])
def test_the_iterable_of_a_bulk_cannot_write_what_its_savepoint_would_take_back(
    session: Session, database: Database, chunks: None, road: str
) -> None:
    def write() -> None:
        if road == "statement":
            session.execute(text("SELECT 1"))  # reading is allowed
            session.execute(Order.__table__.insert().values(note="theirs"))  # type: ignore[attr-defined]
        session.add(Order(note="theirs"))
        (session.commit if road == "commit" else session.flush)()

    session.add(Order(note="mine"))
    with pytest.raises(ConfigurationError, match="must not write through the same session"):
        enqueue_many(session, then(write))
    session.expunge_all()
    session.commit()
    assert [row.note for row in database.rows("SELECT note FROM app_order")] == ["mine"]
    assert database.jobs() == []


def test_the_iterable_of_a_bulk_cannot_finish_jobs(
    session: Session, follow_ups: FollowUps, database: Database, chunks: None
) -> None:
    follow_ups.on_completed(Signup, name="c")(lambda event: Charge(order_id=1))
    enqueue(session, Signup(), queue="work")
    session.commit()
    [job] = claim(session, "work", limit=1)
    session.commit()
    with pytest.raises(ConfigurationError, match="complete"):
        enqueue_many(session, then(lambda: complete(session, job)))
    session.commit()
    assert (database.job(job.id).state, len(database.children(job.id))) == ("running", 0)


# -------------------------------------------------------------------------------------------------- COPY's own ways
@pytest.mark.parametrize("world", ["psycopg", "psycopg2"], indirect=True)
def test_a_connection_in_another_encoding(world: World, database: Database) -> None:
    engine = create_engine(world.url, connect_args={"client_encoding": "latin1"})
    session = world.session(bind=engine)
    enqueue(session, Signup(email="ü"))
    enqueue_many(session, [Signup(email="ü")])
    session.commit()
    session.close()
    engine.dispose()
    assert [job.args["email"] for job in database.jobs()] == ["ü", "ü"]


def _cut(world: World, connection: Any) -> None:
    raw = connection.connection.driver_connection
    number = {
        "psycopg": lambda: raw.pgconn.socket,
        "psycopg2": raw.fileno if world.driver == "psycopg2" else None,
        "asyncpg": lambda: raw._transport.get_extra_info("socket").fileno(),
    }[world.driver]()
    with socket.socket(fileno=os.dup(number)) as other:
        other.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("how", ["terminate", "cut"])
@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")
def test_a_connection_lost_in_copy_is_a_disconnect(
    world: World, session: Session, database: Database, how: str
) -> None:
    pid = session.connection().exec_driver_sql("SELECT pg_backend_pid()").scalar()
    done: list[str] = []

    def kill(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "generate_series" in statement and not done:
            done.append(how)
            if how == "terminate":
                database.rows("SELECT pg_terminate_backend(%s, 5000)", pid)
            else:
                _cut(world, connection)

    event.listen(world.engine, "after_cursor_execute", kill)
    with pytest.raises(DBAPIError) as caught:
        enqueue_many(session, [Signup()])
    assert caught.value.connection_invalidated
    assert passing(caught.value)
    session.rollback()
    enqueue_many(session, [Signup()])
    session.commit()
    event.remove(world.engine, "after_cursor_execute", kill)
    assert len(database.jobs()) == 1


# ----------------------------------------------------------------------------------- enumerations that are text
class Names(str, enum.Enum):  # noqa: UP042 - the older kind, whose str() is its name
    MAIL = "mail"


class Levels(int, enum.Enum):
    HIGH = 1


class InClass(JobArgs, queue=Names.MAIL, priority=Levels.HIGH, tags=[Names.MAIL]):
    pass


def test_options_may_be_members_of_enumerations(session: Session, database: Database) -> None:
    options: dict[str, Any] = {"queue": Names.MAIL, "priority": Levels.HIGH, "tags": [Names.MAIL]}
    enqueue(session, Signup(), **options)
    enqueue(session, InClass())
    enqueue_many(session, [EnqueueRequest(Signup(), **options), InClass()])
    session.commit()
    assert [(job.queue, job.priority, job.tags) for job in database.jobs()] == [("mail", 1, ["mail"])] * 4
    assert len(claim(session, Names.MAIL, limit=9)) == 4


# ----------------------------------------------------------------------------------------- claims without their rows
@in_two_worlds
def test_a_vetoed_flush_leaves_no_twin_behind(session: Session, database: Database) -> None:
    def veto(*_: Any) -> None:
        raise RuntimeError("not now")

    event.listen(session, "before_flush", veto, once=True)
    with pytest.raises(RuntimeError):
        enqueue_unique(session, Report(day=1))
    again = enqueue_unique(session, Report(day=1))
    session.commit()
    assert (again.created, holders(database)) == (True, [again.id])


@in_two_worlds
def test_a_job_that_a_listener_took_out_is_nobodys_twin(session: Session, database: Database) -> None:
    job = enqueue(session, Report(day=1))
    event.listen(session, "before_flush", lambda session, *_: session.expunge(job), once=True)
    session.flush()
    again = enqueue(session, Report(day=1), on_conflict="skip")
    session.commit()
    assert (again.duplicate_of, holders(database)) == (None, [again.id])


@in_two_worlds
def test_a_row_with_a_key_of_its_own_may_be_added_again(session: Session, database: Database) -> None:
    raw = Job(kind="k", unique_key=b"k" * 16, unique_states=Unique().mask)
    session.add(raw)
    session.flush()
    session.rollback()
    database.execute(
        "INSERT INTO jobs_hot (kind, unique_key, unique_states) VALUES ('k', %s, %s)", b"k" * 16, Unique().mask
    )
    session.add(raw)
    with pytest.raises(UniqueConflict):
        session.commit()
    session.commit()


# --------------------------------------------------------------------------------------------- late-bound callables
@in_two_worlds
def test_a_callable_may_release_a_savepoint(session: Session, database: Database) -> None:
    calls: list[int] = []

    def make() -> Signup:
        calls.append(1)
        assert len(calls) == 1
        with session.begin_nested():
            session.add(Order(note="x"))
        return Signup()

    enqueue(session, make)
    session.commit()
    assert (calls, database.kinds()) == ([1], ["signup"])


def test_a_listener_of_the_flush_may_name_what_the_flush_makes(session: Session, database: Database) -> None:
    def bill(session: Session, *_: Any) -> None:
        for order in [row for row in session.new if isinstance(row, Order)]:
            enqueue(session, lambda order=order: Charge(order_id=order.id))

    event.listen(session, "before_flush", bill)
    order = Order(note="x")
    session.add(order)
    session.commit()
    with session.begin_nested():
        session.add(Order(note="y"))
    session.commit()
    assert [job.args["order_id"] for job in database.jobs()] == [order.id, order.id + 1]


@in_one_world
def test_a_callable_that_knows_its_session_lets_it_go(world: World) -> None:
    engine = create_engine(world.url, pool_size=2, max_overflow=0, pool_timeout=1)

    def one() -> weakref.ref[Session]:
        session = Session(engine)
        session.connection()
        enqueue(session, lambda: Signup(email=str(id(session))))
        return weakref.ref(session)

    for _ in range(5):
        left = one()
        gc.collect()
        assert left() is None
    engine.dispose()


@in_one_world
def test_a_callable_that_knows_its_savepoint_lets_it_go(session: Session) -> None:
    def one() -> weakref.ref[Any]:
        with session.begin_nested() as savepoint:
            enqueue(session, lambda: Signup(email=str(savepoint.is_active)))
        session.commit()
        return weakref.ref(savepoint)

    left = one()
    gc.collect()
    assert left() is None


# -------------------------------------------------------------------------------------------------- keys and values
SETS = {
    "root": "class R(RootModel[set[str]]): pass\nclass A(JobArgs):\n    s: R\na = A(s=R(set('abcdefgh')))",
    "exclude": "class A(JobArgs):\n    s: set[str]\n    h: int = Field(0, exclude=True)\na = A(s=set('abcdefgh'))",
    "deque": "class A(JobArgs):\n    s: deque[frozenset[str]]\na = A(s=[frozenset('abcdefgh')])",
}


@pytest.mark.case(48)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.beside] * (case != "root")) for case in SETS])
def test_sets_are_in_order_in_every_shape(case: str) -> None:
    code = (
        "from awa_sqla import *\nfrom awa_sqla.stored import dump\nfrom pydantic import *\n"
        "from collections import deque\n"
        f"{SETS[case]}\nprint(Unique().key('a', 'q', dump(a)).hex())"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(made) == 1


class Ratio(JobArgs, unique=Unique()):
    x: float


class Anything(JobArgs, unique=Unique()):
    x: Any = None


@in_one_world
@pytest.mark.case(48)
@pytest.mark.parametrize("pair", [(Ratio(x=0.0), Ratio(x=-0.0)), (Anything(x=1e16), Anything(x=10**16))])
def test_what_is_stored_as_the_same_has_the_same_key(session: Session, database: Database, pair: Any) -> None:
    for args in pair:
        enqueue(session, args, on_conflict="skip")
    session.commit()
    assert len(database.jobs()) == 1


class Moment(JobArgs, kind="corner_moment", version=2):
    when: Any = None

    @classmethod
    def upcast(cls, data: dict[str, Any], version: int) -> dict[str, Any]:
        return {"when": datetime.now(UTC)}


@in_one_world
def test_an_upcast_that_returns_no_json_is_a_typed_error(session: Session) -> None:
    job = Job(kind="corner_moment", args={}, args_version=1)
    session.add(job)
    session.commit()
    with pytest.raises((InvalidJob, ValidationError)):
        job.args_as(Moment)


# ------------------------------------------------------------------------------- keys from before there were claims
@in_one_world
@pytest.mark.parametrize(("table", "state"), [("scheduled_jobs", "scheduled"), ("jobs_hot", "available")])
def test_of_twins_that_an_upgrade_finds_one_stays_unique(
    world: World, session: Session, database: Database, table: str, state: str
) -> None:
    try:
        with world.engine.begin() as connection:
            migrate(connection, 1)
        for job_id in (900_001, 900_002):
            database.execute(
                f"INSERT INTO {table} (id, kind, state, run_at, unique_key, unique_states) "
                "VALUES (%s, 'k', %s, '2020-01-01', '\\x01', 151)",
                job_id,
                state,
            )
    finally:
        with world.engine.begin() as connection:
            migrate(connection, LATEST)
    other = enqueue(session, Signup(), run_at=datetime(2020, 1, 1, tzinfo=UTC))
    session.flush()
    other_id = other.id
    session.commit()
    assert holders(database) == [900_001]
    promote(session)
    session.commit()
    assert {job.id: job.state for job in database.jobs()} == dict.fromkeys((900_001, 900_002, other_id), "available")
    assert holders(database) == [900_001]
