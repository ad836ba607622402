"""`JobContext`: what a handler is given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator, Mapping
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from awa_sqla.args import JobArgs
from awa_sqla.cel.policy import CallbackPolicy
from awa_sqla.errors import ConfigurationError
from awa_sqla.models.job import Attempt
from awa_sqla.models.snapshot import JobSnapshot
from awa_sqla.session.callbacks import CallbackToken, checked_token
from awa_sqla.worker.claimed import Claimed

T = TypeVar("T")
A_co = TypeVar("A_co", bound=JobArgs, covariant=True)


class Clerk(Protocol):
    """The worker's own short transactions, as a context sees them."""

    async def set_progress(
        self, attempt: Attempt, percent: float | None, message: str | None, metadata: Mapping[str, Any] | None
    ) -> dict[str, Any]: ...

    async def register_callback(
        self,
        attempt: Attempt,
        timeout: timedelta,  # noqa: ASYNC109
        policy: CallbackPolicy | None,
    ) -> CallbackToken: ...

    async def wait_for_callback(self, attempt: Attempt, token: CallbackToken) -> Any: ...


class _Done(Awaitable[T]):
    """What a sync handler gets where an async one gets something to await: done already."""

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:
        yield from ()
        return self._value


class JobContext(Generic[A_co]):
    """The running attempt, for its handler.

    `args` are the decoded arguments, `job` is a frozen `JobSnapshot` of the claimed row, `attempt` the number of
    this attempt (1 is the first), `lease` its `Attempt`, `state` what the app's lifespan yielded, `progress` what
    this or an earlier attempt wrote. In transactional handlers `session` carries your writes, the outcome and its
    follow-ups in one commit: a Session in a `def`, an AsyncSession in an `async def`.

    Methods that write are awaited in `async def` handlers and just called in `def` handlers.
    """

    def __init__(
        self,
        args: A_co,
        claimed: Claimed,
        clerk: Clerk,
        *,
        state: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.args = args
        self.lease = claimed.attempt
        self.state = state
        self.cancel_reason: str | None = None
        self._claimed = claimed
        self._clerk = clerk
        self._loop = loop
        self._session: Any = None
        self._progress: dict[str, Any] | None = None

    @property
    def job(self) -> JobSnapshot:
        """The claimed row."""
        return self._claimed.snapshot

    @property
    def attempt(self) -> int:
        """The number of this attempt; 1 is the first."""
        return self.job.attempt

    @property
    def progress(self) -> dict[str, Any]:
        """What this or an earlier attempt wrote: `percent`, `message`, `metadata`; empty when nothing was."""
        return (self.job.progress or {}) if self._progress is None else self._progress

    @property
    def session(self) -> Any:
        """The session of a transactional handler. Raises `ConfigurationError` in any other."""
        if self._session is None:
            raise ConfigurationError(
                f"ctx.session exists in transactional handlers only: register {self.job.kind} with "
                "@awa.task(..., transactional=True)"
            )
        return self._session

    def is_cancelled(self) -> bool:
        """Whether this attempt should stop: cancelled, lease lost, deadline passed, or the worker shuts down.

        Long `def` handlers ask now and then; `async def` handlers are cancelled as tasks. Does no I/O.
        """
        return self.cancel_reason is not None

    def set_progress(
        self,
        percent: float | None = None,
        message: str | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> Awaitable[None]:
        """Write how far the attempt is, in a short transaction of its own (not that of `ctx.session`).

        `percent` is a number from 0 to 100; what is None stays as it was. It is durable when this returns, which costs
        two statements and a commit each time: write what somebody wants to see, not every row of a million. Calls of
        one attempt that are made at the same time, in the tasks of a group for instance, are written together.
        Raises `InvalidJob` and, when the attempt has ended, `StaleJobError`.
        """
        return self._do(self._write(percent, message, metadata))[0]

    def checkpoint(self, data: Mapping[str, Any]) -> Awaitable[None]:
        """Merge `data` (a JSON object) into `progress["metadata"]`, where the next attempt finds it.

        Durable when this returns, also in transactional handlers, whose own writes are discarded when they raise: note
        there only what holds all the same. Raises like `set_progress`.
        """
        return self.set_progress(metadata=data)

    def register_callback(
        self, *, timeout: timedelta = timedelta(hours=1), policy: CallbackPolicy | None = None
    ) -> Any:
        """A `CallbackToken` for somebody outside, durable when this returns: tell them, and return `WaitForCallback`.

        `timeout` is how long the answer may take, from now; `policy` is for `resolve_callback()`. Awaited in
        `async def` handlers. Raises `InvalidJob` and, when the attempt has ended, `StaleJobError`.
        """
        awaitable, value = self._do(self._clerk.register_callback(self.lease, timeout, policy))
        return awaitable if self._loop is None else value

    def wait_for_callback(self, token: CallbackToken, /) -> Any:
        """Wait for the callback of `token` here, in the handler; returns the payload that `resume_external()` brings.

        The job is `waiting_external` meanwhile, and still this attempt's: it keeps its slot of the worker, and its
        deadline stands still. For waits of minutes; a handler that returns `WaitForCallback(token)` holds nothing.
        Awaited in `async def` handlers, where a time limit of your own (`asyncio.timeout`) may end it; the token is as
        good as before then.

        Raises `CallbackNotFound` for a token that is not the last one registered, `StaleJobError` when the attempt
        ends meanwhile (the callback timed out or completed the job, the job was cancelled), `InvalidJob`, and
        `ConfigurationError` in transactional handlers, whose transaction would stay open.
        """
        if self._session is not None:
            raise ConfigurationError(
                "a transactional handler must not wait for a callback, with its transaction open: return "
                "WaitForCallback(token), or register the task without transactional=True"
            )
        checked_token(token)
        awaitable, value = self._do(self._clerk.wait_for_callback(self.lease, token))
        return awaitable if self._loop is None else value

    def _do(self, work: Coroutine[Any, Any, T]) -> tuple[Awaitable[T], T | None]:
        """Begin to do it in an async handler; have done it in a sync one, which runs in a thread."""
        if self._loop is None:
            return asyncio.ensure_future(work), None
        value = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        return _Done(value), value

    async def _write(self, percent: float | None, message: str | None, metadata: Mapping[str, Any] | None) -> None:
        self._progress = await self._clerk.set_progress(self.lease, percent, message, metadata)

    def give_session(self, session: Any) -> None:
        """Called by the worker: the session of a transactional handler."""
        self._session = session

    def ask_to_stop(self, reason: str) -> None:
        """Called by the worker, from any thread."""
        self.cancel_reason = self.cancel_reason or reason
