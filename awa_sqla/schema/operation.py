"""`op.awa_migrate`: the operation, and how it is written into a revision.

Imported by `awa_sqla.alembic.setup`, while `alembic.autogenerate` is half imported: what is used of it comes
from the module that defines it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alembic.autogenerate.render import renderers
from alembic.operations import MigrateOperation, Operations

from awa_sqla.errors import ConfigurationError, SchemaVersionError
from awa_sqla.models.base import SCHEMA
from awa_sqla.schema import as_ddl, lock_key, lock_version, run, statements

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext


@Operations.register_operation("awa_migrate")
class AwaMigrateOp(MigrateOperation):
    """Bring our schema from one version to another."""

    def __init__(self, from_: int, to: int, schema: str = SCHEMA) -> None:
        self.from_ = from_
        self.to = to
        self.schema = schema

    @classmethod
    def awa_migrate(cls, operations: Operations, *, from_: int, to: int, schema: str = SCHEMA) -> None:
        """Bring our schema from version `from_` to `to`, upwards or downwards.

        Both are named because a revision must mean the same for ever, and offline mode (`--sql`) cannot
        look. Raises `SchemaVersionError` when the database is not at `from_`, `ConfigurationError` for an
        unknown version or outside a transaction.
        """
        operations.invoke(cls(from_, to, schema))

    def reverse(self) -> AwaMigrateOp:
        """The mirrored operation, which autogenerate writes into `downgrade()`."""
        return AwaMigrateOp(self.to, self.from_, self.schema)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What `alembic check` reports."""
        return ("awa_migrate", self.from_, self.to)


@Operations.implementation_for(AwaMigrateOp)
def _run(operations: Operations, operation: AwaMigrateOp) -> None:
    context = operations.get_context()
    if context.as_sql:
        key = lock_key(operation.schema).replace("'", "''")
        operations.execute(as_ddl(f"SELECT pg_advisory_xact_lock(hashtextextended('{key}', 0))"))
        for statement in statements(operation.from_, operation.to, schema=operation.schema):
            operations.execute(as_ddl(statement))
        return
    connection = context.connection
    if connection is None:
        raise ConfigurationError("op.awa_migrate needs a connection or offline mode")
    found = lock_version(connection, operation.schema)
    if found != operation.from_:
        hint = (
            f"this revision leads from {operation.from_} to {operation.to}; if the schema was brought there in "
            "another way, tell Alembic so with `alembic stamp`"
        )
        raise SchemaVersionError(found, operation.from_, operation.schema, hint)
    run(connection, operation.from_, operation.to, operation.schema)


@renderers.dispatch_for(AwaMigrateOp)
def _render(context: AutogenContext, operation: AwaMigrateOp) -> str:
    prefix = context.opts["alembic_module_prefix"]
    schema = "" if operation.schema == SCHEMA else f", schema={operation.schema!r}"
    return f"{prefix}awa_migrate(from_={operation.from_}, to={operation.to}{schema})"
