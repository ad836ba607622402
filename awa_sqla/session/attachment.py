"""What `attach()` accepts, and where it leaves its mark.

A mark sits on a session class or on one session. A sessionmaker has a Session subclass of its
own, which makes it the natural place; an async_sessionmaker gets one the first time, through its
`sync_session_class`, because session events cannot be put on async factories.
"""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakKeyDictionary

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from awa_sqla.errors import ConfigurationError
from awa_sqla.session import listeners
from awa_sqla.session.marks import Mark, Marks, R

_ACCEPTED = (
    "a sessionmaker, a Session subclass, a Session, a scoped_session, an async_sessionmaker, an AsyncSession or an "
    "async_scoped_session"
)


def attach(marks: Marks[R], registry: R, target: object) -> None:
    """Mark the sessions of `target` as belonging to `registry`."""
    place = _place(target, make=True)
    if place is None:  # pragma: no cover - make=True always finds one
        raise ConfigurationError(f"attach() takes {_ACCEPTED}")
    known = marks.get(place)
    if known is not None and known is not registry:
        raise ConfigurationError(
            f"{target!r} has another {marks.noun} attached already: join the two with include(other), or "
            "detach the other first"
        )
    listeners.install(place)
    marks.put(place, registry)


def detach(marks: Marks[R], registry: R, target: object) -> None:
    """Take the mark away again; our listeners stay, their belts hold in any case."""
    place = _place(target, make=False)
    if place is not None and marks.get(place) is registry:
        marks.drop(place)


def _place(target: object, *, make: bool) -> Mark | None:
    """The class or session that `target` stands for."""
    if isinstance(target, scoped_session | async_scoped_session):
        factory: Any = cast("Any", target).session_factory
        return _place(factory, make=make)
    if isinstance(target, async_sessionmaker):
        return _async_place(target, make=make)
    if isinstance(target, sessionmaker):
        return _class_of(target)
    if isinstance(target, AsyncSession):
        return target.sync_session
    if isinstance(target, Session):
        return target
    if isinstance(target, type) and issubclass(target, Session | AsyncSession):
        if target in (Session, AsyncSession):
            raise ConfigurationError(
                f"attaching to {target.__name__} itself would reach every session of the process: attach to your "
                "sessionmaker, or to a subclass"
            )
        if issubclass(target, Session):
            return target
    raise ConfigurationError(f"attach() takes {_ACCEPTED}, not {target!r}")


def _class_of(maker: Any) -> type[Session]:
    own: type[Session] = maker.class_
    return own


def _async_place(maker: Any, *, make: bool) -> Mark | None:
    sync: Any = maker.kw.get("sync_session_class") or maker.class_.sync_session_class
    if isinstance(sync, sessionmaker):
        return _class_of(sync)
    owned = _owners.get(maker)
    if owned is not None and owned is sync:
        return owned
    if not make:
        return None
    own: type[Session] = type(f"Attached{sync.__name__}", (sync,), {})
    maker.configure(sync_session_class=own)
    _owners[maker] = own
    return own


#: The Session subclass that was made for an async_sessionmaker.
_owners: WeakKeyDictionary[async_sessionmaker[Any], type[Session]] = WeakKeyDictionary()
