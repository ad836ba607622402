"""`docs/reference/roles.md` says what the roles are granted, and the how-to page names them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from awa_sqla.schema.grants import FUNCTIONS, RELATIONS, ROLES, SEQUENCES

SCRIPT = Path(__file__).parents[2] / "docs" / "roles.py"
PAGE = SCRIPT.parent / "reference" / "roles.md"
HOW_TO = SCRIPT.parent / "how-to" / "least-privilege.md"


def test_the_page_is_up_to_date() -> None:
    printed = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text("utf-8") == printed, "python docs/roles.py > docs/reference/roles.md"
    assert subprocess.run([sys.executable, SCRIPT, "--check"], check=False).returncode == 0


@pytest.mark.parametrize("role", [role for role in ROLES if role != "owner"])
def test_every_privilege_is_on_the_page(role: str) -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    (names,) = [line.strip("| ").split(" | ") for line in lines if line.startswith("| | ")]
    found = ROLES[role]
    cells = {}
    for line in lines:
        parts = [part.strip() for part in line.split("|")[1:-1]]
        if len(parts) == len(names) + 1 and parts[0].startswith("`"):
            cells[parts[0].strip("`")] = parts[1 + names.index(role)]
    assert set(cells) == {*RELATIONS, *SEQUENCES, *FUNCTIONS}
    letters = {"SELECT": "S", "INSERT": "I", "UPDATE": "U", "DELETE": "D"}
    for relation in RELATIONS:
        privileges = found.relations.get(relation, ())
        assert cells[relation].upper().split() == [letters[privilege.partition(" ")[0]] for privilege in privileges]
        assert sum(cell.islower() for cell in cells[relation].split()) == sum("(" in one for one in privileges)
    assert {name for name in SEQUENCES if cells[name]} == set(found.sequences)
    assert {name for name in FUNCTIONS if cells[name]} == set(found.functions)


def test_the_how_to_page_names_every_role() -> None:
    text = HOW_TO.read_text("utf-8")
    assert [role for role in ROLES if f"| `{role}` |" not in text] == []
