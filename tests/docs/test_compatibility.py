"""`docs/reference/compatibility.md` says of versions what the package's metadata and the test sessions say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from awa_sqla.localpg.binaries import MIN_VERSION

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "compatibility.md").read_text("utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def least(name: str) -> str:
    """The least version of a requirement."""
    extras = [one for several in PROJECT["optional-dependencies"].values() for one in several]
    found = {
        match[1]: match[2]
        for one in (*PROJECT["dependencies"], *extras)
        if (match := re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", one))
    }
    return found[name]


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("SQLAlchemy", "sqlalchemy"),
        ("Alembic", "alembic"),
        ("pydantic", "pydantic"),
        ("psycopg", "psycopg"),
        ("asyncpg (extra `asyncpg`)", "asyncpg"),
        ("psycopg2 (extra `psycopg2`)", "psycopg2-binary"),
    ],
)
def test_the_least_version_of_a_library_is_that_of_the_metadata(library: str, package: str) -> None:
    assert f"| {library} | {least(package)} and newer" in PAGE


def test_the_python_versions_are_those_of_the_metadata() -> None:
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: Python :: 3\.\d+$", one)]
    assert f"| Python | {', '.join(named)} |" in PAGE
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_every_postgresql_has_a_session_that_tests_it() -> None:
    sessions = re.findall(r'^\s+"(\d\d)": \(|"(\d\d)": "@', (ROOT / "noxfile.py").read_text("utf-8"), re.MULTILINE)
    tested = sorted((int(wheel or other) for wheel, other in sessions), reverse=True)
    rows = re.findall(r"^\| ([\d, ]+) \|", PAGE, re.MULTILINE)
    assert [int(number) for row in rows for number in row.split(", ")] == tested
    assert tested[-1] == MIN_VERSION
