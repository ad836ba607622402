"""Claims that came to nothing: rolled back, or stolen, and then used as if they had not."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.orm import Session, SessionTransaction

from awa_sqla import Attempt, Job, claim, complete
from tests.races.conftest import Tally
from tests.races.matrix import FENCED, RULES
from tests.races.race import Rival, Stage, go_on_with, opened
from tests.races.starts import STARTS
from tests.races.verbs import ON_OBJECTS, RACERS, Scene, told
from tests.worlds import World

ENDS = ("rollback", "rollback to a savepoint", "close", "theft")


def _claimed(session: Session, scene: Scene) -> Attempt | None:
    found = claim(session, scene.queue, limit=1, worker_id="w2")
    return Attempt.of(found[0]) if found else None


def _lost(maker: Any, rival: Rival, stage: Stage, end: str, verb: str) -> list[str]:
    """One claims, loses the claim, and goes on with its job object; another claims the job and completes it."""
    running = RULES["claim"].does(STARTS["available"])
    scene, wrong = stage.set(STARTS["available"]), []
    session = opened(maker)
    try:
        savepoint = session.begin_nested() if "savepoint" in end else None
        [mine] = claim(session, scene.queue, limit=1, worker_id="w1")
        held = Attempt.of(mine)
        if (while_held := rival.do(lambda other: _claimed(other, scene))) is not None:
            wrong.append(f"a claimed job was claimed again, under {while_held}")
        if end == "theft":
            session.commit()
            theirs, running = _stolen(rival, stage, scene), RULES["thief"].does(running)
        else:
            _give_up(session, savepoint, end)
            theirs = rival.do(lambda other: _claimed(other, scene))
        if theirs.run_lease <= held.run_lease:
            wrong.append(f"lease {theirs.run_lease} came after {held.run_lease}")
        wrong += _presented(session, mine, verb)
        go_on_with(session, "mine", flushed=False)
        session.commit()
        wrong += stage.violations(scene, running, ["mine"], theirs.run_lease)
        rival.do(lambda other: complete(other, theirs, result=1))
        wrong += stage.violations(scene, RULES["complete"].does(running), ["mine"], theirs.run_lease)
    except Exception as exc:
        wrong.append(f"{type(exc).__name__}: {exc}")
    finally:
        session.close()
    return wrong


def _stolen(rival: Rival, stage: Stage, scene: Scene) -> Attempt:
    rival.do(lambda other: RACERS["thief"](other, scene))
    lease = stage.database.value("SELECT run_lease FROM jobs_hot WHERE id = %s", scene.held.id)
    return Attempt(scene.held.id, lease)


def _give_up(session: Session, savepoint: SessionTransaction | None, end: str) -> None:
    if savepoint is not None:
        savepoint.rollback()
        session.commit()
    elif end == "close":
        session.close()
    else:
        session.rollback()


def _presented(session: Session, mine: Job, verb: str) -> list[str]:
    """The verb on the lost job object, after it was looked at where it still can be."""
    if mine in session:
        assert mine.state
    answer = told(lambda: ON_OBJECTS[verb](session, mine)).answer
    must = RULES[verb].otherwise
    return [] if answer == must else [f"{verb} got {answer}, not {must}"]


@pytest.mark.parametrize("expire_on_commit", [True, False])
@pytest.mark.parametrize(
    "world",
    ["psycopg", *(pytest.param(world, marks=pytest.mark.beside) for world in ("psycopg2", "async-asyncpg"))],
    indirect=True,
)
def test_a_lost_claim_cannot_end_the_next_ones_run(
    world: World, stage: Stage, tally: Tally, expire_on_commit: bool
) -> None:
    maker = world.maker(stage.follow_ups, expire_on_commit=expire_on_commit)
    rival = Rival(world, expire_on_commit=expire_on_commit)
    try:
        for end in ENDS:
            for verb in FENCED:
                wrong = _lost(maker, rival, stage, end, verb)
                tally.add("claims", f"claim lost by {end}, {verb}", wrong)
    finally:
        rival.close()
    tally.check()
