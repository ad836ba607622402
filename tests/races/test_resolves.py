"""Two deliveries of one callback, let go at the same moment, again and again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy.orm import Session

from awa_sqla import CallbackNotFound, complete_external, fail_external, resume_external, retry_external
from tests.races.conftest import Tally
from tests.races.matrix import RULES
from tests.races.race import Rival, Stage
from tests.races.starts import STARTS
from tests.races.verbs import Scene
from tests.worlds import PATIENCE, World, in_two_worlds

#: How often each is raced; the first as often as the case says.
ROUNDS = {"complete_external": 50, "fail_external": 10, "retry_external": 10, "resume_external": 10}
#: What a delivery does with payload 1 or 2, and the column in which the payload is kept.
DELIVERIES: dict[str, Any] = {
    "complete_external": lambda session, scene, n: complete_external(session, scene.token.id, n),
    "fail_external": lambda session, scene, n: fail_external(session, scene.token.id, str(n)),
    "retry_external": lambda session, scene, n: retry_external(session, scene.token.id),
    "resume_external": lambda session, scene, n: resume_external(session, scene.token.id, n),
}
KEPT = {
    "complete_external": lambda row: row.result,
    "fail_external": lambda row: int(row.errors[-1]["error"]),
    "resume_external": lambda row: row.callback_answer["payload"],
}
BROUGHT = {"complete_external": ["completed"], "fail_external": ["exhausted"], "retry_external": ["retried"]}


@pytest.fixture
def rivals(world: World, stage: Stage) -> Iterator[list[Rival]]:
    """Two threads, each with a connection of its own."""
    with closing(Rival(world)) as one, closing(Rival(world)) as two:
        yield [one, two]


def _deliver(session: Session, scene: Scene, verb: str, n: int, barrier: threading.Barrier) -> str:
    session.connection()
    barrier.wait(PATIENCE)
    try:
        DELIVERIES[verb](session, scene, n)
    except CallbackNotFound as exc:
        assert exc.callback_id == str(scene.token.id)
        return "refused"
    return f"ok {n}"


@pytest.mark.case(13)
@pytest.mark.parametrize(
    ("start", "verb"),
    [
        (start, verb)
        for verb in DELIVERIES
        for start in ("registered", "waiting", "attended")
        if RULES[verb].takes(STARTS[start])
    ],
)
@in_two_worlds
def test_of_two_deliveries_one_counts(stage: Stage, rivals: list[Rival], tally: Tally, start: str, verb: str) -> None:
    barrier = threading.Barrier(2)
    for number in range(ROUNDS[verb]):
        scene = stage.set(STARTS[start])
        both = [
            rival.begin(lambda session, n=n, scene=scene: _deliver(session, scene, verb, n, barrier))
            for n, rival in enumerate(rivals, 1)
        ]
        answers = sorted(one.result(PATIENCE) for one in both)
        row = stage.database.job(scene.held.id)
        wrong = [] if answers in (["ok 1", "refused"], ["ok 2", "refused"]) else [f"they got {answers}"]
        if verb in KEPT and KEPT[verb](row) != int(answers[0][-1]):
            wrong.append(f"{KEPT[verb](row)} is kept, though they got {answers}")
        brought = [child.parent_outcome for child in stage.database.children(scene.held.id)]
        if brought != BROUGHT.get(verb, []):
            wrong.append(f"it brought {brought}")
        tally.add("deliveries", f"round {number}", wrong)
    tally.check()
