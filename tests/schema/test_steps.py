"""The versioned steps: up, down, again, beside each other, in a transaction, refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from awa_sqla import ConfigurationError, SchemaVersionError
from awa_sqla.models.wakeups import channel, queue_payload
from awa_sqla.schema import LATEST, create_all, installed_version, migrate, statements
from tests.databases import libpq_url
from tests.schema.catalog import described, names


# ---------------------------------------------------------------------------------------------- up and down
def test_downgrade_leaves_nothing(connection: Connection) -> None:
    before = names(connection)
    create_all(connection)
    assert names(connection) > before
    assert migrate(connection, 0) == (LATEST, 0)
    assert names(connection) == before


def test_upgrade_after_downgrade_makes_the_same_again(connection: Connection) -> None:
    create_all(connection)
    first = described(connection)
    migrate(connection, 0)
    assert migrate(connection) == (0, LATEST)
    assert described(connection) == first


def test_nothing_is_committed_on_the_callers_behalf(empty_engine: Engine) -> None:
    with empty_engine.connect() as connection:
        before = names(connection)
        create_all(connection)
        connection.rollback()
        assert names(connection) == before


def test_a_schema_that_holds_a_foreign_table_stays_with_it(connection: Connection) -> None:
    connection.execute(text("CREATE SCHEMA awa"))
    connection.execute(text("CREATE TABLE awa.theirs AS SELECT 1 AS kept"))
    create_all(connection)
    migrate(connection, 0)
    assert {what for what in described(connection) if what.startswith("relation")} == {"relation theirs"}
    assert connection.scalar(text("SELECT kept FROM awa.theirs")) == 1


def test_a_schema_that_somebody_else_owns_stays(connection: Connection) -> None:
    connection.execute(text("CREATE ROLE awa_test_dba"))
    connection.execute(text("CREATE SCHEMA awa AUTHORIZATION awa_test_dba"))
    create_all(connection)
    migrate(connection, 0)
    assert "schema awa" in names(connection)


@pytest.fixture
def app_role(connection: Connection) -> Iterator[Connection]:
    """A role that owns the schema `awa`, and may create no other."""
    connection.execute(text("CREATE ROLE awa_test_app"))
    connection.execute(text("CREATE SCHEMA awa AUTHORIZATION awa_test_app"))
    connection.execute(text("SET LOCAL ROLE awa_test_app"))
    yield connection
    connection.rollback()


def test_a_schema_that_its_owner_could_not_make_again_stays(app_role: Connection) -> None:
    create_all(app_role)
    migrate(app_role, 0)
    create_all(app_role)
    assert installed_version(app_role) == LATEST


def test_public_is_never_dropped(connection: Connection) -> None:
    connection.execute(text("ALTER SCHEMA public OWNER TO CURRENT_USER"))
    before = names(connection)
    create_all(connection, "public")
    assert installed_version(connection, "public") == LATEST
    migrate(connection, 0, "public")
    assert names(connection) == before


def test_create_all_on_an_installed_schema_only_reads(connection: Connection) -> None:
    create_all(connection)
    applied = connection.execute(text("SELECT version, applied_at FROM awa.schema_version")).all()
    sent: list[str] = []
    event.listen(connection, "before_cursor_execute", lambda *call: sent.append(call[2]))
    create_all(connection)
    assert [statement.split()[0] for statement in sent] == ["SELECT"] * 3
    assert connection.execute(text("SELECT version, applied_at FROM awa.schema_version")).all() == applied


def test_the_version_of_an_empty_database_is_0(connection: Connection) -> None:
    assert installed_version(connection) == 0


# ------------------------------------------------------------------------------------------ schemas and names
def test_a_second_schema_beside_the_first_is_complete_and_separate(connection: Connection) -> None:
    create_all(connection)
    first = described(connection)
    create_all(connection, "jobs-2")
    assert len(described(connection, "jobs-2")) == len(first)
    migrate(connection, 0, "jobs-2")
    assert described(connection) == first
    assert installed_version(connection, "jobs-2") == 0


def test_each_schema_has_a_wake_up_channel_of_its_own(empty_db_url: URL, empty_engine: Engine) -> None:
    with empty_engine.begin() as connection:
        create_all(connection)
        create_all(connection, "second")
    assert channel("awa") != channel("second")
    with psycopg.connect(libpq_url(empty_db_url), autocommit=True) as listening:
        listening.execute(f"LISTEN {channel('awa')}")
        listening.execute(f"LISTEN {channel('second')}")
        with empty_engine.begin() as connection:
            connection.execute(text("INSERT INTO awa.jobs_hot (kind, queue) VALUES ('a', 'here')"))
            connection.execute(text("INSERT INTO second.jobs_hot (kind, queue) VALUES ('a', 'there')"))
        heard = {(note.channel, note.payload) for note in listening.notifies(timeout=10, stop_after=2)}
    assert heard == {(channel("awa"), queue_payload("here")), (channel("second"), queue_payload("there"))}


@pytest.mark.parametrize(
    "schema",
    ["", "1st", "with space", 'quo"te', "semi;colon", "dotted.name", "é" * 32, "a" * 64, "awa\n", "pg_awa", "-awa"],
)
def test_a_name_that_is_no_plain_identifier_is_refused(connection: Connection, schema: str) -> None:
    with pytest.raises(ConfigurationError, match="schema"):
        create_all(connection, schema)
    assert installed_version(connection) == 0


@pytest.mark.parametrize("schema", ["Awa", "select", "job-queue", "_awa", "ärger", "a" * 63])
def test_a_plain_identifier_needs_no_care(connection: Connection, schema: str) -> None:
    before = names(connection)
    create_all(connection, schema)
    assert installed_version(connection, schema) == LATEST
    migrate(connection, 0, schema)
    assert names(connection) == before


def test_a_connection_with_a_translated_schema_installs_what_it_is_told(empty_engine: Engine) -> None:
    translated = empty_engine.execution_options(schema_translate_map={"awa": "other", "other": "awa"})
    with translated.connect() as connection:
        create_all(connection, "other")
        assert installed_version(connection, "other") == LATEST
        assert installed_version(connection, "awa") == 0


# ---------------------------------------------------------------------------------------------------- refusals
def test_a_database_that_is_newer_refuses_and_stays_as_it_is(connection: Connection) -> None:
    create_all(connection)
    connection.execute(text("INSERT INTO awa.schema_version (version) VALUES (:version)"), {"version": LATEST + 1})
    before = described(connection)
    for change in (create_all, migrate, lambda on: migrate(on, 0)):
        with pytest.raises(SchemaVersionError, match="upgrade awa-sqla") as caught:
            change(connection)
        assert (caught.value.found, caught.value.expected) == (LATEST + 1, LATEST)
    assert described(connection) == before
    assert installed_version(connection) == LATEST + 1


@pytest.mark.parametrize("version", [-1, LATEST + 1])
def test_a_version_that_this_package_does_not_know_is_refused(connection: Connection, version: int) -> None:
    with pytest.raises(ConfigurationError, match=f"no schema version {version}"):
        migrate(connection, version)
    assert installed_version(connection) == 0


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_autocommit_is_refused(empty_db_url: URL, driver: str) -> None:
    url = empty_db_url.set(drivername=f"postgresql+{driver}")
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            create_all(connection)
        assert "schema awa" not in names(connection)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_autocommit_is_refused_in_async_too(empty_db_url: URL, driver: str) -> None:
    async def run() -> None:
        url = empty_db_url.set(drivername=f"postgresql+{driver}")
        engine = create_async_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                await connection.run_sync(create_all)

    asyncio.run(run())


# ----------------------------------------------------------------------------------------------------- drivers
def test_psycopg2_installs_the_same(empty_db_url: URL, connection: Connection) -> None:
    create_all(connection)
    expected = described(connection)
    connection.rollback()
    engine = create_engine(empty_db_url.set(drivername="postgresql+psycopg2"), poolclass=NullPool)
    with engine.connect() as other:
        create_all(other)
        assert described(other) == expected


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_async_drivers_install_the_same(empty_db_url: URL, connection: Connection, driver: str) -> None:
    create_all(connection)
    expected = described(connection)
    connection.rollback()

    async def run() -> dict[str, str]:
        engine = create_async_engine(empty_db_url.set(drivername=f"postgresql+{driver}"), poolclass=NullPool)
        async with engine.connect() as other:
            await other.run_sync(create_all)
            return await other.run_sync(described)

    assert asyncio.run(run()) == expected


# ------------------------------------------------------------------------------------------------------- the SQL
def test_the_statements_alone_do_what_create_all_does(connection: Connection, empty_db_url: URL) -> None:
    create_all(connection)
    expected = described(connection)
    connection.rollback()
    script = ";\n".join(statements(0, LATEST))
    with psycopg.connect(libpq_url(empty_db_url), autocommit=True) as plain:
        plain.execute(script.encode())  # without parameters many statements may go at once, as in psql
    assert described(connection) == expected
    assert installed_version(connection) == LATEST


@pytest.mark.parametrize(("from_", "to"), [(0, LATEST + 1), (-1, 0), (LATEST + 1, 0)])
def test_there_are_no_statements_for_unknown_versions(from_: int, to: int) -> None:
    with pytest.raises(ConfigurationError, match="this package knows 0 to"):
        list(statements(from_, to))


def test_there_are_no_statements_between_a_version_and_itself() -> None:
    assert list(statements(LATEST, LATEST)) == []
