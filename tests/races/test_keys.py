"""The races for a unique key: every way to enqueue a job, and every verb on the one that holds the key.

`tests.races.keys` says what must come of each, `tests.races.key_race` runs it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.races.conftest import Tally
from tests.races.key_cells import SITUATIONS, KeyCell, key_cells
from tests.races.key_race import KeyStage, race_for_key
from tests.races.keys import MASKS, VERBS
from tests.races.matrix import RULES
from tests.races.race import Rival, Stage
from tests.races.roads import UNIQUE
from tests.races.test_matrix import LONG, SLICED, WHOLE
from tests.worlds import World

#: As in the other matrix: every so many-th cell in the other worlds.
STEP = 17

CELLS: dict[str, list[KeyCell]] = {name: list(key_cells(one, long=LONG > 0)) for name, one in SITUATIONS.items()}


def run(world: World, stage: Stage, tally: Tally, chosen: list[Any]) -> None:
    """Race these cells one after the other."""
    maker, rival, keys = world.maker(stage.follow_ups), Rival(world), KeyStage(stage)
    try:
        for cell in chosen * max(LONG, 1):
            wrong = race_for_key(maker, rival, keys, cell)
            tally.add("keys", cell, wrong, f"key ended by {cell.end}", f"key {cell.verdict.wait}")
    finally:
        rival.close()
    tally.check()


def test_the_reference_knows_the_states_and_verbs_of_the_package() -> None:
    assert {name: set(unique.states) for name, unique in UNIQUE.items()} == MASKS
    assert set(VERBS) < set(RULES)


@pytest.mark.case(4)
@pytest.mark.case(5)
@pytest.mark.parametrize(
    "situation",
    [pytest.param(name, marks=[pytest.mark.beside] * (not name.startswith("live"))) for name in SITUATIONS],
)
@pytest.mark.parametrize("world", WHOLE, indirect=True)
def test_a_key_goes_to_one_of_two_that_race_for_it(world: World, stage: Stage, tally: Tally, situation: str) -> None:
    run(world, stage, tally, CELLS[situation])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("world", SLICED, indirect=True)
def test_a_slice_of_the_races_for_a_key_is_the_same_with_other_drivers(
    world: World, stage: Stage, tally: Tally, mask: str
) -> None:
    chosen = [cell for name in SITUATIONS for cell in CELLS[name]][::STEP]
    run(world, stage, tally, [cell for cell in chosen if cell.situation.mask == mask])
