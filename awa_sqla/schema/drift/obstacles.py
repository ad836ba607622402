"""What the steps do not make: most of it is the application's or the DBA's to add, some of it stands in the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from awa_sqla.schema.drift import mends
from awa_sqla.schema.drift.catalog import Catalog, Column, Constraint, Index, key
from awa_sqla.schema.drift.mends import Mends, plain
from awa_sqla.schema.objects import quoted

#: The relkind of our tables.
TABLE = "r"


class Finding(NamedTuple):
    """One difference."""

    what: str
    problem: str
    mends: Mends


@dataclass(frozen=True)
class Sides:
    """The two catalogs, and what follows from them; `schema` is quoted."""

    schema: str
    found: Catalog
    wanted: Catalog

    @cached_property
    def tables_of_ours(self) -> set[str]:
        """The names of our tables."""
        return {relation.name for relation in self.wanted.relations.values() if relation.kind == TABLE}

    def there(self, table: str) -> bool:
        """Whether a table of this name is installed; something else may stand in its place."""
        relation = self.found.relations.get(table)
        return relation is not None and relation.kind == TABLE

    @cached_property
    def extra_columns(self) -> dict[str, Column]:
        """The columns of our tables that the steps do not make."""
        return {
            name: column
            for name, column in self.found.columns.items()
            if name not in self.wanted.columns and column.table in self.tables_of_ours
        }

    @cached_property
    def renamed(self) -> dict[str, Constraint]:
        """Constraints of ours that have only another name, by that name."""
        return {
            name: wanted
            for name, actual in self.found.constraints.items()
            if name not in self.wanted.constraints
            for wanted in self.wanted.constraints.values()
            if key(wanted) not in self.found.constraints
            and (wanted.table, wanted.kind, wanted.definition) == (actual.table, actual.kind, actual.definition)
        }


def harmless(column: Column) -> bool:
    """Whether a row can be added without it."""
    return column.default is not None or bool(column.identity) or bool(column.generated)


class Obstacles(Sides):
    """What others have added and what can make a statement of ours fail, as an iterable of findings."""

    def __iter__(self) -> Iterator[Finding]:
        """What the steps do not make and what can make a statement of ours fail."""
        for name, reference in self.found.references.items():
            if reference.table in self.tables_of_ours and reference.within not in self.tables_of_ours:
                yield Finding(
                    f"foreign key {name}",
                    f"refers to {reference.table}: it would forbid to move and to delete jobs",
                    plain(f"ALTER TABLE {reference.source} DROP CONSTRAINT {quoted(reference.name)}"),
                )
        for rule in self.found.rules.values():
            if rule.table in self.tables_of_ours:
                yield Finding(
                    f"rule {key(rule)}",
                    "is none of this schema's and would change its statements",
                    plain(f"DROP RULE {quoted(rule.name)} ON {self.schema}.{rule.table}"),
                )
        yield from self.extra_constraints()
        yield from self.extra_indexes()
        for column in self.extra_columns.values():
            if column.not_null and not harmless(column):
                yield Finding(
                    f"column {key(column)}",
                    "is none of this schema's, is NOT NULL and has no default: no row could be added",
                    plain(f"ALTER TABLE {self.schema}.{column.table} ALTER COLUMN {quoted(column.name)} DROP NOT NULL"),
                )

    def extra_constraints(self) -> Iterator[Finding]:
        """Constraints on our tables that the steps do not make, but those that can never fail for us."""
        for name, extra in self.found.constraints.items():
            if name in self.wanted.constraints or extra.table not in self.tables_of_ours or name in self.renamed:
                continue
            replaced = extra.kind == "p" and any(
                one.kind == "p" and one.table == extra.table and key(one) not in self.found.constraints
                for one in self.wanted.constraints.values()
            )
            apart = extra.kind == "f" or (extra.kind == "u" and "NULLS NOT DISTINCT" not in extra.definition)
            if replaced or (apart and self.only_theirs(extra)):
                continue
            yield Finding(
                f"constraint {name}",
                f"is none of this schema's and could refuse its rows: {extra.definition}",
                plain(f"ALTER TABLE {self.schema}.{extra.table} DROP CONSTRAINT {quoted(extra.name)}"),
            )

    def extra_indexes(self) -> Iterator[Finding]:
        """Unique indexes that the steps do not make, and what a rebuild of one of ours has left."""
        ours = {index.name for index in self.wanted.indexes.values()}
        ours |= {constraint.name for constraint in self.wanted.constraints.values()}
        for name, extra in self.found.indexes.items():
            if name in self.wanted.indexes or extra.table not in self.tables_of_ours:
                continue
            origin = next((one for one in ours if extra.name.startswith((f"{one}_ccnew", f"{one}_ccold"))), None)
            if not extra.valid and origin:
                yield Finding(
                    f"index {name}",
                    f"was left by a REINDEX CONCURRENTLY of {origin} that did not end",
                    mends.drop_index(self.schema, extra.name),
                )
            elif extra.unique and not (extra.plain and extra.distinct_nulls and self.only_theirs(extra)):
                yield Finding(
                    f"index {name}",
                    f"is none of this schema's, is unique and could refuse its rows: {extra.keys}",
                    mends.drop_index(self.schema, extra.name),
                )

    def only_theirs(self, extra: Constraint | Index) -> bool:
        """Whether it is about columns alone that our statements leave NULL."""
        columns = [self.extra_columns.get(f"{extra.table}.{name}") for name in extra.columns]
        return any(column and not column.not_null and column.default is None for column in columns)
