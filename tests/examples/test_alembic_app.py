"""The example `examples/alembic_app`: an app with a history of its own that adds our tables to it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import URL, NullPool, create_engine, text

from awa_sqla.schema import LATEST, installed_version
from tests.databases import libpq_url
from tests.schema.catalog import names

EXAMPLE = Path(__file__).parents[2] / "examples" / "alembic_app"
REVISION = Path("migrations", "versions", "0002_add_awa.py")
UPGRADE = Path("migrations", "versions", "0003_upgrade_awa.py")

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A copy of the example."""
    return shutil.copytree(EXAMPLE, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture
def run(app: Path, empty_db_url: URL) -> Run:
    """Runs a module in the copy, against an empty database."""
    environment = os.environ | {"DATABASE_URL": libpq_url(empty_db_url), "PYTHONDONTWRITEBYTECODE": "1"}

    def process(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=app, env=environment, text=True, capture_output=True, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return process


def test_the_recipe_works_from_an_empty_database_and_back(run: Run, empty_db_url: URL) -> None:
    engine = create_engine(empty_db_url, poolclass=NullPool)
    run("alembic", "upgrade", "head")
    with engine.connect() as connection:
        assert installed_version(connection) == LATEST
    run("alembic", "check")
    assert run("shop.main").stdout == "one order, one receipt, one entry in the books\n"
    run("alembic", "downgrade", "base")
    with engine.connect() as connection:
        left = {name for name in names(connection) if "alembic_version" not in name}
    assert left == {"schema public"}


@pytest.mark.beside
def test_an_app_with_rows_keeps_them(run: Run, empty_db_url: URL) -> None:
    engine = create_engine(empty_db_url, poolclass=NullPool)
    run("alembic", "upgrade", "0001")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO shop_order (email, cents) VALUES ('bob@example.org', 7)"))
    run("alembic", "upgrade", "head")
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT email, receipt_job_id FROM shop_order")).all()
    assert rows == [("bob@example.org", None)]


def test_autogenerate_writes_the_revision_of_the_example(run: Run, app: Path) -> None:
    shown = ast.parse(
        (app / REVISION).read_text().replace("to=1", f"to={LATEST}").replace("from_=1", f"from_={LATEST}")
    )
    (app / REVISION).unlink()
    (app / UPGRADE).unlink()
    run("alembic", "upgrade", "head")
    behind = run("alembic", "check", check=False)
    assert behind.returncode != 0
    assert f"('awa_migrate', 0, {LATEST})" in behind.stdout + behind.stderr
    run("alembic", "revision", "--autogenerate", "-m", "add awa", "--rev-id", "0002")
    assert ast.dump(ast.parse((app / REVISION).read_text())) == ast.dump(shown)


@pytest.mark.beside
def test_autogenerate_writes_the_upgrade_of_the_example(run: Run, app: Path) -> None:
    shown = ast.parse((app / UPGRADE).read_text())
    (app / UPGRADE).unlink()
    run("alembic", "upgrade", "head")
    run("alembic", "revision", "--autogenerate", "-m", "upgrade awa", "--rev-id", "0003")
    assert ast.dump(ast.parse((app / UPGRADE).read_text())) == ast.dump(shown)


@pytest.mark.case(20)
def test_autogenerate_has_nothing_to_add_to_the_example(run: Run, app: Path) -> None:
    run("alembic", "upgrade", "head")
    run("alembic", "revision", "--autogenerate", "-m", "nothing", "--rev-id", "0004")
    written = (app / "migrations" / "versions" / "0004_nothing.py").read_text()
    assert "op." not in written.partition("def upgrade")[2]


@pytest.mark.beside
def test_the_assertions_of_the_example_can_fail(run: Run, empty_db_url: URL) -> None:
    run("alembic", "upgrade", "head")
    with create_engine(empty_db_url, poolclass=NullPool).begin() as connection:
        connection.execute(text("INSERT INTO awa.jobs_hot (kind) VALUES ('stray')"))
    failed = run("shop.main", check=False)
    assert failed.returncode != 0
    assert "AssertionError" in failed.stderr


def ci(app: Path, url: URL) -> subprocess.CompletedProcess[str]:
    """Run what the example's CI runs, as a shell does."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"DATABASE_URL": libpq_url(url), "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(["sh", app / "ci.sh"], env=environment, text=True, capture_output=True, check=False)


def test_ci_is_green_and_leaves_the_head(app: Path, empty_db_url: URL) -> None:
    done = ci(app, empty_db_url)
    assert done.returncode == 0, done.stderr
    with create_engine(empty_db_url, poolclass=NullPool).connect() as connection:
        assert installed_version(connection) == LATEST


@pytest.mark.beside
@pytest.mark.parametrize(
    ("file", "right", "wrong", "says"),
    [
        ("shop/models.py", "email: Mapped[str]", "mail: Mapped[str]", "New upgrade operations detected"),
        (str(UPGRADE), f"op.awa_migrate(from_=1, to={LATEST})", "pass", f"('awa_migrate', 1, {LATEST})"),
        (str(UPGRADE), f"op.awa_migrate(from_={LATEST}, to=1)", "pass", "SchemaVersionError"),
        ("migrations/versions/0001_app.py", 'op.drop_table("shop_order")', "pass", "already exists"),
    ],
)
def test_ci_is_red(app: Path, empty_db_url: URL, file: str, right: str, wrong: str, says: str) -> None:
    text = (app / file).read_text()
    assert text.count(right) == 1
    (app / file).write_text(text.replace(right, wrong))
    done = ci(app, empty_db_url)
    assert done.returncode != 0
    assert says in done.stdout + done.stderr
