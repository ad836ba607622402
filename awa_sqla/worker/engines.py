"""The engines of a worker, made from what it was given: one for async work, one for threads.

A worker is given a URL or an engine of either kind and needs both kinds. Its books, its heart and its listener have
connections of their own, so that handlers who hold all of theirs can neither starve them nor wait for them. A given
engine carries handlers of its kind. What the worker makes it disposes of; what it was given it leaves alone.

Connections made here notice a peer that has gone without a word within half a minute, leave a server that has become
read-only, and prepare no statements where a pooler is in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any

from psycopg.conninfo import make_conninfo
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from awa_sqla.errors import ConfigurationError, SchemaVersionError
from awa_sqla.models.wakeups import channel
from awa_sqla.schema import LATEST, installed_version
from awa_sqla.session.target import refuse_autocommit, schema_in
from awa_sqla.sqlstates import READ_ONLY, driver_sqlstate
from awa_sqla.worker.forks import guard
from awa_sqla.worker.pools import OWN, UPKEEP, warn_of_few

log = logging.getLogger("awa_sqla.worker")

Given = str | URL | Engine | AsyncEngine

#: For libpq: at most 10 s to connect; a peer that has gone is noticed after 15 + 3 * 5 s of silence, or when what was
#: sent is not acknowledged for 30 s (in milliseconds).
PATIENCE = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
#: Seconds after which the server ends a transaction of the books or of a lane in which nothing happens.
FROZEN = 60
#: For asyncpg, which cannot say that: seconds to connect, and for any one statement of the books.
ASYNCPG_PATIENCE = {"timeout": 10, "command_timeout": 60}
#: Seconds that the goodbyes to the server may take.
CLOSING = 5.0

#: Of our own transactions, whatever the database's default: they re-check their rows under locks, and do not conflict.
ISOLATION: dict[str, Any] = {"isolation_level": "READ COMMITTED"}

_DRIVERS = ("psycopg", "psycopg2", "asyncpg")

#: Options of asyncpg and of its dialect that libpq refuses.
_ASYNCPG_ONLY = frozenset(
    {
        "async_fallback",
        "command_timeout",
        "direct_tls",
        "max_cacheable_statement_size",
        "max_cached_statement_lifetime",
        "prepared_statement_cache_size",
        "prepared_statement_name_func",
        "server_settings",
        "statement_cache_size",
        "timeout",
    }
)


class Engines:
    """`book` keeps the books, `heart` beats, `upkeep` maintains, `work` and `async_work` carry handlers."""

    def __init__(self, given: Given, concurrency: int) -> None:
        self._own_sync: list[Engine] = []
        self._own_async: list[AsyncEngine] = []
        #: Whether something answers in the server's place, as poolers do. Known after `check()`.
        self.pooled = False
        self.url, self._options = source(given)
        if self.url.get_backend_name() != "postgresql":
            raise ConfigurationError(f"awa_sqla needs PostgreSQL, not {self.url.get_backend_name()}")
        # What the books do is tried again, so a connection need not be proved alive before each use.
        self.book = self._make_async(ASYNCPG_PATIENCE, **ISOLATION, pool_size=4, max_overflow=4)
        #: For single statements, without BEGIN and COMMIT.
        self.alone = self._make_async(ASYNCPG_PATIENCE, pool_size=1, max_overflow=1, isolation_level="AUTOCOMMIT")
        self.heart = self._make_sync(**ISOLATION, pool_size=1, max_overflow=1)
        # A connection for each lane of maintenance that is at work, and for its looks: none waits for another.
        self.upkeep = self._make_async(ASYNCPG_PATIENCE, **ISOLATION, pool_size=2, max_overflow=UPKEEP)
        self.looks = self._make_async(ASYNCPG_PATIENCE, pool_size=1, max_overflow=UPKEEP, isolation_level="AUTOCOMMIT")
        for engine in (self.book, self.upkeep):
            event.listen(engine.sync_engine, "connect", self._bound)
        self._given, self._concurrency = given, concurrency

    def work(self) -> Engine:
        """For `def` handlers with a session: the given engine, else one with a connection for each slot."""
        if isinstance(self._given, Engine):
            return self._given
        return self._make_sync(pool_size=self._concurrency, max_overflow=-1, pool_pre_ping=True)

    def async_work(self) -> AsyncEngine:
        """For `async def` handlers with a session."""
        if isinstance(self._given, AsyncEngine):
            return self._given
        return self._make_async({}, pool_size=self._concurrency, max_overflow=-1, pool_pre_ping=True)

    @property
    def schema(self) -> str:
        """The schema our tables have there."""
        return schema_in(self.heart)

    @property
    def channel(self) -> str:
        """The wake-up channel of that schema."""
        return channel(self.schema)

    async def check(self) -> None:
        """Refuse a database whose tables are older than this code, and engines in AUTOCOMMIT mode.

        Raises `ConfigurationError`, `SchemaVersionError`, and what the driver raises when it cannot connect.
        """
        await self._check_given()
        await asyncio.to_thread(self._look_for_pooler)
        async with self.book.connect() as connection:
            found = await connection.run_sync(lambda c: installed_version(c, self.schema))
        if found < LATEST:
            raise SchemaVersionError(found, LATEST, self.schema)

    async def check_room(self, handlers: int, *, maintenance: bool) -> None:
        """Warn when the server cannot give the connections that `handlers` at a time may want."""
        if not self.pooled:
            async with self.book.connect() as connection:
                await warn_of_few(connection, handlers, OWN + (UPKEEP if maintenance else 0))

    async def _check_given(self) -> None:
        """Refuse a given engine in AUTOCOMMIT mode: transactional handlers would have nothing to commit."""
        given = self._given
        if isinstance(given, AsyncEngine):
            async with given.connect() as connection:
                await connection.run_sync(refuse_autocommit)
        elif isinstance(given, Engine):

            def refuse() -> None:
                with given.connect() as connection:
                    refuse_autocommit(connection)

            await asyncio.to_thread(refuse)

    def _look_for_pooler(self) -> None:
        """A pooler makes up the process id that it tells in the server's name."""
        with self._heart_connection() as connection:
            told = _told_pid(connection)
            self.pooled = told is not None and told != connection.scalar(text("SELECT pg_backend_pid()"))
        if not self.pooled:
            return
        log.info("a pooler is in between: no statements are prepared")
        if "asyncpg" in (self.url.get_driver_name(), self.book.dialect.driver):
            log.warning(
                "asyncpg prepares every statement, which a pooler in transaction mode does not bear: give the worker a "
                "postgresql+psycopg:// URL"
            )
        self.heart.dispose()

    def _heart_connection(self) -> Connection:
        """A first connection. Raises `ConfigurationError` when a given engine has connected and its URL does not."""
        try:
            return self.heart.connect()
        except DBAPIError as exc:
            if not isinstance(self._given, Engine | AsyncEngine):
                raise
            raise ConfigurationError(
                f"heartbeats and books use connections of their own, and they cannot be had: {exc.orig}. Give the "
                "worker a database URL that says everything, not an engine with connect_args or a creator"
            ) from exc

    def conninfo(self, other: str | None = None) -> str:
        """The URL, or another one, as libpq takes it, for the listener."""
        url = _for_libpq(self.url if other is None else source(other)[0]).set(drivername="postgresql+psycopg")
        _, arguments = url.get_dialect()().create_connect_args(url)  # also of several hosts
        parameters: dict[str, Any] = {**_unsaid(PATIENCE, url), **arguments}
        return make_conninfo(**parameters)

    async def dispose(self) -> None:
        """Close the engines that were made here, within seconds also where the server does not answer."""
        # Asyncpg waits for an answer to each goodbye, a minute: so all at once, each call takes the next connection.
        each = [own.dispose() for own in self._own_async for _ in range(_idle(own) + 1)]
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                await asyncio.gather(*each)
        for engine in self._own_sync:
            engine.dispose()

    def _make_sync(self, **options: Any) -> Engine:
        driver = self.url.get_driver_name()
        name = self.url.drivername if driver in ("psycopg", "psycopg2") else "postgresql+psycopg"
        url = _for_libpq(self.url).set(drivername=name)
        engine = create_engine(url, connect_args=_unsaid(PATIENCE, url), **options)
        self._own_sync.append(engine)
        self._watch(engine)
        return engine.execution_options(**self._options)

    def _make_async(self, asyncpg: dict[str, int], **options: Any) -> AsyncEngine:
        on_asyncpg = self.url.get_driver_name() == "asyncpg"
        url = self.url if on_asyncpg else self.url.set(drivername="postgresql+psycopg")
        engine = create_async_engine(url, connect_args=_unsaid(asyncpg if on_asyncpg else PATIENCE, url), **options)
        self._own_async.append(engine)
        self._watch(engine.sync_engine)
        return engine.execution_options(**self._options)

    def _watch(self, engine: Engine) -> None:
        guard(engine)
        event.listen(engine, "connect", self._connected)
        event.listen(engine, "handle_error", _leave_read_only)

    def _connected(self, connection: Any, _record: object) -> None:
        driver = getattr(connection, "driver_connection", connection)
        if self.pooled and hasattr(driver, "prepare_threshold"):
            driver.prepare_threshold = None

    def _bound(self, connection: Any, _record: object) -> None:
        """A process that is frozen in the middle of a transaction must not hold its rows for ever."""
        if self.pooled:
            return  # the server's connection is others' too
        cursor = connection.cursor()
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{FROZEN}s'")
        cursor.close()
        connection.commit()


