"""`docs/reference/transitions.md` says what the table of transitions says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from awa_sqla.session.table import TRANSITIONS

SCRIPT = Path(__file__).parents[2] / "docs" / "transitions.py"
PAGE = SCRIPT.parent / "reference" / "transitions.md"


def test_the_page_is_up_to_date():
    printed = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text("utf-8") == printed, "python docs/transitions.py > docs/reference/transitions.md"
    assert subprocess.run([sys.executable, SCRIPT, "--check"], check=False).returncode == 0


def test_every_transition_is_on_the_page():
    rows = [
        line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text("utf-8").splitlines() if line[:2] == "| "
    ]
    assert rows[2:] == list(TRANSITIONS)
