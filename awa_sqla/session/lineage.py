"""Where a job comes from: the running job whose handler or transition enqueued it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

from awa_sqla.models.base import Outcome
from awa_sqla.models.job import DeadLetter, Job, ScheduledJob
from awa_sqla.models.snapshot import JobSnapshot


class Parent(NamedTuple):
    """The ids a new job takes over. `outcome` is None for a plain enqueue in a handler."""

    id: int
    root_id: int
    outcome: Outcome | None = None

    @classmethod
    def of(cls, job: Job | ScheduledJob | DeadLetter | JobSnapshot, outcome: Outcome | None = None) -> Parent:
        """The parent that `job` is for what it brings about."""
        return cls(job.id, job.root_id if job.root_id is not None else job.id, outcome)

    def columns(self) -> dict[str, Any]:
        """What a child's row says of it."""
        outcome = None if self.outcome is None else self.outcome.value
        return {"parent_id": self.id, "root_id": self.root_id, "parent_outcome": outcome}


_running: ContextVar[Parent | None] = ContextVar("awa_sqla_running", default=None)


def running() -> Parent | None:
    """The job whose handler is running in this context, if any."""
    return _running.get()


def run_under(parent: Parent) -> None:
    """From here on, jobs enqueued in this context (a task's, or a copied one) are children of `parent`."""
    _running.set(parent)
