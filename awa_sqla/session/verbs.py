"""The verbs of one attempt: guard, statement, stage. The flush does the rest.

Every verb reads the same way: find the session, take the attempt the caller holds, run one guarded statement
and stage its outcome. A statement that matches no row means the attempt has ended: `StaleJobError`, nothing is
staged, and the caller's transaction stays usable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import Row, inspect
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import flag_dirty

from awa_sqla import limits
from awa_sqla.args import Backoff, backoff_of
from awa_sqla.errors import InvalidJob, StaleJobError
from awa_sqla.models.base import JobState, Outcome
from awa_sqla.models.job import SHARED, Attempt, DeadLetter, Job, ScheduledJob
from awa_sqla.session import ledger, listeners, marks, statements
from awa_sqla.session.history import describe
from awa_sqla.session.ledger import Staged
from awa_sqla.session.results import checked_progress, checked_result
from awa_sqla.session.target import SyncSession, require_transaction, sync_session

Held = Job | Attempt
Failed = ScheduledJob | Job | DeadLetter


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
    names = [queues] if isinstance(queues, str) else list(queues)
    limits.integer("limit", limit, 1, 1_000_000)
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
        flag_dirty(job)  # or a savepoint's rollback would leave what RETURNING loaded
    return claimed


def complete(session: SyncSession, job: Held, /, *, result: Any = None) -> Job:
    """Finish the attempt with success; `result` is JSON data of at most 1 MiB, or None.

    Returns this session's instance, fully loaded; Completed follow-ups come with the next flush. One statement.
    Raises `StaleJobError`, `InvalidJob` (job, result), `FollowUpsNotAttached`, `UnsupportedSession`,
    `ConfigurationError`. (DESIGN 4, 5.2)
    """
    target = entered(session, "complete", transition=True)
    attempt = Attempt.of(job)
    checked = checked_result(result)
    row = one(
        target,
        attempt,
        target.scalars(statements.COMPLETE, fence(attempt, given_result=checked)).one_or_none(),
    )
    ledger.stage(target, Staged(row, Outcome.COMPLETED, {"result": checked}))
    return row


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
) -> Failed:
    """`fail()` with the backoff of the caller's own registry."""
    target = entered(session, "fail", transition=True)
    entry = describe(error) | ({"terminal": True} if terminal else {})
    return _fail(target, Attempt.of(job), entry, terminal=terminal, delay=None, backoff=backoff)


def retry_after(session: SyncSession, job: Held, delay: timedelta, /, *, error: str = "") -> Failed:
    """End the attempt and run the job again after `delay` (a timedelta, zero or longer).

    It counts as a failed attempt: when attempts are spent, the job is exhausted as by `fail()`. `error` says
    why. Returns and raises like `fail()`, and `InvalidJob` for the delay. (DESIGN 4)
    """
    target = entered(session, "retry_after", transition=True)
    wait = limits.duration("delay", delay, zero=True)
    entry = describe(error) | {"retry_after": wait.total_seconds()}
    return _fail(target, Attempt.of(job), entry, terminal=False, delay=wait, backoff=None)


def _fail(
    session: Session,
    attempt: Attempt,
    entry: dict[str, Any],
    *,
    terminal: bool,
    delay: timedelta | None,
    backoff: Backoff | None,
) -> Failed:
    locked = session.execute(statements.LOCK, fence(attempt)).one_or_none()
    row, keeps_dead_letters = one(session, attempt, locked)
    number: int = row.attempt
    context = {"error": entry["error"], "attempt": number}
    if not terminal and number < row.max_attempts:
        wait = delay if delay is not None else (backoff or backoff_of(row.kind)).delay(number)
        taken = session.execute(
            statements.TAKE_WITH_ERROR, fence(attempt, entry=entry, delay=wait.total_seconds())
        ).one()
        return _rescheduled(session, taken, JobState.RETRYABLE, Outcome.RETRIED, context)
    if keeps_dead_letters:
        taken = session.execute(statements.TAKE_WITH_ERROR, fence(attempt, entry=entry, delay=0)).one()
        return _buried(session, taken, "terminal_error" if terminal else "max_attempts_exhausted", context)
    failed = session.scalars(statements.EXHAUST, fence(attempt, entry=entry)).one()
    ledger.stage(session, Staged(failed, Outcome.EXHAUSTED, context))
    return failed


