"""A job that moves between its tables while it is looked for by id is found, however often it moves."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, inspect

from awa_sqla import Job, cancel
from tests.races.conftest import Tally
from tests.races.matrix import RULES
from tests.races.race import Stage, opened
from tests.races.starts import STARTS
from tests.worlds import Database, World, in_two_worlds

#: A cancel looks at one table, at the other, at the view, and begins anew: two rounds.
LOOKS = 6
_COLUMNS = ", ".join(c.name for c in inspect(Job).columns if c.name not in ("state", "run_at", "aged"))


def _hop(database: Database, job_id: int) -> None:
    """A retry or a promotion, whichever applies, committed; nothing when somebody holds the row."""
    for source, target, state in (
        ("jobs_hot", "scheduled_jobs", "retryable"),
        ("scheduled_jobs", "jobs_hot", "available"),
    ):
        moved = database.rows(
            f"WITH gone AS (DELETE FROM {source} WHERE id = "
            f"(SELECT id FROM {source} WHERE id = {job_id} FOR UPDATE SKIP LOCKED) RETURNING *) "
            f"INSERT INTO {target} ({_COLUMNS}, state, run_at) SELECT {_COLUMNS}, '{state}', now() FROM gone "
            "RETURNING id"
        )
        if moved:
            return


@pytest.mark.parametrize("start", ["available", "running", "scheduled"])
@in_two_worlds
def test_a_job_that_moves_between_the_looks_is_found(world: World, stage: Stage, tally: Tally, start: str) -> None:
    maker = world.maker(stage.follow_ups)
    longest = 0
    for moves in range(2**LOOKS):
        scene, session, seen = stage.set(STARTS[start]), opened(maker), 0

        def before(conn: Any, cursor: Any, statement: str, *rest: Any, moves: int = moves, scene: Any = scene) -> None:
            nonlocal seen
            if "RETURNING" not in statement and "awa.jobs." not in statement:
                return
            if moves >> seen & 1:
                _hop(stage.database, scene.held.id)
            seen += 1

        event.listen(world.engine, "before_cursor_execute", before)
        try:
            row = cancel(session, scene.held.id, reason="enough")
            session.commit()
        finally:
            event.remove(world.engine, "before_cursor_execute", before)
            session.close()
        wrong = [] if row is not None else ["the cancel did not find it"]
        wrong += stage.violations(scene, RULES["cancel_id"].does(STARTS[start]), [])
        tally.add("looks", f"{start}: moves {moves:06b}", wrong)
        longest = max(longest, seen)
    tally.check()
    assert longest > LOOKS, "no cancel has had to begin anew"
