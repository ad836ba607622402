"""Every Python block of the README and of the pages below docs/ runs, against a real database.

The blocks of one page share one namespace, in order, as a reader would type them; `engine` and `DATABASE_URL` are
there. A block that ends a page without an assertion proves nothing, so each page that has blocks must assert.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import Engine

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(path.read_text("utf-8"))
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_run(path: Path, engine: Engine, db_url_str: str) -> None:
    text = path.read_text("utf-8")
    namespace = {"__name__": "docs_example", "engine": engine, "DATABASE_URL": db_url_str}
    blocks = [(text[: match.start()].count("\n") + 1, match[1]) for match in BLOCK.finditer(text)]
    try:
        for line, block in blocks:
            exec(compile("\n" * line + block, str(path), "exec", dont_inherit=True), namespace)
    finally:
        for thing in namespace.values():
            if type(thing).__name__ in ("Awa", "FollowUps"):
                getattr(thing, "follow_ups", thing)._specs.clear()
    assert any("assert " in block for _, block in blocks)


def test_the_readme_has_an_example() -> None:
    assert ROOT / "README.md" in PAGES
