"""What the steps make: run in the connection's temporary namespace, read, and taken back.

So PostgreSQL itself says what is expected, in the words of the very server that is compared. It needs the privilege
TEMPORARY on the database, which everybody has by default, and touches nothing but this connection's own namespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from awa_sqla.errors import ConfigurationError
from awa_sqla.models.wakeups import channel
from awa_sqla.schema import as_ddl, statements
from awa_sqla.schema.drift.catalog import MARK, Catalog, expected
from awa_sqla.schema.drift.reading import read
from awa_sqla.schema.objects import quoted
from awa_sqla.sqlstates import sqlstate

#: Stands for the schema while the statements are taken apart.
_STAND_IN = "awa_stand_in"

_BODY = re.compile(r"(\$\w*\$).*?\1", re.DOTALL)

#: Definitions only: there are no rows to convert, and no triggers to run.
_DEFINES = re.compile(r"(?:CREATE(?! SCHEMA)|ALTER|DROP(?! SCHEMA))\b")

#: Makes room: what the connection has there by itself gets another name, until all is taken back.
_ASIDE = """
    FOR one IN SELECT oid, relname FROM pg_class
        WHERE relnamespace = pg_my_temp_schema() AND relkind IN ('r', 'p', 'v', 'm', 'S', 'f', 'i', 'I')
    LOOP
        EXECUTE format('ALTER TABLE pg_temp.%I RENAME TO %I', one.relname, 'awa_aside_' || one.oid);
    END LOOP;
    FOR one IN SELECT oid FROM pg_proc WHERE pronamespace = pg_my_temp_schema() AND prokind IN ('f', 'p')
    LOOP
        EXECUTE format('ALTER ROUTINE %s RENAME TO %I', one.oid::regprocedure, 'awa_aside_' || one.oid);
    END LOOP;"""

#: Marks the names of relations, once all are there.
_MARKED = f"""
    FOR one IN SELECT relname FROM pg_class
        WHERE relnamespace = pg_my_temp_schema() AND relkind IN ('r', 'v', 'S') AND relname !~ '^awa_aside_'
    LOOP
        EXECUTE format('ALTER TABLE pg_temp.%I RENAME TO %I', one.relname, '{MARK}' || one.relname);
    END LOOP;"""  # noqa: S608 - a constant

_DENIED = {
    "42501": "needs the privilege TEMPORARY on the database, to see what the steps would make: "
    "GRANT TEMPORARY ON DATABASE ... TO ..., or use a role that has it",
    "25006": "needs a transaction that may write, to see what the steps would make (all of it is taken back): "
    "use the primary server, and no READ ONLY transaction",
}


def expected_catalog(connection: Connection, version: int, schema: str) -> Catalog:
    """What the steps up to `version` make in `schema`. To be called in a savepoint that is rolled back.

    Raises `ConfigurationError` when the role or the transaction may make no temporary objects.
    """
    try:
        connection.execute(text("SET LOCAL check_function_bodies = off"))
        connection.execute(text("SET LOCAL search_path = pg_catalog, pg_temp"))
        connection.execute(as_ddl(_block(version, schema)))
        namespace = connection.scalar(text("SELECT pg_my_temp_schema()::bigint"))
    except DBAPIError as error:
        reason = _DENIED.get(sqlstate(error) or "")
        if reason is None:
            raise
        raise ConfigurationError(f"the comparison with the installed schema {schema!r} {reason}") from error
    return expected(read(connection, int(namespace or 0)), quoted(schema))


def _block(version: int, schema: str) -> str:
    """One statement that does it all: a roundtrip, whatever the number of steps."""
    made = "\n".join(
        f"EXECUTE $awa_{number}${statement}$awa_{number}$;"
        for number, statement in enumerate(_definitions(version, schema))
    )
    return f"DO $awa_block$ DECLARE one record;\nBEGIN {_ASIDE}\n{made}\n{_MARKED}\nEND $awa_block$"


def _definitions(version: int, schema: str) -> Iterator[str]:
    """The statements, for the temporary namespace. The bodies of functions are plain text: they get the real names."""
    stand_in, stood_for = quoted(_STAND_IN), quoted(schema)
    for statement in statements(0, version, schema=_STAND_IN):
        if _DEFINES.match(statement):
            with_bodies = _BODY.sub(
                lambda body: body[0].replace(stand_in, stood_for).replace(channel(_STAND_IN), channel(schema)),
                statement,
            )
            yield with_bodies.replace(stand_in, "pg_temp")
