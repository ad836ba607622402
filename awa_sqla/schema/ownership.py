"""Which tables are ours: in a target metadata by their mark, in a database by what stands around them.

Reads the catalogue and nothing else, and imports no Alembic: `awa_sqla.alembic` uses it while Alembic is half
imported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from sqlalchemy import Connection, Table, bindparam, text

from awa_sqla.errors import ConfigurationError
from awa_sqla.models.base import MARK, AwaBase, ViewBase
from awa_sqla.schema import checked_schema

__all__ = ["NAMES", "Installed", "installed", "marked", "schema_names", "translated"]


def marked(table: Table) -> bool:
    """Whether a `Table` is one of ours, or a copy that `to_metadata` has made of one."""
    return MARK in table.info


#: The names of our tables and views.
NAMES = frozenset(
    table.name for base in (AwaBase, ViewBase) for table in base.metadata.tables.values() if marked(table)
)

#: A schema with all of these is one of ours, whatever its name and version.
_SIGN = frozenset({"schema_version", "jobs_hot", "scheduled_jobs", "dlq_entries"})

_RELATIONS = text("""\
SELECT n.nspname, c.relname, pg_catalog.pg_table_is_visible(c.oid), n.nspname = pg_catalog.current_schema()
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v') AND c.relname IN :names""").bindparams(bindparam("names", expanding=True))


class Installed(NamedTuple):
    """Our tables and views in a database, as the connection sees them."""

    #: With the names of their schemas.
    tables: frozenset[tuple[str, str]]
    #: What an unqualified name finds.
    unqualified: frozenset[str]
    #: What is in the schema where an unqualified CREATE would put a table of that name.
    in_the_way: frozenset[str]

    def has(self, schema: str | None, name: str) -> bool:
        """Whether a table of the database is ours; `None` is the schema that an unqualified name means."""
        return name in self.unqualified if schema is None else (schema, name) in self.tables


def installed(connection: Connection) -> Installed:
    """Find our tables in every schema of the database. One statement."""
    found: dict[str, dict[str, tuple[bool, bool]]] = defaultdict(dict)
    for schema, name, visible, current in connection.execute(_RELATIONS, {"names": sorted(NAMES)}):
        found[schema][name] = (visible, bool(current))
    ours = {schema: tables for schema, tables in found.items() if tables.keys() >= _SIGN}
    default = translated(connection, None)
    if default is not None:
        here = frozenset(ours.get(default, ()))
        return Installed(_pairs(ours), here, here)
    seen = [(name, *flags) for tables in ours.values() for name, flags in tables.items()]
    return Installed(
        _pairs(ours),
        frozenset(name for name, visible, _ in seen if visible),
        frozenset(name for name, _, current in seen if current),
    )


def translated(connection: Connection, schema: str | None) -> str | None:
    """A schema as the connection's `schema_translate_map` has it."""
    names: dict[str | None, str | None] = connection.get_execution_options().get("schema_translate_map") or {}
    return names.get(schema, schema)


def schema_names(value: Any) -> tuple[str, ...]:
    """The schemas that one name or several stand for, each once. Does no I/O.

    Raises `ConfigurationError` for what is no name, or no plain identifier.
    """
    several = isinstance(value, Iterable) and not isinstance(value, str)
    names: list[Any] = list(cast("Iterable[Any]", value)) if several else [value]
    for name in names:
        if not isinstance(name, str):
            raise ConfigurationError(f"{value!r} is neither the name of a schema nor a list of such names")
        checked_schema(name)
    return tuple(dict.fromkeys(names))


def _pairs(schemas: dict[str, dict[str, tuple[bool, bool]]]) -> frozenset[tuple[str, str]]:
    return frozenset((schema, name) for schema, tables in schemas.items() for name in tables)
