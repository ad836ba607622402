"""`FollowUps`: which jobs follow on which outcome of which kind, and the sessions in which that holds.

    follow_ups = FollowUps()

    @follow_ups.on_completed(Signup)
    def welcome(event: Completed[Signup]) -> SendEmail:
        return SendEmail(to=event.args.email, subject="Welcome")

    follow_ups.attach(SessionLocal)

From then on, completing a `Signup` in any session of `SessionLocal`, by whoever and whatever, adds the
`SendEmail` in the same flush: both commit, or neither. A spec is a pure function of its event; it may be
called again when a flush is retried. It returns one `JobArgs`, one `EnqueueRequest`, or an iterable of those;
an empty list means "none, on purpose", and `None` is an error, because a forgotten `return` would lose a side
effect in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeVar

from awa_sqla.args import A, JobArgs, concrete
from awa_sqla.errors import ConfigurationError, DuplicateKind
from awa_sqla.models.base import Outcome
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session import attachment, marks
from awa_sqla.session.events import (
    Cancelled,
    Completed,
    Exhausted,
    Rescued,
    Retried,
    WaitingForCallback,
)
from awa_sqla.session.naming import spec_name
from awa_sqla.session.specs import Spec

FollowUp = JobArgs | EnqueueRequest | Iterable[JobArgs | EnqueueRequest]
F = TypeVar("F", bound=FollowUp)


class FollowUps:
    """A registry of follow-up specs. Registering does no I/O; `attach()` makes it hold for sessions."""

    def __init__(self) -> None:
        self._specs: dict[tuple[str, Outcome], list[Spec]] = {}
        self._classes: dict[str, type[JobArgs]] = {}

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Everything registered, in registration order within one kind and outcome."""
        return tuple(spec for specs in self._specs.values() for spec in specs)

    def specs_of(self, kind: str, outcome: Outcome) -> tuple[Spec, ...]:
        """The specs of one kind and outcome, in registration order."""
        return tuple(self._specs.get((kind, outcome), ()))

    def spec_named(self, kind: str, outcome: Outcome, name: str) -> Spec | None:
        """One spec by its identity."""
        return next((spec for spec in self.specs_of(kind, outcome) if spec.name == name), None)

    def on_completed(
        self, args_class: type[A], /, *, name: str | None = None
    ) -> Callable[[Callable[[Completed[A]], F]], Callable[[Completed[A]], F]]:
        """Register a spec for jobs of `args_class` that complete: by a handler, a callback or a caller."""
        return self._on(Outcome.COMPLETED, args_class, name)

    def on_retried(
        self, args_class: type[A], /, *, name: str | None = None
    ) -> Callable[[Callable[[Retried[A]], F]], Callable[[Retried[A]], F]]:
        """Register a spec for attempts that fail and are tried again."""
        return self._on(Outcome.RETRIED, args_class, name)

    def on_exhausted(
        self, args_class: type[A], /, *, name: str | None = None
    ) -> Callable[[Callable[[Exhausted[A]], F]], Callable[[Exhausted[A]], F]]:
        """Register a spec for jobs that fail for good."""
        return self._on(Outcome.EXHAUSTED, args_class, name)

    def on_cancelled(
        self, args_class: type[A], /, *, name: str | None = None
    ) -> Callable[[Callable[[Cancelled[A]], F]], Callable[[Cancelled[A]], F]]:
        """Register a spec for jobs that are cancelled, by their handler, an app or an operator."""
        return self._on(Outcome.CANCELLED, args_class, name)

    def on_waiting_for_callback(
        self, args_class: type[A], /, *, name: str | None = None
    ) -> Callable[[Callable[[WaitingForCallback[A]], F]], Callable[[WaitingForCallback[A]], F]]:
        """Register a spec for jobs that are parked until a callback."""
        return self._on(Outcome.WAITING_FOR_CALLBACK, args_class, name)

    def on_rescued(
        self, args_class: type[A], /, *, name: str | None = None
    ) -> Callable[[Callable[[Rescued[A]], F]], Callable[[Rescued[A]], F]]:
        """Register a spec for attempts that maintenance took from a dead or overdue worker."""
        return self._on(Outcome.RESCUED, args_class, name)

    def _on(self, outcome: Outcome, args_class: type[JobArgs], name: str | None) -> Callable[[Any], Any]:
        """The decorator that registers. Raises `DuplicateKind`, and `ConfigurationError` for a bad name."""
        kind = concrete(args_class).__awa__.kind

        def register(function: Any) -> Any:
            if inspect.iscoroutinefunction(function):
                raise ConfigurationError(
                    f"follow-up spec {function.__qualname__} is a coroutine function: a spec is a pure function "
                    "of its event; do the I/O in the job it enqueues"
                )
            self._register(Spec(kind, outcome, spec_name(function, name), args_class, function))
            return function

        return register

    def _register(self, spec: Spec) -> None:
        known = self._classes.get(spec.kind)
        if known is not None and known is not spec.args_class:
            raise DuplicateKind(spec.kind, _full_name(known), _full_name(spec.args_class))
        if self.spec_named(spec.kind, spec.outcome, spec.name) is not None:
            raise ConfigurationError(
                f"two follow-up specs of {spec.kind} ({spec.outcome}) are named {spec.name!r}: give one of them "
                "name='...'; the name is its identity in the database"
            )
        self._classes[spec.kind] = spec.args_class
        self._specs.setdefault((spec.kind, spec.outcome), []).append(spec)

    def include(self, other: FollowUps, /) -> None:
        """Take over everything registered in `other`, as a router does.

        Raises `DuplicateKind` or `ConfigurationError` where both have the same, and then takes nothing.
        """
        merged = FollowUps()
        for spec in (*self.specs, *other.specs):
            merged._register(spec)
        self._specs, self._classes = merged._specs, merged._classes

    def attach(self, target: object, /) -> None:
        """Make these follow-ups hold in the sessions of `target`; doing it again changes nothing.

        `target` is a sessionmaker, a Session subclass, a Session, a scoped_session, or an async_sessionmaker,
        AsyncSession or async_scoped_session. Does no I/O.

        Raises `ConfigurationError` for `Session` and `AsyncSession` themselves (that would be every session of
        the process), for a target that has another registry (use `include()`), and for anything else.
        """
        attachment.attach(marks.FOLLOW_UPS, self, target)

    def detach(self, target: object, /) -> None:
        """Undo `attach(target)`; nothing to do when it was not attached."""
        attachment.detach(marks.FOLLOW_UPS, self, target)

    @contextmanager
    def attached(self, target: object, /) -> Generator[FollowUps, None, None]:
        """Attach to `target` inside a `with` block."""
        attachment.attach(marks.FOLLOW_UPS, self, target)
        try:
            yield self
        finally:
            attachment.detach(marks.FOLLOW_UPS, self, target)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
