"""`docs/reference/alembic.md` says what `docs/autogenerate.py` says; `tests/schema/test_guard.py` tries each row."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.schema.guarded import situations


@pytest.fixture
def pages() -> ModuleType:
    """The script, newly loaded."""
    return situations()


def test_the_page_is_up_to_date(pages: ModuleType) -> None:
    assert pages.PAGE.read_text("utf-8") == pages.page(), "python docs/autogenerate.py > docs/reference/alembic.md"
    assert pages.main(["--check"]) == 0


def test_the_check_notices_a_page_that_is_not(
    pages: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages.PAGE = tmp_path / "alembic.md"
    assert pages.main(["--check"]) == 1
    pages.PAGE.write_text(pages.page().replace("nothing", "something", 1))
    assert pages.main(["--check"]) == 1
    assert "not up to date" in capsys.readouterr().err


def test_the_situations_of_the_page_are_all_that_are_tried(pages: ModuleType) -> None:
    rows = [line for line in pages.page().splitlines() if line.startswith("| ")]
    assert len(rows) == sum(map(len, (pages.AXES, pages.DUE, pages.ALIKE, pages.UNGUARDED))) + 2 * 4


@pytest.mark.parametrize("together", [2, 3])
def test_the_combinations_have_all_values_of_so_many_axes_together(pages: ModuleType, together: int) -> None:
    combinations = list(pages.combinations(together))
    assert combinations == list(pages.combinations(together))
    met = {tuple(each[axis] for axis in list(pages.AXES)[:together]) for each in combinations}
    first = [pages.AXES[axis] for axis in list(pages.AXES)[:together]]
    assert len(met) == len(first[0]) * len(first[1]) * (len(first[2]) if together == 3 else 1)
