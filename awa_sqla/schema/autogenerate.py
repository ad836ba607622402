"""What autogenerate says of our tables: `op.awa_migrate` where it is due, and nothing else.

`compare` proposes the operation, and the statements that mend a schema that is not as its steps made it. It runs where
an app names our plugin in `autogenerate_plugins`.

`guard` runs last, in every app that does not choose its plugins itself, and corrects what Alembic has found:

* a table of ours is neither created, altered nor dropped, wherever it is and whether it is listed or not;
* a model of the app whose name finds a table of ours on the search_path gets the table of its own that it needs;
* where the target metadata lists our tables, the operation is proposed as if the plugin were named.

A database other than PostgreSQL never gets here, and one where no name is like one of ours is not asked anything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from alembic.operations import MigrateOperation
from alembic.operations.ops import CreateIndexOp, CreateTableOp, ModifyTableOps
from alembic.util import PriorityDispatchResult
from sqlalchemy import Connection, Index, Table

from awa_sqla.errors import ConfigurationError, SchemaVersionError
from awa_sqla.models.base import SCHEMA
from awa_sqla.schema import LATEST, installed_version
from awa_sqla.schema.mending import AwaMendOp, proposals
from awa_sqla.schema.operation import AwaMigrateOp
from awa_sqla.schema.ownership import NAMES, Installed, installed, marked, schema_names, translated

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps

__all__ = ["compare", "guard"]

_log = logging.getLogger("awa_sqla.schema")

#: A table as Alembic names it: with no schema when that is the connection's default.
_Key = tuple[str | None, str]


def compare(context: AutogenContext, upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
    """Propose the operation while the database is behind, once for each schema, and what mends one that has drifted.

    Raises `SchemaVersionError` when the database is newer than this package: no revision could mend that;
    `ConfigurationError` for an `awa_schema` that names no schema.
    """
    connection = context.connection
    if connection is not None:
        there = [_of(op) for op in upgrade_ops.ops if isinstance(op, AwaMigrateOp | AwaMendOp)]
        due = [op for name in _schemas(context, connection) for op in _due(connection, name)]
        upgrade_ops.ops[:0] = [op for op in due if _of(op) not in there]
    return PriorityDispatchResult.CONTINUE


def guard(context: AutogenContext, upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
    """Correct what Alembic proposes for our tables and for names like theirs. One statement, where there are any.

    Raises `ConfigurationError` when a model's table would be made where one of ours has its name; else as
    `compare`, where the target metadata lists our tables.
    """
    connection = context.connection
    if connection is None:
        return PriorityDispatchResult.CONTINUE
    target = _Target(context)
    if target.listed:
        upgrade_ops.ops[:] = [op for op in upgrade_ops.ops if target.key(op) not in target.listed]
        compare(context, upgrade_ops)
    if target.alike or not NAMES.isdisjoint(key[1] for key in map(target.key, upgrade_ops.ops) if key):
        ours = installed(connection)
        own = {key: table for key, table in target.alike.items() if _at_home(table)}
        _refuse_clashes(context, own, ours, target)
        _leave_alone(upgrade_ops, ours, target, own)
        hidden = {key: table for key, table in own.items() if ours.has(*key)}
        _create_own(context, upgrade_ops, hidden, target)
    return PriorityDispatchResult.CONTINUE


class _Target:
    """The tables of the target metadata, in the names that Alembic has for them."""

    def __init__(self, context: AutogenContext) -> None:
        self.default = context.dialect.default_schema_name
        tables = [(self._named(table.schema, table.name), table) for table in _tables(context)]
        self.order = {key: position for position, (key, _) in enumerate(tables)}
        self.listed = {key for key, table in tables if marked(table)}
        #: The app's own that have a name of ours.
        self.alike = {key: table for key, table in tables if key[1] in NAMES and not marked(table)}

    def key(self, op: MigrateOperation) -> _Key | None:
        """The table an operation is about."""
        name = getattr(op, "table_name", None)
        return None if name is None else self._named(getattr(op, "schema", None), name)

    def _named(self, schema: str | None, name: str) -> _Key:
        return (None if schema == self.default else schema, name)


def _tables(context: AutogenContext) -> list[Table]:
    return [] if context.metadata is None else context.sorted_tables


def _schemas(context: AutogenContext, connection: Connection) -> tuple[str, ...]:
    """The schemas that should have our tables: those named, else those of the tables listed, else the default."""
    named = context.opts.get("awa_schema")
    if named is not None:
        return schema_names(named)
    listed = [translated(connection, table.schema) for table in _tables(context) if marked(table)]
    wanted = listed or [translated(connection, SCHEMA)]
    return schema_names([schema or context.dialect.default_schema_name for schema in wanted])


def _of(op: AwaMigrateOp | AwaMendOp) -> tuple[object, ...]:
    return (op.schema, *op.to_diff_tuple())


def _due(connection: Connection, schema: str) -> Sequence[AwaMigrateOp | AwaMendOp]:
    found = installed_version(connection, schema)
    if found > LATEST:
        raise SchemaVersionError(found, LATEST, schema)
    mends = _mends(connection, schema) if found in {0, LATEST} else []  # 0 also where only the ledger is lost
    return mends or ([] if found == LATEST else [AwaMigrateOp(found, LATEST, schema)])


def _mends(connection: Connection, schema: str) -> list[AwaMendOp]:
    try:
        return proposals(connection, schema)
    except ConfigurationError as exc:
        _log.warning("schema %s: only its version is compared: %s", schema, exc)
        return []


def _at_home(table: Table) -> bool:
    """Whether a model is where its MetaData puts all; one that names a schema itself may be there to read ours."""
    return table.schema in {None, table.metadata.schema}


def _wanted(context: AutogenContext, item: Table | Index, type_: Literal["table", "index"]) -> bool:
    """Whether the app's filters let autogenerate create something."""
    return context.run_object_filters(item, item.name, type_, reflected=False, compare_to=None)


