"""What hooks will be told once the root transaction has committed.

Kept by transaction, as the ledger is: a savepoint that is rolled back takes its happenings along, one that is released
hands them to its parent, and the root's are told after its commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy.orm import Session, SessionTransaction

from awa_sqla.models.snapshot import JobSnapshot
from awa_sqla.session import marks
from awa_sqla.session.events import Event


class Happening(NamedTuple):
    """One event that hooks may be told of: its class, the job then, and its own fields."""

    event: type[Event[Any]]
    snapshot: JobSnapshot
    context: Mapping[str, Any]


_happened: WeakKeyDictionary[SessionTransaction, list[Happening]] = WeakKeyDictionary()


def wanted(session: Session, event: type[Event[Any]], kind: str) -> bool:
    """Whether a hook of this session is told of this event of this kind."""
    hooks = marks.HOOKS.of(session)
    return hooks is not None and hooks.wants(event, kind)


def note(transaction: SessionTransaction, happening: Happening) -> None:
    """Remember it for the end of the root transaction, if a hook wants to know."""
    if wanted(transaction.session, happening.event, happening.snapshot.kind):
        _happened.setdefault(transaction, []).append(happening)


def committed(session: Session) -> None:
    """In `after_commit`: hand over to the parent of a savepoint, or tell the hooks after the root's commit."""
    savepoint = session.get_nested_transaction()
    if savepoint is not None:
        mine = _happened.pop(savepoint, [])
        if mine and savepoint.parent is not None:
            _happened.setdefault(savepoint.parent, []).extend(mine)
        return
    root = session.get_transaction()
    mine = _happened.pop(root, []) if root is not None else []
    hooks = marks.HOOKS.of(session)
    if mine and hooks is not None:
        hooks.tell(mine)
