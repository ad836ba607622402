"""The schema as versioned steps: installed, upgraded and taken away again by plain DDL.

Apps with Alembic call `op.awa_migrate(from_=0, to=7)` in a revision of their own (see `awa_sqla.alembic`); without
Alembic, `create_all(connection)` or `awa-sqla migrate` bring a database to `LATEST`. All run the same steps.

`create_all` and `migrate` commit nothing: the steps are part of the caller's transaction, and an advisory lock of that
transaction keeps two of them apart. `migrate_online` is for tables with much in them and traffic on them: each step is
a short transaction of its own, and what takes long, such as an index, follows outside of any.

`steps` holds the steps, `locks` how they get what they lock, `online` the second way, `alone` what keeps two of that
way apart, `objects` what the models cannot say; `drift` finds what is no longer as the steps made it, `grants` says who
needs what. For Alembic there are `operation`, `mending` (the same for drift), `autogenerate` and `ownership`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta

from sqlalchemy import DDL, Connection, Engine, func, select, text
from sqlalchemy import column as sql_column
from sqlalchemy import table as sql_table

from awa_sqla.errors import ConfigurationError, SchemaVersionError
from awa_sqla.models.base import SCHEMA
from awa_sqla.models.wakeups import channel
from awa_sqla.schema.alone import TRY
from awa_sqla.schema.locks import LOCK_WAIT, strongest, take
from awa_sqla.schema.objects import quoted
from awa_sqla.schema.steps import STEPS

__all__ = ["LATEST", "create_all", "installed_version", "migrate", "migrate_online", "statements"]

#: The version this package needs.
LATEST = len(STEPS)


def statements(from_: int, to: int, *, schema: str = SCHEMA) -> Iterator[str]:
    """The SQL that leads from one version to another in one transaction, upwards or downwards. Does no I/O.

    Raises `ConfigurationError` for a version this package does not know or a schema name that is no
    plain identifier.
    """
    known(from_, to, schema)
    for version in between(from_, to):
        yield from change(version, schema)
        for work in STEPS[version - 1].after if version > 0 else ():
            yield from filled(work.in_transaction(), schema)


def between(from_: int, to: int) -> Iterable[int]:
    """The steps from one version to another: the versions they lead to, or, as negative numbers, back from."""
    return range(from_ + 1, to + 1) if to >= from_ else range(-from_, -to)


def change(version: int, schema: str) -> Iterator[str]:
    """The short part of the step to a version, or, as a negative number, of the way back from it."""
    ledger, step = f"{quoted(schema)}.schema_version", STEPS[abs(version) - 1]
    if version > 0:
        yield from filled(step.up, schema)
        yield f"INSERT INTO {ledger} (version) VALUES ({version})"  # noqa: S608 - a checked name, a number
    else:
        yield f"DELETE FROM {ledger} WHERE version = {-version}"  # noqa: S608
        yield from filled(step.down, schema)


def locks_between(from_: int, to: int) -> Mapping[str, str]:
    """What `statements` of the same versions locks of relations that are there before: the mode of each."""
    wanted: list[Mapping[str, str]] = []
    for version in between(from_, to):
        step = STEPS[abs(version) - 1]
        wanted += [step.locks, {w.table: w.mode for w in step.after}] if version > 0 else [step.down_locks]
    return strongest(wanted)


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
    is newer than this package, `SchemaLocked` when others hold its tables for a minute, `ConfigurationError`
    in AUTOCOMMIT mode, and where isolation hides what another migration did while this one waited for it.
    """
    migrate(connection, schema=schema)


def migrate(connection: Connection, to: int = LATEST, schema: str = SCHEMA) -> tuple[int, int]:
    """Bring `schema` to version `to`, up or down, inside the connection's transaction.

    Returns (version before, version after). Raises like `create_all`.
    """
    found = lock_version(connection, schema)
    run(connection, found, to, schema)
    return found, to


def migrate_online(
    engine: Engine,
    to: int = LATEST,
    schema: str = SCHEMA,
    *,
    lock_wait: timedelta = LOCK_WAIT,
    tell: Callable[[str], None] | None = None,
) -> tuple[int, int]:
    """Bring `schema` to version `to`, up or down, while others go on working; see `awa_sqla.schema.online`.

    Commits, on two connections of `engine`, with a third to see how far it is and to cancel it. What an earlier run has
    left unfinished is finished first; of several processes one works, and the others wait for it. `lock_wait` is how
    long each step waits for its locks at most; `tell` is called with a line of text for each thing that begins, and
    while it goes on.

    Returns (version before, version after). Raises `SchemaVersionError` when the database is newer than this package,
    `SchemaLocked` when others hold its tables, `ConfigurationError` for an unknown version, and the driver's errors;
    the schema is then at the version of a step, and the same call goes on from there.
    """
    from awa_sqla.schema.online import Online  # noqa: PLC0415 - uses this module

    known(to, to, schema)
    return Online(engine, schema, lock_wait, tell or (lambda _: None)).run(to)


def lock_version(connection: Connection, schema: str) -> int:
    """Keep other migrations of this schema out until the transaction ends; return the version found.

    Raises `SchemaVersionError` when it is newer than this package, `ConfigurationError` in AUTOCOMMIT mode, and when
    the transaction has waited for another one that it cannot see.
    """
    checked_schema(schema)
    if autocommits(connection):
        raise ConfigurationError(
            "the schema must be changed inside a transaction, and this connection is in AUTOCOMMIT mode: "
            "use `with engine.begin() as connection`"
        )
    key = {"key": lock_key(schema)}
    if not connection.scalar(TRY, key):
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), key)
        isolation = connection.scalar(text("SHOW transaction_isolation"))
        if isolation in ("repeatable read", "serializable"):
            raise ConfigurationError(
                f"another migration has ended while this one waited for it, and a {isolation.upper()} transaction "
                "that began before cannot see what it has done: begin a new transaction and try again"
            )
    found = installed_version(connection, schema)
    if found > LATEST:
        raise SchemaVersionError(found, LATEST, schema)
    return found


def autocommits(connection: Connection) -> bool:
    """Whether each statement of a connection is a transaction of its own."""
    return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))


def lock_key(schema: str) -> str:
    """The text whose hash is the advisory lock of a schema's migrations."""
    return f"awa_sqla.schema:{schema}"


def run(connection: Connection, from_: int, to: int, schema: str) -> None:
    """Lock what will be changed, then execute the statements between two versions."""
    known(from_, to, schema)
    take(connection, locks_between(from_, to), schema)
    execute(connection, statements(from_, to, schema=schema))


def execute(connection: Connection, sql: Iterator[str]) -> None:
    """Execute plain SQL, statement by statement."""
    for statement in sql:
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


def known(from_: int, to: int, schema: str) -> None:
    """Refuse versions this package does not know, and bad names of a schema."""
    checked_schema(schema)
    for version in (from_, to):
        if version not in range(LATEST + 1):
            raise ConfigurationError(f"no schema version {version!r}: this package knows 0 to {LATEST}")


def filled(sql: Iterable[str], schema: str) -> Iterator[str]:
    """The SQL of a step, for a schema of this name."""
    values = {
        "{schema}": quoted(schema),
        "{schema_literal}": f"'{quoted(schema)}'",
        "{channel}": channel(schema),
    }
    for statement in sql:
        for placeholder, value in values.items():
            statement = statement.replace(placeholder, value)  # noqa: PLW2901 - filled in place by place
        yield statement
