"""`op.awa_mend`: the mends of `awa_sqla.schema.drift` in a revision, and how autogenerate proposes it.

Drift belongs to one database, and a revision runs on all of them. So the revision does not hold the statements for what
was found where it was written; it compares again wherever it runs, and mends what it finds, which may be nothing. There
is nothing to undo in `downgrade()`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from alembic.autogenerate.render import renderers
from alembic.operations import MigrateOperation, Operations

from awa_sqla.errors import ConfigurationError
from awa_sqla.models.base import SCHEMA
from awa_sqla.schema.drift import differences, mend

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from sqlalchemy import Connection

__all__ = ["AwaMendOp", "proposals"]

_log = logging.getLogger("awa_sqla.schema")


@Operations.register_operation("awa_mend")
class AwaMendOp(MigrateOperation):
    """Put right what in our schema is not as the steps of its version made it."""

    def __init__(self, schema: str = SCHEMA, found: tuple[str, ...] = ()) -> None:
        self.schema = schema
        self.found = found

    @classmethod
    def awa_mend(cls, operations: Operations, *, schema: str = SCHEMA) -> None:
        """Compare our schema with what the steps of its version make, and mend what differs, in the transaction.

        Does nothing where nothing differs. Indexes are built while writers wait; `awa-sqla migrate --check` prints the
        statements that let them go on. In offline mode (`--sql`), which cannot look, it prints a comment.

        Raises `ConfigurationError` where the schema cannot be compared (see `awa_sqla.schema.drift.differences`), and
        what PostgreSQL says, for example that a view of the application depends on one of ours.
        """
        operations.invoke(cls(schema))

    def reverse(self) -> MendNothingOp:
        """Nobody wants the difference back."""
        return MendNothingOp()

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What `alembic check` reports."""
        return ("awa_drift", self.schema, *self.found)


class MendNothingOp(MigrateOperation):
    """The mirror of `AwaMendOp`: no line of `downgrade()`."""

    def reverse(self) -> MendNothingOp:
        """Again nothing."""
        return self

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Never a difference."""
        return ()


def proposals(connection: Connection, schema: str = SCHEMA) -> list[AwaMendOp]:
    """The operation, if anything differs. Raises like `awa_sqla.schema.drift.differences`."""
    # On one line each: names that others have given, and in a revision a line of their own would be code.
    found = tuple(" ".join(f"{one.what} {one.problem}".split()) for one in differences(connection, schema))
    return [AwaMendOp(schema, found)] if found else []


@Operations.implementation_for(AwaMendOp)
def _run(operations: Operations, operation: AwaMendOp) -> None:
    context = operations.get_context()
    if context.as_sql:
        context.impl.static_output(
            "-- op.awa_mend compares a database, and offline mode has none: "
            "`awa-sqla migrate --check` prints what mends it\n"
        )
        return
    if context.connection is None:
        raise ConfigurationError("op.awa_mend needs a connection or offline mode")
    found = differences(context.connection, operation.schema)
    mend(context.connection, found)
    for one in found:
        if one.mends_in_transaction:
            _log.info("schema %s: mended: %s %s", operation.schema, one.what, one.problem)
        else:
            _log.warning("schema %s: no statement can mend this: %s %s", operation.schema, one.what, one.problem)


@Operations.implementation_for(MendNothingOp)
def _run_nothing(_operations: Operations, _operation: MendNothingOp) -> None:
    pass


@renderers.dispatch_for(AwaMendOp)
def _render(context: AutogenContext, operation: AwaMendOp) -> list[str]:
    prefix = context.opts["alembic_module_prefix"]
    schema = "" if operation.schema == SCHEMA else f"schema={operation.schema!r}"
    return [*(f"# {one}" for one in operation.found), f"{prefix}awa_mend({schema})"]


@renderers.dispatch_for(MendNothingOp)
def _render_nothing(_context: AutogenContext, _operation: MendNothingOp) -> list[str]:
    return []