def _refuse_clashes(context: AutogenContext, own: dict[_Key, Table], ours: Installed, target: _Target) -> None:
    for (schema, name), table in own.items():
        taken = name in ours.in_the_way if schema is None else ours.has(schema, name)
        if (taken or (schema, name) in target.listed) and _wanted(context, table, "table"):
            raise ConfigurationError(
                f"the target metadata has a table {table.fullname!r} where awa_sqla has its own of that name: "
                "give it another name or schema, or leave it out by include_object"
            )


def _leave_alone(upgrade_ops: UpgradeOps, ours: Installed, target: _Target, own: dict[_Key, Table]) -> None:
    """Take out what is about a table of ours, and not about a new one of the app that has its name elsewhere."""
    created = {target.key(op) for op in upgrade_ops.ops if isinstance(op, CreateTableOp)} & own.keys()
    keys = [(op, target.key(op)) for op in upgrade_ops.ops]
    upgrade_ops.ops[:] = [op for op, key in keys if key is None or key in created or not ours.has(*key)]


def _create_own(context: AutogenContext, upgrade_ops: UpgradeOps, own: dict[_Key, Table], target: _Target) -> None:
    """Create the tables that Alembic took to be there, because it found ours by their names."""
    created = {target.key(op) for op in upgrade_ops.ops if isinstance(op, CreateTableOp)}
    for key, table in own.items():
        if key not in created and _wanted(context, table, "table"):
            at = _place(upgrade_ops.ops, key, target)
            upgrade_ops.ops[at:at] = _creation(context, table)
            created.add(key)


def _place(ops: list[MigrateOperation], key: _Key, target: _Target) -> int:
    """Where a table is created: before those that may refer to it, after those it may refer to."""
    created: set[_Key | None] = set()
    for position, op in enumerate(ops):
        there = target.key(op)
        if isinstance(op, CreateTableOp):
            if there is None or target.order.get(there, -1) > target.order[key]:
                return position
            created.add(there)
        elif there is not None and there not in created:
            return position
    return len(ops)


def _creation(context: AutogenContext, table: Table) -> Iterator[MigrateOperation]:
    yield CreateTableOp.from_table(table)
    indexes = sorted(table.indexes, key=lambda index: str(index.name))
    wanted = [index for index in indexes if _wanted(context, index, "index")]
    if wanted:
        yield ModifyTableOps(table.name, [CreateIndexOp.from_index(index) for index in wanted], schema=table.schema)
