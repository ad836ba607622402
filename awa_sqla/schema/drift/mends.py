"""The statements that put one object of the schema right, without losing a row.

There are two ways. One after another, each in a transaction of its own: nothing is locked for long, indexes are built
CONCURRENTLY, rows are checked beside the application. Or all in one transaction, where that is impossible.
Names of ours are plain identifiers; `schema` is quoted, and what others have made is quoted where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from awa_sqla.schema.drift.catalog import Catalog, Column, Constraint, Function, Index, Sequence, Trigger, View
from awa_sqla.schema.objects import quoted


class Mends(NamedTuple):
    """Both ways to put something right."""

    apart: tuple[str, ...]
    together: tuple[str, ...]


NONE = Mends((), ())

_QUOTED = re.compile(r""" "[^"]*" | '[^']*' """, re.VERBOSE)


def can_be_indented(statement: str) -> bool:
    """Whether its lines may move: not those of a body or a name."""
    return "$" not in statement and not any("\n" in name for name in _QUOTED.findall(statement))


def plain(*statements: str) -> Mends:
    """Statements that are short and can be apart."""
    return Mends(statements, statements)


def inseparable(*statements: str) -> Mends:
    """Statements between which nobody must come: one block when they are executed one after another."""
    if len(statements) == 1:
        return plain(*statements)
    body = "\n".join(f"{statement};" for statement in statements)
    return Mends((f"DO $mend$ BEGIN\n{body}\nEND $mend$",), statements)


# ------------------------------------------------------------------------------------------------------ tables
def create_table(schema: str, table: str, wanted: Catalog) -> Mends:
    """A table with its columns, constraints and indexes."""
    parts = [column_clause(column) for column in wanted.of(wanted.columns.values(), table)]
    parts += [
        f"CONSTRAINT {constraint.name} {constraint.definition}"
        for constraint in wanted.of(wanted.constraints.values(), table)
    ]
    lines = ",\n    ".join(parts)
    indexes = [index.sql for index in wanted.of(wanted.indexes.values(), table)]
    return plain(f"CREATE TABLE {schema}.{table} (\n    {lines}\n)", *indexes)


def column_clause(column: Column) -> str:
    """A column as CREATE TABLE and ADD COLUMN take it."""
    clause = f"{column.name} {column.type}"
    if column.identity:
        clause += f" GENERATED {generated(column)} AS IDENTITY"
    if column.default is not None:
        clause += f" DEFAULT {column.sql_default}"
    return clause + (" NOT NULL" if column.not_null else "")


def generated(column: Column) -> str:
    """How an identity is generated."""
    return "ALWAYS" if column.identity == "a" else "BY DEFAULT"


# ----------------------------------------------------------------------------------------------------- columns
def retype(schema: str, columns: Iterable[Column], found: Catalog, wanted: Catalog) -> Mends:
    """Give columns their type. What PostgreSQL does not let stand meanwhile is taken away and made again at once.

    It does no harm to do this twice.
    """
    columns = list(columns)
    tables = {column.table for column in columns}
    triggers = [
        (trigger, found.triggers[name].enabled)
        for name, trigger in wanted.triggers.items()
        if trigger.table in tables and name in found.triggers and found.triggers[name].columnar
    ]
    views = [wanted.views[name] for name in found.views if name in wanted.views]
    read = [view for view in views if any(f" {table}" in view.definition for table in tables)]
    before = [f"DROP TRIGGER {trigger.name} ON {schema}.{trigger.table}" for trigger, _ in triggers]
    before += [f"DROP VIEW {schema}.{view.name}" for view in read]
    after = [statement for view in read for statement in create_view(schema, view, found.views[view.name])]
    for trigger, enabled in triggers:
        after.append(trigger.sql)
        if enabled != "O":
            after.append(f"ALTER TABLE {schema}.{trigger.table} {_ENABLED[enabled]} TRIGGER {trigger.name}")
    changes: list[str] = []
    for column in columns:
        target = f"ALTER TABLE {schema}.{column.table} ALTER COLUMN {column.name}"
        actual = found.columns[f"{column.table}.{column.name}"]
        if actual.default is not None:
            changes.append(f"{target} DROP {'EXPRESSION IF EXISTS' if actual.generated else 'DEFAULT'}")
        changes.append(f"{target} TYPE {column.type} USING {column.name}::{column.type}")
        if column.default is not None:
            changes.append(f"{target} SET DEFAULT {column.sql_default}")
    return inseparable(*before, *changes, *after)