def _rescheduled(
    session: Session, taken: Row[Any], state: JobState, outcome: Outcome | None, context: dict[str, Any]
) -> ScheduledJob:
    values, due, clock = moved_values(taken)
    row = ScheduledJob(**values | {"state": state, "run_at": due})
    if outcome is not None:
        row.finalized_at = clock
        context = context | {"next_run_at": due}
    ledger.stage(session, Staged(row, outcome, context, rows=[row]))
    return row


def _buried(session: Session, taken: Row[Any], reason: str, context: dict[str, Any]) -> DeadLetter:
    values, _, clock = moved_values(taken)
    own = {"dlq_reason": reason, "dlq_at": clock, "original_run_lease": values["run_lease"]}
    row = DeadLetter(**values | own | {"state": JobState.FAILED, "finalized_at": clock})
    ledger.stage(session, Staged(row, Outcome.EXHAUSTED, context, rows=[row]))
    return row


def snooze(session: SyncSession, job: Held, delay: timedelta, /) -> ScheduledJob:
    """Put the job back for `delay` (a timedelta, zero or longer) without charging the attempt.

    Neither an error nor an outcome: no follow-up, `snoozes` counts it, progress is kept. Returns the
    `ScheduledJob`, fully loaded. One statement and the INSERT of the moved row. Raises `StaleJobError`,
    `InvalidJob` (job, delay), `UnsupportedSession`, `ConfigurationError`. (DESIGN 4)
    """
    return put_back(session, job, delay, verb="snooze", counts=1)


def put_back(session: SyncSession, job: Held, delay: timedelta, *, verb: str, counts: int) -> ScheduledJob:
    """End the attempt uncharged; `counts` is what it adds to `snoozes`."""
    target = entered(session, verb)
    wait = limits.duration("delay", delay, zero=True)
    attempt = Attempt.of(job)
    found = target.execute(statements.TAKE, fence(attempt, delay=wait.total_seconds())).one_or_none()
    row = _rescheduled(target, one(target, attempt, found), JobState.SCHEDULED, None, {})
    row.attempt -= 1
    row.snoozes += counts
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
    attempt = Attempt.of(job)
    values = checked_progress(percent, message, metadata)
    row = one(target, attempt, target.scalars(statements.SET_PROGRESS, fence(attempt, **values)).one_or_none())
    flag_dirty(row)
    return row


# ------------------------------------------------------------ shared steps


def entered(session: object, verb: str, *, transition: bool = False) -> Session:
    """The session of a verb, ready for it: known to us, transactional, attached where that matters."""
    target = sync_session(session, verb)
    listeners.install(target, verb)
    if transition:
        marks.require_registry(target, verb)
    require_transaction(target)
    if not target.autoflush and listeners.pending(target):
        target.flush()
    return target


def fence(attempt: Attempt, **parameters: Any) -> dict[str, Any]:
    """The binds of a guarded statement."""
    return {"held_id": attempt.id, "held_lease": attempt.run_lease, **parameters}


def one(session: Session, attempt: Attempt, found: Any) -> Any:
    """What the guarded statement matched, or `StaleJobError` with the row as it is now."""
    if found is not None:
        return found
    known = session.identity_map.get(inspect(Job).identity_key_from_primary_key((attempt.id,)))
    now = session.get(Job, attempt.id, populate_existing=True)
    if now is None:
        if known is not None and known in session:
            session.expunge(known)
        raise StaleJobError(attempt.id, attempt.run_lease)
    raise StaleJobError(attempt.id, attempt.run_lease, now.state.value, now.run_lease)


def moved_values(taken: Row[Any]) -> tuple[dict[str, Any], Any, Any]:
    """(attributes of the moved row, due time, clock) from a DELETE ... RETURNING of the shared columns."""
    *columns, errors, due, clock = taken
    values = dict(zip(SHARED, columns, strict=True)) | {"errors": errors}
    return values | dict.fromkeys(_CLEARED), due, clock


_CLEARED = tuple(getattr(Job, name).key for name in statements.TRANSITIONS["retry"].clears)
