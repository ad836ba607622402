"""The reference: a queue in plain Python, with several transactions and their savepoints.

A transaction is a pile of layers, the root's and one for each savepoint, over what is committed. A layer holds the
jobs as changed in it, its outcomes, what they owe, and what hooks are to be told. Rolling back drops layers, releasing
joins two, committing joins all of them with what is committed: that is the whole of the semantics.

Unique jobs wait in their layer until the next flush, which decides: the first of each key that nobody holds, as this
transaction sees it, is a job, and the others are duplicates. Late-bound jobs wait for the end of their layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from awa_sqla import Outcome
from tests.model.application import HOOKED, Cause, Claim, Followed, Key, Told, poisoned
from tests.model.rows import Happened, Row


@dataclass
class Wanted:
    """A unique job that waits for the flush; `cause` is that of a follow-up."""

    row: Row
    skip: bool
    cause: Cause | None = None


class Conflict(NamedTuple):
    """A duplicate that was not to be skipped, and the job that holds its key."""

    row: Row
    holder: Row


@dataclass
class Late:
    """A job whose arguments come at the end of its transaction, or never when it `raises`."""

    row: Row
    skip: bool
    number: int
    raises: bool


@dataclass
class Owed:
    """One obligation: what it is for, and how often its dispatch failed since it was last made due."""

    happened: Happened
    spec: Followed
    tries: int = 0
    waits: bool = False


@dataclass
class Layer:
    """What a transaction or savepoint has changed."""

    rows: dict[Key, Row] = field(default_factory=dict[Key, Row])
    outcomes: list[Happened] = field(default_factory=list[Happened])
    owed: list[Owed] = field(default_factory=list[Owed])
    told: list[Told] = field(default_factory=list[Told])
    vetoed: bool = False
    staged: list[Wanted] = field(default_factory=list[Wanted])  # follow-ups that the next flush will add
    new: list[Wanted] = field(default_factory=list[Wanted])
    late: list[Late] = field(default_factory=list[Late])
    skipped: list[Cause] = field(default_factory=list[Cause])
    taken: set[Claim] = field(default_factory=set[Claim])  # for these, others would wait

    @property
    def changed(self) -> bool:
        """Whether there is anything in it."""
        return bool(self.rows or self.staged or self.new or self.late)

    def join(self, upper: Layer) -> None:
        """Take over what a savepoint has changed."""
        self.rows |= upper.rows
        self.outcomes += upper.outcomes
        self.owed += upper.owed
        self.told += upper.told
        self.vetoed |= upper.vetoed
        self.staged += upper.staged
        self.new += upper.new
        self.late += upper.late
        self.skipped += upper.skipped
        self.taken |= upper.taken


class Transaction:
    """One session's transaction. `local` is whether the session has the local specs."""

    def __init__(self, reference: Reference, *, local: bool) -> None:
        self.reference = reference
        self.local = local
        self.layers = [Layer()]

    @property
    def vetoed(self) -> bool:
        """Whether a spec raises, so that nothing can be committed."""
        return any(layer.vetoed for layer in self.layers)

    @property
    def changed(self) -> bool:
        """Whether a commit would change anything."""
        return any(layer.changed for layer in self.layers)

    def view(self, key: Key) -> Row | None:
        """A job as this transaction sees it."""
        for layer in reversed(self.layers):
            if key in layer.rows:
                return layer.rows[key]
        return self.reference.committed.get(key)

    def rows(self) -> list[Row]:
        """All jobs that this transaction sees."""
        seen = dict(self.reference.committed)
        for layer in self.layers:
            seen |= layer.rows
        return list(seen.values())

    def holds(self, key: Key) -> bool:
        """Whether it has changed a job, and so holds its lock."""
        return any(key in layer.rows for layer in self.layers)

    def put(self, row: Row) -> None:
        """Change a job in the innermost savepoint."""
        before = self.view(row.key)
        if row.claim is not None and row.holds and not (before and before.holds):
            self.layers[-1].taken.add(row.claim)
        self.layers[-1].rows[row.key] = row

    def forget(self, key: Key) -> None:
        """A job that was added and never flushed has been taken out of the session."""
        for layer in self.layers:
            layer.rows.pop(key, None)
            layer.new = [one for one in layer.new if one.row.key != key]

    def started(self, row: Row) -> None:
        """A claim: hooks are told."""
        self._tell("started", row)
        self.put(row)

    def stage(self, row: Row, *outcomes: Outcome, defer: bool = False) -> None:
        """A transition, with its outcomes, and everything that they bring."""
        self.put(row)
        assert row.id is not None
        for outcome in outcomes:
            self._tell(outcome.value, row)
            happened = Happened(row.id, row.key, outcome, row.lease, row.root or row.id, row.poison)
            self.layers[-1].outcomes.append(happened)
            for spec in happened.specs:
                if not spec.local or not self.local or defer:
                    self.layers[-1].owed.append(Owed(happened, spec))
                    continue
                self.layers[-1].vetoed |= poisoned(row.kind, row.poison, spec.name)
                self.follow(happened, spec)

    def follow(self, happened: Happened, spec: Followed) -> None:
        """Add the jobs that a spec brings."""
        for child in happened.follow_ups(spec):
            if child.holds:
                self.layers[-1].staged.append(Wanted(child, True, happened.cause(spec)))
            else:
                self.put(child)

    def _tell(self, event: str, row: Row) -> None:
        if row.kind in HOOKED:
            assert row.id is not None
            self.layers[-1].told.append((event, row.kind, row.id, row.lease))

    # Unique jobs.
    def want(self, row: Row, *, skip: bool) -> None:
        """Add a job; one that is to hold a key waits for the flush."""
        if row.holds:
            self.layers[-1].new.append(Wanted(row, skip))
        else:
            self.put(row)

    def waits(self, key: Key | None = None) -> bool:
        """Whether a job, or any, waits for a flush."""
        waiting = [one for layer in self.layers for one in (*layer.staged, *layer.new)]
        return any(key in (None, one.row.key) for one in waiting)

    def wants(self, claim: Claim) -> bool:
        """Whether a job that waits is to hold this key."""
        return any(one.row.claim == claim for layer in self.layers for one in (*layer.staged, *layer.new, *layer.late))

    def holder(self, claim: Claim | None) -> Row | None:
        """The job that holds a key, as this transaction sees it."""
        found = [row for row in self.rows() if row.claim == claim and row.holds]
        assert len(found) < 2, f"several jobs hold {claim}: {found}"
        return found[0] if found else None

    def twin(self, before: Row, after: Row) -> Row | None:
        """The job that holds the key of one that would come back into its unique states."""
        return self.holder(before.claim) if before.comes_in(after) else None

    def flush(self) -> Conflict | None:
        """Decide about everything that waits, or refuse all duplicates that are not to be skipped."""
        for layer in self.layers:
            layer.new += layer.staged
            layer.staged = []
        first: dict[Claim | None, Row] = {}
        lost: list[tuple[Wanted, Row]] = []
        waiting = [(layer, one) for layer in self.layers for one in layer.new]
        for _, one in waiting:
            holder = self.holder(one.row.claim) or first.get(one.row.claim)
            if holder is None:
                first[one.row.claim] = one.row
            else:
                lost.append((one, holder))
        refused = [(one, holder) for one, holder in lost if not one.skip]
        if refused:
            self.tried(first)
            for one, _ in refused:
                self.forget(one.row.key)
            return Conflict(refused[0][0].row, refused[0][1])
        for layer, one in waiting:
            if first.get(one.row.claim) is one.row:
                layer.rows[one.row.key] = replace(one.row, certain=True)
                layer.taken |= {claim for claim in [one.row.claim] if claim}
            elif one.cause is not None:
                layer.skipped.append(one.cause)
            self.reference.duplicates += first.get(one.row.claim) is not one.row
            layer.new = []
        return None

    def tried(self, claims: Iterable[Claim | None]) -> None:
        """Keys were claimed and given back: others wait for them all the same."""
        self.layers[-1].taken.update(claim for claim in claims if claim is not None)

    def end(self, number: int) -> Conflict | Late | None:
        """Flush before the layers from `number` on are released, and bind what waits for their end."""
        if (conflict := self.flush()) is not None:
            return conflict
        for layer in self.layers[number:]:
            while layer.late:
                self.reference.called.add(layer.late[0].number)
                if layer.late[0].raises:
                    return layer.late[0]
                one = layer.late.pop(0)
                if one.row.holds:
                    layer.new.append(Wanted(one.row, one.skip))
                else:
                    layer.rows[one.row.key] = one.row
        return self.flush()

    def end_all(self) -> Conflict | Late | None:
        """End the savepoints from the innermost on, each released before the next, and then the transaction."""
        for number in reversed(range(len(self.layers))):
            if (refusal := self.end(number)) is not None:
                return refusal
            if number:
                self.release(number)
        return None

    # Savepoints are counted from 1, the root is layer 0.
    def begin_nested(self) -> None:
        """Open a savepoint."""
        self.layers.append(Layer())

    def release(self, savepoint: int) -> None:
        """Release a savepoint, and those inside it."""
        while len(self.layers) > savepoint:
            upper = self.layers.pop()
            self.layers[-1].join(upper)

    def roll_back_to(self, savepoint: int) -> None:
        """Roll a savepoint back, and those inside it."""
        del self.layers[savepoint:]

    def roll_back(self) -> None:
        """Roll everything back."""
        self.layers = [Layer()]

    def commit(self) -> None:
        """Make it true."""
        self.release(1)
        [root], self.layers = self.layers, [Layer()]
        reference = self.reference
        reference.committed |= {key: replace(row, certain=True) for key, row in root.rows.items()}
        reference.outcomes += root.outcomes
        reference.owed |= {owed.happened.cause(owed.spec): owed for owed in root.owed}
        reference.told += root.told
        reference.skipped.update(root.skipped)


