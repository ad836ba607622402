"""Outcomes as transitions, and transactional handlers: their writes, the outcome and its follow-ups in one commit.

A transactional handler's body opens a session, hands it to the handler, applies the outcome in the same session and
commits. An exception discards everything; the attempt is then recorded as failed by the worker's own books. An
outcome that is stale discards everything too, and nothing is recorded: the attempt had ended.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla.errors import CallbackNotFound, ConfigurationError, FollowUpError, StaleJobError, UniqueConflict
from awa_sqla.models.base import JobState
from awa_sqla.models.job import Attempt
from awa_sqla.session import callbacks, verbs
from awa_sqla.session.callbacks import CallbackToken
from awa_sqla.session.steps import release, reserve
from awa_sqla.session.target import jobs_connection, refuse_autocommit
from awa_sqla.session.trouble import passing
from awa_sqla.worker.context import JobContext
from awa_sqla.worker.outcomes import (
    Cancel,
    Done,
    Failed,
    PutBack,
    Result,
    RetryAfter,
    Settled,
    Snooze,
    WaitForCallback,
)
from awa_sqla.worker.run import outcome_of
from awa_sqla.worker.tasks import Task

log = logging.getLogger("awa_sqla.worker")

Body = Callable[[JobContext[Any]], Any]


def apply(session: Session, attempt: Attempt, result: Result, task: Task | None = None) -> None:
    """Stage an outcome through the verbs. Raises what they raise.

    One that would bring the job back into its unique states while a twin holds the key cancels it.
    """
    try:
        _apply(session, attempt, result, task)
    except UniqueConflict as exc:
        verbs.cancel_attempt(session, attempt, f"duplicate of job {exc.existing_id}")


def _apply(session: Session, attempt: Attempt, result: Result, task: Task | None) -> None:
    match result:
        case Done(value):
            verbs.complete(session, attempt, result=value)
        case RetryAfter(delay, error):
            verbs.retry_after(session, attempt, delay, error=error)
        case Snooze(delay):
            verbs.snooze(session, attempt, delay)
        case Cancel(reason):
            verbs.cancel_attempt(session, attempt, reason)
        case WaitForCallback(token):
            _park(session, attempt, token, task)
        case PutBack(delay):
            verbs.put_back(session, attempt, delay)
        case Failed(error, terminal, in_place=in_place):
            backoff = None if task is None else task.args_class.__awa__.backoff
            verbs.fail_with(session, attempt, error, terminal=terminal, backoff=backoff, in_place=in_place)
        case Settled():
            pass


def _park(session: Session, attempt: Attempt, token: CallbackToken, task: Task | None) -> None:
    try:
        callbacks.park(session, attempt, token)
    except CallbackNotFound as exc:  # a token of another attempt
        _apply(session, attempt, Failed(exc), task)


def around(task: Task, factory: sessionmaker[Session]) -> Body:
    """The body of a transactional `def` handler, for a thread."""

    def body(context: JobContext[Any]) -> Result:
        with _closed(factory()) as session:
            guard = _CommitGuard(session, context.lease)
            try:
                guard.begin()
            except Exception as exc:  # noqa: BLE001 - the handler has not begun, so the attempt is not charged
                return _not_begun(exc)
            context.give_session(session)
            result = _accepted(task.handler(context))
            guard.lift()
            try:
                _stage(session, context.lease, result)
                session.commit()
            except Exception as exc:  # noqa: BLE001 - not the handler's error, so not for retry_on to judge
                return _refused(exc)
        return Settled()

    return body


def async_around(task: Task, factory: async_sessionmaker[AsyncSession]) -> Body:
    """The body of a transactional `async def` handler."""

    async def body(context: JobContext[Any]) -> Result:
        async with _async_closed(factory()) as session:
            guard = _CommitGuard(session.sync_session, context.lease)
            try:
                await session.run_sync(lambda _: guard.begin())
            except Exception as exc:  # noqa: BLE001 - the handler has not begun, so the attempt is not charged
                return _not_begun(exc)
            context.give_session(session)
            result = _accepted(await task.handler(context))
            guard.lift()
            try:
                await session.run_sync(_stage, context.lease, result)
                await session.commit()
            except Exception as exc:  # noqa: BLE001 - not the handler's error, so not for retry_on to judge
                return _refused(exc)
        return Settled()

    return body


@contextmanager
def _closed(session: Session) -> Generator[Session, None, None]:
    """Close the session at the end; an error of that must not replace the handler's own."""
    try:
        yield session
    except BaseException:
        try:
            session.close()
        except Exception:
            log.exception("closing the session of a failed handler failed as well")
        raise
    session.close()


