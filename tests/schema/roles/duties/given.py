"""Kinds of jobs, what follows on them, and how a duty arranges what it needs as the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from awa_sqla import (
    Completed,
    EnqueueRequest,
    Exhausted,
    FollowUps,
    JobArgs,
    JobState,
    Unique,
    enqueue_many,
)
from awa_sqla.session import catalogue
from tests.schema.roles.least import Place

HOUR = timedelta(hours=1)
PENDING = Unique(states=[JobState.AVAILABLE, JobState.RUNNING])


class Plain(JobArgs):
    number: int = 0


class Keyed(JobArgs, unique=Unique()):
    number: int = 0


class Buried(JobArgs, queue="buried"):
    number: int = 0


class Note(JobArgs):
    about: int


class Later(JobArgs):
    about: int


Duty = Callable[[Place, str], None]


def owed(place: Place, outcome: str, kind: str = "plain", name: str = "elsewhere") -> None:
    """A follow-up that some other process has: this one can only owe it."""
    place.sql(
        "INSERT INTO {awa}.follow_up_specs (kind, outcome, name, created_at) VALUES (:kind, :outcome, :name, "
        "now() - interval '1 minute') ON CONFLICT DO NOTHING",
        kind=kind,
        outcome=outcome,
        name=name,
    )
    catalogue.forget_cache()


def given(place: Place, *jobs: JobArgs | EnqueueRequest) -> list[int]:
    """Committed jobs, by the owner."""
    found = place.run("owner", lambda session: enqueue_many(session, jobs))
    return [job_id for job_id in found if job_id is not None]


def bury(place: Place) -> None:
    """The queue `buried` keeps dead letters."""
    place.sql(
        "INSERT INTO {awa}.queue_meta (queue, override_dead_letters) VALUES ('buried', true) ON CONFLICT DO NOTHING"
    )


async def until(place: Place, condition: Callable[[], object]) -> None:
    """Wait until `condition()` holds, or the role is refused something."""
    while not (place.refused or condition()):  # noqa: ASYNC110 - what is waited for happens in the database
        await asyncio.sleep(0.02)


def follow_ups() -> FollowUps:
    """A follow-up at once, and one for later."""
    registry = FollowUps()

    @registry.on_completed(Plain, name="note")
    def note(event: Completed[Plain]) -> list[Note | EnqueueRequest]:
        return [Note(about=event.job.id), EnqueueRequest(Later(about=event.job.id), delay=HOUR)]

    @registry.on_exhausted(Buried, name="bury")
    def bury(event: Exhausted[Buried]) -> list[Note]:
        return []

    return registry
