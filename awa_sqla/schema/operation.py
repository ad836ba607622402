"""`op.awa_migrate`: the operation, and how it is written into a revision.

Imported by `awa_sqla.alembic.setup`, while `alembic.autogenerate` is half imported: what is used of it comes
from the module that defines it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from alembic.autogenerate.render import renderers
from alembic.operations import MigrateOperation, Operations
from sqlalchemy import text

from awa_sqla.errors import ConfigurationError, SchemaVersionError
from awa_sqla.models.base import SCHEMA
from awa_sqla.schema import (
    as_ddl,
    between,
    change,
    filled,
    known,
    lock_key,
    lock_version,
    run,
    statements,
)
from awa_sqla.schema.locks import LOCK_WAIT
from awa_sqla.schema.online import Online, unfinished
from awa_sqla.schema.steps import STEPS

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext

#: What somebody has SET ROLE to, if so.
_ROLE = text("SELECT CAST(nullif(current_user, session_user) AS text)")

_log = logging.getLogger("awa_sqla.schema")


@Operations.register_operation("awa_migrate")
class AwaMigrateOp(MigrateOperation):
    """Bring our schema from one version to another."""

    def __init__(self, from_: int, to: int, schema: str = SCHEMA, *, concurrently: bool = False) -> None:
        self.from_ = from_
        self.to = to
        self.schema = schema
        self.concurrently = concurrently

    @classmethod
    def awa_migrate(
        cls, operations: Operations, *, from_: int, to: int, schema: str = SCHEMA, concurrently: bool = False
    ) -> None:
        """Bring our schema from version `from_` to `to`, upwards or downwards.

        Both are named because a revision must mean the same for ever, and offline mode (`--sql`) cannot look. A schema
        that is there already, or part of the way, is brought the rest of it: two branches of a history may hold the
        same upgrade, and a run that was interrupted is run again.

        With `concurrently` each step is committed by itself and indexes are built CONCURRENTLY, on connections of their
        own beside the migration's (`awa_sqla.schema.migrate_online`): what the migration has done so far is committed
        first. For large tables with traffic on them.

        Raises `SchemaVersionError` when the database has not come as far as `from_`, or is newer than this package,
        `SchemaLocked` when others hold the tables, `ConfigurationError` for an unknown version or outside a
        transaction.
        """
        operations.invoke(cls(from_, to, schema, concurrently=concurrently))

    def reverse(self) -> AwaMigrateOp:
        """The mirrored operation, which autogenerate writes into `downgrade()`."""
        return AwaMigrateOp(self.to, self.from_, self.schema, concurrently=self.concurrently)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What `alembic check` reports."""
        return ("awa_migrate", self.from_, self.to, *([] if self.schema == SCHEMA else [self.schema]))


@Operations.implementation_for(AwaMigrateOp)
def _run(operations: Operations, operation: AwaMigrateOp) -> None:
    context, schema = operations.get_context(), operation.schema
    known(operation.from_, operation.to, schema)
    if context.as_sql:
        return _print(operations, operation)
    connection = context.connection
    if connection is None:
        raise ConfigurationError("op.awa_migrate needs a connection or offline mode")
    found = lock_version(connection, schema)
    ahead = 1 if operation.to >= operation.from_ else -1
    to_do = _is_to_do(operation, found, ahead)
    if operation.concurrently and (to_do or (ahead > 0 and unfinished(connection, found, schema))):
        online = Online(connection.engine, schema, LOCK_WAIT, _log.info)
        online.role = connection.scalar(_ROLE)  # the other connections have not run what `env.py` runs on this one
        with context.autocommit_block():
            online.run(operation.to, ahead)
    elif to_do:
        run(connection, found, operation.to, schema)
    return None


def _is_to_do(operation: AwaMigrateOp, found: int, ahead: int) -> bool:
    """Whether steps are left from version `found`, up or down. Raises `SchemaVersionError`."""
    if (found - operation.from_) * ahead < 0:
        hint = (
            f"this revision leads from {operation.from_} to {operation.to}; if the schema was brought to {found} in "
            "another way, tell Alembic so with `alembic stamp`"
        )
        raise SchemaVersionError(found, operation.from_, operation.schema, hint)
    if (operation.to - found) * ahead <= 0:
        _log.info("schema %s: version %s is there already", operation.schema, operation.to)
        return False
    return True


def _print(operations: Operations, operation: AwaMigrateOp) -> None:
    """The SQL of offline mode."""
    schema = operation.schema

    def send(sql: Iterable[str]) -> None:
        for statement in sql:
            operations.execute(as_ddl(statement))

    key = lock_key(schema).replace("'", "''")
    lock = f"SELECT pg_advisory_xact_lock(hashtextextended('{key}', 0))"
    if not operation.concurrently:
        send([lock, *statements(operation.from_, operation.to, schema=schema)])
        return
    for version in between(operation.from_, operation.to):
        if version > 0 and operation.from_ > 0:
            send(filled(STEPS[version - 1].before, schema))
        send([lock, *change(version, schema)])
        with operations.get_context().autocommit_block():
            for work in STEPS[version - 1].after if version > 0 else ():
                send(filled(work.beside_others(), schema))


@renderers.dispatch_for(AwaMigrateOp)
def _render(context: AutogenContext, operation: AwaMigrateOp) -> str:
    prefix = context.opts["alembic_module_prefix"]
    schema = "" if operation.schema == SCHEMA else f", schema={operation.schema!r}"
    concurrently = ", concurrently=True" if operation.concurrently else ""
    return f"{prefix}awa_migrate(from_={operation.from_}, to={operation.to}{schema}{concurrently})"
