"""Which registry belongs to which sessions: marks on session classes and on single sessions, held weakly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy.orm import Session

from awa_sqla.errors import FollowUpsNotAttached
from awa_sqla.models.base import Outcome
from awa_sqla.session.events import Event
from awa_sqla.session.specs import Spec

Mark = type[Session] | Session
R = TypeVar("R")


class Registry(Protocol):
    """What a session needs to know of a `FollowUps`."""

    @property
    def specs(self) -> Sequence[Spec]: ...

    def specs_of(self, kind: str, outcome: Outcome) -> Sequence[Spec]: ...


class Observers(Protocol):
    """What a session needs to know of a `Hooks`."""

    def wants(self, event: type[Event[Any]], kind: str) -> bool: ...

    def tell(self, happenings: Sequence[Any]) -> None: ...


class Marks(Generic[R]):
    """Marks of one sort: which registry belongs to a class or session. `noun` is what an error calls it."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._marks: WeakKeyDictionary[Mark, R] = WeakKeyDictionary()
        self.ever: WeakSet[R] = WeakSet()

    def get(self, place: Mark) -> R | None:
        """The registry marked on exactly this class or session."""
        return self._marks.get(place)

    def put(self, place: Mark, registry: R) -> None:
        """Mark a class or session."""
        self._marks[place] = registry
        self.ever.add(registry)

    def drop(self, place: Mark) -> None:
        """Take a mark away."""
        self._marks.pop(place, None)

    def of(self, session: Session) -> R | None:
        """The registry attached to this session or to the nearest of its classes."""
        own = self._marks.get(session)
        if own is not None:
            return own
        return next((self._marks[cls] for cls in type(session).__mro__ if cls in self._marks), None)


FOLLOW_UPS: Marks[Registry] = Marks("FollowUps")
HOOKS: Marks[Observers] = Marks("Hooks")


def registry_of(session: Session) -> Registry | None:
    """The follow-ups attached to this session or to the nearest of its classes."""
    return FOLLOW_UPS.of(session)


def require_registry(session: Session, verb: str) -> None:
    """Refuse a transition whose follow-ups this process has registered, but not for this session."""
    if registry_of(session) is None and any(registry.specs for registry in FOLLOW_UPS.ever):
        raise FollowUpsNotAttached(verb, type(session).__name__)
