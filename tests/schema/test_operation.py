"""`op.awa_migrate`, online and offline."""

from __future__ import annotations

import io
import subprocess
import sys

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import URL, Connection, text

import awa_sqla.alembic
from awa_sqla import ConfigurationError, SchemaVersionError
from awa_sqla.schema import LATEST, create_all, installed_version, migrate
from awa_sqla.schema.operation import AwaMigrateOp
from tests.databases import libpq_url
from tests.schema.catalog import described, names


@pytest.fixture
def op(connection: Connection) -> Operations:
    """Alembic's operations on an empty database, as a revision has them."""
    connection.execute(text("SELECT 1"))
    return Operations(MigrationContext.configure(connection))


def offline(from_: int, to: int, **options: str) -> str:
    """What `alembic upgrade --sql` prints for the operation."""
    script = io.StringIO()
    context = MigrationContext.configure(
        dialect_name="postgresql", opts={"as_sql": True, "output_buffer": script, "transactional_ddl": True}
    )
    with context.begin_transaction():
        Operations(context).awa_migrate(from_=from_, to=to, **options)
    return script.getvalue()


def test_the_operation_installs_what_create_all_installs(op: Operations, connection: Connection) -> None:
    with connection.begin_nested() as savepoint:
        create_all(connection)
        expected = described(connection)
        savepoint.rollback()
    op.awa_migrate(from_=0, to=LATEST)
    assert described(connection) == expected


def test_the_operation_leads_back_too(op: Operations, connection: Connection) -> None:
    before = names(connection)
    op.awa_migrate(from_=0, to=LATEST)
    op.awa_migrate(from_=LATEST, to=0)
    assert names(connection) == before


def test_the_operation_takes_a_schema_of_another_name(op: Operations, connection: Connection) -> None:
    op.awa_migrate(from_=0, to=LATEST, schema="jobs")
    assert installed_version(connection, "jobs") == LATEST
    assert installed_version(connection) == 0


@pytest.mark.parametrize("schema", ["awa", "Job-Queue", "ärger"])
def test_the_offline_script_makes_what_the_online_run_makes(
    op: Operations, connection: Connection, empty_db_url: URL, schema: str
) -> None:
    op.awa_migrate(from_=0, to=LATEST, schema=schema)
    online = described(connection, schema)
    connection.rollback()
    with psycopg.connect(libpq_url(empty_db_url), autocommit=True) as plain:
        plain.execute(offline(0, LATEST, schema=schema).encode())
    assert described(connection, schema) == online
    assert installed_version(connection, schema) == LATEST


def test_the_offline_script_leads_back_to_nothing(connection: Connection, empty_db_url: URL) -> None:
    before = names(connection)
    connection.rollback()
    with psycopg.connect(libpq_url(empty_db_url), autocommit=True) as plain:
        plain.execute(offline(0, LATEST).encode())
        plain.execute(offline(LATEST, 0).encode())
    assert names(connection) == before


@pytest.mark.case(39)
def test_the_offline_script_takes_the_lock_first() -> None:
    begin, lock, *_ = (line for line in offline(0, LATEST).splitlines() if line)
    assert begin == "BEGIN;"
    assert lock == "SELECT pg_advisory_xact_lock(hashtextextended('awa_sqla.schema:awa', 0));"


def test_a_revision_that_starts_ahead_is_refused_with_the_way_out(op: Operations, connection: Connection) -> None:
    migrate(connection, 1)
    with pytest.raises(SchemaVersionError, match=r"leads from 2 to 3.*alembic stamp") as caught:
        op.awa_migrate(from_=2, to=3)
    assert (caught.value.found, caught.value.expected) == (1, 2)
    assert installed_version(connection) == 1


def test_a_downgrade_of_what_is_above_it_is_refused(op: Operations, connection: Connection) -> None:
    migrate(connection, 3)
    with pytest.raises(SchemaVersionError, match="leads from 2 to 1") as caught:
        op.awa_migrate(from_=2, to=1)
    assert (caught.value.found, caught.value.expected) == (3, 2)
    assert installed_version(connection) == 3


@pytest.mark.parametrize(
    ("found", "from_", "to", "then"),
    [(3, 0, 1, 3), (3, 0, 3, 3), (2, 0, 3, 3), (0, 3, 0, 0), (1, 3, 2, 1), (2, 3, 0, 0)],
)
def test_a_revision_does_what_is_left_of_it(
    op: Operations, connection: Connection, found: int, from_: int, to: int, then: int
) -> None:
    migrate(connection, found)
    op.awa_migrate(from_=from_, to=to)
    assert installed_version(connection) == then


def test_a_schema_of_a_newer_package_is_refused(op: Operations, connection: Connection) -> None:
    create_all(connection)
    connection.execute(text("INSERT INTO awa.schema_version (version) VALUES (:new)"), {"new": LATEST + 1})
    for from_, to in ((0, LATEST), (LATEST, 0), (1, 2)):
        with pytest.raises(SchemaVersionError, match="upgrade awa-sqla"):
            op.awa_migrate(from_=from_, to=to)
    assert installed_version(connection) == LATEST + 1


def test_an_unknown_version_is_refused(op: Operations, connection: Connection) -> None:
    with pytest.raises(ConfigurationError, match=f"this package knows 0 to {LATEST}"):
        op.awa_migrate(from_=0, to=LATEST + 1)
    assert installed_version(connection) == 0


def test_an_autocommit_block_is_refused(op: Operations, connection: Connection) -> None:
    connection.rollback()
    context = op.get_context()
    with (
        context.begin_transaction(),
        context.autocommit_block(),
        pytest.raises(ConfigurationError, match="AUTOCOMMIT"),
    ):
        op.awa_migrate(from_=0, to=LATEST)
    assert installed_version(connection) == 0


def test_the_operation_reverses_to_its_mirror() -> None:
    mirror = AwaMigrateOp(0, 1, "jobs").reverse()
    assert (mirror.from_, mirror.to, mirror.schema) == (1, 0, "jobs")


@pytest.mark.parametrize(
    "first", ["alembic", "alembic.op", "awa_sqla.alembic", "awa_sqla.schema.operation", "alembic.autogenerate"]
)
def test_alembic_finds_the_operation_whatever_is_imported_first(first: str) -> None:
    code = f"import {first}; from alembic import op; op.awa_migrate"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_module_of_the_plugin_imports_no_alembic() -> None:
    code = "import sys, awa_sqla.alembic; sys.exit('alembic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plugin_can_be_read_as_a_list_of_plugins() -> None:
    assert list(awa_sqla.alembic) == [awa_sqla.alembic]  # type: ignore[call-overload]
