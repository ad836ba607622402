"""What in an installed schema is not as the steps of its version make it, and the statements that mend it.

Somebody dropped an index, an interrupted CREATE INDEX CONCURRENTLY left an invalid one, a trigger was disabled for
an import and forgotten, a restore left a function out. Nothing of that changes the version, and most of it Alembic does
not compare.

    with engine.connect() as connection:
        print(*lines(differences(connection)), sep="\n")

The application and its DBA may add tables, indexes, triggers and nullable columns to the schema, and choose storage
parameters: that is no drift. Drift is also what they add when it can make a statement of this package fail: a
constraint, a unique index, a NOT NULL column without default, row level security, a rule, a foreign key onto a table
of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, text

from awa_sqla.errors import ConfigurationError, SchemaVersionError
from awa_sqla.models.base import SCHEMA
from awa_sqla.schema import LATEST, as_ddl, autocommits, installed_version
from awa_sqla.schema.drift.catalog import Catalog
from awa_sqla.schema.drift.comparing import Comparison
from awa_sqla.schema.drift.expected import expected_catalog
from awa_sqla.schema.drift.mends import can_be_indented
from awa_sqla.schema.drift.reading import read
from awa_sqla.schema.objects import quoted

#: Tables without the ledger: who has all of them has our schema.
_TELLING = {"jobs_hot", "scheduled_jobs", "queue_meta"}

__all__ = ["Difference", "differences", "lines", "mend"]


@dataclass(frozen=True)
class Difference:
    """One object that is not as it should be.

    Attributes:
        what: its sort and name: `index jobs_hot.ix_jobs_hot_claim`.
        problem: what is wrong with it, to be read after `what`: `is missing`.
        mends: the statements that put it right, each in a transaction of its own (CONCURRENTLY needs that). Empty when
            only a person can.
        mends_in_transaction: the same for one transaction.
    """

    what: str
    problem: str
    mends: tuple[str, ...]
    mends_in_transaction: tuple[str, ...]


def differences(connection: Connection, schema: str = SCHEMA) -> list[Difference]:
    """What differs from the schema of the installed version, in an order in which the mends can be executed.

    Nothing is changed: what is expected is made in the connection's temporary namespace, in a savepoint, and taken
    back (a transaction that did this cannot be prepared for two-phase commit). Tables are locked as by a SELECT, and
    only until it returns. An empty list for a schema that is not installed. Async:
    `await async_connection.run_sync(differences)`.

    Raises `ConfigurationError` in AUTOCOMMIT mode, in a read-only transaction and without the privilege TEMPORARY,
    `SchemaVersionError` when the database is newer than this package.
    """
    version = installed_version(connection, schema)
    if version > LATEST:
        raise SchemaVersionError(version, LATEST, schema)
    if autocommits(connection):
        raise ConfigurationError(
            "the schema is compared inside a transaction, and this connection is in AUTOCOMMIT mode: "
            "use `with engine.connect() as connection`"
        )
    with connection.begin_nested() as savepoint:
        found = _installed(connection, schema)
        lost = not version and found.relations.keys() >= _TELLING
        if lost:
            version = LATEST  # what was installed is there; the mends bring all of it to this version
        wanted = expected_catalog(connection, version, schema) if version else Catalog()
        savepoint.rollback()
    comparison = Comparison(quoted(schema), found, wanted, LATEST if lost else None)
    return [Difference(one.what, one.problem, *one.mends) for one in comparison]


def mend(connection: Connection, found: Iterable[Difference]) -> None:
    """Execute the mends of differences, in their order: one after another in AUTOCOMMIT mode, else in the transaction.

    A difference that no statement can mend is left. Raises what PostgreSQL says, for example that a view of the
    application depends on one of ours.
    """
    apart = autocommits(connection)
    for difference in found:
        for statement in difference.mends if apart else difference.mends_in_transaction:
            connection.execute(as_ddl(statement))


def lines(found: Iterable[Difference]) -> Iterator[str]:
    """Differences as a script for psql: a comment for each, and its statements indented below.

    A statement with the body of a function is not indented: the layout is part of it.
    """
    for difference in found:
        yield "-- " + " ".join(f"{difference.what} {difference.problem}".split())
        for statement in difference.mends:
            indent = "    " if can_be_indented(statement) else ""
            yield from (f"{indent}{line}" for line in f"{statement};".splitlines())


def _installed(connection: Connection, schema: str) -> Catalog:
    # With pg_catalog first no function of the schema can stand in for one of PostgreSQL's, and with pg_temp last no
    # temporary table for one of the schema's; names of the schema are written without it.
    connection.execute(text(f"SET LOCAL search_path = pg_catalog, {quoted(schema)}, pg_temp"))
    connection.execute(text("SET LOCAL quote_all_identifiers = off"))  # what names are compared with is written without
    namespace = connection.scalar(text("SELECT to_regnamespace(:name)::oid::bigint"), {"name": quoted(schema)})
    return Catalog() if namespace is None else read(connection, int(namespace))
