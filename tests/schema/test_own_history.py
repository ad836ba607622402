"""`alembic/` at the top of the repository: the worked example of a history with our tables in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL, Connection, text

from awa_sqla.schema import LATEST, create_all, installed_version
from tests.databases import libpq_url
from tests.schema.catalog import described, names

#: Each takes its own database, project or processes; run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside

ROOT = Path(__file__).parents[2]

Alembic = Callable[..., str]


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`alembic ...`, at the top of the repository."""
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("DATABASE_URL")}
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=ROOT,
        env=inherited | {"PYTHONDONTWRITEBYTECODE": "1"} | environment,
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.fixture
def alembic(empty_db_url: URL) -> Alembic:
    """Runs `alembic -x url=...` and returns what it prints."""

    def run(*arguments: str) -> str:
        done = process("-x", f"url={libpq_url(empty_db_url)}", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_directory_does_not_hide_the_package() -> None:
    code = "import alembic; print(alembic.__version__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (ROOT / "alembic" / "__init__.py").exists()


@pytest.mark.beside
def test_the_history_leads_up_down_and_up_again(alembic: Alembic, connection: Connection) -> None:
    create_all(connection)
    expected = described(connection)
    connection.rollback()

    alembic("upgrade", "head")
    alembic("check")
    alembic("downgrade", "base")
    assert {name for name in names(connection) if "alembic_version" not in name} == {"schema public"}
    connection.rollback()
    alembic("upgrade", "head")
    assert described(connection) == expected
    assert "column customer_order.cents" in described(connection, "public")


@pytest.mark.beside
def test_the_offline_script_is_the_history(alembic: Alembic, connection: Connection, empty_db_url: URL) -> None:
    script = alembic("upgrade", "head", "--sql")
    with psycopg.connect(libpq_url(empty_db_url), autocommit=True) as plain:
        plain.execute(script.encode())
    assert installed_version(connection) == LATEST
    connection.rollback()
    alembic("check")


@pytest.mark.beside
@pytest.mark.case(39)
def test_replicas_that_upgrade_at_once_all_succeed(alembic: Alembic, connection: Connection) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(alembic, "upgrade", "head") for _ in range(8)]:
            done.result()
    assert connection.scalars(text("SELECT version_num FROM alembic_version")).all() == ["0009"]
    assert connection.scalars(text("SELECT version FROM awa.schema_version")).all() == list(range(1, LATEST + 1))


@pytest.mark.beside
@pytest.mark.parametrize("variable", ["AWA_DATABASE_URL", "DATABASE_URL"])
def test_the_database_may_be_named_by_the_environment(empty_db_url: URL, connection: Connection, variable: str) -> None:
    url = libpq_url(empty_db_url)
    done = process("upgrade", "head", **{"DATABASE_URL": "sqlite://", variable: url})
    assert done.returncode == 0, done.stderr
    assert installed_version(connection) == LATEST


def test_a_run_without_a_database_says_what_to_do() -> None:
    done = process("upgrade", "head")
    assert done.returncode != 0
    assert "which database? Say -x url=" in done.stdout + done.stderr
