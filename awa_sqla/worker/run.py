"""One attempt in flight, and what its handler made of it.

`Run` is the worker's record of a claimed row. `perform` runs the handler, as a task or in a thread, and turns
whatever it does into a `Result`: return values, exceptions of any base class, cancellation. Nothing here touches
the database; around a transactional handler, `transaction` brings the session and ends it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from pydantic import ValidationError

from awa_sqla.errors import AwaError, InvalidJob, TerminalError
from awa_sqla.session.lineage import Parent, run_under
from awa_sqla.session.results import checked_result
from awa_sqla.stored import decode_json, misfit
from awa_sqla.worker.claimed import Claimed
from awa_sqla.worker.context import Clerk, JobContext
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
from awa_sqla.worker.tasks import Task
from awa_sqla.worker.threads import Threads

log = logging.getLogger("awa_sqla.worker")

SHUTDOWN = "the worker is shutting down"
LOST = "the lease was lost"
CANCELLED = "the job was cancelled"
OVERDUE = "the deadline has passed"


class DeadlineExceededError(Exception):
    """The attempt ran longer than its deadline allows."""


class WaitInterruptedError(Exception):
    """The attempt was asked to stop while its handler waited for a callback; the message says why."""


class Run:
    """A claimed attempt, from the claim until its outcome is acknowledged."""

    __slots__ = (
        "_context",
        "_left",
        "alarm",
        "asyncio_task",
        "attempt",
        "claimed",
        "left_behind",
        "nudged",
        "since",
        "started",
        "stop_reason",
        "task",
        "thread",
        "turning",
    )

    def __init__(self, claimed: Claimed, task: Task | None) -> None:
        self.claimed = claimed
        self.attempt = claimed.attempt
        self.task = task
        self.asyncio_task: asyncio.Task[None] | None = None
        self.started = False
        #: When it was claimed, of `time.monotonic()`; and in which thread a `def` handler runs, while it does.
        self.since = time.monotonic()
        self.thread: int | None = None
        #: Whether the worker has given up on it: nobody waits for its thread any more.
        self.left_behind = False
        #: Why it was asked to stop, if it was.
        self.stop_reason: str | None = None
        self.alarm: asyncio.TimerHandle | None = None
        #: Set, once, for a handler that waits for a callback: its answer may have come, or it should stop.
        self.nudged = asyncio.Event()
        #: Held by who turns the row from running to waiting or back.
        self.turning = asyncio.Lock()
        self._left: float | None = None
        self._context: JobContext[Any] | None = None

    def context(self, clerk: Clerk, state: Any, loop: asyncio.AbstractEventLoop | None) -> JobContext[Any]:
        """The handler's context. Raises pydantic's `ValidationError` when the row does not fit the class."""
        assert self.task is not None  # noqa: S101 - runs without a task are put back, never performed
        args = decode_json(self.task.args_class, self.claimed.args_json, self.claimed.args_version)
        self._context = JobContext(args, self.claimed, clerk, state=state, loop=loop)
        if self.stop_reason is not None:
            self._context.ask_to_stop(self.stop_reason)
        return self._context

    def stop(self, reason: str) -> None:
        """Ask the handler to stop: the flag for threads, cancellation for tasks. From the loop's thread only."""
        self.stop_reason = self.stop_reason or reason
        if self._context is not None:
            self._context.ask_to_stop(reason)
        self.nudge()
        if self.started and self.asyncio_task is not None and self.task is not None and self.task.is_async:
            self.asyncio_task.cancel(reason)

    def nudge(self) -> None:
        """Let all waits look; the next nudge is another."""
        nudged, self.nudged = self.nudged, asyncio.Event()
        nudged.set()

    def pause(self) -> None:
        """The deadline stands still while the handler waits for a callback."""
        if self.alarm is not None and self._left is None:
            self._left = self.alarm.when() - asyncio.get_running_loop().time()
            self.alarm.cancel()

    def go_on(self) -> None:
        """The deadline counts again."""
        if self._left is not None:
            self.alarm = asyncio.get_running_loop().call_later(self._left, self.stop, OVERDUE)
            self._left = None


Body = Callable[[JobContext[Any]], Any]


async def perform(run: Run, context: JobContext[Any], body: Body, threads: Threads) -> Result:
    """Run `body` (the handler, or a transaction around it) to its end and say what came of it."""
    assert run.task is not None  # noqa: S101
    try:
        run_under(Parent(run.attempt.id, run.claimed.root_id))  # the context is this task's own
        if run.task.is_async:
            returned = await body(context)
        else:
            returned = await _in_thread(run, threads, body, context)
    except asyncio.CancelledError as exc:
        if run.stop_reason is not None:
            return interrupted(run.stop_reason)
        return Failed(exc if exc.args else RuntimeError("the handler cancelled itself"))
    except WaitInterruptedError as exc:
        return interrupted(str(exc))
    except BaseException as exc:  # noqa: BLE001 - SystemExit in a handler must not end the worker
        return run.task.failure(exc)
    return outcome_of(returned)


async def _in_thread(run: Run, threads: Threads, body: Body, context: JobContext[Any]) -> Any:
    """Wait for a handler in a thread; a cancelled wait goes on as the thread does, until it is left behind."""
    try:
        future = threads.run(partial(contextvars.copy_context().run, partial(_contained, run, body, context)))
    except RuntimeError as exc:  # the handler has not begun, so the attempt is not charged
        log.warning("no thread for job %s, it is put back: %s", run.attempt.id, exc)
        return PutBack(timedelta(seconds=1))
    while True:
        try:
            returned, error = await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.done() or run.left_behind:
                raise
            continue
        if error is not None:
            raise error
        return returned


def _contained(run: Run, body: Body, context: JobContext[Any]) -> tuple[Any, BaseException | None]:
    """SystemExit and StopIteration cannot travel through a future; a pair can."""
    run.thread = threading.get_ident()
    try:
        return body(context), None
    except BaseException as exc:  # noqa: BLE001 - carried to the loop's side
        return None, exc
    finally:
        run.thread = None


def interrupted(reason: str) -> Result:
    """What becomes of an attempt that was asked to stop and did."""
    if reason == SHUTDOWN:
        return PutBack(timedelta(0))
    if reason == OVERDUE:
        return Failed(DeadlineExceededError("hard deadline exceeded"))
    return Failed(RuntimeError(reason))  # stale by now: the write finds no row


def outcome_of(returned: Any) -> Result:
    """What a returned value means; a value that cannot be stored fails the attempt and says why."""
    if isinstance(returned, RetryAfter | Snooze | Cancel | WaitForCallback | Failed | PutBack | Settled):
        return returned
    if isinstance(returned, type) and returned in (RetryAfter, Snooze, Cancel, WaitForCallback, TerminalError):
        return Failed(InvalidJob("result", f"is the class {returned.__name__}; return {returned.__name__}(...)"))
    if inspect.iscoroutine(returned):
        returned.close()
        return Failed(
            InvalidJob("result", "is a coroutine: the handler is an async function behind a sync one; await it")
        )
    if isinstance(returned, BaseException):
        return Failed(InvalidJob("result", f"is a {type(returned).__name__}; raise it instead of returning it"))
    try:
        return Done(checked_result(returned))
    except InvalidJob as exc:
        return Failed(exc)
    except (AwaError, RecursionError, ValueError, TypeError) as exc:
        return Failed(InvalidJob("result", f"cannot be stored: {exc}"))


def undecodable(exc: ValidationError) -> Failed:
    """A row whose arguments do not fit its class fails at once: trying again cannot help."""
    return Failed(misfit(exc, "does not fit the class"), terminal=True)
