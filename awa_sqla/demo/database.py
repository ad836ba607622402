"""Where the demo happens: a private PostgreSQL, or the one that was given, with both schemas made by Alembic."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, func, select, text
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.schema import CreateSchema, DropSchema

from awa_sqla.demo.jobs import CONCURRENCY
from awa_sqla.demo.models import APP_SCHEMA, JOBS_SCHEMA, engine_on
from awa_sqla.errors import ConfigurationError
from awa_sqla.localpg import LocalPostgres, PostgresUnavailable
from awa_sqla.worker.engines import source

Say = Callable[[str], None]

#: Connections that a worker may hold: its handlers, its books (10), heartbeat (2) and listener.
WORKER_CONNECTIONS = sum(CONCURRENCY.values()) + 13
OUR_CONNECTIONS = 6


class NoDatabaseError(Exception):
    """There is no database to work in; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Database:
    """A database with both schemas, and an engine on it."""

    url: URL
    engine: Engine


@contextlib.contextmanager
def open_database(given: str | None, *, workers: int, keep: bool, say: Say) -> Generator[Database]:
    """A migrated database; at the end our schemas are dropped again unless `keep`, or the server is thrown away.

    Raises `NoDatabaseError`.
    """
    if given is None:
        with _private_server(workers, say) as url, _schemas(url, keep=True) as database:
            yield database
        return
    try:
        url, _ = source(given)
    except (ArgumentError, ConfigurationError) as exc:
        raise NoDatabaseError(f"the database URL cannot be used: {exc}") from exc
    if url.get_backend_name() != "postgresql":
        raise NoDatabaseError(f"the demo needs PostgreSQL, not {url.get_backend_name()}")
    url = url.set(drivername="postgresql+psycopg")
    with _alone(url, workers), _schemas(url, keep=keep) as database:
        yield database
    if keep:
        say(f"kept for you to look at: the schemas {JOBS_SCHEMA} (jobs) and {APP_SCHEMA}")


@contextlib.contextmanager
def _private_server(workers: int, say: Say) -> Generator[URL]:
    # Settings that the user has for other servers, such as PGSSLMODE, would keep us and the workers from this one.
    theirs = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PG")}
    connections = 20 + OUR_CONNECTIONS + workers * WORKER_CONNECTIONS
    try:
        with LocalPostgres(settings={"max_connections": str(connections)}) as server:
            found = server.binaries
            if found is not None:
                major, minor = found.version
                say(f"started a private PostgreSQL {major}.{minor} (from {found.source})")
            yield source(server.sqlalchemy_url())[0]
    except PostgresUnavailable as exc:
        raise NoDatabaseError(exc.message("AWA_DATABASE_URL")) from exc
    finally:
        os.environ.update(theirs)


@contextlib.contextmanager
def _alone(url: URL, workers: int) -> Generator[None]:
    """Keep a second demo out of a database that was given: each drops what it finds of the other."""
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    try:
        connection = engine.connect()
    except (DBAPIError, UnicodeError) as exc:
        raise NoDatabaseError(f"the database cannot be reached: {getattr(exc, 'orig', exc)}") from exc
    with connection:
        key = func.hashtextextended("awa-sqla demo", 0)
        if not connection.scalar(select(func.pg_try_advisory_lock(key))):
            raise NoDatabaseError("another `awa-sqla demo` is at work in this database: wait for its end")
        _check_room(connection, workers)
        yield


def _check_room(connection: Connection, workers: int) -> None:
    free = connection.scalar(
        text(
            "SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
            " - count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        )
    )
    most = (int(free or 0) - OUR_CONNECTIONS) // WORKER_CONNECTIONS
    if most < workers:
        raise NoDatabaseError(
            f"this server has {free} connections left, and {workers} workers may need "
            f"{OUR_CONNECTIONS + workers * WORKER_CONNECTIONS}: "
            + (f"use --workers {most}" if most > 0 else "raise its max_connections")
        )


@contextlib.contextmanager
def _schemas(url: URL, *, keep: bool) -> Generator[Database]:
    database = Database(url, engine_on(url, pool_size=2, pool_pre_ping=True))
    try:
        try:
            drop(database.engine)
            migrate(database.engine)
        except DBAPIError as exc:
            raise NoDatabaseError(f"the demo's schemas cannot be made here: {exc.orig}") from exc
        yield database
        if not keep:
            drop(database.engine)
    except BaseException:
        if not keep:
            with contextlib.suppress(DBAPIError):  # what brought us here may be that the database is gone
                drop(database.engine)
        raise
    finally:
        database.engine.dispose()


def drop(engine: Engine) -> None:
    """Drop both schemas with all that is in them."""
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '30s'"))
        for schema in (JOBS_SCHEMA, APP_SCHEMA):
            connection.execute(DropSchema(schema, cascade=True, if_exists=True))


def migrate(engine: Engine) -> None:
    """Run the application's migrations, ours among them, as `alembic upgrade head` would."""
    config = Config()
    config.set_main_option("script_location", "awa_sqla.demo:migrations")
    with engine.begin() as connection:
        connection.execute(CreateSchema(APP_SCHEMA))  # the home of Alembic's own table
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
