"""What is in a database, read from PostgreSQL's catalog: for comparing two ways that lead to a schema."""

from __future__ import annotations

from sqlalchemy import Connection, text

from awa_sqla.models.base import SCHEMA

#: Each SELECT yields (what, definition) of one sort of object in the schema :schema. The order of columns, and the
#: names of NOT NULL constraints, are left out: a later step can only append.
_SORTS = {
    "relation": """
        SELECT relname, concat_ws(' ', relkind, relpersistence, relrowsecurity, reloptions)
        FROM pg_class WHERE relnamespace = to_regnamespace(:schema) AND relkind <> 'i'
    """,
    "column": """
        SELECT relname || '.' || attname, concat_ws(
            ' ', format_type(atttypid, atttypmod), attnotnull, attidentity, attgenerated,
            'default ' || pg_get_expr(adbin, adrelid)
        )
        FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
        LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
        WHERE relnamespace = to_regnamespace(:schema) AND relkind IN ('r', 'p', 'v', 'm')
    """,
    "constraint": """
        SELECT conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = to_regnamespace(:schema) AND contype <> 'n'
    """,
    "index": """
        SELECT indexrelid::regclass::text, concat_ws(' ', pg_get_indexdef(indexrelid), indisvalid)
        FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid WHERE relnamespace = to_regnamespace(:schema)
    """,
    "sequence": """
        SELECT relname, concat_ws(
            ' ', format_type(seqtypid, NULL), seqstart, seqincrement, seqmin, seqmax, seqcycle,
            deptype, refobjid::regclass, refobjsubid
        )
        FROM pg_class JOIN pg_sequence ON seqrelid = pg_class.oid
        LEFT JOIN pg_depend ON classid = 'pg_class'::regclass AND objid = seqrelid
            AND refclassid = 'pg_class'::regclass AND deptype IN ('a', 'i')
        WHERE relnamespace = to_regnamespace(:schema)
    """,
    "view": """
        SELECT relname, pg_get_viewdef(oid) FROM pg_class
        WHERE relnamespace = to_regnamespace(:schema) AND relkind IN ('v', 'm')
    """,
    "function": """
        SELECT oid::regprocedure::text, pg_get_functiondef(oid) FROM pg_proc
        WHERE pronamespace = to_regnamespace(:schema)
    """,
    "trigger": """
        SELECT tgrelid::regclass || '.' || tgname, concat_ws(' ', pg_get_triggerdef(pg_trigger.oid), tgenabled)
        FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
        WHERE relnamespace = to_regnamespace(:schema) AND NOT tgisinternal
    """,
    "type": """
        SELECT typname, typtype::text FROM pg_type
        WHERE typnamespace = to_regnamespace(:schema) AND typtype NOT IN ('c', 'b')
    """,
}

_ALL = "\nUNION ALL\n".join(
    f"SELECT '{sort} ' || what, definition FROM ({query}) AS {sort}_found (what, definition)"
    for sort, query in _SORTS.items()
)

_NAMES = """
    SELECT 'relation ' || relnamespace::regnamespace || '.' || relname FROM pg_class
    WHERE relnamespace::regnamespace::text !~ '^(pg_|information_schema)'
    UNION ALL
    SELECT 'function ' || pronamespace::regnamespace || '.' || proname FROM pg_proc
    WHERE pronamespace::regnamespace::text !~ '^(pg_|information_schema)'
    UNION ALL
    SELECT 'type ' || typnamespace::regnamespace || '.' || typname FROM pg_type
    WHERE typnamespace::regnamespace::text !~ '^(pg_|information_schema)'
    UNION ALL
    SELECT 'schema ' || nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema)'
"""


def described(connection: Connection, schema: str = SCHEMA) -> dict[str, str]:
    """Every object of a schema with its definition, as PostgreSQL writes it."""
    connection.execute(text("SET LOCAL search_path = pg_catalog"))  # so that all names come qualified
    rows = connection.execute(text(_ALL), {"schema": f'"{schema}"'}).all()
    connection.execute(text("RESET search_path"))
    return {row[0]: row[1] for row in rows}


def names(connection: Connection) -> set[str]:
    """The names of everything in the database that is not PostgreSQL's own."""
    return set(connection.scalars(text(_NAMES)))


def differences(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """The objects that only one of the two has, or that are not the same in both."""
    return {what for what in one.keys() | other.keys() if one.get(what) != other.get(what)}
