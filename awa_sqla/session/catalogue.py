"""Which follow-up specs exist anywhere: the table that dispatching processes keep, read with a cache.

A process that makes a transition runs the specs it has. For one that only the catalogue lists it leaves an
obligation, so that no road and no process loses a follow-up. A row counts from 10 s after it was written
(so that a first worker's start does not make others owe what they are about to import) until 7 days after
its spec was last seen.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from weakref import WeakKeyDictionary

from sqlalchemy import Engine, delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from awa_sqla.models.base import Outcome
from awa_sqla.models.records import FollowUpSpec
from awa_sqla.session.target import jobs_bind, schema_in

#: How long a reading is kept, and how old a row must be to count.
FRESH = timedelta(seconds=10)
#: How long a spec counts after it was last seen.
REMEMBERED = timedelta(days=7)

Names = dict[tuple[str, str], frozenset[str]]

_now = func.statement_timestamp()
_READ = select(FollowUpSpec.kind, FollowUpSpec.outcome, FollowUpSpec.name).where(
    FollowUpSpec.last_seen > _now - REMEMBERED, FollowUpSpec.created_at <= _now - FRESH
)

_COLUMNS = (FollowUpSpec.kind, FollowUpSpec.outcome, FollowUpSpec.name)
_KEY = tuple_(*_COLUMNS)

_cache: WeakKeyDictionary[Engine, dict[str, tuple[float, Names]]] = WeakKeyDictionary()
_lock = threading.Lock()


def names(session: Session, kind: str, outcome: Outcome) -> frozenset[str]:
    """The catalogued specs of (kind, outcome). Reads through the session at most once in 10 s."""
    return _read(session).get((kind, outcome.value), frozenset())


def _read(session: Session) -> Names:
    bind = jobs_bind(session)
    engine, schema = bind.engine, schema_in(bind)
    cached = _cache.get(engine, {}).get(schema)
    if cached is not None and cached[0] > time.monotonic():
        return cached[1]
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for kind, outcome, name in session.execute(_READ):
        found[kind, outcome].add(name)
    result = {key: frozenset(value) for key, value in found.items()}
    with _lock:
        _cache.setdefault(engine, {})[schema] = (time.monotonic() + FRESH.total_seconds(), result)
    return result


def forget(session: Session, name: str) -> int:
    """Take a spec out of the catalogue: nothing more is owed to it. Returns how many rows it had.

    For a spec that was renamed or removed. A process that still has it writes it again with its next heartbeat; other
    processes notice within 10 s. What is owed already stays owed.
    """
    gone = session.execute(delete(FollowUpSpec).where(FollowUpSpec.name == name).returning(FollowUpSpec.kind)).all()
    forget_cache()
    return len(gone)


def forget_cache() -> None:
    """Read again at the next transition: for tests, and after a spec was forgotten."""
    with _lock:
        _cache.clear()


def publish(session: Session, specs: Iterable[tuple[str, Outcome, str]]) -> None:
    """Write (kind, outcome, name) of every spec this process can dispatch, or refresh when it was seen.

    All processes write the same rows with each heartbeat. One that stands still in the middle must not hold up the
    hearts of all others: rows that somebody else is refreshing are passed over.
    """
    wanted = {(kind, outcome.value, name) for kind, outcome, name in specs}
    if not wanted:
        return
    chosen = _KEY.in_(sorted(wanted))
    known = {tuple(row) for row in session.execute(select(*_COLUMNS).where(chosen))}
    missing = [{"kind": kind, "outcome": outcome, "name": name} for kind, outcome, name in sorted(wanted - known)]
    if missing:
        session.execute(insert(FollowUpSpec).values(missing).on_conflict_do_nothing())
    free = select(*_COLUMNS).where(chosen).order_by(*_COLUMNS).with_for_update(key_share=True, skip_locked=True)
    session.execute(
        update(FollowUpSpec)
        .where(_KEY.in_(free))
        .values(last_seen=func.clock_timestamp())
        .execution_options(synchronize_session=False)
    )
