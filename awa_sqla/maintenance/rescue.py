"""Rescue: attempts whose worker is gone, or whose deadline has passed, are taken away from it; callbacks end too.

Bounded by max_attempts, with backoff and dead letters like any failure. No user code runs here: every follow-up
of the Rescued and Exhausted outcomes becomes an obligation in the same transaction, so a spec that raises cannot
keep a job from being rescued.

Three lanes, none of which has to wait for another: `rescue_stale`, `rescue_overdue`, `rescue_callbacks`. Each row is
one lane's: what nobody attends any more is `rescue_stale`'s, whatever else is late about it. Whether a row is late is
asked again when it is locked, so that any number of them at once end each attempt once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Executable, Integer, and_, bindparam, func, inspect, literal_column, select
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.orm import Session

from awa_sqla.args import Backoff, backoff_of
from awa_sqla.maintenance.duplicates import may_come_in
from awa_sqla.models.base import JobState
from awa_sqla.models.job import Attempt, Job
from awa_sqla.models.records import Queue, RuntimeInstance
from awa_sqla.session import listeners
from awa_sqla.session.events import RescueReason
from awa_sqla.session.failing import Failure, end_locked
from awa_sqla.session.statements import AS_OF, SECOND, among, keeps_dead_letters, seconds
from awa_sqla.session.table import TRANSITIONS
from awa_sqla.session.target import require_transaction

log = logging.getLogger("awa_sqla.maintenance")

_asked = select(RuntimeInstance.stale_after_seconds).where(RuntimeInstance.id == Job.worker_id).scalar_subquery()
#: What the row's own worker has asked for; looked up for rows that are stale but for that. A hundred years are enough:
#: one worker's fancy must not bring the clock of all out of its range.
_own_patience = func.least(func.coalesce(_asked, literal_column("0")), literal_column("3.2e9")) * SECOND
_stale = and_(Job.heartbeat_at < AS_OF - seconds("stale_after"), Job.heartbeat_at < AS_OF - _own_patience)
_runs = among(Job.state, TRANSITIONS["rescue"].sources)
_waits = among(Job.state, TRANSITIONS["prolong"].sources)


def _late(*which: ColumnElement[bool], order: tuple[Any, ...] = (Job.id,)) -> Executable:
    return (
        select(Job, keeps_dead_letters)
        .outerjoin(Queue, Queue.queue == Job.queue)
        .where(*which)
        .order_by(*order)
        .limit(bindparam("most", type_=Integer))
        .with_for_update(of=Job, key_share=True, skip_locked=True)
        .execution_options(populate_existing=True)
    )


_STALE = _late(_runs, _stale)
#: Handlers that wait for a callback, and whose worker is gone. Apart, for an index of their own.
_UNATTENDED = _late(Job.attended_at.is_not(None), _stale)
_OVERDUE = _late(_runs, Job.deadline_at < AS_OF, _stale.is_not(True))
_EXPIRED = _late(_waits, Job.callback_timeout_at < AS_OF, _stale.is_not(True), order=(Job.callback_timeout_at, Job.id))

_TEXTS = {
    RescueReason.STALE_HEARTBEAT: "heartbeat stale: worker presumed dead",
    RescueReason.DEADLINE_EXCEEDED: "hard deadline exceeded",
    RescueReason.EXPIRED_CALLBACK: "callback timed out",
}
_LATE = {
    RescueReason.STALE_HEARTBEAT: (_UNATTENDED, _STALE),
    RescueReason.DEADLINE_EXCEEDED: (_OVERDUE,),
    RescueReason.EXPIRED_CALLBACK: (_EXPIRED,),
}


def rescue(
    session: Session, *, stale_after: timedelta, limit: int = 500, backoff: Callable[[str], Backoff] = backoff_of
) -> list[Attempt]:
    """One pass of `rescue_stale`, `rescue_overdue` and `rescue_callbacks`, each with its own `limit`.

    Returns the attempts that ended.
    """
    return [
        attempt
        for lane in (rescue_stale, rescue_overdue, rescue_callbacks)
        for attempt in lane(session, stale_after=stale_after, limit=limit, backoff=backoff)
    ]


def rescue_stale(
    session: Session, *, stale_after: timedelta, limit: int = 500, backoff: Callable[[str], Backoff] = backoff_of
) -> list[Attempt]:
    """Take up to `limit` attempts that run, and up to `limit` that wait for a callback, from workers that have not
    beaten for `stale_after`, or for as long as that worker has asked for.

    Rows that a transaction holds are passed over: their holder is alive. `backoff` says how jobs of a kind wait.
    Returns the attempts that ended.
    """
    return _rescue(session, RescueReason.STALE_HEARTBEAT, stale_after, limit, backoff)


def rescue_overdue(
    session: Session, *, stale_after: timedelta, limit: int = 500, backoff: Callable[[str], Backoff] = backoff_of
) -> list[Attempt]:
    """Take up to `limit` attempts whose deadline has passed from workers that live; the others are `rescue_stale`'s.

    Else like `rescue_stale`.
    """
    return _rescue(session, RescueReason.DEADLINE_EXCEEDED, stale_after, limit, backoff)


def rescue_callbacks(
    session: Session, *, stale_after: timedelta, limit: int = 500, backoff: Callable[[str], Backoff] = backoff_of
) -> list[Attempt]:
    """End up to `limit` waits whose callback did not come in time, first those that are late the longest.

    Where a handler waits whose worker is gone, that is `rescue_stale`'s. Else like it.
    """
    return _rescue(session, RescueReason.EXPIRED_CALLBACK, stale_after, limit, backoff)


def _rescue(
    session: Session, reason: RescueReason, stale_after: timedelta, limit: int, backoff: Callable[[str], Backoff]
) -> list[Attempt]:
    listeners.install(session, "rescue")
    require_transaction(session)
    parameters: dict[str, Any] = {"stale_after": stale_after.total_seconds(), "most": limit}
    entry = {"error": _TEXTS[reason], "type": "rescue"}
    ended: list[Attempt] = []
    for statement in _LATE[reason]:
        for job, kept in session.execute(statement, parameters).all():
            attempt = Attempt(job.id, job.run_lease)
            failure = Failure(entry=entry, rescued=reason, backoff=backoff(job.kind))
            if job.attempt < job.max_attempts and not may_come_in(session, job, JobState.RETRYABLE):
                if job.state is JobState.CANCELLED:
                    ended.append(attempt)
            elif _ended(session, job, failure, keeps_dead_letters=kept):
                ended.append(attempt)
    return ended


def _ended(session: Session, job: Job, failure: Failure, *, keeps_dead_letters: bool) -> bool:
    """End one attempt; a row that cannot be moved fails where it is, and none keeps the others from being rescued."""
    for one in (failure, replace(failure, in_place=True)):
        try:
            with session.begin_nested():
                end_locked(session, job, one, keeps_dead_letters=keeps_dead_letters)
        except StatementError as exc:
            if isinstance(exc, DBAPIError) and exc.connection_invalidated:
                raise
            log.error("job %s cannot be rescued as it should: %s", inspect(job).identity, str(exc).partition("\n")[0])
        else:
            return True
    return False
