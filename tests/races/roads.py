"""What races for a unique key: every way to enqueue a job, and how its answer is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    EnqueueRequest,
    FollowUpError,
    FollowUps,
    Job,
    JobArgs,
    Unique,
    UniqueConflict,
    cancel,
    complete,
    enqueue,
    enqueue_many,
    enqueue_unique,
)
from awa_sqla.models.records import UniqueClaim
from awa_sqla.unique import OnConflict
from tests.app import Signup
from tests.races.keys import MASKS, ROADS
from tests.races.matrix import Answer
from tests.races.verbs import RACERS, Scene, told

#: Apart from the queue of the first job, so that a claim takes that one and no other.
TWINS = "twins"
#: Made as `JobState` names them, the values of the reference's masks.
UNIQUE: dict[str, Unique] = {name: Unique(states=states) for name, states in MASKS.items()}  # type: ignore[arg-type]


class Carrier(JobArgs):
    """A job whose follow-up wants the key."""

    mask: str
    policy: str


def twin(mask: str, policy: OnConflict | None = None) -> EnqueueRequest:
    """A job with the key of the race."""
    return EnqueueRequest(Signup(), queue=TWINS, unique=UNIQUE[mask], on_conflict=policy)


def carry(follow_ups: FollowUps) -> None:
    """A carrier brings a twin."""

    def brings(event: Any) -> EnqueueRequest:
        return twin(event.args.mask, event.args.policy)

    follow_ups.on_completed(Carrier, name="brings")(brings)


@dataclass(frozen=True)
class KeyScene(Scene):
    """The jobs of a race for a key, and what both racers know of them."""

    mask: str
    twin: int | None
    carriers: Mapping[str, Attempt]
    """By who is to complete them."""

    @property
    def unique(self) -> Unique:
        """What makes the jobs of this race the same."""
        return UNIQUE[self.mask]


@dataclass(frozen=True)
class Heard:
    """What an operation has answered, and the id of the job that it made, or was a duplicate of, if it says so."""

    answer: Answer
    job_id: int | None = None
    holders: tuple[int, ...] | None = None
    """The claims as its own transaction sees them afterwards, once it has sent everything."""


def run(name: str, who: str, session: Session, scene: KeyScene, *, flushed: bool) -> Heard:
    """Run an operation, read its answer, and look at the claims."""
    answer = heard(name, who, session, scene)
    if not flushed:
        return answer
    session.flush()
    return replace(answer, holders=tuple(session.scalars(select(UniqueClaim.job_id))))


def heard(name: str, who: str, session: Session, scene: KeyScene) -> Heard:
    """Run an operation and read its answer."""
    try:
        if name in ROADS:
            return _ROADS[name](session, scene, who)
        if name == "cancel_twin":
            assert scene.twin is not None
            return Heard(told(lambda: cancel(session, scene.twin or 0, reason="enough")).answer)
        return Heard(told(lambda: RACERS[name](session, scene)).answer)
    except UniqueConflict as exc:
        assert exc.unique_key == scene.unique.key("signup", TWINS, {"email": Signup().email})
        assert exc.kind == "signup"
        return Heard(Answer.REFUSED, exc.existing_id)


def _enqueued(session: Session, scene: KeyScene, policy: OnConflict) -> Heard:
    job = enqueue(session, Signup(), queue=TWINS, unique=scene.unique, on_conflict=policy)
    session.flush()
    return _made(job.duplicate_of, job)


def _made(duplicate_of: int | None, job: Any) -> Heard:
    if duplicate_of is not None:
        return Heard(Answer.SKIPPED, duplicate_of)
    return Heard(Answer.WON, job.id)


def _unique(session: Session, scene: KeyScene) -> Heard:
    found = enqueue_unique(session, Signup(), queue=TWINS, unique=scene.unique)
    assert found.created is (found.job is not None)
    return Heard(Answer.WON if found.created else Answer.SKIPPED, found.id)


def _many(session: Session, scene: KeyScene, policy: OnConflict) -> Heard:
    [job_id] = enqueue_many(session, [twin(scene.mask)], on_conflict=policy)
    return Heard(Answer.SKIPPED if job_id is None else Answer.WON, job_id)


def _followed(session: Session, scene: KeyScene, who: str) -> Heard:
    carrier = scene.carriers[who]
    complete(session, carrier)
    session.flush()
    brought = session.scalars(select(Job.id).where(Job.parent_id == carrier.id)).one_or_none()
    return Heard(Answer.SKIPPED if brought is None else Answer.WON, brought)


def _follow_or_raise(session: Session, scene: KeyScene, who: str) -> Heard:
    with _conflict_of_follow_up(), session.begin_nested():
        return _followed(session, scene, who)
    raise AssertionError("unreachable")


@contextmanager
def _conflict_of_follow_up() -> Iterator[None]:
    try:
        yield
    except FollowUpError as exc:
        assert isinstance(exc.__cause__, UniqueConflict)
        raise exc.__cause__ from None


def _there_and_gone(session: Session, scene: KeyScene) -> Heard:
    made = _enqueued(session, scene, "skip")
    if made.answer is Answer.WON:
        assert made.job_id is not None
        cancel(session, made.job_id, reason="enough")
        session.flush()
    return made


_ROADS: dict[str, Callable[[Session, KeyScene, str], Heard]] = {
    "skip": lambda session, scene, who: _enqueued(session, scene, "skip"),
    "raise": lambda session, scene, who: _enqueued(session, scene, "raise"),
    "unique": lambda session, scene, who: _unique(session, scene),
    "many_skip": lambda session, scene, who: _many(session, scene, "skip"),
    "many_raise": lambda session, scene, who: _many(session, scene, "raise"),
    "follow_up": _followed,
    "follow_up_raise": _follow_or_raise,
    "there_and_gone": lambda session, scene, who: _there_and_gone(session, scene),
}
