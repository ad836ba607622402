"""How an attempt ends that did not succeed: retried, failed, or kept as a dead letter.

One road for `fail()`, `retry_after()` and rescue: the row is locked together with its queue's policy, then moved or
updated, and its outcomes are staged.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy.orm import Session

from awa_sqla.args import Backoff, backoff_of
from awa_sqla.models.base import JobState, Outcome
from awa_sqla.models.job import Attempt, DeadLetter, Job, ScheduledJob
from awa_sqla.session import ledger, statements
from awa_sqla.session.events import RescueReason
from awa_sqla.session.ledger import Staged
from awa_sqla.session.steps import fence, moved_values, one
from awa_sqla.session.target import jobs_bind
from awa_sqla.session.unique import reenter

Failed = ScheduledJob | Job | DeadLetter


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What ended the attempt. `entry` is its error entry; `delay` overrides the kind's backoff, and `kept_as` the
    reason of a dead letter.

    With `in_place` the row stays where it is, as failed: the last resort for a row that cannot be written anew, because
    it holds what Python cannot (a JSON number beyond a float, from plain SQL).
    """

    entry: dict[str, Any]
    terminal: bool = False
    delay: timedelta | None = None
    backoff: Backoff | None = None
    rescued: RescueReason | None = None
    in_place: bool = False
    kept_as: str | None = None

    def wait(self, kind: str, attempt: int) -> timedelta:
        """How long until the next attempt."""
        return self.delay if self.delay is not None else (self.backoff or backoff_of(kind)).delay(attempt)

    @property
    def dead_letter_reason(self) -> str:
        """The reason kept with a dead letter."""
        if self.kept_as is not None:
            return self.kept_as
        if self.rescued is not None:
            return _RESCUED[self.rescued]
        return "terminal_error" if self.terminal else "max_attempts_exhausted"


_RESCUED = {
    RescueReason.STALE_HEARTBEAT: "heartbeat_stale",
    RescueReason.DEADLINE_EXCEEDED: "deadline_exceeded",
    RescueReason.EXPIRED_CALLBACK: "callback_timeout",
}


def end_attempt(session: Session, attempt: Attempt, failure: Failure) -> Failed:
    """Lock the attempt's row and end it. Raises `StaleJobError`."""
    # A session that sends reads to a replica must not lock the row there.
    where = {"bind": jobs_bind(session)}
    locked = session.execute(statements.LOCK, fence(attempt), bind_arguments=where).one_or_none()
    row, keeps_dead_letters = one(session, attempt, locked)
    return end_locked(session, row, failure, keeps_dead_letters=keeps_dead_letters)


def end_locked(session: Session, job: Job, failure: Failure, *, keeps_dead_letters: bool) -> Failed:
    """End the attempt of a freshly loaded and locked row."""
    attempt, number = Attempt(job.id, job.run_lease), job.attempt
    spent = {"error": failure.entry["error"], "attempt": number}
    fenced = fence(attempt, entry=failure.entry)
    if not failure.in_place and not failure.terminal and number < job.max_attempts:
        reenter(session, job, JobState.RETRYABLE)
        wait = failure.wait(job.kind, number).total_seconds()
        values, due, clock = moved_values(session.execute(statements.TAKE_WITH_ERROR, fenced | {"delay": wait}).one())
        retried = ScheduledJob(**values | {"state": JobState.RETRYABLE, "run_at": due, "finalized_at": clock})
        _stage(session, retried, failure, Outcome.RETRIED, spent | {"next_run_at": due})
        return retried
    if keeps_dead_letters and not failure.in_place:
        values, _, clock = moved_values(session.execute(statements.TAKE_WITH_ERROR, fenced | {"delay": 0}).one())
        own = {"dlq_reason": failure.dead_letter_reason, "dlq_at": clock, "original_run_lease": values["run_lease"]}
        letter = DeadLetter(**values | own | {"state": JobState.FAILED, "finalized_at": clock})
        _stage(session, letter, failure, Outcome.EXHAUSTED, spent)
        return letter
    failed = session.scalars(statements.EXHAUST, fenced).one()
    _stage(session, failed, failure, Outcome.EXHAUSTED, spent)
    return failed


def _stage(session: Session, row: Failed, failure: Failure, outcome: Outcome, context: dict[str, Any]) -> None:
    """Stage the outcome; a rescue's outcomes are owed, and a retry by rescue is Rescued, not Retried."""
    rows: list[object] = [] if isinstance(row, Job) else [row]  # a move adds a row; a failure in place changes one
    if failure.rescued is None:
        ledger.stage(session, Staged(row, outcome, context, rows=rows))
        return
    reason = {"reason": failure.rescued.value}
    ledger.stage(session, Staged(row, Outcome.RESCUED, reason, defer=True, rows=rows))
    if outcome is Outcome.EXHAUSTED:
        ledger.stage(session, Staged(row, outcome, context, defer=True))
