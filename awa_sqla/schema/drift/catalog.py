"""What is in a schema, read from PostgreSQL's catalog: the material of `awa_sqla.schema.drift`.

Two namespaces are read in the same way: the installed schema, and the temporary one in which the steps have just been
run. PostgreSQL writes both sets of definitions itself, so they differ only where the objects do, on every server
version. In the temporary one each relation is called `MARK` + its name (see `expected`): a name in a definition can so
be told from a column or a word that looks like it, and be turned into the plain or the qualified one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

#: What the names of expected relations begin with, while they exist.
MARK = "awa_x_"

_MARKED = re.compile(rf"(?:pg_temp(?:_\d+)?\.)?{MARK}(\w+)(\.?)")
_TEMPORARY = re.compile(r"\bpg_temp(?:_\d+)?\.")


@dataclass(frozen=True)
class Relation:
    """A table, or what stands in its place; `kind` and `persistence` are those of pg_class."""

    name: str
    kind: str
    persistence: str
    secured: bool
    forced: bool


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    table: str
    name: str
    type: str
    not_null: bool
    unproven: str | None  # the NOT NULL constraint that is not validated yet (PostgreSQL 18)
    identity: str
    generated: str
    default: str | None
    sql_default: str | None


@dataclass(frozen=True)
class Constraint:
    """A CHECK, UNIQUE, EXCLUDE, primary or foreign key of a table."""

    table: str
    name: str
    kind: str
    definition: str
    columns: list[str]


@dataclass(frozen=True)
class Index:
    """An index that belongs to no constraint."""

    table: str
    name: str
    unique: bool
    valid: bool
    keys: str
    predicate: str | None
    columns: list[str]
    plain: bool
    distinct_nulls: bool
    sql: str


@dataclass(frozen=True)
class Sequence:
    """A sequence; `owner` is the column that it goes with, `bound` how: i is an identity, a is OWNED BY."""

    name: str
    persistence: str
    type: str
    start: int
    increment: int
    minimum: int
    maximum: int
    cycle: bool
    owner: str | None
    bound: str | None


@dataclass(frozen=True)
class View:
    """A view, with what a DBA may have set on it."""

    name: str
    definition: str
    columns: list[str]
    options: list[str]
    owner: str
    grants: list[list[str]]
    sql: str


@dataclass(frozen=True)
class Function:
    """A function, by name and types."""

    signature: str
    arguments: str
    result: str
    attributes: str
    security_definer: bool
    settings: list[str]
    source: str
    owner: str
    revoked: bool  # from PUBLIC, which has EXECUTE by default
    grants: list[list[str]]
    sql: str


@dataclass(frozen=True)
class Trigger:
    """A trigger; `columnar` when it names columns, whose type cannot be changed then."""

    table: str
    name: str
    definition: str
    enabled: str
    columnar: bool
    sql: str


@dataclass(frozen=True)
class Rule:
    """A rewrite rule on a table."""

    table: str
    name: str


@dataclass(frozen=True)
class Reference:
    """A foreign key onto a table of the schema, from the table `source`, whose name is quoted and qualified."""

    table: str
    name: str
    source: str
    within: str | None  # the plain name of `source` when it is in the same schema


Found = TypeVar("Found")


@dataclass(frozen=True)
class Catalog:
    """All that was read of one schema, each sort by its name."""

    relations: dict[str, Relation] = field(default_factory=dict[str, Relation])
    columns: dict[str, Column] = field(default_factory=dict[str, Column])
    constraints: dict[str, Constraint] = field(default_factory=dict[str, Constraint])
    indexes: dict[str, Index] = field(default_factory=dict[str, Index])
    sequences: dict[str, Sequence] = field(default_factory=dict[str, Sequence])
    views: dict[str, View] = field(default_factory=dict[str, View])
    functions: dict[str, Function] = field(default_factory=dict[str, Function])
    triggers: dict[str, Trigger] = field(default_factory=dict[str, Trigger])
    rules: dict[str, Rule] = field(default_factory=dict[str, Rule])
    references: dict[str, Reference] = field(default_factory=dict[str, Reference])

    def of(self, found: Iterable[Found], table: str) -> Iterator[Found]:
        """Those that belong to a table."""
        return (one for one in found if getattr(one, "table", None) == table)


def expected(marked: Catalog, schema: str) -> Catalog:
    """What was read of the temporary namespace, as it would read in `schema`; `schema` is quoted.

    Fields called `sql...` are for statements, so that their names are qualified; all others are compared, and plain.
    What is not marked belongs to somebody else's temporary table, and is left out.
    """
    catalog = Catalog()
    for sort in fields(Catalog):
        ours = getattr(catalog, sort.name)
        for one in getattr(marked, sort.name).values():
            if _ours(one):
                values = {each.name: _unmarked(each.name, getattr(one, each.name), schema) for each in fields(one)}
                unmarked = type(one)(**values)
                ours[key(unmarked)] = unmarked
    return catalog


def key(one: Any) -> str:
    """The name of an object among those of its sort."""
    if isinstance(one, Function):
        return one.signature
    if isinstance(one, Reference):
        return f"{one.source}.{one.name}"
    return f"{one.table}.{one.name}" if hasattr(one, "table") else str(one.name)


def _ours(one: Any) -> bool:
    if isinstance(one, Function):
        return not one.signature.startswith("awa_aside_")
    return str(getattr(one, "table", None) or one.name).startswith(MARK)


def _unmarked(name: str, value: Any, schema: str) -> Any:
    if not isinstance(value, str) or name == "source":
        return value
    if name == "persistence":
        return "p"
    if not name.startswith("sql"):
        return _TEMPORARY.sub("", value.replace(MARK, ""))
    # Before a dot it is the table of a column.
    qualified = _MARKED.sub(lambda found: found[1] + "." if found[2] else f"{schema}.{found[1]}", value)
    return _TEMPORARY.sub(f"{schema}.", qualified)
