"""`enqueue()`: add one job to the caller's unit of work. No I/O; the flush sends it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypedDict, Unpack, overload

from awa_sqla.args import JobArgs
from awa_sqla.models.job import Job, ScheduledJob
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session import lineage, listeners, rows
from awa_sqla.session.target import AnyAsyncSession, SyncSession, any_session

SomeSession = SyncSession | AnyAsyncSession


class JobOptions(TypedDict, total=False):
    """The options of `enqueue()` that do not decide which table the job is for."""

    queue: str | None
    priority: int | None
    max_attempts: int | None
    deadline: timedelta | None
    tags: Iterable[str] | None
    metadata: Mapping[str, Any] | None


@overload
def enqueue(session: SomeSession, args: JobArgs, /, **options: Unpack[JobOptions]) -> Job: ...
@overload
def enqueue(
    session: SomeSession, args: JobArgs, /, *, run_at: datetime, **options: Unpack[JobOptions]
) -> ScheduledJob: ...
@overload
def enqueue(
    session: SomeSession, args: JobArgs, /, *, delay: timedelta, **options: Unpack[JobOptions]
) -> ScheduledJob: ...
@overload
def enqueue(
    session: SomeSession,
    args: JobArgs,
    /,
    *,
    run_at: datetime | None = None,
    delay: timedelta | None = None,
    **options: Unpack[JobOptions],
) -> Job | ScheduledJob: ...


def enqueue(
    session: SomeSession,
    args: JobArgs,
    /,
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    run_at: datetime | None = None,
    delay: timedelta | None = None,
    deadline: timedelta | None = None,
    tags: Iterable[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Job | ScheduledJob:
    """Add a job to `session`; it exists when the caller's transaction commits, and never otherwise.

    `session` is a Session or an AsyncSession (or a subclass, or a scoped one). `args` says what to do; every
    option left None takes the default of its class. `queue` is text of at most 200 characters, `priority` 1
    (first) to 4, `max_attempts` 1 to 1000, `deadline` the longest run of one attempt, `tags` at most 20 texts
    (in place of those of the class), `metadata` a JSON object. `run_at`, an aware datetime, or `delay`, counted
    by the database's clock from the flush, make it a scheduled job.

    Returns the pending `Job`, or the pending `ScheduledJob` when `run_at` or `delay` was given; its `id` is there
    after the flush. Does no I/O and is never a coroutine. A job enqueued inside a handler is a child of the
    running job.

    Raises `InvalidJob` naming the field (nothing was added, the transaction is as it was),
    `UnsupportedSession`, and `ConfigurationError` when called for the first time inside a flush of a session
    that nothing was attached to. The flush raises `ConfigurationError` in AUTOCOMMIT mode. (DESIGN 7)
    """
    target = any_session(session, "enqueue")
    request = EnqueueRequest(
        args,
        queue=queue,
        priority=priority,
        max_attempts=max_attempts,
        run_at=run_at,
        delay=delay,
        deadline=deadline,
        tags=tags,
        metadata=metadata,
    )
    job = rows.build(request, lineage.running())
    listeners.install(target, "enqueue")
    target.add(job)
    return job
