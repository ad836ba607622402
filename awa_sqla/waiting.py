"""`wait_for()`: the result of a job, for those who cannot go on without it.

It only reads. Each look is a short transaction of its own on a new session of the factory; between two looks
nothing is held, no connection and no snapshot. It polls, because a notification is only a hint and a listener would
keep a connection for each wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, NamedTuple, overload

from sqlalchemy import BigInteger, bindparam, case, func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import limits
from awa_sqla.errors import JobFailed, JobNotFound, UnsupportedSession
from awa_sqla.models.base import JobState
from awa_sqla.models.job import JobRecord
from awa_sqla.session.target import jobs_bind
from awa_sqla.session.trouble import transient

#: Seconds: the pause after the first look, and the longest; each is half as long again as the one before.
FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 0.02, 1.0, 1.5

#: Of the errors, which can weigh megabytes, only the last, and only when it counts.
_LOOK = select(
    JobRecord.state,
    JobRecord.result,
    case(
        (
            JobRecord.state.in_([JobState.FAILED, JobState.CANCELLED]),
            JobRecord.errors[func.cardinality(JobRecord.errors)]["error"].astext,
        ),
    ).label("error"),
).where(JobRecord.id == bindparam("job_id", type_=BigInteger))


@overload
def wait_for(factory: sessionmaker[Any], job_id: int, /, *, timeout: timedelta = ...) -> Any: ...
@overload
def wait_for(
    factory: async_sessionmaker[Any], job_id: int, /, *, timeout: timedelta = ...
) -> Coroutine[Any, Any, Any]: ...
def wait_for(
    factory: sessionmaker[Any] | async_sessionmaker[Any],
    job_id: int,
    /,
    *,
    timeout: timedelta = timedelta(seconds=30),
) -> Any:
    """The result of a job once it has completed; to be awaited when `factory` is an async_sessionmaker.

    With a sessionmaker it blocks the thread. Commit the job first: this looks from transactions of its own. It writes
    nothing, and holds no connection between two looks, which come after 20 ms, then ever more rarely, up to one a
    second. Errors of the database that pass by themselves are waited out. `timeout` counts from the call (or from the
    start of the coroutine), the last look is at its end; a look itself takes as long as the engine's own timeouts let
    it. Cancelling the task ends the wait and nothing else: the job goes on, as it does after a timeout.

    Raises `JobFailed` when the job failed (also as a dead letter) or was cancelled, `TimeoutError` when it has not
    ended in time, `JobNotFound` when it is not there, at first or any more, `InvalidJob` (job_id, timeout) and
    `UnsupportedSession`.
    """
    limits.integer("job_id", job_id, 1, 2**63 - 1)
    limits.duration("timeout", timeout)
    if isinstance(factory, async_sessionmaker):
        return _wait_async(factory, job_id, timeout)
    if isinstance(factory, sessionmaker):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may not be typed
        return _wait(factory, job_id, timeout)
    raise UnsupportedSession(
        f"wait_for() takes a sessionmaker or an async_sessionmaker, not {limits.type_name(factory)}: each look needs a "
        "session of its own. For a scoped session pass its .session_factory"
    )


def _wait(factory: sessionmaker[Any], job_id: int, timeout: timedelta) -> Any:
    wait = _Wait(job_id, timeout)
    while True:
        try:
            with factory() as session:
                seen = _look(session, job_id)
        except Exception as exc:
            if not transient(exc):
                raise
            wait.trouble = exc
        else:
            if wait.is_over(seen):
                return seen.result
        time.sleep(wait.pause())


async def _wait_async(factory: async_sessionmaker[Any], job_id: int, timeout: timedelta) -> Any:  # noqa: ASYNC109
    wait = _Wait(job_id, timeout)
    while True:
        try:
            session: AsyncSession
            async with factory() as session:
                seen = await session.run_sync(_look, job_id)
        except Exception as exc:
            if not transient(exc):
                raise
            wait.trouble = exc
        else:
            if wait.is_over(seen):
                return seen.result
        await asyncio.sleep(wait.pause())


class _Seen(NamedTuple):
    """A job at one look; nothing but Nones for one that is not there."""

    state: JobState | None
    result: Any = None
    error: str | None = None


def _look(session: Session, job_id: int) -> _Seen:
    """In a session that is closed right after: its rollback ends the transaction, and no commit hook is called."""
    if not session.in_transaction():
        session.begin()  # also for sessions with autobegin=False
    # Where jobs are written: a replica may not have heard of the job yet.
    where = {"bind": jobs_bind(session)}
    found = session.execute(_LOOK, {"job_id": job_id}, bind_arguments=where).one_or_none()
    return _Seen(None) if found is None else _Seen(*found)


class _Wait:
    """One wait: how long it still lasts, and what it has seen so far."""

    def __init__(self, job_id: int, timeout: timedelta) -> None:
        self._job_id = job_id
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._pause = FIRST_PAUSE
        self._last_look = False
        self._state: JobState | None = None
        #: Why the last look saw nothing.
        self.trouble: Exception | None = None

    def is_over(self, seen: _Seen) -> bool:
        """Whether the job has completed. Raises `JobFailed` and `JobNotFound`."""
        if seen.state is None and self._state is None:
            raise JobNotFound(
                self._job_id,
                "it was rolled back or never existed, or the transaction that enqueues it has not committed: "
                "commit before you wait",
            )
        if seen.state is None:
            raise JobNotFound(self._job_id, "it was removed while it was waited for, so nobody knows how it ended")
        self._state, self.trouble = seen.state, None
        if seen.state in (JobState.FAILED, JobState.CANCELLED):
            error = seen.error or ""
            if seen.state is JobState.CANCELLED:
                error = error.removeprefix("cancelled: ")
            raise JobFailed(self._job_id, error, seen.state.value)
        return seen.state is JobState.COMPLETED

    def pause(self) -> float:
        """Seconds until the next look. Raises `TimeoutError` after the last one."""
        left = self._deadline - time.monotonic()
        if self._last_look:
            raise TimeoutError(self._status()) from self.trouble
        if left <= self._pause:
            self._last_look = True
            return max(left, 0)
        pause, self._pause = self._pause, min(self._pause * GROWTH, LONGEST_PAUSE)
        return pause

    def _status(self) -> str:
        if self._state is None:
            return f"job {self._job_id} could not be looked at within {self._timeout}: {self.trouble}"
        return (
            f"job {self._job_id} has not ended within {self._timeout}: it was {self._state} when last seen, and goes on"
        )
