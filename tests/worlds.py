"""One behaviour suite, many worlds: the same test over every driver, synchronous and asynchronous.

A test that asks for `world` (or for `session`, which comes from it) runs once in each of them.  It is written as
plain synchronous code; in an asynchronous world its whole body runs inside `AsyncSession.run_sync`, so that every
statement goes through asyncio and the driver:

    def test_a_completed_job_brings_its_follow_up(session, follow_ups, database):
        follow_ups.on_completed(Signup, name="welcome")(lambda event: Welcome(email=event.args.email))
        complete(session, running(session, Signup()))
        session.commit()
        assert [job.kind for job in database.jobs()] == ["signup", "welcome"]

`session` has an (empty) `FollowUps` of its own attached, which is `follow_ups`.  `world.session(...)` makes more
sessions, each on a connection of its own; `world.meanwhile(act)` does something in another thread; `database`
looks at what is committed, through no ORM at all.  Registries are emptied after the test: the process remembers
every one that was ever attached.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import FollowUps, Outcome
from awa_sqla.models.wakeups import channel
from awa_sqla.session import catalogue
from awa_sqla.session.marks import FOLLOW_UPS

PATIENCE = 10.0


# ---------------------------------------------------------------------------------------------------- worlds
class World(ABC):
    """One way of talking to the database, and everything a test makes in it."""

    engine: Engine
    """The synchronous face of this world's engine: what events are put on."""

    def __init__(self, name: str, driver: str, url: URL) -> None:
        self.name = name
        self.url = url.set(drivername=f"postgresql+{driver}")
        self.driver = driver
        self.follow_ups = self.registry()
        self._sessions: list[Session] = []

    # What differs from world to world.
    @abstractmethod
    def call(self, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run synchronous code, from wherever we are, so that its I/O goes this world's way."""

    @abstractmethod
    def maker(self, follow_ups: FollowUps | None = None, **options: Any) -> Any:
        """A sessionmaker or an async_sessionmaker with `follow_ups` attached (None: nothing is)."""

    @abstractmethod
    def engine_with(self, **execution_options: Any) -> Any:
        """The engine with other execution options, for `maker(bind=...)`."""

    @abstractmethod
    def close(self) -> None:
        """End everything that was made here."""

    # What is the same in all of them.
    def registry(self) -> FollowUps:
        """A `FollowUps` that is forgotten with this world."""
        registry = FollowUps()
        self._registries = [*getattr(self, "_registries", ()), registry]
        return registry

    def from_maker(self, maker: Any) -> Session:
        """A session of any maker, by its synchronous face; closed with this world."""
        made = maker()
        session: Session = made.sync_session if isinstance(made, AsyncSession) else made
        self._sessions.append(session)
        return session

    def session(self, **options: Any) -> Session:
        """A session with a connection of its own; `options` are those of the sessionmaker."""
        return self.from_maker(self.maker(self.follow_ups, **options))

    def bare_session(self, **options: Any) -> Session:
        """A session to which nobody has attached anything."""
        return self.from_maker(self.maker(None, **options))

    @contextmanager
    def counting(self) -> Iterator[list[str]]:
        """Every statement that is sent meanwhile, by any session of this world."""
        sent: list[str] = []

        def note(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
            sent.append(statement)

        event.listen(self.engine, "before_cursor_execute", note)
        try:
            yield sent
        finally:
            event.remove(self.engine, "before_cursor_execute", note)

    @contextmanager
    def noting(self, *names: str) -> Iterator[list[str]]:
        """The names of the engine's events as they happen, of those that are asked for."""
        seen: list[str] = []
        listeners = {name: lambda *_, name=name: seen.append(name) for name in names}
        for name, listener in listeners.items():
            event.listen(self.engine, name, listener)
        try:
            yield seen
        finally:
            for name, listener in listeners.items():
                event.remove(self.engine, name, listener)

    def warm(self, session: Session) -> None:
        """Let the session's engine have read the catalogue, as it has in a process that has been up a while."""
        catalogue.names(session, "", Outcome.COMPLETED)

    def meanwhile(self, act: Callable[[Session], Any], **options: Any) -> Meanwhile:
        """Do something in a transaction of another thread, which commits when `act` returns."""
        return Meanwhile(self, act, options)

    def twin(self) -> World:
        """A world of the same kind for another thread."""
        return type(self)(self.name, self.driver, self.url)

    def _forget(self) -> None:
        for session in self._sessions:
            session.close()
        for registry in self._registries:
            registry.__init__()  # type: ignore[misc]


class SyncWorld(World):
    def __init__(self, name: str, driver: str, url: URL, engine: Engine | None = None) -> None:
        super().__init__(name, driver, url)
        self.engine = engine if engine is not None else create_engine(self.url)

    def call(self, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return act(*args, **kwargs)

    def maker(self, follow_ups: FollowUps | None = None, **options: Any) -> sessionmaker[Session]:
        made = sessionmaker(**({"bind": self.engine} | options))
        if follow_ups is not None:
            follow_ups.attach(made)
        return made

    def engine_with(self, **execution_options: Any) -> Engine:
        return self.engine.execution_options(**execution_options)

    def close(self) -> None:
        self._forget()
        self.engine.dispose()


class AsyncWorld(World):
    def __init__(self, name: str, driver: str, url: URL, engine: AsyncEngine | None = None) -> None:
        super().__init__(name, driver, url)
        self.async_engine = engine if engine is not None else create_async_engine(self.url)
        self.engine = self.async_engine.sync_engine
        self.runner = asyncio.Runner()
        self._inside = False

    def call(self, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return act(*args, **kwargs)
        self._inside = True
        try:
            return self.runner.run(AsyncSession().run_sync(lambda _: act(*args, **kwargs)))
        finally:
            self._inside = False

    def maker(self, follow_ups: FollowUps | None = None, **options: Any) -> async_sessionmaker[AsyncSession]:
        made = async_sessionmaker(**({"bind": self.async_engine} | options))
        if follow_ups is not None:
            follow_ups.attach(made)
        return made

    def engine_with(self, **execution_options: Any) -> AsyncEngine:
        return self.async_engine.execution_options(**execution_options)

    def close(self) -> None:
        self.call(self._forget)
        self.runner.run(self.async_engine.dispose())
        self.runner.close()


WORLDS: dict[str, tuple[type[World], str]] = {
    "psycopg": (SyncWorld, "psycopg"),
    "psycopg2": (SyncWorld, "psycopg2"),
    "async-psycopg": (AsyncWorld, "psycopg"),
    "async-asyncpg": (AsyncWorld, "asyncpg"),
}

#: For what no driver has a part in: refusals of arguments, registration, guards.
in_one_world = pytest.mark.parametrize("world", ["psycopg"], indirect=True)

#: For long lists of pairs, where the driver has a small part: one world of each kind.
in_two_worlds = pytest.mark.parametrize("world", ["psycopg", "async-asyncpg"], indirect=True)

#: SQLAlchemy has no two-phase commit on asynchronous drivers.
in_sync_worlds = pytest.mark.parametrize(
    "world", [name for name, (cls, _) in WORLDS.items() if cls is SyncWorld], indirect=True
)

#: For coroutine tests.
in_async_worlds = pytest.mark.parametrize(
    "world", [name for name, (cls, _) in WORLDS.items() if cls is AsyncWorld], indirect=True
)


class Meanwhile:
    """What another transaction does while the test goes on: a thread with a world of its own."""

    def __init__(self, world: World, act: Callable[[Session], Any], options: dict[str, Any]) -> None:
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(world, act, options), daemon=True)
        self._thread.start()

    def _run(self, world: World, act: Callable[[Session], Any], options: dict[str, Any]) -> None:
        twin = world.twin()

        def whole() -> Any:
            session = twin.from_maker(twin.maker(world.follow_ups, **options))
            with session.begin():
                return act(session)

        try:
            self._outcome = twin.call(whole)
        except BaseException as exc:
            self._error = exc
        finally:
            twin.close()

    def result(self) -> Any:
        """What it returned, once it has committed; what it raised, once it has rolled back."""
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            raise TimeoutError("the other transaction does not end")
        if self._error is not None:
            raise self._error
        return self._outcome


# -------------------------------------------------------------------------------------------------- database
class Database:
    """What is committed, seen by plain SQL on a connection of its own."""

    def __init__(self, url: URL) -> None:
        self.url = url
        self.conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._connection = psycopg.connect(self.conninfo, autocommit=True, row_factory=namedtuple_row)
        self._connection.execute("SET search_path TO awa, public")

    def rows(self, query: str, *parameters: Any) -> list[Any]:
        """The rows of a query."""
        return self._connection.execute(query, parameters or None).fetchall()

    def value(self, query: str, *parameters: Any) -> Any:
        """The first column of a query's one row."""
        [(found,)] = self.rows(query, *parameters)
        return found

    def execute(self, statement: str, *parameters: Any) -> None:
        """Do something in a transaction of its own."""
        self._connection.execute(statement, parameters or None)

    def job(self, job_id: int) -> Any:
        """The one row of a job in the three tables, or None; two rows are a failure."""
        found = self.rows("SELECT * FROM jobs WHERE id = %s", job_id)
        assert len(found) <= 1, f"job {job_id} is in {[row.stored_in for row in found]}"
        return found[0] if found else None

    def jobs(self) -> list[Any]:
        """All jobs, in the order of their ids."""
        return self.rows("SELECT * FROM jobs ORDER BY id")

    def kinds(self) -> list[str]:
        """The kinds of all jobs, in the order of their ids."""
        return [job.kind for job in self.jobs()]

    def children(self, job_id: int) -> list[Any]:
        """The follow-ups of a job."""
        return self.rows("SELECT * FROM jobs WHERE parent_id = %s ORDER BY id", job_id)

    def obligations(self) -> list[Any]:
        """The follow-ups still owed."""
        return self.rows("SELECT * FROM follow_up_obligations ORDER BY id")

    def keep_dead_letters(self, queue: str) -> None:
        """What an operator's `set_queue(dead_letters=True)` does."""
        self.execute("INSERT INTO queue_meta (queue, override_dead_letters) VALUES (%s, true)", queue)

    def move_on(self, job_id: int) -> None:
        """A rescue and the next claim, as another worker's: the same job under another lease."""
        self.execute(
            "UPDATE jobs_hot SET run_lease = nextval('run_lease_seq'), attempt = attempt + 1 WHERE id = %s", job_id
        )

    def restart_sequences(self, ids: int, leases: int) -> None:
        """The next job's id and the next lease follow these."""
        self.rows("SELECT setval('jobs_id_seq', %s)", ids)
        self.rows("SELECT setval('run_lease_seq', %s)", leases)

    def wait_until_one_is_blocked(self, others: int = 1) -> None:
        """Return when another transaction waits for a lock, or so many do."""
        deadline = time.monotonic() + PATIENCE
        while others > self.value(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock' AND backend_type = 'client backend'"
        ):
            if time.monotonic() > deadline:
                raise TimeoutError("nobody waits for a lock")
            time.sleep(0.005)

    @contextmanager
    def listening(self) -> Iterator[Listener]:
        """Hear the wake-ups of the schema."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            connection.execute(f"LISTEN {channel('awa')}")
            yield Listener(connection)

    def another(self) -> Database:
        """The same on a second connection, for a transaction that is held open."""
        return Database(self.url)

    def close(self) -> None:
        self._connection.close()


class Listener:
    """A connection that hears wake-ups."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def heard(self) -> list[str]:
        """The payloads of all transactions that have committed by now; never waits for one to come."""
        # A round trip: the server delivers what is due before it answers.
        self._connection.execute("SELECT 1")
        return [note.payload for note in self._connection.notifies(timeout=0)]


# -------------------------------------------------------------------------------------------------- fixtures
@pytest.fixture(params=list(WORLDS))
def world(request: pytest.FixtureRequest, db_url: URL) -> Iterator[World]:
    """Each of the worlds in turn."""
    cls, driver = WORLDS[request.param]
    catalogue.forget_cache()
    # A process that has specs refuses sessions without; those of other tests, in this process, are not ours.
    ever, FOLLOW_UPS.ever = FOLLOW_UPS.ever, WeakSet()
    made = cls(request.param, driver, db_url, _engine(cls, driver, db_url))
    yield made
    made.close()
    FOLLOW_UPS.ever = ever


@cache
def _engine(cls: type[World], driver: str, url: URL) -> Any:
    """One engine for all tests of a world: its connections end with each test, its compiled statements stay."""
    create = create_async_engine if cls is AsyncWorld else create_engine
    return create(url.set(drivername=f"postgresql+{driver}"))


@pytest.fixture
def session(world: World) -> Session:
    """A session of the world with `follow_ups` attached and SQLAlchemy's own defaults."""
    return world.session()


@pytest.fixture
def other(world: World) -> Session:
    """A second session, on a connection of its own."""
    return world.session()


@pytest.fixture
def follow_ups(world: World) -> FollowUps:
    """The registry of the world's sessions, empty."""
    return world.follow_ups


@pytest.fixture
def database(db_url: URL) -> Iterator[Database]:
    """The committed state, by plain SQL."""
    made = Database(db_url)
    yield made
    made.close()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run the test in the world it asked for; a coroutine test in the event loop of that world."""
    world = pyfuncitem.funcargs.get("world")
    if isinstance(world, World):
        test = pyfuncitem.obj
        if asyncio.iscoroutinefunction(test):
            pyfuncitem.obj = lambda **arguments: world.runner.run(test(**arguments))  # type: ignore[attr-defined]
        else:
            pyfuncitem.obj = lambda **arguments: world.call(test, **arguments)
    return (yield)