def _idle(engine: AsyncEngine) -> int:
    pool: Any = engine.pool
    idle: int = pool.checkedin()
    return idle


def _unsaid(arguments: dict[str, int], url: URL) -> dict[str, int]:
    """Those arguments of a connection that neither the URL nor libpq's environment gives."""
    said = {*url.query, *(["connect_timeout"] if "PGCONNECT_TIMEOUT" in os.environ else [])}
    return {name: value for name, value in arguments.items() if name not in said}


def _leave_read_only(context: ExceptionContext) -> None:
    """A server that has become read-only, as after a failover, will be for this connection's whole life."""
    if driver_sqlstate(context.original_exception) == READ_ONLY:
        context.is_disconnect = context.invalidate_pool_on_disconnect = True


def _told_pid(connection: Connection) -> int | None:
    """The process id that was told when the connection was made."""
    driver: Any = connection.connection.driver_connection
    if hasattr(driver, "get_backend_pid"):  # psycopg2
        return int(driver.get_backend_pid())
    info = getattr(driver, "info", None)
    return None if info is None else int(info.backend_pid)


def _for_libpq(url: URL) -> URL:
    """The URL without what only asyncpg understands."""
    if url.get_driver_name() != "asyncpg":
        return url
    query = {key: value for key, value in url.query.items() if key not in _ASYNCPG_ONLY}
    if "ssl" in query:
        query["sslmode"] = query.pop("ssl")
    return url.set(query=query)


