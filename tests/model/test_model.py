"""The stateful model, and the proof that it can fail.

pytest tests/model                              # the bounded run: the same histories every time
AWA_LONG=1 pytest tests/model -m slow           # other histories each time, also over asyncpg; prints its seed
AWA_LONG=1 AWA_SEED=7 pytest tests/model        # those of one seed
AWA_SABOTAGE=lease pytest tests/model           # without one guard (see tests/races/sabotage.py): must fail
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.conftest import PROPERTY
from tests.model.rig import Rig
from tests.model.stories import Stories
from tests.races.sabotage import GUARDS
from tests.worlds import Database, World

ROOT = Path(__file__).parents[2]
LONG = bool(os.environ.get("AWA_LONG"))
SABOTAGED = bool(os.environ.get("AWA_SABOTAGE"))
# A sabotaged run has to fail, not to explain itself; making a failure smaller takes a minute or more.
SHRINKS = os.environ.get("AWA_SHRINK") != "0" and not SABOTAGED
EXAMPLES = int(os.environ.get("AWA_EXAMPLES", "400" if LONG else "32"))
STEPS = 120 if LONG else 60
WORLDS = ["psycopg", "async-asyncpg"] if LONG else ["psycopg"]
SEED = int(os.environ.get("AWA_SEED", random.randrange(2**32)))

profile = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    derandomize=not LONG,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink] if SHRINKS else [Phase.generate],
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.normal,
    print_blob=True,
)


@pytest.mark.slow
@pytest.mark.timeout(0 if LONG else 600)
@pytest.mark.parametrize("world", WORLDS, indirect=True)
def test_every_history_leaves_what_the_reference_says(
    world: World, database: Database, record_property: pytest.FixtureRequest
) -> None:
    rig, begun = Rig(world, database), time.monotonic()
    history = seed(SEED)(type("Seeded", (Stories,), {})) if LONG else Stories
    violations = 1
    try:
        run_state_machine_as_test(lambda: history(rig), settings=profile)  # type: ignore[no-untyped-call]
        violations = 0
    finally:
        record_property(PROPERTY, _summary(world.name, rig.counts, violations, time.monotonic() - begun))  # type: ignore[operator]


def _summary(world: str, counts: Counter[str], violations: int, seconds: float) -> str:
    drawn = f"seed {SEED}" if LONG else "derandomized"
    crashes = sum(counts[how] for how in ("crash", "crash in flush", "invalidate"))
    first = ("examples", "steps", "commits")
    others = ", ".join(f"{name} {counts[name]}" for name in sorted(set(counts) - set(first)))
    return (
        f"{world} ({drawn}): {', '.join(f'{counts[name]} {name}' for name in first)}, "
        f"{counts['rollback'] + counts['close']} rollbacks, {crashes} crashes, violations {violations}, "
        f"{seconds:.0f} s\n  {others}"
    )


# ---------------------------------------------------------------------------------------------- sabotage
def _run(guard: str) -> tuple[int, int, str]:
    """(exit status, violations, output) of a run in a process of its own, with a server of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "AWA_"))}
    clean |= {"AWA_SABOTAGE": guard, "AWA_EXAMPLES": "60"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:xdist", "-k", "history"],
        cwd=ROOT,
        env=clean,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    counted = re.search(r"violations (\d+)", done.stdout)
    assert counted, done.stdout + done.stderr
    return done.returncode, int(counted[1]), done.stdout


@pytest.mark.slow
@pytest.mark.sabotage
@pytest.mark.skipif(SABOTAGED, reason="a sabotaged run tests one thing")
@pytest.mark.parametrize("guard", [*GUARDS, "callback"])
def test_the_model_is_red_without_a_guard(guard: str) -> None:
    status, violations, output = _run(guard)
    assert (status, violations) == (1, 1), output
