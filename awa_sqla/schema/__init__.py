"""The schema as versioned steps: installed, upgraded and taken away again by plain DDL.

Apps with Alembic call `op.awa_migrate(from_=0, to=6)` in a revision of their own (see
`awa_sqla.alembic`); without Alembic, `create_all(connection)` or `awa-sqla migrate` bring a database to
`LATEST`. Both run the same steps. Nothing here commits: the steps are part of the caller's transaction,
and an advisory lock of that transaction keeps two of them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sqlalchemy import DDL, Connection, func, select, text
from sqlalchemy import column as sql_column
from sqlalchemy import table as sql_table

from awa_sqla.errors import ConfigurationError, SchemaVersionError
from awa_sqla.models.base import SCHEMA
from awa_sqla.models.wakeups import channel
from awa_sqla.schema.objects import quoted
from awa_sqla.schema.steps import STEPS

__all__ = ["LATEST", "create_all", "installed_version", "migrate", "statements"]

#: The version this package needs.
LATEST = len(STEPS)


def statements(from_: int, to: int, *, schema: str = SCHEMA) -> Iterator[str]:
    """The SQL that leads from one version to another, upwards or downwards. Does no I/O.

    Raises `ConfigurationError` for a version this package does not know or a schema name that is no
    plain identifier.
    """
    checked_schema(schema)
    for version in (from_, to):
        if version not in range(LATEST + 1):
            raise ConfigurationError(f"no schema version {version!r}: this package knows 0 to {LATEST}")
    ledger = f"{quoted(schema)}.schema_version"
    for version in range(from_ + 1, to + 1):
        yield from _filled(STEPS[version - 1].up, schema)
        yield f"INSERT INTO {ledger} (version) VALUES ({version})"  # noqa: S608 - a checked name, a number
    for version in range(from_, to, -1):
        yield f"DELETE FROM {ledger} WHERE version = {version}"  # noqa: S608
        yield from _filled(STEPS[version - 1].down, schema)


def installed_version(connection: Connection, schema: str = SCHEMA) -> int:
    """The version installed in `schema`; 0 when there is none. Reads only."""
    checked_schema(schema)
    known = connection.scalar(select(func.to_regclass(f"{quoted(schema)}.schema_version")))
    if known is None:
        return 0
    ledger = sql_table("schema_version", sql_column("version"), schema=schema)  # no Table: it is not translated
    found = connection.scalar(select(func.max(ledger.c.version)))
    return int(found or 0)


def create_all(connection: Connection, schema: str = SCHEMA) -> None:
    """Bring `schema` to `LATEST` inside the connection's transaction; nothing to do when it is there.

    Async: `await async_connection.run_sync(create_all)`. Raises `SchemaVersionError` when the database
    is newer than this package, `ConfigurationError` in AUTOCOMMIT mode.
    """
    found = lock_version(connection, schema)
    if found > LATEST:
        raise SchemaVersionError(found, LATEST, schema)
    run(connection, found, LATEST, schema)


def migrate(connection: Connection, to: int = LATEST, schema: str = SCHEMA) -> tuple[int, int]:
    """Bring `schema` to version `to`, up or down, inside the connection's transaction.

    Returns (version before, version after). Raises like `create_all`.
    """
    found = lock_version(connection, schema)
    if found > LATEST:
        raise SchemaVersionError(found, LATEST, schema)
    run(connection, found, to, schema)
    return found, to


def lock_version(connection: Connection, schema: str) -> int:
    """Keep other migrations of this schema out until the transaction ends; return the version found."""
    checked_schema(schema)
    driver_connection = connection.connection.dbapi_connection
    if getattr(driver_connection, "autocommit", False):
        raise ConfigurationError(
            "the schema must be changed inside a transaction, and this connection is in AUTOCOMMIT mode: "
            "use `with engine.begin() as connection`"
        )
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": lock_key(schema)})
    return installed_version(connection, schema)


def lock_key(schema: str) -> str:
    """The text whose hash is the advisory lock of a schema's migrations."""
    return f"awa_sqla.schema:{schema}"


def run(connection: Connection, from_: int, to: int, schema: str) -> None:
    """Execute the statements between two versions."""
    for statement in statements(from_, to, schema=schema):
        connection.execute(as_ddl(statement))


def as_ddl(statement: str) -> DDL:
    """An executable element of plain SQL; colons and percent signs are left alone."""
    return DDL(statement.replace("%", "%%"))  # type: ignore[no-untyped-call, unused-ignore]


def checked_schema(schema: str) -> None:
    """Refuse names that would need more than quoting."""
    if not re.fullmatch(r"[^\W\d][\w-]{0,62}", schema) or len(schema.encode()) > 63:
        raise ConfigurationError(
            f"schema {schema!r} is no plain identifier: letters, digits, '_' and '-', at most 63 bytes, "
            "and no digit first"
        )
    if schema.startswith("pg_") or schema == "information_schema":
        raise ConfigurationError(f"schema {schema!r} is PostgreSQL's own: choose another name")


def _filled(step: tuple[str, ...], schema: str) -> Iterator[str]:
    values = {
        "{schema}": quoted(schema),
        "{schema_literal}": f"'{quoted(schema)}'",
        "{channel}": channel(schema),
    }
    for statement in step:
        for placeholder, value in values.items():
            statement = statement.replace(placeholder, value)  # noqa: PLW2901 - filled in place by place
        yield statement
