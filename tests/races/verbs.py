"""What races: each operation as a function of a session and the scene, and how its answer is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from sqlalchemy import text
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    CallbackNotFound,
    CallbackToken,
    CompletedBatch,
    Completion,
    DeadLetter,
    Job,
    ScheduledJob,
    StaleJobError,
    cancel,
    cancel_callback,
    claim,
    complete,
    complete_external,
    complete_many,
    fail,
    fail_external,
    heartbeat_callback,
    park,
    register_callback,
    resume_external,
    retry_after,
    retry_external,
    set_progress,
    snooze,
)
from awa_sqla.maintenance import age, dispatch_obligation, promote, rescue_callbacks, rescue_overdue, rescue_stale
from awa_sqla.session import attending, ledger
from awa_sqla.session.attending import attend, go_on
from awa_sqla.session.specs import Spec
from awa_sqla.session.verbs import cancel_attempt, put_back
from awa_sqla.worker.heartbeat import BEAT
from tests.races.matrix import Answer

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


@dataclass(frozen=True)
class Scene:
    """The one job of a race, and what both racers know of it."""

    held: Attempt
    token: CallbackToken
    """A token of the held attempt, or one that is nobody's by now."""
    queue: str
    store: str
    specs: Sequence[Spec]


def new_token() -> CallbackToken:
    """A token that no job has yet."""
    return CallbackToken(uuid4(), datetime.now(UTC) + HOUR)


@dataclass(frozen=True)
class Ended:
    """A job that was handed out as it had ended before."""

    row: Job | DeadLetter


Racer = Callable[[Session, Scene], Any]


def _cancel_object(session: Session, scene: Scene) -> Any:
    known = session.get(ScheduledJob if scene.store == "scheduled" else Job, scene.held.id)
    assert known is not None
    return cancel(session, known, reason="enough")


def _beat(session: Session, scene: Scene) -> int:
    found: Any = session.execute(BEAT, {"ids": [scene.held.id], "leases": [scene.held.run_lease]})
    return int(found.rowcount)


def _park(session: Session, scene: Scene) -> Any:
    row = park(session, scene.held, scene.token)
    return row if any(found.staged for found in ledger.unsettled(session)) else Ended(row)


def _attend(session: Session, scene: Scene) -> Any:
    answer = attend(session, scene.held, scene.token)
    return True if any(found.staged for found in ledger.unsettled(session)) else answer


def _thief(session: Session, scene: Scene) -> int:
    """Rescued and claimed again by another: the job runs on under another lease, with a callback of that attempt."""
    stolen: Any = session.connection().execute(
        text(
            "UPDATE awa.jobs_hot SET run_lease = nextval('awa.run_lease_seq'), attempt = attempt + 1, "
            "heartbeat_at = clock_timestamp(), worker_id = 'thief', "
            "callback_id = CASE WHEN callback_id IS NOT NULL THEN gen_random_uuid() END, "
            "state = 'running', attended_at = NULL, callback_answer = NULL "
            "WHERE id = :id AND (state = 'running' OR attended_at IS NOT NULL)"
        ),
        {"id": scene.held.id},
    )
    return int(stolen.rowcount)


RACERS: dict[str, Racer] = {
    "claim": lambda session, scene: claim(session, scene.queue, limit=1, worker_id="w2"),
    "complete": lambda session, scene: complete(session, scene.held, result=1),
    "complete_many": lambda session, scene: complete_many(session, [Completion(scene.held, 1)]),
    "fail": lambda session, scene: fail(session, scene.held, "no"),
    "fail_terminal": lambda session, scene: fail(session, scene.held, "no", terminal=True),
    "retry_after": lambda session, scene: retry_after(session, scene.held, MINUTE, error="no"),
    "snooze": lambda session, scene: snooze(session, scene.held, HOUR),
    "put_back": lambda session, scene: put_back(session, scene.held, HOUR),
    "cancel_id": lambda session, scene: cancel(session, scene.held.id, reason="enough"),
    "cancel_object": _cancel_object,
    "cancel_attempt": lambda session, scene: cancel_attempt(session, scene.held, "enough"),
    "set_progress": lambda session, scene: set_progress(session, scene.held, 50),
    "beat": _beat,
    "rescue_stale": lambda session, scene: rescue_stale(session, stale_after=MINUTE),
    "rescue_overdue": lambda session, scene: rescue_overdue(session, stale_after=MINUTE),
    "rescue_callbacks": lambda session, scene: rescue_callbacks(session, stale_after=MINUTE),
    "age": lambda session, scene: age(session),
    "promote": lambda session, scene: promote(session).jobs,
    "dispatch": lambda session, scene: dispatch_obligation(session, scene.specs),
    "thief": _thief,
    "register": lambda session, scene: register_callback(session, scene.held, timeout=HOUR),
    "cancel_callback": lambda session, scene: cancel_callback(session, scene.held),
    "park": _park,
    "complete_external": lambda session, scene: complete_external(session, scene.token.id, 1),
    "fail_external": lambda session, scene: fail_external(
        session, scene.token.id, "no", run_lease=scene.held.run_lease
    ),
    "retry_external": lambda session, scene: retry_external(session, scene.token.id),
    "heartbeat_callback": lambda session, scene: heartbeat_callback(session, scene.token.id, timeout=HOUR),
    "attend": _attend,
    "go_on": lambda session, scene: go_on(session, scene.held),
    "resume_external": lambda session, scene: resume_external(session, scene.token.id, 1),
}

#: The verbs of an attempt, on the job object that a claim has returned.
ON_OBJECTS: dict[str, Callable[[Session, Job], Any]] = {
    "complete": lambda session, job: complete(session, job, result=1),
    "complete_many": lambda session, job: complete_many(session, [job]),
    "fail": lambda session, job: fail(session, job, "no"),
    "fail_terminal": lambda session, job: fail(session, job, "no", terminal=True),
    "retry_after": lambda session, job: retry_after(session, job, MINUTE),
    "snooze": lambda session, job: snooze(session, job, HOUR),
    "put_back": lambda session, job: put_back(session, job, HOUR),
    "cancel_attempt": lambda session, job: cancel_attempt(session, job, "enough"),
    "set_progress": lambda session, job: set_progress(session, job, 50),
    "register": register_callback,
}


@dataclass(frozen=True)
class Told:
    """What an operation has answered: the row as it was then, or the error."""

    answer: Answer
    state: str | None = None
    lease: int | None = None
    error: StaleJobError | None = None
    callback: str | None = None
    """The id of the callback that was registered, or not found."""


def told(act: Callable[[], Any]) -> Told:
    """Run an operation and read its answer; every error but those of a lost race goes on."""
    try:
        found = act()
    except StaleJobError as exc:
        return Told(Answer.STALE, error=exc)
    except CallbackNotFound as exc:
        return Told(Answer.UNKNOWN, callback=exc.callback_id)
    match found:
        case None:
            return Told(Answer.NONE)
        case CompletedBatch(completed=[], stale=[_]):
            return Told(Answer.LISTED)
        case [] | 0 | False:
            return Told(Answer.NOTHING)
        case CallbackToken():
            return Told(Answer.WON, callback=str(found.id))
        case attending.Answer(payload=1):
            return Told(Answer.ANSWERED)
        case Ended(row):
            return Told(Answer.ENDED, row.state, row.run_lease)
        case [Job() as row]:
            return Told(Answer.WON, row.state, row.run_lease)
        case Job() | ScheduledJob() | DeadLetter() as row:
            return Told(Answer.WON, row.state, row.run_lease)
        case _:
            return Told(Answer.WON)