@asynccontextmanager
async def _async_closed(session: AsyncSession) -> AsyncGenerator[AsyncSession, None]:
    """The same for an async session."""
    try:
        yield session
    except BaseException:
        try:
            await session.close()
        except Exception:
            log.exception("closing the session of a failed handler failed as well")
        raise
    await session.close()


def _accepted(returned: Any) -> Result:
    """The outcome of a returned value; one that cannot be stored discards the handler's writes."""
    result = outcome_of(returned)
    if isinstance(result, Failed):
        raise result.error
    return result


def _stage(session: Session, attempt: Attempt, result: Result) -> None:
    session.flush()  # a duplicate among what the handler has enqueued is its own error
    try:
        apply(session, attempt, result)
    except StaleJobError as exc:
        if not ended_by_handler(exc):
            raise
        log.debug("job %s was finished by its own handler", attempt.id)


def ended_by_handler(stale: StaleJobError) -> bool:
    """Whether the job was completed under the very lease that now comes too late: by its own handler."""
    return stale.state == JobState.COMPLETED and stale.found_lease == stale.run_lease


def _refused(exc: Exception) -> Result:
    """What becomes of an attempt whose outcome could not be committed with its writes."""
    if isinstance(exc, StaleJobError):
        log.warning("%s Its writes were discarded.", exc)
        return Settled()
    return Failed(exc, owed=isinstance(exc, FollowUpError))


def _not_begun(exc: Exception) -> Result:
    if not passing(exc) and not isinstance(exc, OSError):
        return Failed(exc)
    log.warning("no connection for a transactional handler, its job is put back: %s", str(exc).partition("\n")[0])
    return PutBack(timedelta(seconds=1))


class _CommitGuard:
    """Keeps the handler from ending `ctx.session`'s transaction or its own job: both are the worker's to end."""

    def __init__(self, session: Session, attempt: Attempt) -> None:
        self._lifted = False
        self._session = session
        self._attempt = attempt
        event.listen(session, "before_commit", self._check)

    def begin(self) -> None:
        """Begin, with a connection in hand before the handler runs."""
        self._transaction = self._session.begin()
        self._connection = jobs_connection(self._session)
        refuse_autocommit(self._connection)
        self._began = self._connection.get_transaction()
        reserve(self._session, self._attempt)

    def lift(self) -> None:
        """The handler has returned. Raises `ConfigurationError` when its transaction is no longer the one it got."""
        self._lifted = True
        release(self._session)
        if self._session.get_transaction() is not self._transaction or not self._began_is_active():
            raise ConfigurationError(
                "a transactional handler must not end the transaction of ctx.session (commit, rollback, close): raise "
                "to discard its writes, and use ctx.session.begin_nested() for a part of them"
            )

    def _began_is_active(self) -> bool:
        return self._began is not None and self._began.is_active

    def _check(self, session: Session) -> None:
        if not self._lifted and not session.in_nested_transaction():
            raise ConfigurationError(
                "a transactional handler must not commit ctx.session: the worker commits your writes together with "
                "the outcome. Use a session of your own for what must be durable earlier"
            )
