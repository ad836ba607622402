"""Every Python block of the README and of the pages below docs/ runs, against a real database.

The blocks of one page share one namespace, in order, as a reader would type them; `engine` and `DATABASE_URL` are
there. A block that ends a page without an assertion proves nothing, so each page that has blocks must assert. The
pages of docs/tutorial are run as what they are, files and commands, by `test_tutorials`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from sqlalchemy import Engine

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.parent.name != "tutorial" and BLOCK.search(path.read_text("utf-8"))
]


def run_page(text: str, name: str, engine: Engine, database_url: str) -> None:
    """Run the blocks of a page; what they raise has the page's own line numbers in its traceback."""
    page = sys.modules["docs_example"] = ModuleType("docs_example")  # frameworks look names up in the handler's module
    namespace = vars(page)
    namespace.update(engine=engine, DATABASE_URL=database_url)
    blocks = [(text[: match.start()].count("\n") + 1, match[1]) for match in BLOCK.finditer(text)]
    try:
        for line, block in blocks:
            exec(compile("\n" * line + block, name, "exec", dont_inherit=True), namespace)
    finally:
        del sys.modules["docs_example"]
        for thing in namespace.values():
            if type(thing).__name__ in ("Awa", "FollowUps"):
                getattr(thing, "follow_ups", thing)._specs.clear()
    assert any("assert " in block for _, block in blocks), f"{name} asserts nothing"


@pytest.mark.filterwarnings("ignore:The declarative_mixin decorator")  # Litestar imports advanced_alchemy if it can
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_run(path: Path, engine: Engine, db_url_str: str) -> None:
    run_page(path.read_text("utf-8"), str(path), engine, db_url_str)


HOW_TO = ROOT / "docs" / "how-to" / "unique-jobs.md"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("duplicate.duplicate_of ==", "duplicate.duplicate_of !="),  # an assertion that does not hold
        ("from awa_sqla import", "from awa_sqla.nowhere import"),  # an import that is gone
    ],
)
def test_a_page_that_is_wrong_is_red(right: str, wrong: str, engine: Engine, db_url_str: str) -> None:
    text = HOW_TO.read_text("utf-8")
    assert text.count(right) >= 1
    broken = text.replace(right, wrong, 1)
    with pytest.raises((AssertionError, ImportError)) as caught:
        run_page(broken, "broken.md", engine, db_url_str)
    (line,) = [entry.lineno for entry in caught.traceback if str(entry.path).endswith("broken.md")]
    assert wrong in broken.splitlines()[line]


def test_a_page_that_asserts_nothing_is_red(engine: Engine, db_url_str: str) -> None:
    with pytest.raises(AssertionError, match="asserts nothing"):
        run_page("```python\nfrom awa_sqla import Job\n```\n", "empty.md", engine, db_url_str)


def test_the_readme_has_an_example() -> None:
    assert ROOT / "README.md" in PAGES


def test_every_how_to_has_examples() -> None:
    assert set((ROOT / "docs" / "how-to").glob("*.md")) <= set(PAGES)
