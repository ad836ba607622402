"""`docs/reference/tables.md` says what the models say, in full."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from sqlalchemy import CheckConstraint

from awa_sqla.models import metadata
from awa_sqla.models.base import ViewBase
from awa_sqla.schema import objects

SCRIPT = Path(__file__).parents[2] / "docs" / "tables.py"


@pytest.fixture
def tables() -> ModuleType:
    """The script, newly loaded."""
    spec = importlib.util.spec_from_file_location("tables_of_the_docs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(tables: ModuleType) -> None:
    assert tables.PAGE.read_text("utf-8") == tables.page(), "python docs/tables.py > docs/reference/tables.md"
    assert tables.main(["--check"]) == 0


def test_the_check_notices_a_page_that_is_not(
    tables: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables.PAGE = tmp_path / "tables.md"
    assert tables.main(["--check"]) == 1
    tables.PAGE.write_text(tables.page().replace("bigint", "integer", 1))
    assert tables.main(["--check"]) == 1
    assert "not up to date" in capsys.readouterr().err


def test_every_table_column_check_and_index_is_on_the_page(tables: ModuleType) -> None:
    page = tables.page()
    described = [*metadata.tables.values(), *ViewBase.metadata.tables.values()]
    names = [
        name
        for table in described
        for name in (
            table.name,
            *(column.name for column in table.columns),
            *(index.name for index in table.indexes),
            *(c.name for c in table.constraints if isinstance(c, CheckConstraint)),
        )
    ]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_function_and_trigger_is_on_the_page(tables: ModuleType) -> None:
    page = tables.page()
    made = "\n".join(objects.statements())
    names = re.findall(r"^CREATE (?:FUNCTION \S+\.|(?:CONSTRAINT )?TRIGGER )(\w+)", made, re.MULTILINE)
    assert {"sync_claims", "jobs_hot_claims_delete", "job_unique_claims_idle"} <= set(names)
    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("column", ["snoozes", "state"])
def test_a_shared_column_without_a_phrase_is_an_error(tables: ModuleType, column: str) -> None:
    del tables.SHARED[column]
    with pytest.raises(tables.UndescribedError, match=column):
        tables.page()


@pytest.mark.parametrize("column", ["queue_meta.paused_by", "dlq_entries.dlq_at", "jobs.stored_in"])
def test_a_column_without_a_phrase_is_an_error(tables: ModuleType, column: str) -> None:
    del tables.COLUMNS[column]
    with pytest.raises(tables.UndescribedError, match=column):
        tables.page()


def test_an_index_without_its_query_is_an_error(tables: ModuleType) -> None:
    del tables.QUERIES["ix_jobs_hot_claim"]
    with pytest.raises(tables.UndescribedError, match="ix_jobs_hot_claim"):
        tables.page()


@pytest.mark.parametrize("function", ["sync_claims", "wake_workers"])
def test_a_function_without_a_phrase_is_an_error(tables: ModuleType, function: str) -> None:
    del tables.FUNCTIONS[function]
    with pytest.raises(tables.UndescribedError, match=function):
        tables.page()


@pytest.mark.parametrize(
    ("phrases", "gone"),
    [
        ("TABLES", "carrots"),
        ("COLUMNS", "jobs_hot.colour"),
        ("SHARED", "colour"),
        ("QUERIES", "ix_jobs_hot_colour"),
        ("FUNCTIONS", "paint"),
    ],
)
def test_a_phrase_for_something_that_is_gone_is_an_error(tables: ModuleType, phrases: str, gone: str) -> None:
    getattr(tables, phrases)[gone] = "?"
    with pytest.raises(tables.UndescribedError, match=gone):
        tables.page()
