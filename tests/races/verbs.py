"""What races: each operation as a function of a session and the scene, and how its answer is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    CompletedBatch,
    Completion,
    Job,
    ScheduledJob,
    StaleJobError,
    cancel,
    claim,
    complete,
    complete_many,
    fail,
    retry_after,
    set_progress,
    snooze,
)
from awa_sqla.maintenance import dispatch_obligation, promote, rescue
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
    queue: str
    store: str
    specs: Sequence[Spec]


Racer = Callable[[Session, Scene], Any]


def _cancel_object(session: Session, scene: Scene) -> Any:
    known = session.get(ScheduledJob if scene.store == "scheduled" else Job, scene.held.id)
    assert known is not None
    return cancel(session, known, reason="enough")


def _beat(session: Session, scene: Scene) -> int:
    found: Any = session.execute(BEAT, {"ids": [scene.held.id], "leases": [scene.held.run_lease]})
    return int(found.rowcount)


def _thief(session: Session, scene: Scene) -> int:
    """Rescued and claimed again by another: the job runs on under another lease."""
    stolen: Any = session.connection().execute(
        text(
            "UPDATE awa.jobs_hot SET run_lease = nextval('awa.run_lease_seq'), attempt = attempt + 1, "
            "heartbeat_at = clock_timestamp(), worker_id = 'thief' WHERE id = :id AND state = 'running'"
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
    "rescue": lambda session, scene: rescue(session, stale_after=MINUTE),
    "promote": lambda session, scene: promote(session).jobs,
    "dispatch": lambda session, scene: dispatch_obligation(session, scene.specs),
    "thief": _thief,
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
}


@dataclass(frozen=True)
class Told:
    """What an operation has answered: the row as it was then, or the error."""

    answer: Answer
    state: str | None = None
    lease: int | None = None
    error: StaleJobError | None = None


def told(act: Callable[[], Any]) -> Told:
    """Run an operation and read its answer; every error but `StaleJobError` goes on."""
    try:
        found = act()
    except StaleJobError as exc:
        return Told(Answer.STALE, error=exc)
    match found:
        case None:
            return Told(Answer.NONE)
        case CompletedBatch(completed=[], stale=[_]):
            return Told(Answer.LISTED)
        case [] | 0:
            return Told(Answer.NOTHING)
        case [Job() as row]:
            return Told(Answer.WON, row.state, row.run_lease)
        case Job() | ScheduledJob() as row:
            return Told(Answer.WON, row.state, row.run_lease)
        case _:
            return Told(Answer.WON)
