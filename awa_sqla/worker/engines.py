"""The engines of a worker, made from what it was given: one for async work, one for threads.

A worker is given a URL or an engine of either kind and needs both kinds: bookkeeping and `async def` handlers run
on an AsyncEngine, heartbeats and `def` handlers on an Engine. What it makes it disposes of; what it was given it
leaves alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from awa_sqla.errors import ConfigurationError, SchemaVersionError
from awa_sqla.models.wakeups import channel
from awa_sqla.schema import LATEST, installed_version
from awa_sqla.session.target import refuse_autocommit, schema_in
from awa_sqla.worker.forks import guard

Given = str | URL | Engine | AsyncEngine


_DRIVERS = ("psycopg", "psycopg2", "asyncpg")

#: Options of asyncpg and of its dialect that libpq refuses.
_ASYNCPG_ONLY = frozenset(
    {
        "async_fallback",
        "command_timeout",
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
    """`book` keeps the books, `heart` beats, `work` and `async_work` carry transactional handlers."""

    def __init__(self, given: Given, concurrency: int) -> None:
        self._own_sync: list[Engine] = []
        self._own_async: list[AsyncEngine] = []
        self.url, self._options = source(given)
        if self.url.get_backend_name() != "postgresql":
            raise ConfigurationError(f"awa_sqla needs PostgreSQL, not {self.url.get_backend_name()}")
        self.book = given if isinstance(given, AsyncEngine) else self._make_async(pool_size=5, max_overflow=5)
        self.heart = self._make_sync(pool_size=1, max_overflow=1)
        self._given, self._concurrency = given, concurrency

    def work(self) -> Engine:
        """For `def` handlers with a session: the given engine, else one with a connection for each slot."""
        if isinstance(self._given, Engine):
            return self._given
        return self._make_sync(pool_size=self._concurrency, max_overflow=0)

    def async_work(self) -> AsyncEngine:
        """For `async def` handlers with a session."""
        if isinstance(self._given, AsyncEngine):
            return self._given
        return self._make_async(pool_size=self._concurrency, max_overflow=0)

    @property
    def schema(self) -> str:
        """The schema our tables have there."""
        return schema_in(self.heart)

    @property
    def channel(self) -> str:
        """The wake-up channel of that schema."""
        return channel(self.schema)

    async def check(self) -> None:
        """Refuse a database whose tables are older than this code, and engines in AUTOCOMMIT mode."""
        async with self.book.connect() as connection:
            await connection.run_sync(refuse_autocommit)
            found = await connection.run_sync(lambda c: installed_version(c, self.schema))
        await asyncio.to_thread(self._check_given)
        if found < LATEST:
            raise SchemaVersionError(found, LATEST, self.schema)

    def _check_given(self) -> None:
        """Refuse a given Engine in AUTOCOMMIT mode: transactional handlers would have nothing to commit."""
        if isinstance(self._given, Engine):
            with self._given.connect() as connection:
                refuse_autocommit(connection)

    def libpq_url(self, other: str | None = None) -> str:
        """The URL, or another one, as libpq reads it, for the listener."""
        url = _for_libpq(self.url if other is None else source(other)[0])
        return url.set(drivername="postgresql").render_as_string(hide_password=False)

    async def dispose(self) -> None:
        """Close the engines that were made here."""
        for own in self._own_async:
            await own.dispose()
        for engine in self._own_sync:
            engine.dispose()

    def _make_sync(self, **pool: Any) -> Engine:
        driver = self.url.get_driver_name()
        name = self.url.drivername if driver in ("psycopg", "psycopg2") else "postgresql+psycopg"
        engine = create_engine(_for_libpq(self.url).set(drivername=name), **pool, pool_pre_ping=True)
        guard(engine)
        self._own_sync.append(engine)
        return engine.execution_options(**self._options)

    def _make_async(self, **pool: Any) -> AsyncEngine:
        name = self.url.drivername if self.url.get_driver_name() == "asyncpg" else "postgresql+psycopg"
        engine = create_async_engine(self.url.set(drivername=name), **pool, pool_pre_ping=True)
        guard(engine.sync_engine)
        self._own_async.append(engine)
        return engine.execution_options(**self._options)


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
                f"{given.partition('@')[2] or given!r} is no database URL; write postgresql://user:password@host/database"
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
