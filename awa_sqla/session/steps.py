"""The steps that all verbs share: enter the session, fence the attempt, read what the statement matched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import inspect
from sqlalchemy.orm import Session

from awa_sqla.errors import ConfigurationError, StaleJobError
from awa_sqla.models.base import JobState
from awa_sqla.models.job import SHARED, Attempt, Job
from awa_sqla.session import drain, ledger, listeners, marks, statements
from awa_sqla.session.table import ATTEMPT_COLUMNS
from awa_sqla.session.target import jobs_bind, require_transaction, sync_session
from awa_sqla.session.unique import reenter

T = TypeVar("T")


def entered(session: object, verb: str, *, transition: bool = False) -> Session:
    """The session of a verb, ready for it: known to us, transactional, attached where that matters."""
    target = sync_session(session, verb)
    listeners.install(target, verb)
    if transition:
        marks.require_registry(target, verb)
    require_transaction(target)
    if ledger.is_sending(target):
        raise ConfigurationError(f"{verb}() was called by the iterable of an enqueue_many() of the same session")
    if not ledger.flushing(target):
        drain.drain(target, outer=True)  # the row of a move may have been expunged, and must be found
        if not target.autoflush and listeners.pending(target):
            target.flush()
    return target


_reserved: WeakKeyDictionary[Session, Attempt] = WeakKeyDictionary()


def reserve(session: Session, attempt: Attempt) -> None:
    """Keep this attempt's outcome for the worker: a transactional handler returns it instead of calling a verb."""
    _reserved[session] = attempt


def release(session: Session) -> None:
    """The handler has returned: the outcome may be written."""
    _reserved.pop(session, None)


def refuse_reserved(session: Session, job_id: int) -> None:
    """Refuse a verb on the very job whose handler holds this session."""
    reserved = _reserved.get(session)
    if reserved is not None and reserved.id == job_id:
        raise ConfigurationError(
            "a transactional handler must not touch its own job through ctx.session: return the outcome (a result, "
            "RetryAfter, Snooze, Cancel) or raise, and write progress with ctx.set_progress()"
        )


def held(session: Session, job: object) -> Attempt:
    """The attempt a verb is about. Raises `InvalidJob`, and `ConfigurationError` for the handler's own job."""
    attempt = Attempt.of(job)
    refuse_reserved(session, attempt.id)
    return attempt


def fence(attempt: Attempt, **parameters: Any) -> dict[str, Any]:
    """The binds of a guarded statement."""
    return {"held_id": attempt.id, "held_lease": attempt.run_lease, **parameters}


def one(session: Session, attempt: Attempt, found: T | None) -> T:
    """What the guarded statement matched, or `StaleJobError` with the row as it is now."""
    if found is not None:
        return found
    raise stale(attempt, as_it_is(session, attempt))


def as_it_is(session: Session, attempt: Attempt) -> Job | None:
    """The attempt's row as it is now; None, and not in the session either, when it has left the table."""
    known = session.identity_map.get(inspect(Job).identity_key_from_primary_key((attempt.id,)))
    now = session.get(Job, attempt.id, populate_existing=True)
    if now is None and known is not None and known in session:
        session.expunge(known)
    return now


def holds(now: Job | None, attempt: Attempt) -> bool:
    """Whether the row is the attempt's own as it is now: running, or attended while it waits for a callback."""
    if now is None or now.run_lease != attempt.run_lease:
        return False
    return now.state is JobState.RUNNING or now.attended_at is not None


def claim_anew(session: Session, attempt: Attempt, state: JobState) -> None:
    """Of an attempt's job that comes into its unique states: lock the row and claim its key.

    The row first and then the key, as all verbs do: two of them cannot wait for each other. Raises `StaleJobError`, and
    `UniqueConflict` when another job has the key: then nothing has changed.
    """
    now = as_it_is(session, attempt)
    if not holds(now, attempt):
        raise stale(attempt, now)
    # A session that sends reads to a replica must not lock the row there.
    where = {"bind": jobs_bind(session)}
    locked = session.execute(statements.LOCK, fence(attempt), bind_arguments=where).one_or_none()
    reenter(session, one(session, attempt, locked)[0], state)


def stale(attempt: Attempt, now: Job | None) -> StaleJobError:
    """The error for an attempt whose row is `now` another's."""
    if now is None:
        return StaleJobError(attempt.id, attempt.run_lease)
    return StaleJobError(attempt.id, attempt.run_lease, now.state.value, now.run_lease)


def moved_values(taken: Sequence[Any]) -> tuple[dict[str, Any], Any, Any]:
    """(attributes of the moved row, due time, clock) from a DELETE ... RETURNING of the shared columns."""
    *columns, errors, due, clock = taken
    values = dict(zip(SHARED, columns, strict=True)) | {"errors": errors}
    return values | dict.fromkeys(ATTEMPT_COLUMNS), due, clock
