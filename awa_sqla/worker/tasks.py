"""Tasks: which handler runs which kind, and how."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from awa_sqla.args import Backoff, JobArgs, backoff_of, concrete
from awa_sqla.errors import ConfigurationError, DuplicateKind, TerminalError, UnknownKind
from awa_sqla.session.trouble import passing
from awa_sqla.worker.forks import async_confined, confined
from awa_sqla.worker.outcomes import Failed

Errors = tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A handler and its settings."""

    args_class: type[JobArgs]
    handler: Callable[[Any], Any]
    is_async: bool
    transactional: bool
    retry_on: Errors | None
    discard_on: Errors

    @property
    def kind(self) -> str:
        """The kind it handles."""
        return self.args_class.__awa__.kind

    def failure(self, error: BaseException) -> Failed:
        """Whether an error that the handler raised ends the job or is tried again; trouble of the server is."""
        if isinstance(error, (TerminalError, *self.discard_on)):
            return Failed(error, terminal=True)
        tried_again = self.retry_on is None or isinstance(error, self.retry_on) or passing(error)
        return Failed(error, terminal=not tried_again)


class Tasks:
    """The tasks of one application, by kind."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Task] = {}

    def add(
        self,
        args_class: type[JobArgs],
        handler: Callable[[Any], Any],
        *,
        transactional: bool,
        retry_on: Iterable[type[BaseException]] | None,
        discard_on: Iterable[type[BaseException]],
    ) -> None:
        """Register a handler. Raises `DuplicateKind`, `ConfigurationError`, `InvalidJob`."""
        kind = concrete(args_class).__awa__.kind
        known = self._by_kind.get(kind)
        if known is not None and known.args_class is not args_class:
            raise DuplicateKind(kind, _full_name(known.args_class), _full_name(args_class))
        if known is not None:
            raise ConfigurationError(f"kind {kind!r} has a handler already: {_full_name(known.handler)}")
        if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
            raise ConfigurationError(f"handler {_full_name(handler)} is a generator; it must be a plain function")
        is_async = inspect.iscoroutinefunction(handler)
        self._by_kind[kind] = Task(
            args_class,
            async_confined(handler) if is_async else confined(handler),
            is_async,
            transactional,
            None if retry_on is None else _errors("retry_on", retry_on),
            _errors("discard_on", discard_on),
        )

    def get(self, kind: str, version: int = 1) -> Task | None:
        """The task that can read a row of this kind and version, if there is one."""
        task = self._by_kind.get(kind)
        return task if task is not None and version <= task.args_class.__awa__.version else None

    def named(self, kind: str) -> Task:
        """The task of a kind, or `UnknownKind` with the nearest name."""
        task = self._by_kind.get(kind)
        if task is None:
            near = difflib.get_close_matches(kind, self._by_kind, 1)
            raise UnknownKind(kind, near[0] if near else None)
        return task

    def backoff(self, kind: str) -> Backoff:
        """How failed jobs of a kind wait: as its task's class says."""
        task = self._by_kind.get(kind)
        return task.args_class.__awa__.backoff if task else backoff_of(kind)

    @property
    def kinds(self) -> list[str]:
        """All kinds, sorted."""
        return sorted(self._by_kind)

    @property
    def queues(self) -> set[str]:
        """The default queues of all kinds."""
        return {task.args_class.__awa__.queue for task in self._by_kind.values()}

    @property
    def any_sync_transactional(self) -> bool:
        """Whether some handler needs a sync session."""
        return any(task.transactional and not task.is_async for task in self._by_kind.values())


def _errors(option: str, given: Any) -> Errors:
    """A tuple of exception classes, or `ConfigurationError` naming the option."""
    several = isinstance(given, tuple | list | set | frozenset)
    found: tuple[Any, ...] = tuple(cast("Any", given)) if several else (given,)
    if not several or not all(isinstance(one, type) and issubclass(one, BaseException) for one in found):
        raise ConfigurationError(f"{option} must be a tuple of exception classes, such as (OSError,), not {given!r}")
    return found


def _full_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
