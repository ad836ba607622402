"""`Hooks`: observation of what has happened, after the commit, in this process, best effort.

    hooks = Hooks()

    @hooks.on(Completed, SendEmail)
    def count(event: Completed[SendEmail]) -> None:
        metrics.increment("emails")

    hooks.attach(SessionLocal)

A hook is told when the root transaction has committed, and never for what a savepoint or the root has rolled back. It
may be lost with the process, and whatever it raises is logged and swallowed: the commit is done. What must not be
lost is a follow-up (`FollowUps`), not a hook.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from awa_sqla.args import A, JobArgs, concrete
from awa_sqla.errors import ConfigurationError
from awa_sqla.session import attachment, marks
from awa_sqla.session.events import (
    Cancelled,
    Completed,
    Event,
    Exhausted,
    Rescued,
    Retried,
    Started,
    WaitingForCallback,
)
from awa_sqla.session.happenings import Happening

log = logging.getLogger("awa_sqla.hooks")

Told = Callable[[Any], object]
H = TypeVar("H", bound=Told)

_CLASSES = (Started, Completed, Retried, Exhausted, Cancelled, WaitingForCallback, Rescued)
_running: set[asyncio.Task[Any]] = set()


class Hooks:
    """A registry of hooks. Registering does no I/O; `attach()` makes it hold for sessions."""

    def __init__(self) -> None:
        self._hooks: dict[tuple[type[Event[Any]], str], list[tuple[type[JobArgs], Told]]] = {}

    @overload
    def on(
        self, event: type[Started[Any]], args_class: type[A], /
    ) -> Callable[[Callable[[Started[A]], Any]], Callable[[Started[A]], Any]]: ...
    @overload
    def on(
        self, event: type[Completed[Any]], args_class: type[A], /
    ) -> Callable[[Callable[[Completed[A]], Any]], Callable[[Completed[A]], Any]]: ...
    @overload
    def on(
        self, event: type[Retried[Any]], args_class: type[A], /
    ) -> Callable[[Callable[[Retried[A]], Any]], Callable[[Retried[A]], Any]]: ...
    @overload
    def on(
        self, event: type[Exhausted[Any]], args_class: type[A], /
    ) -> Callable[[Callable[[Exhausted[A]], Any]], Callable[[Exhausted[A]], Any]]: ...
    @overload
    def on(
        self, event: type[Cancelled[Any]], args_class: type[A], /
    ) -> Callable[[Callable[[Cancelled[A]], Any]], Callable[[Cancelled[A]], Any]]: ...
    @overload
    def on(
        self, event: type[WaitingForCallback[Any]], args_class: type[A], /
    ) -> Callable[[Callable[[WaitingForCallback[A]], Any]], Callable[[WaitingForCallback[A]], Any]]: ...
    @overload
    def on(
        self, event: type[Rescued[Any]], args_class: type[A], /
    ) -> Callable[[Callable[[Rescued[A]], Any]], Callable[[Rescued[A]], Any]]: ...

    def on(self, event: type[Event[Any]], args_class: type[JobArgs], /) -> Callable[[Any], Any]:
        """Register a hook for jobs of `args_class`: the decorated function gets the typed event.

        `event` is `Started` (an attempt of a known kind was claimed) or one of the six outcomes. An `async def` hook
        is scheduled on the running loop, and in code without a loop run to its end. Several hooks run in
        registration order. Raises `ConfigurationError` for another event, `InvalidJob` for an abstract class.
        """
        if event not in _CLASSES:
            known = ", ".join(cls.__name__ for cls in _CLASSES)
            raise ConfigurationError(f"hooks are told of {known}, not of {event!r}")
        kind = concrete(args_class).__awa__.kind

        def register(hook: H) -> H:
            self._hooks.setdefault((event, kind), []).append((args_class, hook))
            return hook

        return register

    def wants(self, event: type[Event[Any]], kind: str) -> bool:
        """Whether some hook is told of this event of this kind."""
        return (event, kind) in self._hooks

    def attach(self, target: object, /) -> None:
        """Make these hooks hold in the sessions of `target`; accepts and raises what `FollowUps.attach` does."""
        attachment.attach(marks.HOOKS, self, target)

    def detach(self, target: object, /) -> None:
        """Undo `attach(target)`; nothing to do when it was not attached."""
        attachment.detach(marks.HOOKS, self, target)

    def include(self, other: Hooks, /) -> None:
        """Take over everything registered in `other`, as a router does."""
        for key, hooks in other._hooks.items():
            self._hooks.setdefault(key, []).extend(hooks)

    @contextmanager
    def attached(self, target: object, /) -> Generator[Hooks, None, None]:
        """Attach to `target` inside a `with` block."""
        self.attach(target)
        try:
            yield self
        finally:
            self.detach(target)

    def tell(self, happenings: Sequence[Happening]) -> None:
        """Call the hooks of everything that has happened, in order. Raises nothing but KeyboardInterrupt."""
        for happening in happenings:
            for args_class, hook in self._hooks.get((happening.event, happening.snapshot.kind), ()):
                event = happening.event.load(args_class, happening.snapshot, happening.context)
                _call(hook, event)


def _call(hook: Told, event: Event[Any]) -> None:
    try:
        returned = hook(event)
        if inspect.iscoroutine(returned):
            _finish(hook, event, returned)
    except KeyboardInterrupt:
        raise
    except BaseException:
        log.exception("the hook %s failed on %r; what it was told of is committed", _name(hook), event)


def _finish(hook: Told, event: Event[Any], work: Coroutine[Any, Any, object]) -> None:
    """Run an async hook: as a task of the running loop, or here and now where there is none."""

    async def contained() -> None:
        try:
            await work
        except Exception:
            log.exception("the hook %s failed on %r; what it was told of is committed", _name(hook), event)

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(contained())
        return
    task = loop.create_task(contained())
    _running.add(task)  # the loop itself holds tasks weakly
    task.add_done_callback(_running.discard)


def _name(hook: Told) -> str:
    return str(getattr(hook, "__qualname__", hook))
