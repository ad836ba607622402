"""The verbs for `AsyncSession`: same names, same arguments, same behaviour, awaited.

Each runs its sync twin inside `AsyncSession.run_sync`; there is one implementation. What they return is
fully loaded, so no attribute access starts I/O. Make your sessions with
`async_sessionmaker(engine, expire_on_commit=False)`: after a commit with expiry, and after any rollback, an
attribute access would need I/O that async code cannot do.

    from awa_sqla import asyncio as awa_async

    async with AsyncSessionLocal.begin() as session:
        (job,) = await awa_async.claim(session, "email", limit=1)
        await awa_async.complete(session, job)
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Unpack
from uuid import UUID

from awa_sqla.args import JobArgs
from awa_sqla.cel.policy import CallbackPolicy, DefaultAction, Resolution, checked_policy, judge
from awa_sqla.models.job import Attempt, DeadLetter, Job, JobRecord, ScheduledJob
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session import batch, bulk, callbacks, resolving, tree, verbs
from awa_sqla.session import cancel as cancelling
from awa_sqla.session import enqueue as enqueueing
from awa_sqla.session.batch import CompletedBatch, Completion
from awa_sqla.session.callbacks import CallbackToken
from awa_sqla.session.enqueue import EnqueueResult, UniqueOptions, enqueue
from awa_sqla.session.target import AnyAsyncSession, async_session
from awa_sqla.unique import OnConflict

__all__ = [
    "cancel",
    "cancel_callback",
    "claim",
    "complete",
    "complete_external",
    "complete_many",
    "enqueue",
    "enqueue_many",
    "enqueue_unique",
    "fail",
    "fail_external",
    "heartbeat_callback",
    "lineage",
    "park",
    "register_callback",
    "resolve_callback",
    "resume_external",
    "retry_after",
    "retry_external",
    "set_progress",
    "snooze",
]


async def claim(
    session: AnyAsyncSession, queues: str | Iterable[str], /, *, limit: int, worker_id: str | None = None
) -> list[Job]:
    """See `awa_sqla.claim`."""
    target = async_session(session, "claim")
    return await target.run_sync(verbs.claim, queues, limit=limit, worker_id=worker_id)


async def complete(session: AnyAsyncSession, job: Job | Attempt, /, *, result: Any = None) -> Job:
    """See `awa_sqla.complete`."""
    return await async_session(session, "complete").run_sync(verbs.complete, job, result=result)


async def enqueue_unique(session: AnyAsyncSession, args: JobArgs, /, **options: Unpack[UniqueOptions]) -> EnqueueResult:
    """See `awa_sqla.enqueue_unique`."""
    target = async_session(session, "enqueue_unique")
    return await target.run_sync(enqueueing.enqueue_unique, args, **options)


async def enqueue_many(
    session: AnyAsyncSession, jobs: Iterable[JobArgs | EnqueueRequest], /, *, on_conflict: OnConflict = "raise"
) -> list[int | None]:
    """See `awa_sqla.enqueue_many`."""
    target = async_session(session, "enqueue_many")
    return await target.run_sync(bulk.enqueue_many, jobs, on_conflict=on_conflict)


async def fail(
    session: AnyAsyncSession, job: Job | Attempt, error: str | BaseException, /, *, terminal: bool = False
) -> Job | ScheduledJob | DeadLetter:
    """See `awa_sqla.fail`."""
    return await async_session(session, "fail").run_sync(verbs.fail, job, error, terminal=terminal)


async def retry_after(
    session: AnyAsyncSession, job: Job | Attempt, delay: timedelta, /, *, error: str = ""
) -> Job | ScheduledJob | DeadLetter:
    """See `awa_sqla.retry_after`."""
    return await async_session(session, "retry_after").run_sync(verbs.retry_after, job, delay, error=error)


async def snooze(session: AnyAsyncSession, job: Job | Attempt, delay: timedelta, /) -> ScheduledJob:
    """See `awa_sqla.snooze`."""
    return await async_session(session, "snooze").run_sync(verbs.snooze, job, delay)


async def cancel(session: AnyAsyncSession, job_or_id: cancelling.Cancellable, /, *, reason: str) -> Job | None:
    """See `awa_sqla.cancel`."""
    return await async_session(session, "cancel").run_sync(cancelling.cancel, job_or_id, reason=reason)


async def set_progress(
    session: AnyAsyncSession,
    job: Job | Attempt,
    percent: float | None = None,
    /,
    *,
    message: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Job:
    """See `awa_sqla.set_progress`."""
    target = async_session(session, "set_progress")
    return await target.run_sync(verbs.set_progress, job, percent, message=message, metadata=metadata)


async def complete_many(session: AnyAsyncSession, items: Iterable[Job | Attempt | Completion], /) -> CompletedBatch:
    """See `awa_sqla.complete_many`."""
    return await async_session(session, "complete_many").run_sync(batch.complete_many, items)


async def lineage(session: AnyAsyncSession, job_or_id: cancelling.Cancellable, /) -> list[JobRecord]:
    """See `awa_sqla.lineage`."""
    return await async_session(session, "lineage").run_sync(tree.lineage, job_or_id)


async def register_callback(
    session: AnyAsyncSession,
    job: Job | Attempt,
    /,
    *,
    timeout: timedelta = callbacks.HOUR,  # noqa: ASYNC109 - not of the coroutine
    policy: CallbackPolicy | None = None,
) -> CallbackToken:
    """See `awa_sqla.register_callback`."""
    target = async_session(session, "register_callback")
    if policy is not None:
        await to_thread(checked_policy, policy)  # once for each: what was checked is remembered
    return await target.run_sync(callbacks.register_callback, job, timeout=timeout, policy=policy)


async def cancel_callback(session: AnyAsyncSession, job: Job | Attempt, /) -> bool:
    """See `awa_sqla.cancel_callback`."""
    return await async_session(session, "cancel_callback").run_sync(callbacks.cancel_callback, job)


async def park(session: AnyAsyncSession, job: Job | Attempt, token: CallbackToken, /) -> Job | DeadLetter:
    """See `awa_sqla.park`."""
    return await async_session(session, "park").run_sync(callbacks.park, job, token)


async def complete_external(
    session: AnyAsyncSession, callback_id: UUID | str, payload: Any = None, /, *, run_lease: int | None = None
) -> Job:
    """See `awa_sqla.complete_external`."""
    target = async_session(session, "complete_external")
    return await target.run_sync(callbacks.complete_external, callback_id, payload, run_lease=run_lease)


async def fail_external(
    session: AnyAsyncSession,
    callback_id: UUID | str,
    error: str | BaseException,
    /,
    *,
    run_lease: int | None = None,
) -> Job | DeadLetter:
    """See `awa_sqla.fail_external`."""
    target = async_session(session, "fail_external")
    return await target.run_sync(callbacks.fail_external, callback_id, error, run_lease=run_lease)


async def resume_external(
    session: AnyAsyncSession, callback_id: UUID | str, payload: Any = None, /, *, run_lease: int | None = None
) -> Job:
    """See `awa_sqla.resume_external`."""
    target = async_session(session, "resume_external")
    return await target.run_sync(callbacks.resume_external, callback_id, payload, run_lease=run_lease)


async def retry_external(session: AnyAsyncSession, callback_id: UUID | str, /, *, run_lease: int | None = None) -> Job:
    """See `awa_sqla.retry_external`."""
    target = async_session(session, "retry_external")
    return await target.run_sync(callbacks.retry_external, callback_id, run_lease=run_lease)


async def resolve_callback(
    session: AnyAsyncSession,
    callback_id: UUID | str,
    payload: Any = None,
    /,
    *,
    default: DefaultAction,
    run_lease: int | None = None,
) -> Resolution:
    """See `awa_sqla.resolve_callback`. The policy is asked from a thread."""
    target = async_session(session, "resolve_callback")
    policy, job, checked = await target.run_sync(
        resolving.read_policy, callback_id, payload, default=default, run_lease=run_lease
    )
    verdict = await to_thread(judge, policy, checked, default)
    return await target.run_sync(resolving.resolve_as, job, verdict, callback_id=callback_id, run_lease=run_lease)


async def heartbeat_callback(
    session: AnyAsyncSession,
    callback_id: UUID | str,
    /,
    *,
    timeout: timedelta,  # noqa: ASYNC109 - not of the coroutine
) -> Job:
    """See `awa_sqla.heartbeat_callback`."""
    target = async_session(session, "heartbeat_callback")
    return await target.run_sync(callbacks.heartbeat_callback, callback_id, timeout=timeout)
