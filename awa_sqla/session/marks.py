"""Which registry belongs to which sessions: marks on session classes and on single sessions, held weakly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy.orm import Session

from awa_sqla.errors import FollowUpsNotAttached
from awa_sqla.models.base import Outcome
from awa_sqla.session.specs import Spec

Mark = type[Session] | Session


class Registry(Protocol):
    """What a session needs to know of a `FollowUps`."""

    @property
    def specs(self) -> Sequence[Spec]: ...

    def specs_of(self, kind: str, outcome: Outcome) -> Sequence[Spec]: ...


_marks: WeakKeyDictionary[Mark, Registry] = WeakKeyDictionary()
_ever: WeakSet[Registry] = WeakSet()


def get(place: Mark) -> Registry | None:
    """The registry marked on exactly this class or session."""
    return _marks.get(place)


def put(place: Mark, registry: Registry) -> None:
    """Mark a class or session."""
    _marks[place] = registry
    _ever.add(registry)


def drop(place: Mark) -> None:
    """Take a mark away."""
    _marks.pop(place, None)


def registry_of(session: Session) -> Registry | None:
    """The registry attached to this session or to the nearest of its classes."""
    own = _marks.get(session)
    if own is not None:
        return own
    return next((_marks[cls] for cls in type(session).__mro__ if cls in _marks), None)


def require_registry(session: Session, verb: str) -> None:
    """Refuse a transition whose follow-ups this process has registered, but not for this session."""
    if registry_of(session) is None and any(registry.specs for registry in _ever):
        raise FollowUpsNotAttached(verb, type(session).__name__)
