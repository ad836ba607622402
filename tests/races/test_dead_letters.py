"""A last attempt that fails while it is rescued, again and again: one dead letter, and one of all that follows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from awa_sqla import JobRecord, StaleJobError, fail
from awa_sqla.maintenance import dispatch_obligation, rescue_callbacks, rescue_overdue, rescue_stale
from tests.races.conftest import Tally
from tests.races.race import Rival, Stage
from tests.races.starts import STARTS
from tests.races.verbs import MINUTE, Scene
from tests.worlds import PATIENCE, World, in_two_worlds

ROUNDS = 100
#: Who takes a job in its last attempt away, and the job.
TAKERS: dict[str, Any] = {"last-kept": rescue_stale, "overdue-last-kept": rescue_overdue}
REASONS = {"fail": "max_attempts_exhausted", "last-kept": "heartbeat_stale", "overdue-last-kept": "deadline_exceeded"}


@pytest.fixture
def rivals(world: World, stage: Stage) -> Iterator[list[Rival]]:
    """Threads, each with a connection of its own: one that fails, two that rescue, one that looks on."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Rival(world))) for _ in range(4)]


class Round:
    """One job, and everyone that wants it."""

    def __init__(self, scene: Scene, start: str, number: int) -> None:
        self.scene = scene
        self.start = start
        self.number = number
        self.barrier = threading.Barrier(4)
        self.over = threading.Event()

    def _ready(self, session: Session, wait: int) -> None:
        session.connection()
        self.barrier.wait(PATIENCE)
        for _ in range(wait):  # now this one is ahead, and now that
            session.scalar(select(1))

    def fails(self, session: Session) -> str | None:
        self._ready(session, self.number % 3)
        try:
            fail(session, self.scene.held, "no")
        except StaleJobError:
            return None
        return "fail"

    def rescues(self, session: Session) -> str | None:
        self._ready(session, 0)
        found = TAKERS[self.start](session, stale_after=MINUTE) + rescue_callbacks(session, stale_after=MINUTE)
        assert found in ([], [self.scene.held])
        return self.start if found else None

    def looks(self, session: Session) -> list[list[str]]:
        """Every answer to the question where the job is, from before to after."""
        self._ready(session, 0)
        found: list[list[str]] = []
        last = False
        while not last:
            last = self.over.is_set()
            found.append(list(session.scalars(select(JobRecord.stored_in).where(JobRecord.id == self.scene.held.id))))
        return found


def _dispatched(session: Session, scene: Scene) -> None:
    while (done := dispatch_obligation(session, scene.specs)) is not None:
        assert done.error is None


@pytest.mark.case(50)
@pytest.mark.beside
@pytest.mark.parametrize("start", TAKERS)
@in_two_worlds
def test_of_a_failure_and_its_rescue_one_counts(stage: Stage, rivals: list[Rival], tally: Tally, start: str) -> None:
    """It is in one place at any moment, with one dead letter at the end and one follow-up on the exhaustion."""
    failing, rescuing, also, looking = rivals
    winners: Counter[str] = Counter()
    for number in range(ROUNDS):
        this = Round(stage.set(STARTS[start]), start, number)
        acts = [failing.begin(this.fails), rescuing.begin(this.rescues), also.begin(this.rescues)]
        looks = looking.begin(this.looks)
        try:
            won = [who for act in acts if (who := act.result(PATIENCE))]
        finally:
            this.over.set()
        places = [where for [where] in looks.result(PATIENCE)]
        looking.do(lambda session, scene=this.scene: _dispatched(session, scene))
        tally.add("dead letters", f"round {number}", _wrong(stage, this, won, places))
        winners.update(won)
    tally.check()
    assert set(winners) == {"fail", start}, "one of the two was always ahead"


def _wrong(stage: Stage, this: Round, won: list[str], places: list[str]) -> list[str]:
    database, job_id = stage.database, this.scene.held.id
    if len(won) != 1:
        return [f"it was ended by {won}"]
    row = database.job(job_id)
    brought = Counter(child.parent_outcome for child in database.children(job_id))
    due = Counter({"exhausted": 1} | ({} if won == ["fail"] else {"rescued": 1}))
    hot = places.count("hot")
    checks = {
        "store": (row.stored_in, "dead"),
        "state": (row.state, "failed"),
        "errors": (len(row.errors), 1),
        "dead letters": (database.rows("SELECT id, dlq_reason FROM dlq_entries"), [(job_id, REASONS[won[0]])]),
        "places": (places, ["hot"] * hot + ["dead"] * (len(places) - hot)),
        "last place": (places[-1], "dead"),
        "follow-ups": (brought, due),
        "debts": (database.obligations(), []),
    }
    return [f"{what}: {is_!r}, not {must!r}" for what, (is_, must) in checks.items() if is_ != must]
