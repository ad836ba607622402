"""Differences in an app's own Alembic history: the revision that is written, and that it runs as it is written."""

from __future__ import annotations

import ast
import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import render_python_code
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.operations.ops import DowngradeOps, UpgradeOps
from sqlalchemy import URL, Connection, MetaData, NullPool, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from awa_sqla.schema import create_all
from awa_sqla.schema.drift import differences
from awa_sqla.schema.mending import proposals
from tests.schema import catalog
from tests.schema.test_autogenerate import ENV, MAKO
from tests.schema.test_differences import ROWS, execute

SCHEMA = "Job-Queue"

#: All kinds of statements: functions with bodies, a view, a table, an index, a check full of colons, a type.
DAMAGE = """
    CREATE OR REPLACE FUNCTION {s}.take_keys(keys bytea[], ids bigint[])
    RETURNS TABLE (unique_key bytea, job_id bigint, fresh boolean) LANGUAGE sql
    AS 'SELECT NULL::bytea, NULL::bigint, true';
    DROP FUNCTION {s}.claim_keys(bytea[], bigint[]);
    DROP VIEW {s}.jobs;
    DROP TABLE {s}.audit_log;
    DROP INDEX {s}.ix_jobs_hot_claim;
    DROP TRIGGER jobs_hot_wake_workers ON {s}.jobs_hot;
    ALTER TABLE {s}.jobs_hot DROP CONSTRAINT ck_jobs_hot_run_at;
    ALTER TABLE {s}.queue_meta ALTER paused_by TYPE varchar(99);
    ALTER TABLE {s}.queue_meta ADD CONSTRAINT "a :name of 100%
import sys" CHECK (queue <> ':x')"""


def propose(connection: Connection, schema: str) -> Callable[..., None]:
    """What a comparator does, as a hook of one revision."""

    def hook(_context: Any, _revision: Any, directives: list[Any]) -> None:
        (script,) = directives
        script.upgrade_ops.ops.extend(proposals(connection, schema))
        script.upgrade_ops.reverse_into(script.downgrade_ops)

    return hook


def history(directory: Path, connection: Connection) -> Config:
    """A history in a directory, to which one revision can be written."""
    (directory / "versions").mkdir()
    (directory / "env.py").write_text(ENV)
    (directory / "script.py.mako").write_text(MAKO)
    config = Config(attributes={"connection": connection, "metadata": MetaData(), "options": {}})
    config.set_main_option("script_location", str(directory))
    config.set_main_option("path_separator", "newline")
    return config


def mend(connection: Connection, directory: Path) -> str:
    """Damage the schema, write the revision and run it; return its text."""
    config = history(directory, connection)
    hook = propose(connection, SCHEMA)
    script = command.revision(config, autogenerate=True, process_revision_directives=hook)
    command.upgrade(config, "head")
    assert differences(connection, SCHEMA) == []
    command.downgrade(config, "base")
    assert differences(connection, SCHEMA) == []
    return Path(script.path).read_text("utf-8")  # type: ignore[union-attr]


@pytest.fixture
def damaged(empty_db_url: URL) -> tuple[URL, dict[str, str]]:
    """A database whose schema was damaged, and how it was before."""
    engine = create_engine(empty_db_url, poolclass=NullPool)
    with engine.begin() as connection:
        create_all(connection, SCHEMA)
        execute(connection, ROWS, SCHEMA)
        clean = catalog.described(connection, SCHEMA)
        execute(connection, DAMAGE, SCHEMA)
    return empty_db_url, clean


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
def test_a_revision_runs_as_it_is_written(damaged: tuple[URL, dict[str, str]], tmp_path: Path, driver: str) -> None:
    url, clean = damaged
    url = url.set(drivername=f"postgresql+{driver}")

    def work(connection: Connection) -> str:
        text = mend(connection, tmp_path)
        assert catalog.differences(clean, catalog.described(connection, SCHEMA)) == set()
        return text

    async def work_async() -> str:
        async with create_async_engine(url, poolclass=NullPool).begin() as connection:
            return await connection.run_sync(work)

    if driver == "asyncpg":
        text = asyncio.run(work_async())
    else:
        with create_engine(url, poolclass=NullPool).begin() as connection:
            text = work(connection)
    upgrade, _, downgrade = text.partition("def downgrade")
    assert f"op.awa_mend(schema={SCHEMA!r})" in upgrade
    assert "    # index jobs_hot.ix_jobs_hot_claim is missing\n" in upgrade
    assert "op." not in downgrade
    assert not any(isinstance(node, ast.Import) and node.names[0].name == "sys" for node in ast.walk(ast.parse(text)))


def test_check_reports_what_differs(connection: Connection) -> None:
    create_all(connection)
    execute(connection, "DROP INDEX {s}.ix_audit_log_at", "awa")
    (operation,) = proposals(connection)
    assert operation.to_diff_tuple() == ("awa_drift", "awa", "index audit_log.ix_audit_log_at is missing")


def test_a_clean_schema_proposes_nothing(connection: Connection) -> None:
    create_all(connection)
    assert proposals(connection) == []


def test_what_no_statement_can_mend_is_said(connection: Connection, caplog: pytest.LogCaptureFixture) -> None:
    create_all(connection)
    execute(connection, "DROP TABLE {s}.leaders; CREATE VIEW {s}.leaders AS SELECT 1 AS one", "awa")
    body = render_python_code(UpgradeOps(proposals(connection)))
    assert "# table leaders is a view\n" in body
    compile(f"def upgrade():\n    {body}", "revision", "exec")
    Operations(MigrationContext.configure(connection)).awa_mend()  # type: ignore[attr-defined]
    assert "no statement can mend this: table leaders is a view" in caplog.text


def test_the_operation_can_be_invoked_and_its_reverse_does_nothing(connection: Connection) -> None:
    create_all(connection)
    execute(connection, "DROP INDEX {s}.ix_audit_log_at", "awa")
    upgrade = UpgradeOps(proposals(connection))
    downgrade = upgrade.reverse_into(DowngradeOps([]))
    operations = Operations(MigrationContext.configure(connection))
    for operation in (*upgrade.ops, *downgrade.ops):
        operations.invoke(operation)
    assert differences(connection) == []
    assert downgrade.reverse().ops[0].reverse().to_diff_tuple() == ()


def test_a_revision_runs_where_nothing_differs(connection: Connection) -> None:
    """Drift belongs to one database; the revision comes to all of them."""
    create_all(connection)
    before = catalog.described(connection)
    Operations(MigrationContext.configure(connection)).awa_mend()  # type: ignore[attr-defined]
    assert catalog.described(connection) == before


def test_offline_it_says_that_it_cannot_look() -> None:
    script = io.StringIO()
    context = MigrationContext.configure(dialect_name="postgresql", opts={"as_sql": True, "output_buffer": script})
    Operations(context).awa_mend(schema="jobs")  # type: ignore[attr-defined]
    assert script.getvalue().startswith("-- op.awa_mend compares a database")
