"""The mends of `awa_sqla.schema.drift` as Alembic operations: what autogenerate writes into a revision.

They are written as the plain statements, to be read, changed or deleted: a later version of this package would mend in
another way, and a revision must mean the same for ever. There is nothing to undo in `downgrade()`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from alembic.autogenerate.render import renderers
from alembic.operations import MigrateOperation, Operations

from awa_sqla.models.base import SCHEMA
from awa_sqla.schema import as_ddl
from awa_sqla.schema.drift import Difference, differences
from awa_sqla.schema.drift.mends import can_be_indented

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from sqlalchemy import Connection

__all__ = ["MendOp", "proposals"]

#: What `op.execute()`, which makes a `text()` of it, would take for a parameter.
_PARAMETER = re.compile(r"(?<![:\w\\]):(?=\w+(?!:))")


class MendOp(MigrateOperation):
    """Put one object of the schema right, in the transaction of the revision."""

    def __init__(self, schema: str, what: str, problem: str, statements: tuple[str, ...]) -> None:
        self.schema = schema
        self.what = what
        self.problem = problem
        self.statements = statements

    def reverse(self) -> MendNothingOp:
        """Nobody wants the difference back."""
        return MendNothingOp()

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What `alembic check` reports."""
        return ("awa_drift", self.schema, self.what, self.problem)


class MendNothingOp(MigrateOperation):
    """The mirror of `MendOp`: no line of `downgrade()`."""

    def reverse(self) -> MendNothingOp:
        """Again nothing."""
        return self

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Never a difference."""
        return ()


def proposals(connection: Connection, schema: str = SCHEMA) -> list[MendOp]:
    """An operation for each difference of an installed schema, in the order in which they must run.

    Raises like `awa_sqla.schema.drift.differences`.
    """
    return [operation_for(difference, schema) for difference in differences(connection, schema)]


def operation_for(difference: Difference, schema: str = SCHEMA) -> MendOp:
    """The operation that mends a difference."""
    return MendOp(schema, difference.what, difference.problem, difference.mends_in_transaction)


@Operations.implementation_for(MendOp)
def _run(operations: Operations, operation: MendOp) -> None:
    for statement in operation.statements:
        operations.execute(as_ddl(statement))


@Operations.implementation_for(MendNothingOp)
def _run_nothing(_operations: Operations, _operation: MendNothingOp) -> None:
    pass


@renderers.dispatch_for(MendOp)
def _render(context: AutogenContext, operation: MendOp) -> list[str]:
    # On one line: names that others have given, and a line of their own would be code.
    comment = " ".join(f"{operation.what} {operation.problem}".split())
    if not operation.statements:
        return [f"# {comment}: no statement can mend this", "pass"]
    prefix = context.opts["alembic_module_prefix"]
    return [f"# {comment}", *(f"{prefix}execute({_literal(statement)})" for statement in operation.statements)]


@renderers.dispatch_for(MendNothingOp)
def _render_nothing(_context: AutogenContext, _operation: MendNothingOp) -> list[str]:
    return []


def _literal(statement: str) -> str:
    """A string literal for `op.execute()`.

    Alembic indents all lines of an operation, those within literals too. That is only layout in most statements; in
    the body of a function, where it would be another difference, each line gets a literal of its own.
    """
    escaped = _PARAMETER.sub(r"\\:", statement)
    lines = escaped.splitlines(keepends=True)
    moves = len(lines) == 1 or can_be_indented(statement)
    if moves and "\\" not in escaped and '"""' not in escaped and not escaped.endswith('"'):
        return f'"""{escaped}"""'
    if len(lines) == 1:
        return repr(escaped)
    return "\n    " + "\n    ".join(map(repr, lines)) + "\n"
