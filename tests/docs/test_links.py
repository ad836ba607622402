"""Links between the pages lead somewhere: the file is there, and so is the heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = FENCED.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, text: str) -> list[str]:
    """The links of a page's text that lead nowhere."""
    found: list[str] = []
    for link in LINK.findall(FENCED.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text("utf-8")) == []


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    text = "[a](docs/nowhere.md) [b](docs/testing.md#nowhere) [c](#nowhere) [d](docs/testing.md) [e](https://x.invalid)"
    assert broken(ROOT / "README.md", text) == ["docs/nowhere.md", "docs/testing.md#nowhere", "#nowhere"]


@pytest.mark.parametrize("folder", ["tutorial", "how-to"])
def test_the_readme_leads_to_every_page(folder: str) -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text("utf-8")))
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs" / folder).glob("*.md")}
    assert pages <= linked
