"""Waits that a handler attends: the job is `waiting_external`, and still its attempt's.

What `ctx.wait_for_callback()` does, in short transactions of the worker's: `attend` begins the wait, `look` asks
whether the answer is there, and `go_on` ends a wait that the handler has given up. The row keeps its worker and its
heartbeat, so a worker that dies while its handler waits is noticed like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from awa_sqla.errors import CallbackNotFound
from awa_sqla.models.base import JobState, Outcome
from awa_sqla.models.job import Attempt, Job
from awa_sqla.session import callback_statements as statements
from awa_sqla.session import ledger
from awa_sqla.session.callbacks import CallbackToken
from awa_sqla.session.ledger import Staged
from awa_sqla.session.rows import expire_record
from awa_sqla.session.steps import as_it_is, claim_anew, entered, fence, one, stale
from awa_sqla.session.target import jobs_bind


@dataclass(frozen=True, slots=True)
class Answer:
    """What `resume_external()` brought."""

    payload: Any


def attend(session: Session, attempt: Attempt, token: CallbackToken) -> Answer | None:
    """Begin to wait for the callback of `token`; WaitingForCallback follow-ups come with the next flush.

    Returns the answer when it is there already. Waiting again for the same token changes nothing. Raises
    `CallbackNotFound` for a token that is not the attempt's last one, and `StaleJobError`. (DESIGN 4)
    """
    target = entered(session, "wait_for_callback", transition=True)
    row = target.scalars(statements.ATTEND, fence(attempt, callback=token.id)).one_or_none()
    if row is None:
        return look(target, attempt, token)
    ledger.stage(target, Staged(row, Outcome.WAITING_FOR_CALLBACK))
    return None


def look(session: Session, attempt: Attempt, token: CallbackToken) -> Answer | None:
    """The answer to a wait, or None while there is none.

    Raises `StaleJobError` when the attempt has ended, and `CallbackNotFound` when the token is another's.
    """
    where = {"bind": jobs_bind(session)}
    found = session.execute(statements.LOOK, fence(attempt), bind_arguments=where).one_or_none()
    if found is not None:
        state, attended_at, callback, answer = found
        if answer is not None and answer["callback"] == str(token.id):
            return Answer(answer["payload"])
        if state is JobState.RUNNING or attended_at is not None:
            if callback != token.id:
                raise CallbackNotFound(token.id)
            return None
    raise stale(attempt, as_it_is(session, attempt))


def go_on(session: Session, attempt: Attempt) -> Job:
    """The handler has stopped waiting and runs again; its token is as good as before.

    Returns the running `Job`. Raises `StaleJobError` when the attempt does not wait, and `UniqueConflict`.
    """
    target = entered(session, "go_on")
    row = target.scalars(statements.GO_ON, fence(attempt)).one_or_none()
    if row is None:
        now = as_it_is(target, attempt)
        if now is None or now.attended_at is None:
            raise stale(attempt, now)
        claim_anew(target, attempt, JobState.RUNNING)
        row = one(target, attempt, target.scalars(statements.GO_ON_CLAIMED, fence(attempt)).one_or_none())
    ledger.mark_dirty(target, row)
    expire_record(target, row.id)
    return row
