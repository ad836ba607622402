"""`cancel()`: by id or by object, wherever the row lives and while it moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import inspect
from sqlalchemy.orm import InstanceState, Session

from awa_sqla import limits
from awa_sqla.errors import InvalidJob, JobNotFound
from awa_sqla.models.base import JobState, Outcome
from awa_sqla.models.job import DeadLetter, Job, JobRecord, ScheduledJob
from awa_sqla.models.snapshot import JobSnapshot
from awa_sqla.models.wakeups import channel
from awa_sqla.session import ledger, statements
from awa_sqla.session.ledger import Staged
from awa_sqla.session.steps import entered, moved_values, refuse_reserved
from awa_sqla.session.table import TERMINAL
from awa_sqla.session.target import SyncSession, schema_of

Cancellable = Job | ScheduledJob | DeadLetter | JobRecord | JobSnapshot | int


def cancel(session: SyncSession, job_or_id: Cancellable, /, *, reason: str) -> Job | None:
    """Cancel a job that is not finished, in whatever state and table it is.

    `job_or_id` is a job object or its id; `reason` is text, kept in `errors` as "cancelled: ...". A running
    attempt is told when the transaction commits, and its late outcome is stale. Returns the cancelled `Job`,
    fully loaded, or None when the job had already ended; Cancelled follow-ups come with the next flush. One
    statement for a live job, two and an INSERT for a scheduled one.

    Raises `JobNotFound`, `InvalidJob` (job, reason), `FollowUpsNotAttached`, `UnsupportedSession`,
    `ConfigurationError`. (DESIGN 4, 5.6)
    """
    target = entered(session, "cancel", transition=True)
    text = limits.text("reason", reason, longest=limits.ERROR_CHARACTERS)
    return cancel_row(target, id_of(target, job_or_id), text)


def cancel_row(session: Session, job_id: int, reason: str, *, defer: bool = False) -> Job | None:
    """Cancel by id in a session that is ready for it; with `defer`, its follow-ups are owed."""
    refuse_reserved(session, job_id)
    parameters = {
        "job_id": job_id,
        "entry": {"error": f"cancelled: {reason}", "type": "cancelled"},
        "channel": channel(schema_of(session)),
    }
    while True:
        live = session.execute(statements.CANCEL, parameters).one_or_none()
        if live is not None:
            return _staged(session, live[0], reason, defer=defer)
        deferred = session.execute(statements.CANCEL_DEFERRED, parameters).one_or_none()
        if deferred is not None:
            return _staged(session, _moved(deferred), reason, moved=True, defer=defer)
        found = session.execute(statements.FIND, parameters).one_or_none()
        if found is None:
            raise JobNotFound(job_id)
        if found.state in TERMINAL:
            return None
        # It was promoted or rescheduled between the two looks: look again.


def _moved(taken: Sequence[Any]) -> Job:
    values, _, clock = moved_values(taken)
    return Job(**values | {"state": JobState.CANCELLED, "finalized_at": clock})


def _staged(session: Session, row: Job, reason: str, *, moved: bool = False, defer: bool = False) -> Job:
    rows: list[object] = [row] if moved else []
    ledger.stage(session, Staged(row, Outcome.CANCELLED, {"reason": reason}, rows=rows, defer=defer))
    return row


def id_of(session: Session, job_or_id: object) -> int:
    if isinstance(job_or_id, bool) or not isinstance(job_or_id, Cancellable):
        raise InvalidJob("job", f"must be a job or its id, not {type(job_or_id).__name__}")
    if isinstance(job_or_id, int):
        return limits.integer("job", job_or_id, 1, 2**63 - 1)
    if isinstance(job_or_id, JobSnapshot):
        return job_or_id.id
    state: InstanceState[Any] = inspect(job_or_id)
    if state.pending:
        session.flush()
    if state.identity is None:
        raise InvalidJob("job", f"{job_or_id!r} was never stored")
    return int(state.identity[0])
