"""A matrix that cannot fail proves nothing: without any one of its guards the package loses races."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.races.matrix import FENCED
from tests.races.sabotage import CALLBACK_GUARDS, GUARDS, KEY_GUARDS, SWEEP_GUARDS

ROOT = Path(__file__).parents[2]
#: For each guard: a row of a matrix, and the violations that must show in it.
ROWS = {
    "lease": (
        "test_matrix.py",
        "psycopg-running-thief or psycopg-attended-thief",
        [
            f"{start}: thief ends by commit[^\n]*, {verb} races\n    the second got won"
            for start in ("running", "attended")
            for verb in FENCED
        ],
    ),
    "claim": (
        "test_matrix.py",
        "psycopg-available-claim",
        ["available: claim ends by commit, claim races\n    the second got won, not nothing taken"],
    ),
    "rescue": (
        "test_matrix.py",
        "psycopg-running-complete or psycopg-running-beat or psycopg-running-rescue",
        [
            f"running: {first} ends by {end}[^\n]*, rescue_stale races\n    {what}"
            for first, end, what in (
                ("complete", "rollback", "the second got won, not nothing taken"),
                ("rescue_stale", "commit", "NoResultFound"),
                ("beat", "commit", "the second got won, not nothing taken"),
            )
        ],
    ),
    "ledger": (
        "test_matrix.py",
        "psycopg-running-complete",
        [r"children is Counter\(\), not Counter\({'completed': 1}\)"],
    ),
    "obligation": (
        "test_matrix.py",
        "psycopg-running-rescue",
        [r"obligations is Counter\(\), not Counter\({'rescued': 1}\)"],
    ),
    "callback": (
        "test_matrix.py",
        "psycopg-registered-register",
        [
            f"register ends by commit[^\n]*, {verb} races\n    the second got won, not CallbackNotFound"
            for verb in ("park", "complete_external", "fail_external")
        ],
    ),
    "attendance": (
        "test_matrix.py",
        "psycopg-attended-park",
        ["park ends by commit[^\n]*, resume_external races\n    the second got won, not CallbackNotFound"],
    ),
    "unique": (
        "test_keys.py",
        "psycopg-available-scheduled-twin or psycopg-available-nobody",
        [
            r"skip ends by commit[^\n]*, raise races\n +IntegrityError: .* would be a duplicate of job",
            r"raise ends by rollback[^\n]*, promote races\n +IntegrityError: .* would be a duplicate of job",
        ],
    ),
    "triggers": (
        "test_keys.py",
        "psycopg-live-available",
        [r"cancel_id races\n +what is claimed for job \d+ is not true\n +the key is held by \[\d+\], not \[\]"],
    ),
    "order": ("test_batches.py", "many_skip-flush-psycopg", [r"OperationalError: .*deadlock detected"]),
}


@pytest.mark.slow
@pytest.mark.sabotage
@pytest.mark.parametrize("guard", [*GUARDS, *SWEEP_GUARDS, *CALLBACK_GUARDS, *KEY_GUARDS])
def test_the_matrix_is_red_without_a_guard(guard: str) -> None:
    file, row, violations = ROWS[guard]
    command = [sys.executable, "-m", "pytest", f"tests/races/{file}", "-q", "-p", "no:xdist", "-m", "", "-k", row]
    done = subprocess.run(
        [*command, "--sabotage", guard],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "AWA_"))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert [what for what in violations if not re.search(what, done.stdout)] == []
    assert re.search(r"^violations [1-9]", done.stdout, re.MULTILINE)