_ENABLED = {"D": "DISABLE", "R": "ENABLE REPLICA", "A": "ENABLE ALWAYS"}


def set_not_null(schema: str, column: Column) -> Mends:
    """NOT NULL, proven by a CHECK first so that nobody waits for the scan; a default fills what is empty."""
    table = f"{schema}.{column.table}"
    fill = []
    if column.default is not None:
        fill = [f"UPDATE {table} SET {column.name} = DEFAULT WHERE {column.name} IS NULL"]  # noqa: S608 - our names
    name = f"{column.table}_{column.name}_not_null_check"
    set_it = f"ALTER TABLE {table} ALTER COLUMN {column.name} SET NOT NULL"
    return Mends(
        (
            f"ALTER TABLE {table} ADD CONSTRAINT {name} CHECK ({column.name} IS NOT NULL) NOT VALID",
            *fill,
            f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}",
            set_it,
            f"ALTER TABLE {table} DROP CONSTRAINT {name}",
        ),
        (*fill, set_it),
    )


def set_identity(schema: str, column: Column, actual: Column) -> Mends:
    """Make, change or take away the identity of a column; a new one goes on after the highest value."""
    target = f"ALTER TABLE {schema}.{column.table} ALTER COLUMN {column.name}"
    if not column.identity:
        default = [f"{target} SET DEFAULT {column.sql_default}"] if column.default is not None else []
        return inseparable(f"{target} DROP IDENTITY", *default)
    if actual.identity:
        return plain(f"{target} SET GENERATED {generated(column)}")
    before = [f"{target} DROP DEFAULT"] if actual.default is not None else []
    if not actual.not_null:
        before.append(f"{target} SET NOT NULL")
    go_on = (
        f"SELECT setval(pg_get_serial_sequence('{schema}.{column.table}', '{column.name}'), "  # noqa: S608
        f"(SELECT coalesce(max({column.name}), 0) + 1 FROM {schema}.{column.table}), false)"
    )
    made = f"{target} ADD GENERATED {generated(column)} AS IDENTITY"
    together = (*before, made, go_on)
    apart = inseparable(*before, made, go_on.replace("SELECT setval", "PERFORM setval", 1)).apart
    return Mends(apart, together)


# ------------------------------------------------------------------------------------- constraints and indexes
def add_constraint(schema: str, wanted: Constraint, instead_of: str | None) -> Mends:
    """Make a constraint, in place of another or not; rows are checked afterwards, beside the application."""
    table = f"{schema}.{wanted.table}"
    drop = f"DROP CONSTRAINT {quoted(instead_of)}, " if instead_of else ""
    add = f"ALTER TABLE {table} {drop}ADD CONSTRAINT {wanted.name}"
    if wanted.kind in ("c", "f"):
        return Mends(
            (
                f"{add} {wanted.definition} NOT VALID",
                f"ALTER TABLE {table} VALIDATE CONSTRAINT {wanted.name}",
            ),
            (f"{add} {wanted.definition}",),
        )
    kind = "PRIMARY KEY" if wanted.kind == "p" else "UNIQUE"
    building = f"{wanted.name}_new"
    return Mends(
        (
            f"DROP INDEX CONCURRENTLY IF EXISTS {schema}.{building}",
            f"CREATE UNIQUE INDEX CONCURRENTLY {building} ON {table} ({', '.join(wanted.columns)})",
            f"{add} {kind} USING INDEX {building}",
        ),
        (f"{add} {wanted.definition}",),
    )


def create_index(schema: str, wanted: Index, actual: Index | None) -> Mends:
    """Build an index; a valid one that is another serves until the new one is there."""
    name, building = f"{schema}.{wanted.name}", f"{wanted.name}_new"
    concurrently = wanted.sql.replace("INDEX ", "INDEX CONCURRENTLY ", 1)
    if actual is None:
        return Mends((concurrently,), (wanted.sql,))
    together = (f"DROP INDEX {name}", wanted.sql)
    if not actual.valid:
        return Mends((f"DROP INDEX CONCURRENTLY {name}", concurrently), together)
    return Mends(
        (
            f"DROP INDEX CONCURRENTLY IF EXISTS {schema}.{building}",
            concurrently.replace(f" {wanted.name} ", f" {building} ", 1),
            f"DROP INDEX CONCURRENTLY {name}",
            f"ALTER INDEX {schema}.{building} RENAME TO {wanted.name}",
        ),
        together,
    )


