"""The app's sessions: of whichever kind, on the road that suits them, and always closed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import anyio
import anyio.to_thread
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from awa_sqla.errors import ConfigurationError
from awa_sqla.session.trouble import passing
from awa_sqla.web.answers import Refusal, logger
from awa_sqla.web.transaction import Answer, Asked, Hooks, run, run_async

_ACCEPTED = (
    "a sessionmaker, an async_sessionmaker, a scoped session, or a callable that gives a Session or AsyncSession"
)


class Sessions:
    """A session factory, and whether its sessions are asynchronous: None until the first one has been seen."""

    def __init__(self, factory: object, hooks: Hooks) -> None:
        if not callable(factory) or inspect.iscoroutinefunction(factory) or inspect.isgeneratorfunction(factory):
            raise ConfigurationError(f"session_factory: must be {_ACCEPTED}, not {factory!r}")
        self._factory: Callable[[], Any] = cast("Callable[[], Any]", factory)
        self._scoped: Any = factory if isinstance(factory, scoped_session | async_scoped_session) else None
        self._hooks = hooks
        self._asynchronous = _asynchronous(cast("object", factory))
        if self._asynchronous is False:
            for hook in (hooks.before, hooks.after):
                if inspect.iscoroutinefunction(hook):
                    raise ConfigurationError(
                        f"{hook!r} is a coroutine function, but the session factory gives no AsyncSession"
                    )

    async def answer(self, asked: Asked) -> Answer:
        """What the request is answered, out of one transaction. Raises `Refusal`."""
        if not self._asynchronous:
            found = await anyio.to_thread.run_sync(partial(self._in_thread, asked))
            if not isinstance(found, AsyncSession):
                return found
            self._asynchronous = True
            return await self._on_loop(found, asked)
        return await self._on_loop(cast("AsyncSession", _made(self._factory)), asked)

    def _in_thread(self, asked: Asked) -> Answer | AsyncSession:
        """The request; or the session that was made for it, when it turns out to belong on the event loop."""
        session = _made(self._factory)
        try:
            if isinstance(session, AsyncSession):
                return session
            if not isinstance(session, Session):
                logger.error("the session factory gave a %s: it must be %s", type(session).__name__, _ACCEPTED)
                raise Refusal("internal")
            return run(session, asked, self._hooks)
        finally:
            if self._scoped is not None:
                self._scoped.remove()
            elif isinstance(session, Session):
                session.close()

    async def _on_loop(self, session: AsyncSession, asked: Asked) -> Answer:
        try:
            async with session:  # closes it also when the request is cancelled
                return await run_async(session, asked, self._hooks)
        finally:
            if self._scoped is not None:
                self._scoped.registry.clear()


def _made(factory: Callable[[], Any]) -> object:
    try:
        made: object = factory()
        while isinstance(made, scoped_session | async_scoped_session):
            made = cast("Callable[[], object]", made)()
        return made
    except BaseException as exc:
        if passing(exc):
            raise Refusal("unavailable") from exc
        logger.error("the session factory raised %s", type(exc).__name__, exc_info=exc)
        raise Refusal("internal") from exc


def _asynchronous(factory: object) -> bool | None:
    if isinstance(factory, sessionmaker | scoped_session):
        return False
    if isinstance(factory, async_sessionmaker | async_scoped_session):
        return True
    if isinstance(factory, type):
        if issubclass(factory, Session):
            return False
        if issubclass(factory, AsyncSession):
            return True
    return None
