"""The comparison of schemas: who may ask for it, over which driver, and what it leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from awa_sqla import ConfigurationError, SchemaVersionError
from awa_sqla.schema import LATEST, create_all
from awa_sqla.schema.drift import Difference, differences, lines, mend
from tests.schema import catalog

#: Run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside


@pytest.fixture
def installed(empty_engine: Engine) -> Engine:
    """An engine on a database with our schema, from which one index is missing."""
    with empty_engine.begin() as connection:
        create_all(connection)
        connection.exec_driver_sql("DROP INDEX awa.ix_audit_log_at")
    return empty_engine


@pytest.fixture
def reader(installed: Engine) -> Iterator[Connection]:
    """A connection as somebody who may read our schema and nothing else."""
    with installed.connect() as connection:
        connection.exec_driver_sql("CREATE ROLE awa_test_reader")
        connection.exec_driver_sql("GRANT USAGE ON SCHEMA awa TO awa_test_reader")
        connection.exec_driver_sql("GRANT SELECT ON awa.schema_version TO awa_test_reader")
        connection.exec_driver_sql("SET LOCAL ROLE awa_test_reader")
        yield connection
        connection.rollback()


def whats(found: list[Difference]) -> list[str]:
    return [difference.what for difference in found]


MISSING = ["index audit_log.ix_audit_log_at"]


@pytest.mark.parametrize("driver", ["psycopg2", "psycopg", "asyncpg"])
def test_every_driver_sees_the_same(installed: Engine, driver: str) -> None:
    url = installed.url.set(drivername=f"postgresql+{driver}")

    async def seen() -> list[Difference]:
        async with create_async_engine(url, poolclass=NullPool).connect() as connection:
            return await connection.run_sync(differences)

    if driver == "asyncpg":
        found = asyncio.run(seen())
    else:
        with create_engine(url, poolclass=NullPool).connect() as connection:
            found = differences(connection)
    assert whats(found) == MISSING


def test_a_role_that_may_only_read_sees_it(reader: Connection) -> None:
    assert whats(differences(reader)) == MISSING


def test_without_the_privilege_temporary_the_error_names_it(reader: Connection) -> None:
    database = reader.engine.url.database
    reader.exec_driver_sql(f'RESET ROLE; REVOKE TEMPORARY ON DATABASE "{database}" FROM PUBLIC')
    reader.exec_driver_sql("SET LOCAL ROLE awa_test_reader")
    with pytest.raises(ConfigurationError, match="schema 'awa' needs the privilege TEMPORARY on the database"):
        differences(reader)
    assert reader.scalar(text("SELECT count(*) FROM awa.schema_version")) == LATEST  # the transaction is still usable


def test_a_read_only_transaction_is_refused(installed: Engine) -> None:
    with installed.connect() as connection:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        with pytest.raises(ConfigurationError, match="needs a transaction that may write"):
            differences(connection)


def test_another_error_of_the_database_is_not_renamed(connection: Connection) -> None:
    create_all(connection)
    connection.exec_driver_sql(
        """CREATE FUNCTION no_sequences() RETURNS event_trigger LANGUAGE plpgsql
        AS $$ BEGIN RAISE 'not on this server'; END $$;
        CREATE EVENT TRIGGER none ON ddl_command_start WHEN TAG IN ('CREATE SEQUENCE')
        EXECUTE FUNCTION no_sequences()"""
    )
    with pytest.raises(DBAPIError, match="not on this server"):
        differences(connection)


@pytest.mark.parametrize(
    ("sql", "drawn", "used"),
    [
        ("DROP SEQUENCE awa.jobs_id_seq CASCADE", "nextval('awa.jobs_id_seq')", 900),
        ("DROP SEQUENCE awa.run_lease_seq", "nextval('awa.run_lease_seq')", 800),
        (
            "ALTER TABLE awa.audit_log ALTER id DROP IDENTITY",
            "nextval(pg_get_serial_sequence('awa.audit_log', 'id'))",
            700,
        ),
    ],
)
def test_a_sequence_made_anew_gives_no_number_again(connection: Connection, sql: str, drawn: str, used: int) -> None:
    create_all(connection)
    connection.exec_driver_sql(
        f"""INSERT INTO awa.dlq_entries (id, kind, original_run_lease, dlq_reason) VALUES (900, 'dead', 800, 'no');
        INSERT INTO awa.audit_log (id, source, verb, target) OVERRIDING SYSTEM VALUE VALUES (700, 'a', 'b', 'c');
        {sql}"""
    )
    mend(connection, differences(connection))
    assert connection.scalar(text(f"SELECT {drawn}")) == used + 1


@pytest.mark.parametrize("driver", ["psycopg2", "psycopg", "asyncpg"])
def test_autocommit_is_refused(installed: Engine, driver: str) -> None:
    url = installed.url.set(drivername=f"postgresql+{driver}")
    options: dict[str, Any] = {"poolclass": NullPool, "isolation_level": "AUTOCOMMIT"}

    async def compare_async() -> None:
        async with create_async_engine(url, **options).connect() as connection:
            await connection.run_sync(differences)

    def compare() -> None:
        with create_engine(url, **options).connect() as connection:
            differences(connection)

    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        asyncio.run(compare_async()) if driver == "asyncpg" else compare()


def test_a_database_that_is_newer_is_refused(connection: Connection) -> None:
    create_all(connection)
    connection.exec_driver_sql(f"INSERT INTO awa.schema_version (version) VALUES ({LATEST + 1})")
    with pytest.raises(SchemaVersionError):
        differences(connection)


def test_a_schema_that_is_not_installed_has_no_differences(connection: Connection) -> None:
    assert differences(connection) == []
    connection.exec_driver_sql("CREATE SCHEMA awa; CREATE TABLE awa.jobs_hot (id int)")
    assert differences(connection) == []


def test_it_leaves_nothing_and_locks_nothing(installed: Engine) -> None:
    with installed.connect() as connection:
        connection.exec_driver_sql("SET search_path = awa, public")
        connection.exec_driver_sql("CREATE TEMP TABLE jobs_hot (id serial PRIMARY KEY, note text)")
        connection.exec_driver_sql("CREATE FUNCTION pg_temp.sync_claims() RETURNS int LANGUAGE sql AS 'SELECT 7'")
        connection.exec_driver_sql("INSERT INTO pg_temp.jobs_hot (note) VALUES ('kept')")
        connection.commit()
        before = catalog.names(connection)
        assert whats(differences(connection)) == MISSING
        assert catalog.names(connection) == before
        assert connection.scalar(text("SELECT note FROM pg_temp.jobs_hot WHERE id = 1")) == "kept"
        assert connection.scalar(text("SELECT pg_temp.sync_claims()")) == 7
        assert connection.scalar(text("SHOW search_path")) == "awa, public"
        assert connection.scalar(text("SHOW check_function_bodies")) == "on"
        held = connection.scalars(
            text(
                "SELECT DISTINCT mode FROM pg_locks JOIN pg_class ON pg_class.oid = relation "
                "WHERE pid = pg_backend_pid() AND relnamespace = 'awa'::regnamespace"
            )
        ).all()
        assert set(held) <= {"AccessShareLock"}


def test_it_waits_only_for_what_a_select_waits_for(installed: Engine) -> None:
    with installed.connect() as other, installed.connect() as connection:
        connection.exec_driver_sql("SET LOCAL lock_timeout = '100ms'")
        other.exec_driver_sql("LOCK TABLE awa.jobs_hot, awa.audit_log IN EXCLUSIVE MODE")
        assert whats(differences(connection)) == MISSING


def test_the_number_of_statements_does_not_grow_with_the_schema(installed: Engine) -> None:
    statements: list[str] = []
    event.listen(installed, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    with installed.connect() as connection:
        differences(connection)
    assert len(statements) == 13


def test_the_lines_are_a_script(installed: Engine) -> None:
    with installed.connect() as connection:
        clean = catalog.described(connection)
    with installed.begin() as connection:
        connection.exec_driver_sql(
            """ALTER TABLE awa.leaders ALTER term SET DEFAULT 2; DROP VIEW awa.jobs;
            ALTER TABLE awa.leaders ADD CONSTRAINT "two\nlines" CHECK (term > 0);
            DROP FUNCTION awa.take_keys(bytea[], bigint[]);
            ALTER FUNCTION awa.claim_keys(bytea[], bigint[]) SECURITY DEFINER"""
        )
        script = list(lines(differences(connection)))
    refused = "is none of this schema's and could refuse its rows: CHECK (term > 0)"
    assert script[0] == f"-- constraint leaders.two lines {refused}"
    index = script.index("-- column leaders.term has another default: 2 instead of 1")
    assert script[index + 1] == '    ALTER TABLE "awa".leaders ALTER COLUMN term SET DEFAULT 1;'
    assert "     SELECT jobs_hot.id," in script
    assert script[-2:] == [
        "-- index audit_log.ix_audit_log_at is missing",
        '    CREATE INDEX CONCURRENTLY ix_audit_log_at ON "awa".audit_log USING btree (at);',
    ]
    with installed.begin() as connection:
        connection.exec_driver_sql("\n".join(script[:-2]))
        assert whats(differences(connection)) == MISSING
        assert catalog.differences(clean, catalog.described(connection)) == set()


@pytest.mark.parametrize("isolation_level", ["AUTOCOMMIT", "READ COMMITTED"])
def test_an_async_connection_can_mend(installed: Engine, isolation_level: str) -> None:
    url = installed.url.set(drivername="postgresql+asyncpg")

    async def mended() -> list[Difference]:
        engine = create_async_engine(url, poolclass=NullPool)
        async with engine.begin() as connection:
            found = await connection.run_sync(differences)
        async with engine.connect() as connection:
            await connection.execution_options(isolation_level=isolation_level)
            await connection.run_sync(mend, found)
            await connection.commit()
        async with engine.connect() as connection:
            return await connection.run_sync(differences)

    assert asyncio.run(mended()) == []


@pytest.mark.parametrize(
    ("sql", "what", "problem"),
    [
        ("CREATE VIEW awa.leaders AS SELECT 1 AS one", "table leaders", "is a view"),
        ("CREATE TABLE awa.leaders (name text) PARTITION BY LIST (name)", "table leaders", "is a partitioned table"),
        ("DROP VIEW awa.jobs; CREATE TABLE awa.jobs (id int); CREATE TABLE awa.leaders ()", "view jobs", "is a table"),
    ],
)
def test_what_no_statement_can_mend_is_said(connection: Connection, sql: str, what: str, problem: str) -> None:
    create_all(connection)
    connection.exec_driver_sql(f"DROP TABLE awa.leaders; {sql}")
    named = [(one.what, one.problem, one.mends) for one in differences(connection) if "leaders." not in one.what]
    assert named == [(what, problem, ())]
    mend(connection, [one for one in differences(connection) if one.what == what])
    assert what in whats(differences(connection))


def test_a_virtual_column_cannot_be_mended(connection: Connection) -> None:
    create_all(connection)
    if connection.scalar(text("SELECT current_setting('server_version_num')::int")) < 180000:
        pytest.skip("PostgreSQL has them from version 18 on")
    connection.exec_driver_sql(
        """ALTER TABLE awa.queue_meta DROP paused_by;
        ALTER TABLE awa.queue_meta ADD paused_by varchar(9) GENERATED ALWAYS AS (upper(queue)) VIRTUAL"""
    )
    (found,) = differences(connection)
    assert (found.what, found.mends) == ("column queue_meta.paused_by", ())


def test_not_null_that_is_not_validated_is_seen(connection: Connection) -> None:
    create_all(connection)
    if connection.scalar(text("SELECT current_setting('server_version_num')::int")) < 180000:
        pytest.skip("PostgreSQL has it from version 18 on")
    connection.exec_driver_sql(
        """ALTER TABLE awa.leaders ALTER holder DROP NOT NULL;
        ALTER TABLE awa.leaders ADD CONSTRAINT "Held" NOT NULL holder NOT VALID"""
    )
    (found,) = differences(connection)
    assert (found.what, found.problem) == ("column leaders.holder", "is NOT NULL, but not validated")
    mend(connection, [found])
    assert differences(connection) == []


def test_not_null_by_another_name_is_the_same(connection: Connection) -> None:
    create_all(connection)
    connection.exec_driver_sql(
        """ALTER TABLE awa.leaders ALTER holder DROP NOT NULL;
        ALTER TABLE awa.leaders ADD CONSTRAINT held CHECK (holder IS NOT NULL);
        ALTER TABLE awa.leaders ALTER holder SET NOT NULL, DROP CONSTRAINT held"""
    )
    if connection.scalar(text("SELECT current_setting('server_version_num')::int")) >= 180000:
        connection.exec_driver_sql(
            'ALTER TABLE awa.leaders RENAME CONSTRAINT leaders_holder_not_null TO "Not null at all"'
        )
    assert differences(connection) == []


def test_a_view_and_a_function_keep_their_owner_and_grants(connection: Connection) -> None:
    """Though they must be dropped to be mended."""
    create_all(connection)
    connection.exec_driver_sql(
        """CREATE ROLE "The owner"; CREATE ROLE awa_reader;
        GRANT USAGE, CREATE ON SCHEMA awa TO "The owner"; GRANT SELECT ON ALL TABLES IN SCHEMA awa TO "The owner";
        DROP VIEW awa.jobs; CREATE VIEW awa.jobs WITH (security_barrier = true) AS SELECT 1 AS one;
        ALTER VIEW awa.jobs OWNER TO "The owner";
        GRANT SELECT ON awa.jobs TO PUBLIC; GRANT SELECT, INSERT ON awa.jobs TO awa_reader WITH GRANT OPTION;
        DROP FUNCTION awa.holds_claim(bigint, bytea);
        CREATE FUNCTION awa.holds_claim(a bigint, b bytea) RETURNS int LANGUAGE sql AS 'SELECT 1';
        ALTER FUNCTION awa.holds_claim(bigint, bytea) OWNER TO "The owner";
        REVOKE ALL ON FUNCTION awa.holds_claim(bigint, bytea) FROM PUBLIC;
        GRANT EXECUTE ON FUNCTION awa.holds_claim(bigint, bytea) TO awa_reader"""
    )
    sorted_acl = "(SELECT array_agg(one::text ORDER BY one::text) FROM unnest({}) AS one)::text"
    rights = text(
        f"""SELECT {sorted_acl.format("relacl")}, relowner::regrole::text, reloptions::text
        FROM pg_class WHERE relname = 'jobs'
        UNION ALL
        SELECT {sorted_acl.format("proacl")}, proowner::regrole::text, '' FROM pg_proc WHERE proname = 'holds_claim'"""
    )
    before = connection.execute(rights).all()
    found = differences(connection)
    assert whats(found) == ["view jobs", "function holds_claim(bigint, bytea)"]
    mend(connection, found)
    assert differences(connection) == []
    assert connection.execute(rights).all() == before
