"""`docs/reference/steps.md` says what the steps say; `tests/schema/test_online.py` compares that with `pg_locks`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "steps.py"
PAGE = SCRIPT.parent / "reference" / "steps.md"


def test_the_page_is_up_to_date() -> None:
    printed = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text("utf-8") == printed, "python docs/steps.py > docs/reference/steps.md"
    assert subprocess.run([sys.executable, SCRIPT, "--check"], check=False).returncode == 0