def drop_index(schema: str, name: str) -> Mends:
    """Take an index away."""
    return Mends(
        (f"DROP INDEX CONCURRENTLY {schema}.{quoted(name)}",),
        (f"DROP INDEX {schema}.{quoted(name)}",),
    )


# --------------------------------------------------------------------------------------------------- sequences
def sequence_options(sequence: Sequence) -> str:
    """All that CREATE and ALTER SEQUENCE say of it, but its owner."""
    return (
        f"AS {sequence.type} INCREMENT BY {sequence.increment} MINVALUE {sequence.minimum} "
        f"MAXVALUE {sequence.maximum} START WITH {sequence.start} {'' if sequence.cycle else 'NO '}CYCLE"
    )


#: The columns whose values a sequence must never give again.
_DRAWN = {"jobs_id_seq": ("id", "job_id"), "run_lease_seq": ("run_lease", "original_run_lease")}


def create_sequence(schema: str, sequence: Sequence, found: Catalog) -> Mends:
    """Make a sequence that goes on after the highest value in the tables that are there."""
    highest = [
        f"(SELECT max({column.name}) FROM {schema}.{column.table})"  # noqa: S608 - our names
        for column in found.columns.values()
        if column.name in _DRAWN.get(sequence.name, ()) and column.type == sequence.type and not column.identity
    ]
    go_on = (
        [f"SELECT setval('{schema}.{sequence.name}', greatest(0, {', '.join(highest)}) + 1, false)"] if highest else []
    )
    return plain(f"CREATE SEQUENCE {schema}.{sequence.name} {sequence_options(sequence)}", *go_on)


# -------------------------------------------------------------------------------- views, functions and triggers
def _rights(sort: str, name: str, actual: View | Function | None) -> Iterator[str]:
    """Give what was made again to whom it belonged, and to whom it was granted."""
    if actual is None:
        return
    yield f"ALTER {sort} {name} OWNER TO {actual.owner}"
    if isinstance(actual, Function) and actual.revoked:
        yield f"REVOKE ALL ON FUNCTION {name} FROM PUBLIC"
    for privilege, grantee, option in actual.grants:
        yield f"GRANT {privilege} ON {'TABLE' if sort == 'VIEW' else sort} {name} TO {grantee}{option}"


def create_view(schema: str, wanted: View, actual: View | None) -> list[str]:
    """Make a view that is not there now, with the options, the owner and the grants of the one that was."""
    name = f"{schema}.{wanted.name}"
    return [f"CREATE VIEW {name}{_options(actual)} AS\n{wanted.sql}", *_rights("VIEW", name, actual)]


def _options(actual: View | None) -> str:
    return f" WITH ({', '.join(actual.options)})" if actual and actual.options else ""


def replace_view(schema: str, wanted: View, actual: View | None) -> Mends:
    """Make a view, or its text; one with other columns goes first, and its grants are made again."""
    if actual is None:
        return plain(*create_view(schema, wanted, None))
    if actual.columns == wanted.columns[: len(actual.columns)]:
        return plain(f"CREATE OR REPLACE VIEW {schema}.{wanted.name}{_options(actual)} AS\n{wanted.sql}")
    return inseparable(f"DROP VIEW {schema}.{wanted.name}", *create_view(schema, wanted, actual))


def replace_function(schema: str, wanted: Function, actual: Function | None) -> Mends:
    """Make a function, or all that is said of it; one with another result goes first, its grants are made again."""
    made = wanted.sql.strip()
    if actual is None or (actual.result, actual.arguments) == (wanted.result, wanted.arguments):
        return plain(made)
    name = f"{schema}.{wanted.signature}"
    return inseparable(f"DROP FUNCTION {name}", made, *_rights("FUNCTION", name, actual))


def replace_trigger(schema: str, wanted: Trigger, actual: Trigger | None) -> Mends:
    """Make a trigger, in place of another of its name or not."""
    drop = [f"DROP TRIGGER {wanted.name} ON {schema}.{wanted.table}"] if actual else []
    return inseparable(*drop, wanted.sql)
