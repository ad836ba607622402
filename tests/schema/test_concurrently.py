"""`op.awa_migrate(..., concurrently=True)`, and `env.py` under a lock that outlasts its commits."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Connection, Engine, text

from awa_sqla import ConfigurationError, SchemaVersionError
from awa_sqla.alembic import one_at_a_time
from awa_sqla.schema import LATEST, create_all, installed_version, migrate
from awa_sqla.schema.online import unfinished
from tests.schema.catalog import described
from tests.schema.projects import NAMED, Project, executed
from tests.schema.test_concurrent import advisory_locks

#: Each takes its own database, project or processes; run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside

REVISION = """
revision = "{revision}"
down_revision = {down!r}
import sqlalchemy as sa
from alembic import op
def upgrade():
    {table}
    op.awa_migrate(from_={from_}, to={to}, concurrently=True)
def downgrade():
    op.awa_migrate(from_={to}, to={from_}, concurrently=True)
    {drop}
"""


def concurrent_project(root: Path, url: URL, driver: str = "psycopg") -> Project:
    """Two revisions, each with a table of the app before our steps."""
    template, _, driver = driver.rpartition(" ")
    project = Project(root, template or "generic").configure(NAMED).at(url, driver)
    imported = "from alembic import context"
    project.edit(imported, f"{imported}\nfrom awa_sqla.alembic import one_at_a_time")
    online = project.directory / "env.py"
    head, _, tail = online.read_text().rpartition("with context.begin_transaction():")
    online.write_text(f"{head}with one_at_a_time(connection), context.begin_transaction():{tail}")
    steps: list[dict[str, Any]] = [
        {"revision": "one", "down": None, "from_": 0, "to": 2},
        {"revision": "two", "down": "one", "from_": 2, "to": LATEST},
    ]
    for step in steps:
        name = step["revision"]
        table = f"op.create_table('t_{name}', sa.Column('id', sa.Integer, primary_key=True))"
        text = REVISION.format(**step, table=table, drop=f"op.drop_table('t_{name}')")
        (project.versions / f"{name}.py").write_text(text)
    return project


@pytest.mark.parametrize("driver", ["psycopg", "async psycopg", "async asyncpg"])
def test_a_revision_that_goes_online_makes_the_same(
    tmp_path: Path, connection: Connection, empty_db_url: URL, driver: str
) -> None:
    create_all(connection)
    expected = described(connection)
    connection.rollback()
    project = concurrent_project(tmp_path, empty_db_url, driver)
    project.run("upgrade", "head")
    assert described(connection) == expected
    connection.rollback()
    project.run("downgrade", "base")
    assert installed_version(connection) == 0
    assert advisory_locks(connection) == 0


def test_the_offline_script_of_such_a_revision_makes_the_same(
    tmp_path: Path, connection: Connection, empty_db_url: URL
) -> None:
    create_all(connection)
    expected = described(connection)
    connection.rollback()
    project = concurrent_project(tmp_path, empty_db_url)
    script = project.run("upgrade", "head", sql=True)
    assert "CREATE INDEX CONCURRENTLY ix_jobs_hot_finished" in script
    statement_by_statement(empty_db_url, script)
    assert described(connection) == expected
    connection.rollback()
    statement_by_statement(empty_db_url, project.run("downgrade", "head:base", sql=True))
    assert installed_version(connection) == 0


def statement_by_statement(url: URL, script: str) -> None:
    """As psql does, which matters for what cannot be in a transaction."""
    for statement in script.split(";\n\n"):
        executed(url, statement)


def test_an_interrupted_revision_goes_on(
    tmp_path: Path, connection: Connection, empty_db_url: URL, empty_engine: Engine
) -> None:
    """The steps were committed up to one of them, and the revision was not recorded."""
    project = concurrent_project(tmp_path, empty_db_url)
    project.run("upgrade", "one")
    with empty_engine.begin() as other:
        migrate(other, 5)
        other.execute(text("DROP INDEX awa.ix_jobs_hot_callback"))
    project.run("upgrade", "head")
    assert installed_version(connection) == LATEST
    assert unfinished(connection, LATEST, "awa") == []


@pytest.mark.beside
@pytest.mark.case(39)
def test_replicas_that_run_such_revisions_at_once_all_succeed(
    tmp_path: Path, connection: Connection, empty_db_url: URL
) -> None:
    concurrent_project(tmp_path, empty_db_url)

    def upgrade() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "alembic", "upgrade", "head"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(5) as pool:
        for future in [pool.submit(upgrade) for _ in range(5)]:
            done = future.result()
            assert done.returncode == 0, done.stderr
    assert connection.scalars(text("SELECT version_num FROM alembic_version")).all() == ["two"]
    assert connection.scalars(text("SELECT version FROM awa.schema_version ORDER BY 1")).all() == [
        *range(1, LATEST + 1)
    ]
    assert advisory_locks(connection) == 0


def test_the_lock_is_refused_inside_a_transaction(connection: Connection) -> None:
    connection.execute(text("SELECT 1"))
    with pytest.raises(ConfigurationError, match="before the transaction begins"), one_at_a_time(connection):
        pass


def test_the_lock_ends_with_an_error_in_it(empty_engine: Engine) -> None:
    with empty_engine.connect() as connection:
        with pytest.raises(ZeroDivisionError), one_at_a_time(connection):
            _ = advisory_locks(connection) // 0
        connection.rollback()
        with one_at_a_time(connection):
            assert advisory_locks(connection) == 1
        connection.rollback()
        assert advisory_locks(connection) == 0


# ------------------------------------------------------------------------------------------------- drift, in Alembic
def test_check_fails_while_the_schema_has_drifted_and_autogenerate_mends_it(
    tmp_path: Path, connection: Connection, empty_db_url: URL
) -> None:
    create_all(connection)
    expected = described(connection)
    connection.execute(text("CREATE TABLE orders (id serial PRIMARY KEY, note int)"))
    connection.execute(text("CREATE INDEX ix_orders_note ON orders (note)"))
    connection.execute(text("DROP INDEX awa.ix_jobs_hot_claim"))
    connection.execute(text("ALTER TABLE awa.jobs_hot DISABLE TRIGGER jobs_hot_wake_workers"))
    connection.commit()
    project = Project(tmp_path).configure(NAMED).at(empty_db_url)
    assert project.diffs() == [
        (
            "awa_drift",
            "awa",
            "trigger jobs_hot.jobs_hot_wake_workers is disabled",
            "index jobs_hot.ix_jobs_hot_claim is missing",
        )
    ]
    written = project.revise("mend")
    assert "op.awa_mend()" in written
    assert "op.awa_migrate" not in written
    project.run("upgrade", "head")
    assert described(connection) == expected
    connection.rollback()
    assert project.diffs() == []


def test_a_role_that_cannot_compare_still_learns_the_version(
    tmp_path: Path, connection: Connection, empty_db_url: URL, caplog: pytest.LogCaptureFixture
) -> None:
    create_all(connection)
    connection.execute(text("DROP INDEX awa.ix_jobs_hot_claim"))
    connection.execute(text("CREATE TABLE orders (id serial PRIMARY KEY, note int)"))
    connection.execute(text("CREATE INDEX ix_orders_note ON orders (note)"))
    connection.commit()
    project = Project(tmp_path).configure(NAMED).at(empty_db_url)
    project.run("ensure_version")
    url = (tmp_path / "alembic.ini").read_text()
    read_only = url.replace("_empty\n", "_empty?options=-c%%20default_transaction_read_only%%3Don\n")
    (tmp_path / "alembic.ini").write_text(read_only)
    assert project.diffs() == []
    assert "only its version is compared" in caplog.text


def test_a_newer_schema_is_refused_by_check_and_by_a_revision(
    tmp_path: Path, connection: Connection, empty_db_url: URL
) -> None:
    create_all(connection)
    connection.execute(text("INSERT INTO awa.schema_version (version) VALUES (:new)"), {"new": LATEST + 1})
    connection.commit()
    before = described(connection)
    connection.rollback()
    project = concurrent_project(tmp_path, empty_db_url)
    with pytest.raises(SchemaVersionError, match="upgrade awa-sqla"):
        project.run("upgrade", "head")
    assert described(connection) == before
    connection.rollback()
    (tmp_path / "another").mkdir()
    with pytest.raises(SchemaVersionError, match="upgrade awa-sqla"):
        Project(tmp_path / "another").configure(NAMED).at(empty_db_url).diffs()
