"""What a step is: a short change of the catalog, then long work that others can go on beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

#: The lock modes that steps take, weakest first.
MODES = ("SHARE", "SHARE ROW EXCLUSIVE", "ACCESS EXCLUSIVE")


def exclusive(*relations: str) -> dict[str, str]:
    """Locks of relations that nobody else may use meanwhile, in this order."""
    return dict.fromkeys(relations, "ACCESS EXCLUSIVE")


@dataclass(frozen=True)
class Index:
    """An index on a table that may be large: built CONCURRENTLY, unless it must be part of a transaction."""

    table: str
    name: str
    definition: str
    unique: bool = False

    @property
    def what(self) -> str:
        """How it is called where somebody waits for it."""
        return f"index {self.name} on {self.table}"

    #: The mode in which a transaction locks the table for it.
    mode: ClassVar = "SHARE"

    def in_transaction(self) -> Iterator[str]:
        """The statement that builds it while writers wait."""
        yield self._create("")

    def beside_others(self) -> Iterator[str]:
        """The statements that build it outside a transaction; one that a failed build has left goes first."""
        yield f"DROP INDEX CONCURRENTLY IF EXISTS {{schema}}.{self.name}"
        yield self._create("CONCURRENTLY ")

    def unfinished(self) -> str:
        """SQL: whether it is missing, or of no use."""
        return f"""\
NOT EXISTS (SELECT FROM pg_catalog.pg_index JOIN pg_catalog.pg_class ON pg_class.oid = indexrelid
    WHERE indrelid = pg_catalog.to_regclass('{{schema}}.{self.table}') AND relname = '{self.name}' AND indisvalid)"""

    def _create(self, how: str) -> str:
        kind = "UNIQUE INDEX" if self.unique else "INDEX"
        return f"CREATE {kind} {how}{self.name} ON {{schema}}.{self.table} {self.definition}"


@dataclass(frozen=True)
class Validation:
    """The look at old rows that checks, added NOT VALID, are still owed; `repair` mends the rows that break them."""

    table: str
    names: tuple[str, ...]
    repair: str

    @property
    def what(self) -> str:
        """How it is called where somebody waits for it."""
        return f"rows of {self.table} for {', '.join(self.names)}"

    #: In a transaction that has added the checks there is a stronger lock already.
    mode: ClassVar = "SHARE"

    def in_transaction(self) -> Iterator[str]:
        """The statements; the lock lets others read and write."""
        yield self.repair
        yield f"ALTER TABLE {{schema}}.{self.table} {', '.join(f'VALIDATE CONSTRAINT {name}' for name in self.names)}"

    beside_others = in_transaction

    def unfinished(self) -> str:
        """SQL: whether it is still owed."""
        names = ", ".join(f"'{name}'" for name in self.names)
        return f"""\
EXISTS (SELECT FROM pg_catalog.pg_constraint
    WHERE conrelid = pg_catalog.to_regclass('{{schema}}.{self.table}') AND conname IN ({names}) AND NOT convalidated)"""


class Step(NamedTuple):
    """One step and its way back. Placeholders in the SQL are filled in by `awa_sqla.schema`.

    Attributes:
        up: the change of the catalog, in one transaction.
        down: the way back, in one transaction.
        locks: what `up` locks of relations that are there before: its mode by the relation's name, in the order in
            which they are taken. They are held for milliseconds.
        down_locks: the same of `down`.
        after: what follows on `up`, and may take long.
    """

    up: tuple[str, ...]
    down: tuple[str, ...]
    locks: Mapping[str, str]
    down_locks: Mapping[str, str]
    after: tuple[Index | Validation, ...] = ()

    @property
    def before(self) -> tuple[str, ...]:
        """What mends old rows already before the checks are there: from then on they could not be changed at all."""
        return tuple(work.repair for work in self.after if isinstance(work, Validation))
