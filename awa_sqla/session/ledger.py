"""What the current transaction still owes: transitions staged, rows not yet persistent.

A ledger belongs to one `SessionTransaction` (the innermost savepoint or the root), held weakly: rolling
a savepoint back, or closing the session without a word, drops exactly what was staged inside it, with no
event needed. `session.info` would outlive both.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import inspect
from sqlalchemy.orm import InstanceState, Session, SessionTransaction
from sqlalchemy.orm.attributes import flag_dirty

from awa_sqla.models.base import Outcome
from awa_sqla.models.job import DeadLetter, Job, ScheduledJob
from awa_sqla.models.snapshot import JobSnapshot
from awa_sqla.session.events import EVENTS, Started
from awa_sqla.session.happenings import Happening, note, wanted


@dataclass(slots=True, eq=False)
class Staged:
    """One transition of this transaction.

    `row` is the job after it, and `snapshot` its values, taken at once: the caller may expire or expunge the row.
    `context` holds the outcome's own event fields. With `defer`, no spec is called: each is owed as an obligation.
    `rows` must become persistent before this entry may leave the ledger: the row of a move from the start, the
    follow-ups once they are `computed`.
    """

    row: Job | ScheduledJob | DeadLetter
    outcome: Outcome | None
    context: dict[str, Any] = field(default_factory=dict[str, Any])
    defer: bool = False
    rows: list[object] = field(default_factory=list[object])
    computed: bool = False
    snapshot: JobSnapshot = field(init=False)

    def __post_init__(self) -> None:
        self.snapshot = JobSnapshot.of(self.row)


@dataclass(slots=True, eq=False)
class Ledger:
    """The staged transitions of one transaction, in order; the duplicates that were left out of its flushes, and the
    (key, id) that new rows have claimed.
    """

    staged: list[Staged] = field(default_factory=list[Staged])
    draining: bool = False
    left_out: set[object] = field(default_factory=set[object])
    claims: dict[object, tuple[bytes, int]] = field(default_factory=dict[object, tuple[bytes, int]])


_ledgers: WeakKeyDictionary[SessionTransaction, Ledger] = WeakKeyDictionary()
_deferring: WeakKeyDictionary[SessionTransaction, str | None] = WeakKeyDictionary()

#: Sessions whose flush has sent its SQL, with the rows to mark as dirty once it is over.
_flushed: WeakKeyDictionary[Session, list[object]] = WeakKeyDictionary()


def boundary(session: Session) -> SessionTransaction | None:
    """The innermost savepoint or root transaction of the session."""
    return session.get_nested_transaction() or session.get_transaction()


def current(session: Session) -> Ledger | None:
    """The ledger of the innermost transaction, if anything was staged in it."""
    transaction = boundary(session)
    return None if transaction is None else _ledgers.get(transaction)


def unsettled(session: Session) -> list[Ledger]:
    """The ledgers of all open transactions of the session, the root's first."""
    found: list[Ledger] = []
    transaction = boundary(session)
    while transaction is not None:
        if (ledger := _ledgers.get(transaction)) is not None:
            found.insert(0, ledger)
        transaction = transaction.parent
    return found


def stage(session: Session, entry: Staged) -> None:
    """Remember a transition and make sure that the next flush happens."""
    transaction = boundary(session)
    if transaction is None:  # pragma: no cover - the guarded statement has begun one
        raise RuntimeError("a transition was staged outside a transaction")
    ledger = _ledgers.setdefault(transaction, Ledger())
    entry.defer = entry.defer or deferring(session)
    ledger.staged.append(entry)
    if entry.outcome is not None:
        note(transaction, Happening(EVENTS[entry.outcome], entry.snapshot, entry.context))
    mark_dirty(session, entry.row)
    for row in entry.rows:
        row.moved = True  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        _make_room(session, row)
    session.add_all(entry.rows)


_sending: WeakSet[Session] = WeakSet()


def is_sending(session: Session) -> bool:
    """Whether `enqueue_many()` is at work in this session: what its iterable wrote would go with its savepoint."""
    return session in _sending


@contextmanager
def sending(session: Session) -> Generator[None, None, None]:
    """While the iterable of `enqueue_many()` runs, nothing else is written through the session."""
    _sending.add(session)
    try:
        yield
    finally:
        _sending.discard(session)


