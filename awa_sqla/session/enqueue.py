"""`enqueue()`: add one job to the caller's unit of work. No I/O; the flush sends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypedDict, Unpack, overload

from awa_sqla.args import JobArgs
from awa_sqla.errors import InvalidJob
from awa_sqla.models.job import Job, ScheduledJob
from awa_sqla.requests import EnqueueRequest, Options
from awa_sqla.session import late, ledger, lineage, listeners, rows
from awa_sqla.session import unique as uniqueness
from awa_sqla.session.steps import entered
from awa_sqla.session.target import AnyAsyncSession, SyncSession, any_session
from awa_sqla.unique import OnConflict, Unique

SomeSession = SyncSession | AnyAsyncSession
SomeArgs = JobArgs | Callable[[], JobArgs]


class JobOptions(TypedDict, total=False):
    """The options of `enqueue()` that do not decide which table the job is for."""

    queue: str | None
    priority: int | None
    max_attempts: int | None
    deadline: timedelta | None
    tags: Iterable[str] | None
    metadata: Mapping[str, Any] | None
    unique: Unique | None
    on_conflict: OnConflict


@overload
def enqueue(session: SomeSession, args: SomeArgs, /, **options: Unpack[JobOptions]) -> Job: ...
@overload
def enqueue(
    session: SomeSession, args: SomeArgs, /, *, run_at: datetime, **options: Unpack[JobOptions]
) -> ScheduledJob: ...
@overload
def enqueue(
    session: SomeSession, args: SomeArgs, /, *, delay: timedelta, **options: Unpack[JobOptions]
) -> ScheduledJob: ...
@overload
def enqueue(
    session: SomeSession,
    args: SomeArgs,
    /,
    *,
    run_at: datetime | None = None,
    delay: timedelta | None = None,
    **options: Unpack[JobOptions],
) -> Job | ScheduledJob: ...


def enqueue(
    session: SomeSession,
    args: SomeArgs,
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
    unique: Unique | None = None,
    on_conflict: OnConflict = "raise",
) -> Job | ScheduledJob:
    """Add a job to `session`; it exists when the caller's transaction commits, and never otherwise.

    `session` is a Session or an AsyncSession (or a subclass, or a scoped one). `args` says what to do; every
    option left None takes the default of its class. `queue` is text of at most 200 characters, `priority` 1
    (first) to 4, `max_attempts` 1 to 1000, `deadline` the longest run of one attempt, `tags` at most 20 texts
    (in place of those of the class), `metadata` a JSON object. `run_at`, an aware datetime, or `delay`, counted
    by the database's clock from the flush, make it a scheduled job.

    With `unique`, or of a class that is unique, it may be a duplicate. The flush finds out, and waits for another
    open transaction that has claimed the key. `on_conflict="raise"` then raises `UniqueConflict` out of the flush;
    "skip" leaves the job out, and its `duplicate_of` is the holder's id. Nothing else in the transaction suffers.

    `args` may be a callable without arguments that returns them: it is called once, after a flush and before the
    innermost transaction or savepoint ends, so it can read what the database has made. What it raises comes out of
    that commit, and the transaction stays usable.

    Returns the pending `Job`, or the pending `ScheduledJob` when `run_at` or `delay` was given; its `id` is there
    after the flush. With a callable it is transient until then. Does no I/O and is never a coroutine. A job enqueued
    inside a handler is a child of the running job.

    Raises `InvalidJob` naming the field (nothing was added, the transaction is as it was),
    `UnsupportedSession`, and `ConfigurationError` when called for the first time inside a flush of a session
    that nothing was attached to; inside a flush of another one also `UniqueConflict`. The flush raises
    `ConfigurationError` in AUTOCOMMIT mode. (DESIGN 7)
    """
    target = any_session(session, "enqueue")
    options: dict[str, Any] = {
        "queue": queue,
        "priority": priority,
        "max_attempts": max_attempts,
        "run_at": run_at,
        "delay": delay,
        "deadline": deadline,
        "tags": tags,
        "metadata": metadata,
        "unique": unique,
        "on_conflict": on_conflict,
    }
    parent = lineage.running()
    if isinstance(args, JobArgs):
        job = rows.build(EnqueueRequest(args, **options), parent)
        listeners.install(target, "enqueue")
    else:
        if isinstance(args, EnqueueRequest):
            raise InvalidJob(
                "args", "is an EnqueueRequest: give its options to enqueue(), or the request to enqueue_many()"
            )
        if isinstance(args, type) or not callable(args):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidJob("args", f"must be a JobArgs instance or a callable that returns one, not {args!r:.100}")
        waiting = late.Late(Options(**options), args, parent)
        listeners.install(target, "enqueue")
        if late.wait(target, waiting):
            return waiting.job
        if not ledger.flushing(target):
            target.flush()
        job = waiting.bind()
    if ledger.flushing(target):
        uniqueness.settle_alone(target, job)  # our part of this flush is over, or still to come
    if job.duplicate_of is None:
        target.add(job)
    return job


@dataclass(frozen=True, slots=True)
class EnqueueResult:
    """What `enqueue_unique()` found: the id of the job that holds the key, and the job if it was made just now."""

    id: int
    created: bool
    job: Job | ScheduledJob | None


class UniqueOptions(TypedDict, total=False):
    """The options of `enqueue_unique()`: those of `enqueue()` without `on_conflict`."""

    queue: str | None
    priority: int | None
    max_attempts: int | None
    run_at: datetime | None
    delay: timedelta | None
    deadline: timedelta | None
    tags: Iterable[str] | None
    metadata: Mapping[str, Any] | None
    unique: Unique | None


def enqueue_unique(session: SyncSession, args: JobArgs, /, **options: Unpack[UniqueOptions]) -> EnqueueResult:
    """Add a unique job at once, or find the one that is there already.

    `unique`, or the class's own, says when two jobs are the same; the other options are those of `enqueue()`. Flushes
    the session; waits for another open transaction that has claimed the key, and is right whether that commits or
    rolls back. Returns an `EnqueueResult`: with `created`, `job` is this session's new row; else `id` is the job that
    holds the key, perhaps uncommitted in this very transaction, and `job` is None.

    Raises `InvalidJob` naming the field, `UnsupportedSession`, `ConfigurationError`, and what other rows in the flush
    raise; then this job is not in the session. (DESIGN 7)
    """
    target = entered(session, "enqueue_unique")
    if unknown := options.keys() - UniqueOptions.__annotations__.keys():
        raise TypeError(f"enqueue_unique() takes no {', '.join(sorted(unknown))}")
    request = EnqueueRequest(args, **options, on_conflict="skip")
    if request.uniqueness is None:
        raise InvalidJob(
            "unique", f"{type(args).__name__} is not unique: pass unique=Unique(...), or give it to the class"
        )
    job = rows.build(request, lineage.running())
    target.flush()
    target.add(job)
    try:
        target.flush()
    except BaseException:
        if job in target:
            target.expunge(job)
        raise
    if job.duplicate_of is not None:
        return EnqueueResult(job.duplicate_of, created=False, job=None)
    return EnqueueResult(job.id, created=True, job=job)
