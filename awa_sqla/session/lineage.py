"""Where a job comes from: the running job whose handler or transition enqueued it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

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


_running: ContextVar[Parent | None] = ContextVar("awa_sqla_running", default=None)


def running() -> Parent | None:
    """The job whose handler is running in this context, if any."""
    return _running.get()


@contextmanager
def running_under(parent: Parent) -> Generator[None, None, None]:
    """Jobs enqueued inside this block are children of `parent`."""
    token = _running.set(parent)
    try:
        yield
    finally:
        _running.reset(token)