def claimed(session: Session, row: object, key: bytes, job_id: int) -> None:
    """A new row has claimed a key, ahead of its INSERT."""
    transaction = boundary(session)
    if transaction is not None:
        _ledgers.setdefault(transaction, Ledger()).claims[row] = (key, job_id)


def idle_claims(session: Session) -> dict[bytes, int]:
    """Keys that were claimed for rows which were never stored, and are no longer in the session."""
    idle: dict[bytes, int] = {}
    for ledger in unsettled(session):
        gone = [row for row in ledger.claims if inspect(row).key is not None or row not in session]
        for row in gone:
            key, job_id = ledger.claims.pop(row)
            if inspect(row).key is None:
                idle[key] = job_id
    return idle


def leave_out(session: Session, row: object) -> None:
    """This row is a duplicate, as far as the innermost transaction sees it; rolled back, it may be none."""
    transaction = boundary(session)
    if transaction is not None:
        _ledgers.setdefault(transaction, Ledger()).left_out.add(row)


def missing(session: Session, rows: Iterable[object]) -> list[object]:
    """Those of `rows` that are not in the database, and are no duplicates that were left out."""
    left_out = [ledger.left_out for ledger in unsettled(session) if ledger.left_out]
    return [row for row in rows if inspect(row).key is None and not any(row in each for each in left_out)]


def settled(session: Session, entry: Staged) -> bool:
    """Whether everything that a transition brings is in the database."""
    return entry.computed and not missing(session, entry.rows)


def _make_room(session: Session, row: object) -> None:
    """Let go of an object whose row another session has moved away, now that the row comes back."""
    known = session.identity_map.get(inspect(type(row)).identity_key_from_instance(row))
    if known is not None:
        session.expunge(known)


def note_started(session: Session, job: Job) -> None:
    """A claim is no outcome, but hooks may want to know."""
    transaction = boundary(session)
    if transaction is not None and wanted(session, Started, job.kind):
        note(transaction, Happening(Started, JobSnapshot.of(job), {}))


def flushing(session: Session) -> bool:
    """Whether the session is inside its flush."""
    return bool(getattr(session, "_flushing", False))


def in_event(session: Session) -> bool:
    """Whether the session is inside a flush, or its transaction inside a commit or another change of state."""
    return bool(ending(session)) or flushing(session)


def is_ending(transaction: SessionTransaction) -> bool:
    """Whether a transaction is inside its commit, or another change of state."""
    return getattr(transaction, "_current_fn", None) is not None


def ending(session: Session) -> list[SessionTransaction]:
    """The transactions that end together now, the outermost first: committing one commits the savepoints in it."""
    chain: list[SessionTransaction] = []
    transaction = boundary(session)
    while transaction is not None:
        chain.insert(0, transaction)
        transaction = transaction.parent
    while chain and not is_ending(chain[0]):
        del chain[0]
    return chain


def mark_dirty(session: Session, row: object) -> None:
    """`flag_dirty`, for a row that a statement has changed.

    It makes an otherwise clean session flush, and a savepoint's rollback expire attributes that came in by
    RETURNING. In an after_flush listener it has to wait for the end of the flush, which would undo it.
    """
    waiting = _flushed.get(session) if flushing(session) else None
    if waiting is not None:
        waiting.append(row)
        return
    state: InstanceState[Any] = inspect(row)
    if state.persistent:
        flag_dirty(row)


def flush_begins(session: Session) -> None:
    """In `before_flush`: an earlier flush may have failed half-way."""
    _flushed.pop(session, None)


def sql_is_sent(session: Session) -> None:
    """In `after_flush`: rows that are marked from now on wait for `flush_is_over`."""
    _flushed[session] = []


def flush_is_over(session: Session) -> None:
    """In `after_flush_postexec`: mark the rows that have waited."""
    for row in _flushed.pop(session, ()):
        mark_dirty(session, row)


def hand_over(session: Session) -> None:
    """A savepoint is being released: what it still holds is its parent's."""
    transaction = session.get_nested_transaction()
    ledger = _ledgers.pop(transaction, None) if transaction is not None else None
    if ledger is not None and transaction is not None and transaction.parent is not None:
        parent = _ledgers.setdefault(transaction.parent, Ledger())
        parent.staged.extend(ledger.staged)
        parent.left_out |= ledger.left_out
        parent.claims |= ledger.claims


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
