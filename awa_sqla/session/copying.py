"""COPY into one of our tables on a session's own connection, whatever the driver.

SQLAlchemy has no COPY: this goes to the driver's connection, inside the transaction that SQLAlchemy has begun on it.
"""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import Connection, FromClause
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError
from sqlalchemy.util import await_only

from awa_sqla.errors import ConfigurationError
from awa_sqla.session.target import schema_in

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
        quoted = ('"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"' for item in value)
        return ("{" + ",".join(quoted) + "}").translate(_ESCAPES)
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False).translate(_ESCAPES)
    return str(value).translate(_ESCAPES)


def copy_rows(connection: Connection, table: FromClause, columns: Sequence[str], lines: Sequence[str]) -> None:
    """Send rows, each a line of COPY's text format, to a table of ours.

    Raises SQLAlchemy's `DBAPIError` for what the driver raises, and `ConfigurationError` for a driver without COPY.
    """
    dialect = connection.dialect
    driver, quote = dialect.driver, dialect.identifier_preparer.quote_identifier
    name: Any = table.name
    schema = schema_in(connection)
    statement = f"COPY {quote(schema)}.{quote(name)} ({', '.join(map(quote, columns))}) FROM STDIN"
    raw: Any = connection.connection.driver_connection
    try:
        if driver == "psycopg" and dialect.is_async:
            await_only(_psycopg_async(raw, statement, lines))
        elif driver == "psycopg":
            with raw.cursor() as cursor, cursor.copy(statement) as copy:
                for chunk in _chunks(lines):
                    copy.write(chunk)
        elif driver == "asyncpg":
            where = {"schema_name": schema, "columns": columns, "format": "text"}
            await_only(raw.copy_to_table(name, source=_later(_chunks(lines)), **where))
        elif driver == "psycopg2":
            with raw.cursor() as cursor:
                cursor.copy_expert(statement, io.StringIO("".join(lines)))
        else:
            raise ConfigurationError(f"enqueue_many() needs psycopg, asyncpg or psycopg2, not {driver}")
    except Exception as exc:
        state = getattr(exc, "sqlstate", None) or getattr(exc, "pgcode", None)
        if state is None:
            raise
        raise _ERRORS.get(state[:2], DBAPIError)(statement, None, exc) from exc


async def _psycopg_async(raw: Any, statement: str, lines: Sequence[str]) -> None:
    async with raw.cursor() as cursor, cursor.copy(statement) as copy:
        for chunk in _chunks(lines):
            await copy.write(chunk)


async def _later(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def _chunks(lines: Iterable[str]) -> Iterator[bytes]:
    rest = iter(lines)
    while chunk := "".join(islice(rest, CHUNK)):
        yield chunk.encode()
