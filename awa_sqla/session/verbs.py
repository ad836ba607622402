"""The verbs of one attempt: guard, statement, stage. The flush does the rest.

Every verb reads the same way: find the session, take the attempt the caller holds, run one guarded statement
and stage its outcome. A statement that matches no row means the attempt has ended: `StaleJobError`, nothing is
staged, and the caller's transaction stays usable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy.orm import Session

from awa_sqla import limits
from awa_sqla.args import Backoff
from awa_sqla.errors import InvalidJob
from awa_sqla.models.base import JobState, Outcome
from awa_sqla.models.job import Attempt, Job, ScheduledJob
from awa_sqla.session import ledger, statements
from awa_sqla.session.failing import Failed, Failure, end_attempt
from awa_sqla.session.history import describe
from awa_sqla.session.ledger import Staged
from awa_sqla.session.results import checked_progress, checked_result
from awa_sqla.session.rows import expire_record
from awa_sqla.session.steps import claim_anew, entered, fence, held, moved_values, one
from awa_sqla.session.target import SyncSession

Held = Job | Attempt


def claim(
    session: SyncSession, queues: str | Iterable[str], /, *, limit: int, worker_id: str | None = None
) -> list[Job]:
    """Take up to `limit` due jobs of `queues` for this transaction, and mark them running.

    Most urgent first: by priority, due time and id within a queue; several queues are served in the order
    given. Paused queues and rows that others hold are passed over. `worker_id` is kept on the row. Each job gets
    a lease that is never issued again; if the transaction rolls back, the jobs are available as before.

    Returns this session's instances, fully loaded. One statement for each queue asked. Raises `InvalidJob` (limit,
    queue), `UnsupportedSession`, `ConfigurationError`. (DESIGN 4, 5.1)
    """
    target = entered(session, "claim")
    limits.integer("limit", limit, 1, 1_000_000)
    if not isinstance(queues, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJob("queues", f"must be a queue's name or several, not {type(queues).__name__}")
    names = [queues] if isinstance(queues, str) else list(queues)
    if not names:
        raise InvalidJob("queues", "must name at least one queue")
    if worker_id is not None:
        limits.text("worker_id", worker_id)
    claimed: list[Job] = []
    for name in dict.fromkeys(limits.text("queue", queue) for queue in names):
        if len(claimed) < limit:
            parameters = {"in_queue": name, "limit": limit - len(claimed), "by_worker": worker_id}
            found = target.scalars(statements.CLAIM, parameters).all()
            claimed += sorted(found, key=lambda job: (job.priority, job.run_at, job.id))
    for job in claimed:
        job.held_attempt = Attempt(job.id, job.run_lease)
        ledger.mark_dirty(target, job)
        ledger.note_started(target, job)
        expire_record(target, job.id)
    return claimed


def complete(session: SyncSession, job: Held, /, *, result: Any = None) -> Job:
    """Finish the attempt with success; `result` is JSON data of at most 1 MiB, or None.

    Returns this session's instance, fully loaded; Completed follow-ups come with the next flush. One statement.
    Raises `StaleJobError`, `UniqueConflict` (the job would come back into its unique states beside a twin),
    `InvalidJob` (job, result), `FollowUpsNotAttached`, `UnsupportedSession`, `ConfigurationError`. (DESIGN 4, 5.2)
    """
    target = entered(session, "complete", transition=True)
    attempt = held(target, job)
    checked = checked_result(result)
    row = target.scalars(statements.COMPLETE, fence(attempt, given_result=checked)).one_or_none()
    if row is None:
        row = complete_claiming(target, attempt, checked)
    ledger.stage(target, Staged(row, Outcome.COMPLETED, {"result": checked}))
    return row


def complete_claiming(session: Session, attempt: Attempt, result: Any) -> Job:
    """Complete a job that has to claim its unique key first; whoever calls stages it. Raises like `complete()`."""
    claim_anew(session, attempt, JobState.COMPLETED)
    found = session.scalars(statements.COMPLETE_CLAIMED, fence(attempt, given_result=result)).one_or_none()
    return one(session, attempt, found)


def fail(session: SyncSession, job: Held, error: str | BaseException, /, *, terminal: bool = False) -> Failed:
    """Record that the attempt failed with `error` (text or an exception).

    With attempts left and not `terminal`, the job becomes retryable after its kind's backoff: a `ScheduledJob`.
    Else it has failed for good: a `Job`, or a `DeadLetter` when its queue keeps dead letters. The error is kept
    in `errors`, cut to 64 KiB, with a traceback without locals.

    Returns the row after the transition, fully loaded; Retried or Exhausted follow-ups come with the next flush.
    Two statements, or two and the INSERT of a moved row. Raises `StaleJobError`, `InvalidJob` (job, error),
    `FollowUpsNotAttached`, `UnsupportedSession`, `ConfigurationError`. (DESIGN 4)
    """
    return fail_with(session, job, error, terminal=terminal, backoff=None)


def fail_with(
    session: SyncSession,
    job: Held,
    error: str | BaseException,
    *,
    terminal: bool = False,
    backoff: Backoff | None = None,
    in_place: bool = False,
) -> Failed:
    """`fail()` with the backoff of the caller's own registry; `in_place` for rows that cannot be moved."""
    target = entered(session, "fail", transition=True)
    entry = describe(error) | ({"terminal": True} if terminal else {})
    return end_attempt(
        target, held(target, job), Failure(entry=entry, terminal=terminal, backoff=backoff, in_place=in_place)
    )