def sync_url(given: str) -> URL:
    """A URL for a sync engine, whichever driver it names. Raises `ConfigurationError`."""
    url = source(given)[0]
    return _for_libpq(url).set(drivername="postgresql+psycopg") if url.get_driver_name() == "asyncpg" else url


def source(given: object) -> tuple[URL, dict[str, Any]]:
    if isinstance(given, AsyncEngine):
        given = given.sync_engine
    if isinstance(given, Engine):
        translate = given.get_execution_options().get("schema_translate_map")
        return given.url, {} if translate is None else {"schema_translate_map": translate}
    if isinstance(given, str):
        # What libpq and most hosting services write.
        given = given.replace("postgres://", "postgresql://", 1) if given.startswith("postgres://") else given
        try:
            url = make_url(given)
        except (ArgumentError, ValueError) as exc:
            raise ConfigurationError(
                f"{given.rpartition('@')[2]!r} is no database URL; write postgresql://user:password@host/database"
            ) from exc
        return _with_driver(url), {}
    if isinstance(given, URL):
        return _with_driver(given), {}
    raise ConfigurationError(f"a worker takes a database URL, an Engine or an AsyncEngine, not {given!r}")


def _with_driver(url: URL) -> URL:
    if url.get_backend_name() != "postgresql":
        raise ConfigurationError(f"awa_sqla needs PostgreSQL, not {url.get_backend_name()}")
    if url.drivername not in ("postgresql", *(f"postgresql+{driver}" for driver in _DRIVERS)):
        raise ConfigurationError(f"{url.drivername} is not supported; the drivers are {', '.join(_DRIVERS)}")
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url
