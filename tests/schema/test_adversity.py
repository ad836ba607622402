"""What stands in the way of a migration: other migrations, settings of a role, autovacuum, small pools, broken runs."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, text

from awa_sqla import ConfigurationError, SchemaLocked
from awa_sqla.alembic import one_at_a_time
from awa_sqla.schema import LATEST, create_all, migrate_online
from awa_sqla.schema.alone import alone
from awa_sqla.schema.drift import differences
from awa_sqla.schema.online import script
from awa_sqla.schema.steps import STEPS, Index
from tests.databases import libpq_url
from tests.schema.catalog import described
from tests.schema.test_concurrent import advisory_locks
from tests.schema.test_concurrently import concurrent_project
from tests.schema.test_online import at, is_finished, version_of
from tests.worker.poolers import pgbouncer

SOON = timedelta(seconds=0.1)

KEY = "awa_sqla.schema.online:awa"


def until(condition: str, connection: Connection) -> None:
    """Return once a condition in SQL is true; fail after 30 s."""
    deadline = time.monotonic() + 30
    while not connection.scalar(text(f"SELECT {condition}")):
        connection.rollback()
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)
    connection.rollback()


# ------------------------------------------------------------------------------------------- others that migrate too
@contextmanager
def somebody_migrating(engine: Engine) -> Generator[threading.Event, None, None]:
    """Another process is alone with the schema until the event is set."""
    began, end = threading.Event(), threading.Event()

    def hold() -> None:
        with alone(engine, KEY, print):
            began.set()
            end.wait(60)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert began.wait(10)
        try:
            yield end
        finally:
            end.set()
            holding.result()


@pytest.mark.beside
@pytest.mark.case(39)
def test_who_waits_takes_nothing_back_that_others_have_added(empty_engine: Engine, empty_db_url: URL) -> None:
    """When it was started its target was above the version of the schema."""
    at(empty_engine, 1)
    command = [sys.executable, "-m", "awa_sqla", "-d", libpq_url(empty_db_url), "migrate", "--to", "2"]
    with somebody_migrating(empty_engine) as end:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr
        assert "waiting" in process.stderr.readline()
        at(empty_engine, LATEST)
        end.set()
        said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, f"schema awa: already at version {LATEST}\n")
    assert version_of(empty_engine) == LATEST


@pytest.mark.case(39)
def test_a_revision_that_waits_takes_nothing_back_that_others_have_added(
    tmp_path: Path, empty_engine: Engine, empty_db_url: URL, connection: Connection
) -> None:
    """Replicas without a lock around all of it: the first is at its second revision when the other gets to go on."""
    project = concurrent_project(tmp_path, empty_db_url)
    project.edit("with one_at_a_time(connection), context", "with context")
    with somebody_migrating(empty_engine) as end, ThreadPoolExecutor(1) as pool:
        going = pool.submit(project.run, "upgrade", "one")
        until("count(*) > 0 FROM pg_class WHERE relname = 't_one'", connection)
        at(empty_engine, LATEST)
        end.set()
        going.result(timeout=60)
    assert version_of(empty_engine) == LATEST


@pytest.mark.beside
@pytest.mark.case(39)
def test_several_behind_a_pooler_all_succeed(tmp_path: Path, empty_engine: Engine, empty_db_url: URL) -> None:
    """A direct connection is better; prepared statements would be another's."""
    at(empty_engine, 2)
    with pgbouncer(empty_db_url, tmp_path) as url:
        command = [sys.executable, "-m", "awa_sqla", "-d", libpq_url(url), "migrate"]
        running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        said = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 3, said
    assert is_finished(empty_engine)


def test_one_that_goes_up_stops_when_others_are_beyond(empty_engine: Engine) -> None:
    at(empty_engine, 2)
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if line.startswith("index") and version_of(empty_engine) == 3:
            at(empty_engine, LATEST)

    assert migrate_online(empty_engine, 4, tell=tell) == (2, LATEST)
    assert version_of(empty_engine) == LATEST
    assert not [line for line in told if line.startswith("back")]


@pytest.mark.case(39)
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_that_cannot_see_what_it_has_waited_for_says_so(
    empty_engine: Engine, connection: Connection, isolation: str
) -> None:
    """And one that waits for nobody works."""
    engine = create_engine(empty_engine.url, poolclass=NullPool, isolation_level=isolation)
    with empty_engine.connect() as first, ThreadPoolExecutor(1) as pool:
        create_all(first)

        def second() -> None:
            with engine.begin() as own:
                create_all(own)

        going = pool.submit(second)
        until("count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", connection)
        first.commit()
        with pytest.raises(ConfigurationError, match=f"{isolation} transaction.*try again"):
            going.result(timeout=30)
    second()
    at(empty_engine, 0)
    second()
    assert version_of(empty_engine) == LATEST


def test_a_transaction_that_migrates_is_waited_for_and_said_so(empty_engine: Engine, connection: Connection) -> None:
    told: list[str] = []
    with empty_engine.connect() as other, ThreadPoolExecutor(1) as pool:
        create_all(other)
        going = pool.submit(migrate_online, empty_engine, tell=told.append)
        until("count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", connection)
        other.commit()
        assert going.result(timeout=30) == (LATEST, LATEST)
    assert told == ["waiting for a transaction that migrates"]


def test_a_lock_inside_itself_is_refused_rather_than_waited_for(empty_engine: Engine) -> None:
    """As when a script takes it around `command.upgrade()`, and `env.py` once more."""
    with empty_engine.connect() as outer, empty_engine.connect() as inner:
        for _ in range(2):  # and it is free afterwards
            with (
                pytest.raises(ConfigurationError, match="would wait for itself"),
                one_at_a_time(outer),
                one_at_a_time(inner, "another"),
                one_at_a_time(inner),
            ):
                pass
        assert advisory_locks(inner) == 0


# ------------------------------------------------------------------------------------------------------ broken runs
@pytest.mark.parametrize("version", [n for n, step in enumerate(STEPS, 1) if any(type(w) is Index for w in step.after)])
def test_there_is_a_way_back_from_a_step_whose_indexes_were_not_built(
    empty_engine: Engine, connection: Connection, version: int
) -> None:
    at(empty_engine, version - 1)
    expected = described(connection)
    connection.rollback()
    for way_back in (at, migrate_online):
        at(empty_engine, version)
        for work in STEPS[version - 1].after:
            if isinstance(work, Index):
                connection.execute(text(f"DROP INDEX awa.{work.name}"))
        connection.commit()
        way_back(empty_engine, version - 1)
        assert described(connection) == expected
        connection.rollback()


def test_a_revision_whose_last_index_was_not_built_builds_it(
    tmp_path: Path, empty_engine: Engine, empty_db_url: URL, connection: Connection
) -> None:
    """The version of the schema is already that of the revision, which was not recorded."""
    project = concurrent_project(tmp_path, empty_db_url)
    project.run("upgrade", "one")
    at(empty_engine, LATEST)
    expected = described(connection)
    connection.execute(text("DROP INDEX awa.ix_dlq_entries_queue"))
    connection.commit()
    assert not is_finished(empty_engine)
    project.run("upgrade", "head")
    assert described(connection) == expected
    assert advisory_locks(connection) == 0


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
        with pytest.raises(SchemaLocked, match=r"prepared transaction \(left behind, of ") as caught:
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
