"""What the current transaction still owes: transitions staged, rows not yet persistent.

A ledger belongs to one `SessionTransaction` (the innermost savepoint or the root), held weakly: rolling
a savepoint back, or closing the session without a word, drops exactly what was staged inside it, with no
event needed. `session.info` would outlive both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import inspect
from sqlalchemy.orm import InstanceState, Session, SessionTransaction
from sqlalchemy.orm.attributes import flag_dirty

from awa_sqla.models.base import Outcome
from awa_sqla.models.job import DeadLetter, Job, ScheduledJob


@dataclass(slots=True, eq=False)
class Staged:
    """One transition of this transaction.

    `row` is the job after it, `context` the outcome's own event fields. With `defer`, no spec is called:
    each is owed as an obligation. `rows` must become persistent before this entry may leave the ledger: the
    row of a move from the start, the follow-ups once they are `computed`.
    """

    row: Job | ScheduledJob | DeadLetter
    outcome: Outcome | None
    context: dict[str, Any] = field(default_factory=dict[str, Any])
    defer: bool = False
    rows: list[object] = field(default_factory=list[object])
    computed: bool = False

    @property
    def settled(self) -> bool:
        """Whether everything this transition brings is in the database."""
        return self.computed and all(inspect(row).key is not None for row in self.rows)


@dataclass(slots=True, eq=False)
class Ledger:
    """The staged transitions of one transaction, in order."""

    staged: list[Staged] = field(default_factory=list[Staged])
    draining: bool = False


_ledgers: WeakKeyDictionary[SessionTransaction, Ledger] = WeakKeyDictionary()
_deferring: WeakKeyDictionary[SessionTransaction, str | None] = WeakKeyDictionary()


def boundary(session: Session) -> SessionTransaction | None:
    """The innermost savepoint or root transaction of the session."""
    return session.get_nested_transaction() or session.get_transaction()


def current(session: Session) -> Ledger | None:
    """The ledger of the innermost transaction, if anything was staged in it."""
    transaction = boundary(session)
    return None if transaction is None else _ledgers.get(transaction)


def stage(session: Session, entry: Staged) -> None:
    """Remember a transition and make sure that the next flush happens.

    `flag_dirty` is what makes an otherwise clean session flush, and what makes a savepoint's rollback expire
    attributes that came in by RETURNING.
    """
    transaction = boundary(session)
    if transaction is None:  # pragma: no cover - the guarded statement has begun one
        raise RuntimeError("a transition was staged outside a transaction")
    ledger = _ledgers.setdefault(transaction, Ledger())
    entry.defer = entry.defer or deferring(session)
    ledger.staged.append(entry)
    state: InstanceState[Any] = inspect(entry.row)
    if state.persistent:
        flag_dirty(entry.row)
    session.add_all(entry.rows)


def hand_over(session: Session) -> None:
    """A savepoint is being released: what it still holds is its parent's."""
    transaction = session.get_nested_transaction()
    ledger = _ledgers.pop(transaction, None) if transaction is not None else None
    if ledger is not None and ledger.staged and transaction is not None and transaction.parent is not None:
        _ledgers.setdefault(transaction.parent, Ledger()).staged.extend(ledger.staged)


def defer_all(session: Session, *, error: str | None = None) -> None:
    """In the session's present root transaction, call no spec: every follow-up becomes an obligation.

    `error` is why, kept on the obligations.
    """
    _deferring[session.get_transaction() or session.begin()] = error


def deferring(session: Session) -> bool:
    """Whether `defer_all` holds for the session's present root transaction."""
    return session.get_transaction() in _deferring


def reason_to_defer(session: Session) -> str | None:
    """The error given to `defer_all`."""
    transaction = session.get_transaction()
    return None if transaction is None else _deferring.get(transaction)
