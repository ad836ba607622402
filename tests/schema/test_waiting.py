"""What a migration has to wait for or to bear: limits of a role, small pools, autovacuum, traffic."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, text

from awa_sqla import SchemaLocked
from awa_sqla.schema import LATEST, create_all, migrate_online
from awa_sqla.schema.drift import differences
from awa_sqla.schema.online import script
from tests.schema.test_adversity import until
from tests.schema.test_concurrently import concurrent_project
from tests.schema.test_online import at, is_finished

#: Run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside

SOON = timedelta(seconds=0.1)


# ---------------------------------------------------------------------------------------------------- a role's settings
LIMITS = (
    "statement_timeout=50ms",
    "idle_in_transaction_session_timeout=100ms",
    "lock_timeout=10ms",
    "transaction_timeout=500ms",
)


@pytest.mark.beside
@pytest.mark.parametrize("setting", LIMITS)
def test_no_limit_of_a_role_ends_what_has_to_wait(empty_engine: Engine, connection: Connection, setting: str) -> None:
    """For a table, for another migration, and for an index."""
    name, _, _ = setting.partition("=")
    if not connection.scalar(text("SELECT count(*) FROM pg_settings WHERE name = :name"), {"name": name}):
        pytest.skip("this server has no such setting")
    connection.rollback()
    at(empty_engine, 6)
    limited = create_engine(empty_engine.url, poolclass=NullPool, connect_args={"options": f"-c {setting}"})
    with empty_engine.connect() as other, ThreadPoolExecutor(1) as pool:
        other.execute(text("SELECT count(*) FROM awa.dlq_entries"))
        going = pool.submit(migrate_online, limited)
        with pytest.raises(TimeoutError):
            going.result(timeout=1.5)
        other.rollback()
        assert going.result(timeout=30) == (6, LATEST)
        create_all(other, "another")
        going = pool.submit(migrate_online, limited, schema="another")
        with pytest.raises(TimeoutError):
            going.result(timeout=1)
        other.rollback()
        assert going.result(timeout=30) == (0, LATEST)
        other.execute(text("DROP INDEX awa.ix_jobs_hot_callback"))
        other.commit()
        other.execute(text("INSERT INTO awa.jobs_hot (kind) VALUES ('x')"))
        going = pool.submit(migrate_online, limited)
        with pytest.raises(TimeoutError):
            going.result(timeout=1)
        other.rollback()
        assert going.result(timeout=30) == (LATEST, LATEST)
    assert is_finished(empty_engine)


def test_a_revision_that_goes_online_keeps_the_role_of_its_environment(
    tmp_path: Path, empty_db_url: URL, connection: Connection
) -> None:
    """`env.py` may SET ROLE on its connection; the steps have others."""
    owner = '"the owner, 100%"'
    connection.execute(text(f"CREATE ROLE {owner}"))
    connection.execute(text(f"GRANT CREATE ON DATABASE {empty_db_url.database} TO {owner}"))
    connection.execute(text(f"GRANT ALL ON SCHEMA public TO {owner}"))
    connection.commit()
    try:
        project = concurrent_project(tmp_path, empty_db_url)
        opened = "with connectable.connect() as connection:\n"
        change = f"connection.exec_driver_sql('SET ROLE {owner}'.replace('%', '%%'))"
        project.edit(opened, f"{opened}        {change}\n        connection.commit()\n")
        project.run("upgrade", "head")
        owners = text(
            "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class WHERE relnamespace = to_regnamespace('awa') "
            "UNION SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'awa'"
        )
        assert connection.scalars(owners).all() == ["the owner, 100%"]
        connection.rollback()
        project.run("downgrade", "base")
    finally:
        connection.rollback()
        connection.execute(text(f"DROP OWNED BY {owner}"))
        connection.execute(text(f"DROP ROLE {owner}"))
        connection.commit()


def test_quoted_names_are_no_difference(connection: Connection) -> None:
    create_all(connection)
    connection.execute(text("SET quote_all_identifiers = on"))
    assert differences(connection) == []
    assert connection.scalar(text("SHOW quote_all_identifiers")) == "on"


@pytest.mark.beside
def test_an_engine_of_two_connections_is_enough(empty_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("awa_sqla.schema.online._EVERY", 0.1)
    at(empty_engine, 2)
    small = create_engine(empty_engine.url, pool_size=2, max_overflow=0, pool_timeout=0.2)
    with empty_engine.connect() as writer, ThreadPoolExecutor(1) as pool:
        writer.execute(text("INSERT INTO awa.jobs_hot (kind) VALUES ('x')"))
        going = pool.submit(migrate_online, small, 3)
        with pytest.raises(TimeoutError):
            going.result(timeout=1.5)
        writer.rollback()
        assert going.result(timeout=30) == (2, 3)
    assert small.pool.checkedout() == 0  # type: ignore[attr-defined]
    small.dispose()


# ------------------------------------------------------------------------------------------------- who has the tables
def test_a_prepared_transaction_is_named(empty_engine: Engine, connection: Connection) -> None:
    at(empty_engine, LATEST - 1)
    connection.execute(text("SELECT count(*) FROM awa.dlq_entries"))
    connection.execute(text("PREPARE TRANSACTION 'left behind'"))
    connection.commit()
    try:
        with pytest.raises(SchemaLocked, match="prepared transaction left behind of ") as caught:
            migrate_online(empty_engine, lock_wait=SOON)
        assert len(caught.value.holders) == 1
    finally:
        with connection.execution_options(isolation_level="AUTOCOMMIT"):
            connection.execute(text("ROLLBACK PREPARED 'left behind'"))


@pytest.mark.beside
@pytest.mark.case(40)
def test_short_transactions_that_overlap_do_not_keep_it_out(empty_engine: Engine) -> None:
    """Somebody always has the first table: it is had within a second, in which all of them end, or never."""
    at(empty_engine, LATEST - 1)
    stop = threading.Event()

    def traffic(first_pause: float) -> None:
        time.sleep(first_pause)
        while not stop.is_set():
            with empty_engine.begin() as connection:
                connection.execute(text("INSERT INTO awa.jobs_hot (kind) VALUES ('traffic')"))
                time.sleep(0.4)

    with ThreadPoolExecutor(6) as pool:
        busy = [pool.submit(traffic, n * 0.07) for n in range(6)]
        try:
            time.sleep(0.5)
            assert migrate_online(empty_engine, lock_wait=timedelta(seconds=8)) == (LATEST - 1, LATEST)
        finally:
            stop.set()
        for one in busy:
            one.result()


@pytest.mark.beside
@pytest.mark.case(40)
def test_autovacuum_gives_way(empty_engine: Engine, empty_db_url: URL, connection: Connection) -> None:
    """It does so for who has waited for a deadlock_timeout, which no try for our locks does."""
    at(empty_engine, LATEST - 1)
    connection.execute(
        text(
            "ALTER TABLE awa.jobs_hot SET (autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1, "
            "autovacuum_vacuum_threshold = 1, autovacuum_vacuum_scale_factor = 0)"
        )
    )
    connection.execute(text("INSERT INTO awa.jobs_hot (kind) SELECT 'x' FROM generate_series(1, 20000)"))
    connection.commit()
    connection.execute(text("UPDATE awa.jobs_hot SET kind = 'y'"))
    connection.commit()
    with empty_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as server:
        server.execute(text("ALTER SYSTEM SET autovacuum_naptime = '1s'"))
        server.execute(text("SELECT pg_reload_conf()"))
        try:
            until(
                "count(*) > 0 FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE usesysid IS NULL AND granted "
                "AND relation = 'awa.jobs_hot'::regclass",
                connection,
            )
            assert migrate_online(empty_engine, lock_wait=timedelta(seconds=15)) == (LATEST - 1, LATEST)
        finally:
            server.execute(text("ALTER SYSTEM RESET autovacuum_naptime"))
            server.execute(text("SELECT pg_reload_conf()"))


@pytest.mark.case(40)
def test_a_printed_step_waits_for_its_locks_as_long_as_one_that_is_run(connection: Connection) -> None:
    """All together less than a second: after that a server looks for deadlocks, and ends the transaction of others."""
    until("setting::int >= 1000 FROM pg_settings WHERE name = 'deadlock_timeout'", connection)
    for version in range(1, LATEST + 1):
        for from_, to in ((version - 1, version), (version, version - 1)):
            statements = list(script(from_, to, "awa"))
            locks = sum(statement.startswith("LOCK TABLE") for statement in statements)
            timeouts = re.findall(r"SET LOCAL lock_timeout = '(\d+)ms'", "\n".join(statements))
            assert len(timeouts) == (1 if locks else 0)
            assert sum(map(int, timeouts)) * locks <= 1000, (from_, to)
