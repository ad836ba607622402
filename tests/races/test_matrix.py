"""The race matrix: every ordered pair of operations on one job, from two transactions.

`tests.races.matrix` says what must come of each, `tests.races.race` runs it.  One test is one row of the matrix: a
starting state and a first operation, against every second operation, committed and rolled back.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.races.cells import cells
from tests.races.conftest import Tally
from tests.races.matrix import RULES
from tests.races.race import Rival, Stage, race
from tests.races.starts import STARTS
from tests.races.verbs import RACERS
from tests.worlds import WORLDS, World

#: 0, or how often the long matrix is repeated.
LONG = int(os.environ.get("AWA_LONG") or 0)
#: The whole matrix in one world; every so many-th cell in these.  No factor of the number of cells in a row.
WHOLE = list(WORLDS) if LONG else ["psycopg"]
SLICED = [] if LONG else ["async-asyncpg", "psycopg2"]
STEP = 7

CELLS = list(cells(long=LONG > 0))
#: What the short matrix leaves out of maintenance; the long one has it.
BESIDE = [] if LONG else list(cells(beside=True))
ROWS = list(dict.fromkeys((cell.start, cell.first) for cell in CELLS))


def run(world: World, stage: Stage, tally: Tally, chosen: list[Any]) -> None:
    """Race these cells one after the other."""
    maker, rival = world.maker(stage.follow_ups), Rival(world)
    try:
        for cell in chosen * max(LONG, 1):
            wrong = race(maker, rival, stage, cell)
            tally.add("cells", cell, wrong, f"ended by {cell.end}", f"won by {cell.verdict.winner}")
    finally:
        rival.close()
    tally.check()


def test_every_operation_has_its_rule() -> None:
    assert set(RACERS) == set(RULES)


@pytest.mark.case(26)
@pytest.mark.parametrize(("start", "first"), ROWS)
@pytest.mark.parametrize("world", WHOLE, indirect=True)
def test_of_two_that_race_the_documented_one_wins(
    world: World, stage: Stage, tally: Tally, start: str, first: str
) -> None:
    run(world, stage, tally, [cell for cell in CELLS if (cell.start, cell.first) == (start, first)])


@pytest.mark.beside
@pytest.mark.case(26)
@pytest.mark.parametrize("start", dict.fromkeys(cell.start for cell in BESIDE))
@pytest.mark.parametrize("world", WHOLE, indirect=True)
def test_maintenance_races_with_everything(world: World, stage: Stage, tally: Tally, start: str) -> None:
    run(world, stage, tally, [cell for cell in BESIDE if cell.start == start])


@pytest.mark.beside
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("world", SLICED, indirect=True)
def test_a_slice_of_the_matrix_is_the_same_with_other_drivers(
    world: World, stage: Stage, tally: Tally, start: str
) -> None:
    run(world, stage, tally, [cell for cell in (CELLS + BESIDE)[::STEP] if cell.start == start])
