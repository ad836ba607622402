"""Rescue: attempts whose worker is gone, or whose deadline has passed, are taken away from it; callbacks end too.

Bounded by max_attempts, with backoff and dead letters like any failure. No user code runs here: every follow-up
of the Rescued and Exhausted outcomes becomes an obligation in the same transaction, so a spec that raises cannot
keep a job from being rescued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Integer, Text, bindparam, case, inspect, literal_column, or_, select
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.orm import Session

from awa_sqla.args import Backoff, backoff_of
from awa_sqla.maintenance.duplicates import may_come_in
from awa_sqla.models.base import JobState
from awa_sqla.models.job import Attempt, Job
from awa_sqla.models.records import Queue
from awa_sqla.session import listeners
from awa_sqla.session.events import RescueReason
from awa_sqla.session.failing import Failure, end_locked
from awa_sqla.session.statements import AS_OF, among, keeps_dead_letters, seconds
from awa_sqla.session.table import TRANSITIONS
from awa_sqla.session.target import require_transaction

log = logging.getLogger("awa_sqla.maintenance")

_stale = Job.heartbeat_at < AS_OF - seconds("stale_after")

_STALE = (
    select(
        Job,
        keeps_dead_letters,
        case((_stale, literal_column("'stale'", Text)), else_=literal_column("'overdue'", Text)),
    )
    .outerjoin(Queue, Queue.queue == Job.queue)
    .where(among(Job.state, TRANSITIONS["rescue"].sources), or_(_stale, Job.deadline_at < AS_OF))
    .order_by(Job.id)
    .limit(bindparam("most", type_=Integer))
    .with_for_update(of=Job, key_share=True, skip_locked=True)
    .execution_options(populate_existing=True)
)

#: Handlers that wait for a callback, and whose worker is gone.
_UNATTENDED = (
    select(Job, keeps_dead_letters, literal_column("'stale'", Text))
    .outerjoin(Queue, Queue.queue == Job.queue)
    .where(Job.attended_at.is_not(None), _stale)
    .order_by(Job.id)
    .limit(bindparam("most", type_=Integer))
    .with_for_update(of=Job, key_share=True, skip_locked=True)
    .execution_options(populate_existing=True)
)

_EXPIRED = (
    select(Job, keeps_dead_letters, literal_column("'expired'", Text))
    .outerjoin(Queue, Queue.queue == Job.queue)
    .where(among(Job.state, TRANSITIONS["prolong"].sources), Job.callback_timeout_at < AS_OF)
    .order_by(Job.callback_timeout_at, Job.id)
    .limit(bindparam("most", type_=Integer))
    .with_for_update(of=Job, key_share=True, skip_locked=True)
    .execution_options(populate_existing=True)
)

_REASONS = {
    "expired": (RescueReason.EXPIRED_CALLBACK, "callback timed out"),
    "stale": (RescueReason.STALE_HEARTBEAT, "heartbeat stale: worker presumed dead"),
    "overdue": (RescueReason.DEADLINE_EXCEEDED, "hard deadline exceeded"),
}


def rescue(
    session: Session,
    *,
    stale_after: timedelta,
    limit: int = 500,
    backoff: Callable[[str], Backoff] = backoff_of,
) -> list[Attempt]:
    """Take up to `limit` attempts from workers that have not beaten for `stale_after`, or that are overdue, and up to
    `limit` jobs whose callback did not come in time.

    Rows that a transaction holds are passed over: their holder is alive. `backoff` says how jobs of a kind wait.
    Returns the attempts that ended.
    """
    listeners.install(session, "rescue")
    require_transaction(session)
    parameters: dict[str, Any] = {"stale_after": stale_after.total_seconds(), "most": limit}
    ended: list[Attempt] = []
    late = (_EXPIRED, _UNATTENDED, _STALE)
    found = {row[0].id: row for statement in late for row in session.execute(statement, parameters).all()}
    for job, kept, why in found.values():
        reason, text = _REASONS[why]
        attempt = Attempt(job.id, job.run_lease)
        failure = Failure(entry={"error": text, "type": "rescue"}, rescued=reason, backoff=backoff(job.kind))
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
