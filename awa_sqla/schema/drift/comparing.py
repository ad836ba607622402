"""The comparison of two catalogs: what is installed with what is expected, sort by sort.

The sorts come in the order in which their mends can be executed: what stands in the way goes first, then sequences,
tables and columns are there before what is built on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from awa_sqla.schema.drift import mends
from awa_sqla.schema.drift.catalog import Column, Constraint, Function, Sequence, key
from awa_sqla.schema.drift.mends import Mends, plain
from awa_sqla.schema.drift.obstacles import TABLE, Finding, Obstacles, Sides, harmless
from awa_sqla.schema.objects import quoted

#: A generated column that PostgreSQL cannot make an ordinary one.
VIRTUAL = "v"

_KINDS = {
    "v": "a view",
    "m": "a materialized view",
    "p": "a partitioned table",
    "f": "a foreign table",
    TABLE: "a table",
}


@dataclass(frozen=True)
class Comparison(Sides):
    """The findings of two catalogs, as an iterable.

    `lost` is the version whose rows a ledger that is missing must be given.
    """

    lost: int | None = None

    def __iter__(self) -> Iterator[Finding]:
        yield from Obstacles(self.schema, self.found, self.wanted)
        yield from self.sequences()
        yield from self.tables()
        yield from self.columns()
        yield from self.constraints()
        yield from self.views()
        yield from self.functions()
        yield from self.triggers()
        yield from self.indexes()

    # ------------------------------------------------------------------------------------- sequences and tables
    def sequences(self) -> Iterator[Finding]:
        """Sequences; that of an identity belongs to its column."""
        for name, wanted in self.wanted.sequences.items():
            actual = self.found.sequences.get(name)
            if wanted.bound == "i" and (actual is None or actual.bound != "i"):
                continue
            if actual is None:
                yield Finding(f"sequence {name}", "is missing", mends.create_sequence(self.schema, wanted, self.found))
            elif actual != wanted:
                yield Finding(f"sequence {name}", _changes(actual, wanted), self.alter_sequence(actual, wanted))

    def alter_sequence(self, actual: Sequence, wanted: Sequence) -> Mends:
        """Make the one what the other is."""
        target = f"ALTER SEQUENCE {self.schema}.{wanted.name}"
        statements: list[str] = []
        if (actual.bound, actual.owner) != (wanted.bound, wanted.owner):
            statements.append(f"{target} OWNED BY NONE")
        if actual.persistence != wanted.persistence:
            statements.append(f"{target} SET LOGGED")
        if mends.sequence_options(actual) != mends.sequence_options(wanted):
            statements.append(f"{target} {mends.sequence_options(wanted)}")
        return plain(*statements)

    def tables(self) -> Iterator[Finding]:
        """Tables: that they are there, are logged, and show all rows."""
        for name in self.wanted.relations:
            if name not in self.tables_of_ours:
                continue
            target, actual = f"ALTER TABLE {self.schema}.{name}", self.found.relations.get(name)
            if actual is None:
                yield self.missing_table(name)
                continue
            if actual.kind != TABLE:
                yield Finding(f"table {name}", f"is {_KINDS.get(actual.kind, 'something else')}", mends.NONE)
                continue
            if actual.persistence != "p":
                yield Finding(f"table {name}", "is UNLOGGED: a crash would empty it", plain(f"{target} SET LOGGED"))
            if actual.secured or actual.forced:
                statements = [f"{target} NO FORCE ROW LEVEL SECURITY"] if actual.forced else []
                statements += [f"{target} DISABLE ROW LEVEL SECURITY"] if actual.secured else []
                yield Finding(f"table {name}", "has row level security, which would hide jobs", plain(*statements))

    def missing_table(self, name: str) -> Finding:
        """A table of ours that is not there; its triggers follow by themselves."""
        made, problem = mends.create_table(self.schema, name, self.wanted), "is missing"
        if name == "schema_version" and self.lost:
            problem = f"is missing, so that nobody knows the version: all is compared with version {self.lost}"
            rows = ", ".join(f"({version})" for version in range(1, self.lost + 1))
            made = plain(*made.together, f"INSERT INTO {self.schema}.{name} (version) VALUES {rows}")  # noqa: S608
        return Finding(f"table {name}", problem, made)

    # -------------------------------------------------------------------------------------------------- columns
    def columns(self) -> Iterator[Finding]:
        """Columns: first those that are missing, then those that are others."""
        pairs = [
            (wanted, self.found.columns.get(name))
            for name, wanted in self.wanted.columns.items()
            if self.there(wanted.table)
        ]
        for wanted, actual in pairs:
            if actual is None:
                yield self.missing_column(wanted)
        retyped = [
            wanted for wanted, actual in pairs if actual and actual.type != wanted.type and actual.generated != VIRTUAL
        ]
        for wanted, actual in pairs:
            if actual is not None:
                if wanted in retyped:
                    # All at once: the view is over several tables, and cannot be made while their types differ.
                    change = mends.retype(self.schema, retyped, self.found, self.wanted)
                    yield Finding(f"column {key(wanted)}", _other("type", actual.type, wanted.type), change)
                    actual = replace(actual, default=wanted.default)  # noqa: PLW2901 - that is mended too
                yield from self.changed_column(wanted, actual)

    def missing_column(self, wanted: Column) -> Finding:
        """A column of ours that is not there."""
        problem = "is missing"
        if wanted.not_null and not harmless(wanted):
            problem += "; it has no default, so it can be added only while the table is empty"
        add = f"ALTER TABLE {self.schema}.{wanted.table} ADD COLUMN {mends.column_clause(wanted)}"
        return Finding(f"column {key(wanted)}", problem, plain(add))

    def changed_column(self, wanted: Column, actual: Column) -> Iterator[Finding]:
        """All but the type."""
        what, target = f"column {key(wanted)}", f"ALTER TABLE {self.schema}.{wanted.table} ALTER COLUMN {wanted.name}"
        if actual.generated and not wanted.generated:
            default = [f"{target} SET DEFAULT {wanted.sql_default}"] if wanted.default is not None else []
            ordinary = plain(f"{target} DROP EXPRESSION IF EXISTS", *default)
            possible = ordinary if actual.generated != VIRTUAL else mends.NONE
            yield Finding(what, f"is generated: {actual.default}", possible)
        elif actual.identity != wanted.identity:
            identities = {"a": "GENERATED ALWAYS", "d": "GENERATED BY DEFAULT", "": "no identity"}
            problem = _other("identity", identities[actual.identity], identities[wanted.identity])
            yield Finding(what, problem, mends.set_identity(self.schema, wanted, actual))
            return
        elif actual.default != wanted.default:
            change = f"SET DEFAULT {wanted.sql_default}" if wanted.default is not None else "DROP DEFAULT"
            yield Finding(what, _other("default", actual.default, wanted.default), plain(f"{target} {change}"))
        if wanted.not_null and not actual.not_null:
            yield Finding(what, "is not NOT NULL", mends.set_not_null(self.schema, wanted))
        elif actual.not_null and not wanted.not_null:
            yield Finding(what, "is NOT NULL", plain(f"{target} DROP NOT NULL"))
        elif actual.unproven:
            validate = f"ALTER TABLE {self.schema}.{wanted.table} VALIDATE CONSTRAINT {quoted(actual.unproven)}"
            yield Finding(what, "is NOT NULL, but not validated", plain(validate))

    # ------------------------------------------------------------------------------- constraints and indexes
    def constraints(self) -> Iterator[Finding]:
        """Constraints of the tables that are there."""
        names = {key(wanted): self.found.constraints[name].name for name, wanted in self.renamed.items()}
        for name, wanted in self.wanted.constraints.items():
            if not self.there(wanted.table):
                continue
            what, table = f"constraint {name}", f"{self.schema}.{wanted.table}"
            actual = self.found.constraints.get(name)
            if actual is None and name in names:
                rename = f"ALTER TABLE {table} RENAME CONSTRAINT {quoted(names[name])} TO {wanted.name}"
                yield Finding(what, f"is called {names[name]}", plain(rename))
            elif actual is None:
                other = self.primary_key(wanted.table) if wanted.kind == "p" else None
                problem = "is missing" if other is None else f"is missing: {other.name} stands in its place"
                yield Finding(what, problem, mends.add_constraint(self.schema, wanted, other.name if other else None))
            elif actual.definition == f"{wanted.definition} NOT VALID":
                validate = f"ALTER TABLE {table} VALIDATE CONSTRAINT {wanted.name}"
                yield Finding(what, "is NOT VALID: the rows of before were never checked", plain(validate))
            elif (actual.kind, actual.definition) != (wanted.kind, wanted.definition):
                change = mends.add_constraint(self.schema, wanted, wanted.name)
                yield Finding(what, _other("definition", actual.definition, wanted.definition), change)

    def primary_key(self, table: str) -> Constraint | None:
        """The one that a table has."""
        keys = self.found.of(self.found.constraints.values(), table)
        return next((one for one in keys if one.kind == "p"), None)

    def indexes(self) -> Iterator[Finding]:
        """Indexes of the tables that are there; storage parameters are the DBA's."""
        for name, wanted in self.wanted.indexes.items():
            actual = self.found.indexes.get(name)
            if not self.there(wanted.table):
                continue
            if actual is None:
                problem = "is missing"
            elif not actual.valid:
                problem = "is not valid: its build has failed, or is going on"
            elif actual.unique != wanted.unique:
                problem = "is not unique" if wanted.unique else "is unique"
            elif actual.keys != wanted.keys:
                problem = _other("columns", actual.keys, wanted.keys)
            elif actual.predicate != wanted.predicate:
                problem = _other("predicate", actual.predicate, wanted.predicate)
            else:
                continue
            yield Finding(f"index {name}", problem, mends.create_index(self.schema, wanted, actual))

    # ----------------------------------------------------------------------------- views, functions, triggers
    def views(self) -> Iterator[Finding]:
        """Views; options are the DBA's. A type among the columns follows from those of the tables."""
        for name, wanted in self.wanted.views.items():
            actual, relation = self.found.views.get(name), self.found.relations.get(name)
            if actual is None and relation is not None:
                yield Finding(f"view {name}", f"is {_KINDS.get(relation.kind, 'something else')}", mends.NONE)
            elif actual is None:
                yield Finding(f"view {name}", "is missing", mends.replace_view(self.schema, wanted, None))
            elif actual.definition != wanted.definition:
                change = mends.replace_view(self.schema, wanted, actual)
                problem = "has another text"
                if change.together[0].startswith("DROP"):
                    problem += " and other columns; it is dropped and made again, with its grants"
                yield Finding(f"view {name}", problem, change)

    def functions(self) -> Iterator[Finding]:
        """Functions, with all that is declared of them."""
        for signature, wanted in self.wanted.functions.items():
            actual = self.found.functions.get(signature)
            problem = "is missing" if actual is None else _function_changes(actual, wanted)
            if problem:
                yield Finding(f"function {signature}", problem, mends.replace_function(self.schema, wanted, actual))

    def triggers(self) -> Iterator[Finding]:
        """Triggers: their text, and that they fire."""
        for name, wanted in self.wanted.triggers.items():
            actual = self.found.triggers.get(name)
            if wanted.table in self.found.relations and not self.there(wanted.table):
                continue
            if actual is None or actual.definition != wanted.definition:
                problem = "is missing" if actual is None else "has another text"
                change = mends.replace_trigger(self.schema, wanted, actual)
            elif actual.enabled in ("D", "R"):
                problem = "is disabled" if actual.enabled == "D" else "fires on a replica only"
                change = plain(f"ALTER TABLE {self.schema}.{wanted.table} ENABLE TRIGGER {wanted.name}")
            else:
                continue
            yield Finding(f"trigger {name}", problem, change)


def _other(part: str, actual: object, wanted: object) -> str:
    """The words for a part that is not what it should be."""
    if actual is None:
        return f"has no {part}: it should be {wanted}"
    if wanted is None:
        return f"has a {part}: {actual}"
    return f"has another {part}: {actual} instead of {wanted}"


def _changes(actual: Sequence, wanted: Sequence) -> str:
    """Which fields of a sequence are others."""
    if actual.persistence != wanted.persistence:
        return "is UNLOGGED: a crash would set it back"
    if (actual.bound, actual.owner) != (wanted.bound, wanted.owner):
        return f"is owned by {actual.owner}: it would be dropped with it"
    return _other("definition", mends.sequence_options(actual), mends.sequence_options(wanted))


def _function_changes(actual: Function, wanted: Function) -> str | None:
    if actual.source != wanted.source:
        return "has another text"
    if actual.security_definer != wanted.security_definer:
        return "is SECURITY DEFINER" if actual.security_definer else "is not SECURITY DEFINER"
    for part in ("settings", "arguments", "result", "attributes"):
        one, other = getattr(actual, part), getattr(wanted, part)
        if one != other:
            if part == "settings":
                one, other = ", ".join(one) or None, ", ".join(other) or None
            return _other(part, one, other)
    return None
