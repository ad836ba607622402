"""COPY into one of our tables on a session's own connection, whatever the driver.

SQLAlchemy has no COPY: this goes to the driver's connection, inside the transaction that SQLAlchemy has begun on it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, cast

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.util import await_only

from awa_sqla.errors import ConfigurationError
from awa_sqla.session.hints import explain
from awa_sqla.session.target import schema_in
from awa_sqla.sqlstates import driver_sqlstate

#: Rows that are joined for one write.
CHUNK = 2000

_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})
_ERRORS: dict[str, type[DBAPIError]] = {
    "22": DataError,
    "23": IntegrityError,
    "40": OperationalError,
    "57": OperationalError,
}


def field(value: Any) -> str:
    """A value in COPY's text format: None, numbers, text, lists of text, JSON objects."""
    if value is None:
        return r"\N"
    if isinstance(value, list):
        texts = cast("list[str]", value)
        quoted = ('"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"' for item in texts)
        return ("{" + ",".join(quoted) + "}").translate(_ESCAPES)
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False).translate(_ESCAPES)
    return str(value).translate(_ESCAPES)


@contextmanager
def savepoint(connection: Connection) -> Generator[None, None, None]:
    """All of it or nothing, and the transaction stays usable; the session does not see it."""
    connection.exec_driver_sql("SAVEPOINT awa_sqla_bulk")
    try:
        yield
    except BaseException:
        with suppress(SQLAlchemyError):  # of a connection that is gone, the first error tells more
            connection.exec_driver_sql("ROLLBACK TO SAVEPOINT awa_sqla_bulk")
            connection.exec_driver_sql("RELEASE SAVEPOINT awa_sqla_bulk")
        raise
    connection.exec_driver_sql("RELEASE SAVEPOINT awa_sqla_bulk")


def copy_rows(connection: Connection, table: str, columns: Sequence[str], lines: Iterable[str]) -> None:
    """Send rows, each a line of COPY's text format, to a table of ours.

    What `lines` raises comes out, and the transaction is lost unless there is a savepoint. Raises SQLAlchemy's
    `DBAPIError` for what the driver raises, and `ConfigurationError` for a driver without COPY.
    """
    dialect = connection.dialect
    driver, quote = dialect.driver, dialect.identifier_preparer.quote_identifier
    schema = schema_in(connection)
    statement = (
        f"COPY {quote(schema)}.{quote(table)} ({', '.join(map(quote, columns))}) FROM STDIN WITH (ENCODING 'UTF8')"
    )
    raw: Any = connection.connection.driver_connection
    source = _Source(lines)
    try:
        if driver == "psycopg" and dialect.is_async:
            await_only(_psycopg_async(raw, statement, source))
        elif driver == "psycopg":
            with raw.cursor() as cursor, cursor.copy(statement) as copy:
                for chunk in source:
                    copy.write(chunk)
        elif driver == "asyncpg":
            where = {"schema_name": schema, "columns": columns, "format": "text", "encoding": "UTF8"}
            await_only(raw.copy_to_table(table, source=_later(source), **where))
        elif driver == "psycopg2":
            with raw.cursor() as cursor:
                cursor.copy_expert(statement, source)
        else:
            raise ConfigurationError(f"enqueue_many() needs psycopg, asyncpg or psycopg2, not {driver}")
    except Exception as exc:
        if source.error is not None:  # psycopg2 makes text of it
            raise source.error from None
        if isinstance(exc, ConfigurationError):
            raise
        raise _as_sqlalchemys(connection, statement, exc) from exc


def _as_sqlalchemys(connection: Connection, statement: str, error: Exception) -> DBAPIError:
    """What SQLAlchemy would have raised, and made of its connection."""
    state = driver_sqlstate(error)
    raw: Any = connection.connection.driver_connection
    closed = raw.is_closed() if hasattr(raw, "is_closed") else bool(raw.closed)
    cls = _ERRORS.get(state[:2], DBAPIError) if state else OperationalError
    if closed:
        connection.invalidate(error)
    found = cls(statement, None, error, connection_invalidated=closed)
    explain(found, state, statement)
    return found


class _Source:
    """The rows in chunks: to iterate over, or to read like a file. `error` is what made them end too early."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines, self._rest = iter(lines), b""
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self._next():
            yield chunk

    def read(self, size: int) -> bytes:
        """For psycopg2."""
        self._rest = self._rest or self._next()
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    def _next(self) -> bytes:
        try:
            return "".join(islice(self._lines, CHUNK)).encode()
        except BaseException as exc:
            self.error = exc
            raise


async def _psycopg_async(raw: Any, statement: str, source: Iterable[bytes]) -> None:
    async with raw.cursor() as cursor, cursor.copy(statement) as copy:
        for chunk in source:
            await copy.write(chunk)


async def _later(source: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in source:
        yield chunk