class Reference:
    """The queue: what is committed, and the open transactions over it."""

    def __init__(self, *local: bool) -> None:
        self.committed: dict[Key, Row] = {}
        self.outcomes: list[Happened] = []
        self.owed: dict[Cause, Owed] = {}
        self.told: list[Told] = []
        self.skipped: Counter[Cause] = Counter()  # follow-ups that were duplicates
        self.called: set[int] = set()  # late-bound jobs whose callables were called
        self.duplicates = 0
        self.last_lease = 0
        self.transactions = [Transaction(self, local=each) for each in local]

    def elsewhere(self, mine: Transaction | None, key: Key) -> bool:
        """Whether another transaction than mine holds a job."""
        return any(one.holds(key) for one in self.transactions if one is not mine)

    def holder(self, claim: Claim | None) -> Row | None:
        """The committed job that holds a key."""
        return next((row for row in self.committed.values() if row.claim == claim and row.holds), None)

    def locked(self, mine: Transaction, claim: Claim | None) -> bool:
        """Whether a claim of this key would wait for another transaction: one that is seen to be held never does."""
        if mine.holder(claim) or self.holder(claim):
            return False
        return any(claim in layer.taken for one in self.transactions if one is not mine for layer in one.layers)

    def blocked(self, mine: Transaction, claim: Claim) -> bool:
        """Whether another transaction has claimed this key, or is going to."""
        others = [one for one in self.transactions if one is not mine]
        return self.locked(mine, claim) or any(one.wants(claim) for one in others)

    def free(self) -> list[Row]:
        """The committed jobs that no transaction holds."""
        return [row for row in self.committed.values() if not self.elsewhere(None, row.key)]

    def issued(self, lease: int) -> int:
        """A lease that has just been issued is later than every one before it, rolled back or not."""
        assert lease > self.last_lease, f"lease {lease} was issued after {self.last_lease}"
        self.last_lease = lease
        return lease
