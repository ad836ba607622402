"""Callbacks: park a job until the outside world has spoken, and resolve it in an app transaction.

    token = register_callback(session, job, timeout=timedelta(hours=1))
    session.commit()                      # durable now: only then tell the outside
    ...
    with SessionLocal.begin() as session:                 # in the webhook, say
        order.paid = True
        complete_external(session, token.id, {"amount": 5})   # the order, the job and its follow-ups, or nothing

A token belongs to one attempt. It is used up by whoever resolves it first, and it ends with its attempt: everybody
later gets `CallbackNotFound`, and nothing changes. The answer may come before the job is parked.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy.orm import Session

from awa_sqla import limits
from awa_sqla.cel.policy import CallbackPolicy, checked_policy
from awa_sqla.errors import CallbackNotFound, InvalidJob
from awa_sqla.models.base import JobState, Outcome
from awa_sqla.models.job import Attempt, DeadLetter, Job
from awa_sqla.models.wakeups import channel
from awa_sqla.session import callback_statements as statements
from awa_sqla.session import ledger
from awa_sqla.session.failing import Failure, end_locked
from awa_sqla.session.history import describe
from awa_sqla.session.ledger import Staged
from awa_sqla.session.results import checked_result
from awa_sqla.session.rows import expire_record
from awa_sqla.session.steps import as_it_is, entered, fence, held, holds, one, stale
from awa_sqla.session.target import SyncSession, jobs_bind, schema_of
from awa_sqla.session.unique import reenter

Held = Job | Attempt

#: How long a callback may take unless something else is said.
HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class CallbackToken:
    """What the outside world needs to answer: `id`, and until when (UTC, by the database's clock)."""

    id: UUID
    expires_at: datetime


def checked_token(token: object) -> None:
    """Raises `InvalidJob` for what is no token."""
    if not isinstance(token, CallbackToken):
        raise InvalidJob("token", f"must be the CallbackToken of register_callback(), not {limits.type_name(token)}")


def register_callback(
    session: SyncSession, job: Held, /, *, timeout: timedelta = HOUR, policy: CallbackPolicy | None = None
) -> CallbackToken:
    """Give the attempt a token by which somebody outside can answer for it.

    `timeout` is how long the answer may take, from now; after that, maintenance moves the job on. `policy` says what a
    payload means to `resolve_callback()`; its expressions are checked here. A second token replaces the first one.
    **Commit before you tell anybody**: the token is known to others from then on only. Returns the `CallbackToken`.
    One statement.

    Raises `StaleJobError`, `InvalidJob` (job, timeout, policy, policy.filter and so on), `UnsupportedSession`,
    `ConfigurationError` (also where a policy is given and the extra `[cel]` is missing). (DESIGN 4)
    """
    wait = limits.duration("timeout", timeout)
    expressions = {f"callback_{name}": expression for name, expression in checked_policy(policy).items()}
    target = entered(session, "register_callback")
    attempt = held(target, job)
    parameters = fence(attempt, new_callback=uuid4(), timeout=wait.total_seconds(), **expressions)
    row = one(target, attempt, target.scalars(statements.REGISTER, parameters).one_or_none())
    ledger.mark_dirty(target, row)
    expire_record(target, row.id)
    assert row.callback_id is not None  # noqa: S101
    assert row.callback_timeout_at is not None  # noqa: S101
    return CallbackToken(row.callback_id, row.callback_timeout_at)


def cancel_callback(session: SyncSession, job: Held, /) -> bool:
    """Withdraw the attempt's token: whoever comes with it gets `CallbackNotFound`. False when there was none.

    One statement, and one more when there was none. Raises `StaleJobError`, `InvalidJob` (job), `UnsupportedSession`,
    `ConfigurationError`. (DESIGN 4)
    """
    target = entered(session, "cancel_callback")
    attempt = held(target, job)
    row = target.scalars(statements.WITHDRAW, fence(attempt)).one_or_none()
    if row is None:
        now = as_it_is(target, attempt)
        if not holds(now, attempt):
            raise stale(attempt, now)
        return False
    ledger.mark_dirty(target, row)
    expire_record(target, row.id)
    return True


def park(session: SyncSession, job: Held, token: CallbackToken, /) -> Job | DeadLetter:
    """End the attempt by waiting for its callback: what a handler's `WaitForCallback(token)` does.

    Returns the waiting `Job`, fully loaded; WaitingForCallback follow-ups come with the next flush. A callback that
    came first has ended the job already: then that row is returned as it is, and nothing else happens. An attempt that
    has no callback registered would wait for ever, and fails for good. One statement.

    Raises `StaleJobError`, `CallbackNotFound` for a token that is not this attempt's, `InvalidJob` (job, token),
    `FollowUpsNotAttached`, `UnsupportedSession`, `ConfigurationError`. (DESIGN 4)
    """
    target = entered(session, "park", transition=True)
    attempt = held(target, job)
    checked_token(token)
    while True:
        row = target.scalars(statements.PARK, fence(attempt, callback=token.id)).one_or_none()
        if row is not None:
            ledger.stage(target, Staged(row, Outcome.WAITING_FOR_CALLBACK))
            return row
        if (found := _not_parked(target, attempt, token)) is not None:
            return found


def _not_parked(session: Session, attempt: Attempt, token: CallbackToken) -> Job | DeadLetter | None:
    """What has become of an attempt that does not wait for this token; None when that changes just now."""
    now: Job | DeadLetter | None = as_it_is(session, attempt)
    if now is None:
        now = session.get(DeadLetter, attempt.id, populate_existing=True)
    if now is None or now.run_lease != attempt.run_lease:
        raise stale(attempt, now if isinstance(now, Job) else None)
    if isinstance(now, DeadLetter) or now.state in (JobState.COMPLETED, JobState.FAILED):
        return now  # the callback was quicker
    if not holds(now, attempt):
        raise stale(attempt, now)
    if now.callback_id is not None or now.callback_answer is not None:
        raise CallbackNotFound(token.id)
    entry = {"error": "wait_for_callback without a registered callback", "type": "wait_for_callback_contract_violation"}
    where = {"bind": jobs_bind(session)}
    locked = session.execute(statements.LOCK_UNCALLED, fence(attempt), bind_arguments=where).one_or_none()
    if locked is None:
        return None
    failure = Failure(entry=entry, terminal=True, kept_as=entry["type"])
    failed = end_locked(session, locked[0], failure, keeps_dead_letters=locked[1])
    assert isinstance(failed, Job | DeadLetter)  # noqa: S101 - terminal: never a retry
    return failed


# ------------------------------------------------------------------------------------------- from the outside
def complete_external(
    session: SyncSession, callback_id: UUID | str, payload: Any = None, /, *, run_lease: int | None = None
) -> Job:
    """Complete a job by its callback, parked or still running; `payload` (JSON data, at most 1 MiB) is its result.

    `callback_id` is the token's id, as a UUID or its text. With `run_lease`, only that attempt's. Returns this
    session's instance, fully loaded; Completed follow-ups come with the next flush. One statement.

    Raises `CallbackNotFound` (unknown, used up, withdrawn, expired and moved on, or another attempt's),
    `UniqueConflict` (the job would come back into its unique states beside a twin), `InvalidJob` (callback_id,
    payload, run_lease), `FollowUpsNotAttached`, `UnsupportedSession`, `ConfigurationError`. (DESIGN 4)
    """
    target = entered(session, "complete_external", transition=True)
    checked = checked_result(payload, field="payload")
    parameters = called(callback_id, run_lease) | {"given_result": checked}
    row = target.scalars(statements.COMPLETE, parameters).one_or_none()
    if row is None:
        _claim_again(target, statements.LOCK, parameters, JobState.COMPLETED)
        row = found_by(parameters, target.scalars(statements.COMPLETE_CLAIMED, parameters).one_or_none())
    ledger.stage(target, Staged(row, Outcome.COMPLETED, {"result": checked, "by_callback": True}))
    return row


def fail_external(
    session: SyncSession, callback_id: UUID | str, error: str | BaseException, /, *, run_lease: int | None = None
) -> Job | DeadLetter:
    """Fail a job for good by its callback, parked or still running; `error` is text or an exception.

    Returns the failed `Job`, or the `DeadLetter` when its queue keeps dead letters (reason "callback_failed"), fully
    loaded; Exhausted follow-ups come with the next flush. Two statements, or two and an INSERT. Raises like
    `complete_external`, and `InvalidJob` for the error. (DESIGN 4)
    """
    target = entered(session, "fail_external", transition=True)
    return fail_called(target, called(callback_id, run_lease), describe(error))


def fail_called(target: Session, parameters: dict[str, Any], entry: dict[str, Any]) -> Job | DeadLetter:
    """Fail the job of a callback, with this error entry."""
    failure = Failure(entry=entry | {"terminal": True}, terminal=True, kept_as="callback_failed")
    found = target.execute(statements.LOCK, parameters, bind_arguments={"bind": jobs_bind(target)}).one_or_none()
    row, keeps_dead_letters = found_by(parameters, found)
    failed = end_locked(target, row, failure, keeps_dead_letters=keeps_dead_letters)
    assert isinstance(failed, Job | DeadLetter)  # noqa: S101 - terminal: never a retry
    return failed


def retry_external(session: SyncSession, callback_id: UUID | str, /, *, run_lease: int | None = None) -> Job:
    """Run a waiting job again from the start, at once: its attempts count from 0, its progress is kept.

    Returns the available `Job`, fully loaded; Retried follow-ups come with the next flush, and a wake-up with the
    commit. One statement. Raises like `complete_external`; a job that is not waiting is `CallbackNotFound`. (DESIGN 4)
    """
    target = entered(session, "retry_external", transition=True)
    parameters = called(callback_id, run_lease) | {"channel": channel(schema_of(target))}
    found = target.execute(statements.RETRY, parameters).one_or_none()
    if found is None:
        _claim_again(target, statements.LOCK_WAITING, parameters, JobState.AVAILABLE)
        found = target.execute(statements.RETRY_CLAIMED, parameters).one_or_none()
    row: Job
    row, attempt, _ = found_by(parameters, found)
    again = {"error": "", "attempt": attempt, "next_run_at": row.run_at}
    ledger.stage(target, Staged(row, Outcome.RETRIED, again))
    return row


def resume_external(
    session: SyncSession, callback_id: UUID | str, payload: Any = None, /, *, run_lease: int | None = None
) -> Job:
    """Answer a handler that waits in `ctx.wait_for_callback()`: it goes on, with `payload` (JSON data, at most 1 MiB).

    The answer may come before the handler waits. No outcome: no follow-up. Returns the running `Job`, fully loaded;
    the handler is woken by the commit. One statement. Raises like `complete_external`; a job that is parked has no
    handler any more, and is `CallbackNotFound`. (DESIGN 4)
    """
    target = entered(session, "resume_external")
    checked = checked_result(payload, field="payload")
    parameters = called(callback_id, run_lease) | {"payload": checked, "channel": channel(schema_of(target))}
    found = target.execute(statements.RESUME, parameters).one_or_none()
    if found is None:
        _claim_again(target, statements.LOCK_RESUMABLE, parameters, JobState.RUNNING)
        found = target.execute(statements.RESUME_CLAIMED, parameters).one_or_none()
    row: Job = found_by(parameters, found)[0]
    ledger.mark_dirty(target, row)
    expire_record(target, row.id)
    return row


def heartbeat_callback(session: SyncSession, callback_id: UUID | str, /, *, timeout: timedelta) -> Job:
    """The outside is still at it: the answer may take `timeout` more, from now. For waiting jobs.

    Returns this session's instance, fully loaded. One statement. Raises `CallbackNotFound`, `InvalidJob`
    (callback_id, timeout), `UnsupportedSession`, `ConfigurationError`. (DESIGN 4)
    """
    target = entered(session, "heartbeat_callback")
    wait = limits.duration("timeout", timeout)
    parameters = called(callback_id, None) | {"timeout": wait.total_seconds()}
    row: Job = found_by(parameters, target.scalars(statements.PROLONG, parameters).one_or_none())
    ledger.mark_dirty(target, row)
    expire_record(target, row.id)
    return row


def called(callback_id: object, run_lease: object) -> dict[str, Any]:
    """The binds of a statement by callback."""
    if isinstance(callback_id, str):
        try:
            callback_id = UUID(callback_id)
        except ValueError:
            raise InvalidJob("callback_id", f"{callback_id!r:.60} is no UUID") from None
    if not isinstance(callback_id, UUID):
        raise InvalidJob("callback_id", f"must be a UUID or its text, not {limits.type_name(callback_id)}")
    if run_lease is not None:
        limits.integer("run_lease", run_lease, 0, 2**63 - 1)
    return {"callback": callback_id, "of_lease": run_lease}


def found_by(parameters: dict[str, Any], found: Any) -> Any:
    if found is None:
        raise CallbackNotFound(parameters["callback"])
    return found


def _claim_again(session: Session, lock: Any, parameters: dict[str, Any], state: JobState) -> None:
    """A job that is unique in `state` and not while it waits takes its key again first."""
    where = {"bind": jobs_bind(session)}
    row, _ = found_by(parameters, session.execute(lock, parameters, bind_arguments=where).one_or_none())
    reenter(session, row, state)
