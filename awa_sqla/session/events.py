"""The typed events that follow-up specs receive.

One class for each outcome. `event.job` is a frozen snapshot of the row after the transition;
`event.args` is decoded when it is first read, so that a spec that does not look at it cannot fail on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from awa_sqla.args import JobArgs
from awa_sqla.models.base import Outcome
from awa_sqla.models.snapshot import JobSnapshot
from awa_sqla.stored import decode

A_co = TypeVar("A_co", bound=JobArgs, covariant=True)


class RescueReason(StrEnum):
    """Why maintenance took a job away from its attempt."""

    STALE_HEARTBEAT = "stale_heartbeat"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    EXPIRED_CALLBACK = "expired_callback"


class Event(Generic[A_co]):
    """Base of the events: the decoded `args` and the `job` after the transition."""

    outcome: ClassVar[Outcome]

    def __init__(self, args: A_co | Callable[[], A_co], job: JobSnapshot) -> None:
        self._args = args
        self.job = job

    @property
    def args(self) -> A_co:
        """The job's arguments. Raises pydantic's `ValidationError` when the row does not fit the class."""
        given: Any = self._args
        if not isinstance(given, JobArgs):
            given = self._args = given()
        return cast("A_co", given)

    @classmethod
    def load(cls, args_class: type[JobArgs], job: JobSnapshot, context: Mapping[str, Any]) -> Self:
        """The event of a transition: `context` holds the outcome's own fields, also as plain JSON."""
        later: Any = lambda: decode(args_class, job.args, job.args_version)  # noqa: E731 - decoded when first read
        return cls(later, job, **cls.fields(context))

    @classmethod
    def fields(cls, context: Mapping[str, Any]) -> dict[str, Any]:
        """The outcome's own fields, from Python values or from JSON."""
        return dict(context)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.job.kind} {self.job.id}>"


class Started(Event[A_co]):
    """An attempt was claimed. For hooks only: it is no outcome, and nothing can follow on it."""


class Completed(Event[A_co]):
    """The job is completed; `result` is what the handler returned or a callback delivered."""

    outcome = Outcome.COMPLETED

    def __init__(
        self, args: A_co | Callable[[], A_co], job: JobSnapshot, result: Any = None, *, by_callback: bool = False
    ) -> None:
        super().__init__(args, job)
        self.result = result
        self._by_callback = by_callback

    @property
    def duration(self) -> timedelta:
        """From the claim to the completion, by the database's clock; zero when a callback has completed it."""
        claimed, ended = self.job.attempted_at, self.job.finalized_at
        if self._by_callback or claimed is None or ended is None:
            return timedelta(0)
        return ended - claimed


class Retried(Event[A_co]):
    """Attempt number `attempt` failed with `error`; the job runs again at `next_run_at` (UTC)."""

    outcome = Outcome.RETRIED

    def __init__(
        self,
        args: A_co | Callable[[], A_co],
        job: JobSnapshot,
        error: str,
        attempt: int,
        next_run_at: datetime,
    ) -> None:
        super().__init__(args, job)
        self.error = error
        self.attempt = attempt
        self.next_run_at = next_run_at

    @classmethod
    def fields(cls, context: Mapping[str, Any]) -> dict[str, Any]:
        when = context["next_run_at"]
        return {**context, "next_run_at": datetime.fromisoformat(when) if isinstance(when, str) else when}


class Exhausted(Event[A_co]):
    """The job failed for good with `error`, at attempt number `attempt`."""

    outcome = Outcome.EXHAUSTED

    def __init__(self, args: A_co | Callable[[], A_co], job: JobSnapshot, error: str, attempt: int) -> None:
        super().__init__(args, job)
        self.error = error
        self.attempt = attempt


class Cancelled(Event[A_co]):
    """The job was cancelled; `reason` is what the canceller said."""

    outcome = Outcome.CANCELLED

    def __init__(self, args: A_co | Callable[[], A_co], job: JobSnapshot, reason: str) -> None:
        super().__init__(args, job)
        self.reason = reason


class WaitingForCallback(Event[A_co]):
    """The job is parked until the outside world calls back."""

    outcome = Outcome.WAITING_FOR_CALLBACK


class Rescued(Event[A_co]):
    """Maintenance took the job from an attempt that was presumed dead, for `reason`."""

    outcome = Outcome.RESCUED

    def __init__(self, args: A_co | Callable[[], A_co], job: JobSnapshot, reason: RescueReason) -> None:
        super().__init__(args, job)
        self.reason = reason

    @classmethod
    def fields(cls, context: Mapping[str, Any]) -> dict[str, Any]:
        return {**context, "reason": RescueReason(context["reason"])}


EVENTS: dict[Outcome, type[Event[Any]]] = {
    cls.outcome: cls for cls in (Completed, Retried, Exhausted, Cancelled, WaitingForCallback, Rescued)
}


def plain(context: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome's own fields as JSON data, for an obligation."""
    return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in context.items()}