def retry_after(session: SyncSession, job: Held, delay: timedelta, /, *, error: str = "") -> Failed:
    """End the attempt and run the job again after `delay` (a timedelta, zero or longer).

    It counts as a failed attempt: when attempts are spent, the job is exhausted as by `fail()`. `error` says
    why. Returns and raises like `fail()`, and `InvalidJob` for the delay. (DESIGN 4)
    """
    target = entered(session, "retry_after", transition=True)
    wait = limits.duration("delay", delay, zero=True)
    entry = describe(error) | {"retry_after": wait.total_seconds()}
    return end_attempt(target, held(target, job), Failure(entry=entry, delay=wait))


def snooze(session: SyncSession, job: Held, delay: timedelta, /) -> ScheduledJob:
    """Put the job back for `delay` (a timedelta, zero or longer) without charging the attempt.

    Neither an error nor an outcome: no follow-up, `snoozes` counts it, progress is kept. Returns the
    `ScheduledJob`, fully loaded. One statement and the INSERT of the moved row. Raises `StaleJobError`,
    `InvalidJob` (job, delay), `UnsupportedSession`, `ConfigurationError`. (DESIGN 4)
    """
    return _put_back(entered(session, "snooze"), job, delay, counts=1)


def put_back(session: SyncSession, job: Held, delay: timedelta) -> ScheduledJob:
    """End the attempt as if it had never been claimed, and offer the job again after `delay`.

    For attempts that could not run: a kind the worker does not know, a shutdown. Otherwise like `snooze()`, but not
    counted as one.
    """
    return _put_back(entered(session, "put_back"), job, delay, counts=0)


def _put_back(session: Session, job: Held, delay: timedelta, *, counts: int) -> ScheduledJob:
    wait = limits.duration("delay", delay, zero=True)
    attempt = held(session, job)
    parameters = fence(attempt, delay=wait.total_seconds())
    found = session.execute(statements.TAKE, parameters).one_or_none()
    if found is None:
        claim_anew(session, attempt, JobState.SCHEDULED)
        found = session.execute(statements.TAKE_CLAIMED, parameters).one_or_none()
    values, due, _ = moved_values(one(session, attempt, found))
    values |= {"attempt": values["attempt"] - 1, "snoozes": values["snoozes"] + counts}
    row = ScheduledJob(**values | {"state": JobState.SCHEDULED, "run_at": due})
    ledger.stage(session, Staged(row, None, rows=[row]))
    return row


def cancel_attempt(session: SyncSession, job: Held, reason: str) -> Job:
    """`cancel()` by the attempt itself, fenced by its lease: what a handler's `Cancel(reason)` does."""
    target = entered(session, "cancel", transition=True)
    attempt = held(target, job)
    reason = limits.cleaned(reason)
    entry = {"error": f"cancelled: {reason}", "type": "cancelled"}
    row = one(target, attempt, target.scalars(statements.CANCEL_HELD, fence(attempt, entry=entry)).one_or_none())
    ledger.stage(target, Staged(row, Outcome.CANCELLED, {"reason": reason}))
    return row


def set_progress(
    session: SyncSession,
    job: Held,
    percent: float | None = None,
    /,
    *,
    message: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Job:
    """Write how far the attempt is: `{"percent", "message", "metadata"}` in the column `progress`.

    `percent` is a number from 0 to 100; what is None stays as it was; `metadata` is merged at its top level.
    Kept by every outcome but completion, so the next attempt can go on from it. Returns this session's instance,
    fully loaded. One statement. Raises `StaleJobError`, `InvalidJob` (job, percent, message, metadata),
    `UnsupportedSession`, `ConfigurationError`. (DESIGN 4)
    """
    target = entered(session, "set_progress")
    attempt = held(target, job)
    values = checked_progress(percent, message, metadata)
    row = one(target, attempt, target.scalars(statements.SET_PROGRESS, fence(attempt, **values)).one_or_none())
    ledger.mark_dirty(target, row)
    expire_record(target, row.id)
    return row
