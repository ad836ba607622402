"""The reference: a queue in plain Python, with several transactions and their savepoints.

A transaction is a pile of layers, the root's and one for each savepoint, over what is committed. A layer holds the
jobs as changed in it, its outcomes, what they owe, and what hooks are to be told. Rolling back drops layers, releasing
joins two, committing joins all of them with what is committed: that is the whole of the semantics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from awa_sqla import Outcome
from tests.model.application import (
    DEAD,
    HOOKED,
    SPECS,
    Cause,
    Followed,
    Key,
    Told,
    follow_up,
    key_of,
    poisoned,
)

RESCUED = "heartbeat stale: worker presumed dead"


@dataclass(frozen=True)
class Row:
    """One job. `certain` is whether a statement of its own transaction must see it; `due` is for scheduled ones."""

    key: Key
    queue: str
    priority: int = 2
    max_attempts: int = 25
    poison: bool = False
    state: str = "available"
    store: str = "hot"
    attempt: int = 0
    snoozes: int = 0
    lease: int = 0
    errors: tuple[str, ...] = ()
    progress: dict[str, Any] | None = None
    result: Any = None
    due: bool = True
    silent: bool = False
    certain: bool = True
    id: int | None = None
    parent: int | None = None
    root: int | None = None
    parent_outcome: str | None = None

    @property
    def kind(self) -> str:
        """Its kind."""
        return str(self.key[0])

    # What the verbs do to it.
    def claimed(self, job_id: int, lease: int) -> Row:
        """Running, under a new lease."""
        return replace(self, state="running", attempt=self.attempt + 1, lease=lease, id=job_id, silent=False)

    def completed(self, result: Any) -> Row:
        """Finished with success."""
        return replace(self, state="completed", result=result, progress=None, silent=False)

    def failed(self, error: str, *, terminal: bool = False, due: bool = False) -> Row:
        """The attempt failed: tried again, failed for good, or kept as a dead letter."""
        ended = replace(self, errors=(*self.errors, error), silent=False)
        if not terminal and self.attempt < self.max_attempts:
            return replace(ended, state="retryable", store="scheduled", due=due)
        return replace(ended, state="failed", store="dead" if self.queue == DEAD else "hot")

    def put_back(self, *, due: bool, counts: int) -> Row:
        """Snoozed, or put back without counting it as a snooze."""
        left = {"attempt": self.attempt - 1, "snoozes": self.snoozes + counts, "silent": False}
        return replace(self, state="scheduled", store="scheduled", due=due, **left)  # type: ignore[arg-type]

    def cancelled(self, reason: str) -> Row:
        """Cancelled, wherever it was."""
        errors = (*self.errors, f"cancelled: {reason}")
        return replace(self, state="cancelled", store="hot", errors=errors, silent=False)

    def promoted(self) -> Row:
        """Available again."""
        return replace(self, state="available", store="hot")

    def progressed(self, percent: float | None, message: str | None, metadata: dict[str, Any]) -> Row:
        """What is None stays as it was; metadata is merged."""
        old = self.progress or {"percent": None, "message": None, "metadata": {}}
        new = {
            "percent": old["percent"] if percent is None else percent,
            "message": old["message"] if message is None else message,
            "metadata": old["metadata"] | metadata,
        }
        return replace(self, progress=new)


@dataclass(frozen=True)
class Happened:
    """One outcome of one job, with what its follow-ups take over."""

    job: int
    kind: str
    outcome: Outcome
    lease: int
    root: int
    poison: bool

    @property
    def specs(self) -> tuple[Followed, ...]:
        """What follows on it, wherever the spec is registered."""
        return SPECS.get((self.kind, self.outcome), ())

    def cause(self, spec: Followed) -> Cause:
        """The identity of one follow-up of it."""
        return self.job, self.outcome.value, self.lease, spec.name

    def follow_ups(self, spec: Followed) -> Iterator[Row]:
        """The jobs that a spec brings: the first at once, the others later."""
        for part in range(spec.parts):
            args = follow_up(self.kind, self.cause(spec), part)
            options = args.__awa__
            later: dict[str, Any] = {"state": "scheduled", "store": "scheduled", "due": False} if part else {}
            yield Row(
                key_of(options.kind, args.model_dump()),
                options.queue,
                max_attempts=options.max_attempts,
                certain=False,
                parent=self.job,
                root=self.root,
                parent_outcome=self.outcome.value,
                **later,
            )


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

    def join(self, upper: Layer) -> None:
        """Take over what a savepoint has changed."""
        self.rows |= upper.rows
        self.outcomes += upper.outcomes
        self.owed += upper.owed
        self.told += upper.told
        self.vetoed |= upper.vetoed


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
        return any(layer.rows for layer in self.layers)

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
        self.layers[-1].rows[row.key] = row

    def forget(self, key: Key) -> None:
        """A job that was added and never flushed has been taken out of the session."""
        for layer in self.layers:
            layer.rows.pop(key, None)

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
            happened = Happened(row.id, row.kind, outcome, row.lease, row.root or row.id, row.poison)
            self.layers[-1].outcomes.append(happened)
            for spec in happened.specs:
                if not spec.local or not self.local or defer:
                    self.layers[-1].owed.append(Owed(happened, spec))
                    continue
                self.layers[-1].vetoed |= poisoned(row.kind, row.poison, spec.name)
                for child in happened.follow_ups(spec):
                    self.put(child)

    def _tell(self, event: str, row: Row) -> None:
        if row.kind in HOOKED:
            assert row.id is not None
            self.layers[-1].told.append((event, row.kind, row.id, row.lease))

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


class Reference:
    """The queue: what is committed, and the open transactions over it."""

    def __init__(self, *local: bool) -> None:
        self.committed: dict[Key, Row] = {}
        self.outcomes: list[Happened] = []
        self.owed: dict[Cause, Owed] = {}
        self.told: list[Told] = []
        self.last_lease = 0
        self.transactions = [Transaction(self, local=each) for each in local]

    def elsewhere(self, mine: Transaction | None, key: Key) -> bool:
        """Whether another transaction than mine holds a job."""
        return any(one.holds(key) for one in self.transactions if one is not mine)

    def free(self) -> list[Row]:
        """The committed jobs that no transaction holds."""
        return [row for row in self.committed.values() if not self.elsewhere(None, row.key)]

    def issued(self, lease: int) -> int:
        """A lease that has just been issued is later than every one before it, rolled back or not."""
        assert lease > self.last_lease, f"lease {lease} was issued after {self.last_lease}"
        self.last_lease = lease
        return lease
