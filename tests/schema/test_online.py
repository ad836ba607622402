"""The way through the steps beside the traffic: short transactions, indexes outside of them, and what may go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError

from awa_sqla import SchemaLocked, SchemaVersionError
from awa_sqla.schema import LATEST, create_all, installed_version, locks_between, migrate, migrate_online
from awa_sqla.schema.locks import take
from awa_sqla.schema.online import script, unfinished
from awa_sqla.schema.steps import STEPS, Index
from tests.databases import libpq_url
from tests.schema.catalog import described
from tests.schema.test_concurrent import advisory_locks, wait_until_blocked

SOON = timedelta(seconds=0.1)

Hold = Callable[[str], None]


@pytest.fixture
def hold(empty_engine: Engine) -> Iterator[Hold]:
    """Makes another session hold locks, by a statement in a transaction that stays open."""
    with empty_engine.connect() as connection:
        yield lambda statement: connection.execute(text(statement)) and None
        connection.rollback()


def at(engine: Engine, version: int) -> None:
    """Bring the schema to a version, in one transaction."""
    with engine.begin() as connection:
        migrate(connection, version)


def version_of(engine: Engine) -> int:
    with engine.connect() as connection:
        return installed_version(connection)


def versions(connection: Connection) -> Sequence[int]:
    return connection.scalars(text("SELECT version FROM awa.schema_version ORDER BY version")).all()


def is_finished(engine: Engine) -> bool:
    with engine.connect() as connection:
        return unfinished(connection, LATEST, "awa") == []


# ---------------------------------------------------------------------------------------------- the same in the end
@pytest.mark.parametrize("schema", ["awa", "Job-Queue"])
def test_it_makes_what_a_transaction_makes(empty_engine: Engine, connection: Connection, schema: str) -> None:
    create_all(connection, schema)
    expected = described(connection, schema)
    connection.rollback()
    assert migrate_online(empty_engine, schema=schema) == (0, LATEST)
    assert described(connection, schema) == expected
    assert unfinished(connection, LATEST, schema) == []
    connection.rollback()
    assert migrate_online(empty_engine, 0, schema) == (LATEST, 0)
    assert described(connection, schema) == {}


@pytest.mark.beside
@pytest.mark.parametrize("from_", range(LATEST + 1))
def test_it_makes_it_from_every_version(empty_engine: Engine, connection: Connection, from_: int) -> None:
    create_all(connection)
    expected = described(connection)
    connection.rollback()
    at(empty_engine, from_)
    assert migrate_online(empty_engine) == (from_, LATEST)
    assert described(connection) == expected


@pytest.mark.beside
@pytest.mark.parametrize("schema", ["awa", "ärger"])
def test_its_script_makes_the_same(
    empty_engine: Engine, connection: Connection, empty_db_url: URL, schema: str
) -> None:
    create_all(connection, schema)
    expected = described(connection, schema)
    connection.rollback()
    with psycopg.connect(libpq_url(empty_db_url), autocommit=True) as plain:
        for version in range(LATEST):  # also from each version to the next, where there are locks to take
            for statement in script(version, version + 1, schema):
                if not statement.startswith("--"):
                    plain.execute(statement.encode())
        assert described(connection, schema) == expected
        connection.rollback()
        for statement in script(LATEST, 0, schema):
            if not statement.startswith("--"):
                plain.execute(statement.encode())
    assert described(connection, schema) == {}


# ---------------------------------------------------------------------------------------------------------- locks
_MODES = {
    "ShareLock": "SHARE",
    "ShareRowExclusiveLock": "SHARE ROW EXCLUSIVE",
    "AccessExclusiveLock": "ACCESS EXCLUSIVE",
}


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("version", range(1, LATEST + 1))
def test_a_step_locks_what_it_declares(
    empty_engine: Engine, connection: Connection, monkeypatch: pytest.MonkeyPatch, version: int, up: bool
) -> None:
    from_, to = (version - 1, version) if up else (version, version - 1)
    at(empty_engine, from_)
    tables = "SELECT oid, relname FROM pg_class WHERE relnamespace = to_regnamespace('awa') AND relkind IN ('r', 'v')"
    there = {oid: name for oid, name in connection.execute(text(tables)) if name != "schema_version"}
    monkeypatch.setattr("awa_sqla.schema.take", lambda *_: None)  # what the statements themselves lock
    migrate(connection, to)
    strongest: dict[str, str] = {}
    for oid, mode in connection.execute(text("SELECT relation, mode FROM pg_locks WHERE pid = pg_backend_pid()")):
        if oid in there and mode in _MODES:
            strongest[there[oid]] = max(mode, strongest.get(there[oid], mode), key=list(_MODES).index)
    assert {name: _MODES[mode] for name, mode in strongest.items()} == locks_between(from_, to)


def test_locks_are_all_taken_before_anything_changes(empty_engine: Engine, connection: Connection) -> None:
    at(empty_engine, LATEST - 1)
    sent: list[str] = []
    event.listen(connection, "before_cursor_execute", lambda *call: sent.append(call[2]))
    migrate(connection)
    kinds = [statement.split()[0] for statement in sent]
    assert kinds.index("ALTER") > max(n for n, kind in enumerate(kinds) if kind == "LOCK")
    assert kinds.count("LOCK") == len(STEPS[-1].locks)


@pytest.mark.beside
@pytest.mark.case(40)
def test_who_holds_a_table_is_not_waited_for_in_a_queue(empty_engine: Engine, hold: Hold) -> None:
    """While the migration tries, others get through: it never waits long enough to stand in their way."""
    at(empty_engine, LATEST - 1)
    hold("LOCK TABLE awa.jobs_hot IN ROW EXCLUSIVE MODE")
    stop, slowest = threading.Event(), [0.0]

    def traffic() -> None:
        with empty_engine.connect() as connection:
            while not stop.is_set():
                began = time.monotonic()
                connection.execute(text("INSERT INTO awa.jobs_hot (kind) VALUES ('traffic')"))
                connection.commit()
                slowest[0] = max(slowest[0], time.monotonic() - began)

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(traffic)
        with pytest.raises(SchemaLocked):
            migrate_online(empty_engine, lock_wait=timedelta(seconds=3))
        stop.set()
        busy.result()
    assert slowest[0] < 2.5, "an insert stood behind the migration for as long as it tried"
    assert version_of(empty_engine) == LATEST - 1


@pytest.mark.case(40)
def test_locks_that_are_not_to_be_had_change_nothing_and_name_who_has_them(
    connection: Connection, empty_engine: Engine, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(empty_engine, LATEST - 1)
    hold("SET application_name = 'a report'")
    hold("SELECT count(*) FROM awa.dlq_entries")
    with pytest.raises(SchemaLocked, match=r"a report, idle in transaction.*try again") as caught:
        migrate_online(empty_engine, lock_wait=SOON)
    assert (caught.value.schema, caught.value.seconds, len(caught.value.holders)) == ("awa", 0.1, 1)
    assert version_of(empty_engine) == LATEST - 1
    monkeypatch.setattr("awa_sqla.schema.locks.LOCK_WAIT", SOON)
    connection.execute(text("CREATE TABLE mine (id int)"))
    connection.execute(text("SET LOCAL lock_timeout = '7s'"))
    with pytest.raises(SchemaLocked):
        create_all(connection)
    assert connection.scalar(text("SELECT count(*) FROM mine")) == 0  # the caller's transaction is as it was
    assert connection.scalar(text("SHOW lock_timeout")) == "7s"
    assert not connection.scalar(
        text("SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND relation = 'awa.jobs_hot'::regclass")
    )


@pytest.mark.beside
def test_it_goes_on_when_the_holder_lets_go(empty_engine: Engine) -> None:
    at(empty_engine, LATEST - 1)
    with empty_engine.connect() as report, ThreadPoolExecutor(1) as pool:
        report.execute(text("SELECT count(*) FROM awa.jobs_hot"))
        told: list[str] = []
        going = pool.submit(migrate_online, empty_engine, tell=told.append)
        while not told:
            time.sleep(0.01)
        with pytest.raises(TimeoutError):
            going.result(timeout=1.5)
        report.rollback()
        assert going.result(timeout=20) == (LATEST - 1, LATEST)


def test_what_was_set_of_lock_timeout_stays(empty_engine: Engine, connection: Connection) -> None:
    at(empty_engine, LATEST - 1)
    connection.execute(text("SET lock_timeout = '4321ms'"))
    migrate(connection)
    assert connection.scalar(text("SHOW lock_timeout")) == "4321ms"
    connection.rollback()
    connection.execute(text("SET lock_timeout = 0"))
    migrate(connection)
    assert connection.scalar(text("SHOW lock_timeout")) == "0"


# -------------------------------------------------------------------------------------------------- at the same time
@pytest.mark.case(39)
def test_of_eight_that_migrate_at_once_one_does_it(empty_engine: Engine, connection: Connection) -> None:
    at(empty_engine, 1)
    with ThreadPoolExecutor(8) as pool:
        done = [future.result() for future in [pool.submit(migrate_online, empty_engine) for _ in range(8)]]
    assert sorted(done) == [(1, LATEST)] + [(LATEST, LATEST)] * 7
    assert connection.scalars(text("SELECT version FROM awa.schema_version ORDER BY 1")).all() == list(
        range(1, LATEST + 1)
    )
    assert advisory_locks(connection) == 0
    assert is_finished(empty_engine)


@pytest.mark.beside
@pytest.mark.case(39)
def test_both_ways_at_once_do_it_once(empty_engine: Engine, connection: Connection) -> None:
    def in_transaction() -> None:
        with empty_engine.begin() as own:
            create_all(own)

    at(empty_engine, 1)
    with ThreadPoolExecutor(8) as pool:
        ways: list[Callable[[], object]] = [in_transaction, lambda: migrate_online(empty_engine)] * 4
        for future in [pool.submit(way) for way in ways]:
            future.result()
    assert connection.scalars(text("SELECT version FROM awa.schema_version ORDER BY 1")).all() == list(
        range(1, LATEST + 1)
    )
    assert is_finished(empty_engine)


@pytest.mark.beside
@pytest.mark.case(39)
def test_processes_that_migrate_at_once_all_exit_with_0(empty_db_url: URL, empty_engine: Engine) -> None:
    command = [sys.executable, "-m", "awa_sqla", "-d", libpq_url(empty_db_url), "migrate"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert sorted(said) == sorted(
        [f"schema awa: 0 -> version {LATEST}\n"] + [f"schema awa: already at version {LATEST}\n"] * 3
    )


@pytest.mark.beside
def test_an_index_is_built_while_others_write(empty_engine: Engine) -> None:
    """A transaction that writes is open all the time that it takes; others write meanwhile."""
    at(empty_engine, 2)
    with empty_engine.connect() as writer, empty_engine.connect() as other, ThreadPoolExecutor(1) as pool:
        told: list[str] = []
        writer.execute(text("INSERT INTO awa.jobs_hot (kind) VALUES ('x')"))
        going = pool.submit(migrate_online, empty_engine, 3, tell=told.append)
        while not other.scalar(text("SELECT count(*) FROM pg_stat_progress_create_index")):
            other.rollback()
            time.sleep(0.01)
        other.rollback()
        other.execute(text("SET lock_timeout = '2s'"))
        other.execute(text("INSERT INTO awa.jobs_hot (kind) VALUES ('y')"))
        other.commit()
        writer.rollback()
        assert going.result(timeout=30) == (2, 3)
    assert "index ix_jobs_hot_callback on jobs_hot" in told


# ------------------------------------------------------------------------------------------------------ interruptions
@contextmanager
def building(engine: Engine, url: URL, stop: int | None = None) -> Iterator[tuple[subprocess.Popen[str], Connection]]:
    """A process that builds an index of step 3, and cannot end before the block does; and a connection to watch it."""
    at(engine, 2)
    with engine.connect() as writer, engine.connect() as watcher:
        writer.execute(text("INSERT INTO awa.jobs_hot (kind) VALUES ('x')"))
        command = [sys.executable, "-m", "awa_sqla", "-d", libpq_url(url), "migrate"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 30
            while not watcher.scalar(text("SELECT count(*) FROM pg_stat_progress_create_index")):
                watcher.rollback()
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            watcher.rollback()
            yield process, watcher
        finally:
            process.kill()
            process.communicate()


def nobody_builds(watcher: Connection) -> None:
    """Return once the server has no build any more; fail after 20 s."""
    deadline = time.monotonic() + 20
    while watcher.scalar(text("SELECT count(*) FROM pg_stat_progress_create_index")):
        watcher.rollback()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watcher.rollback()


@pytest.mark.beside
@pytest.mark.case(40)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_is_found_and_done_again(
    empty_engine: Engine, empty_db_url: URL, connection: Connection, how: signal.Signals
) -> None:
    with building(empty_engine, empty_db_url) as (process, watcher):
        time.sleep(1)  # now also who watches the build waits
        process.send_signal(how)
        _, said = process.communicate(timeout=20)
        if how is signal.SIGINT:
            assert process.returncode == 130
            assert "the same command goes on from here" in said
            nobody_builds(watcher)  # although the transaction that it waited for goes on
        nobody_builds(watcher)
        assert advisory_locks(watcher) == 0
        watcher.rollback()
    assert version_of(empty_engine) == 3
    assert not is_finished(empty_engine)
    assert connection.scalar(text("SELECT count(*) FROM pg_index WHERE NOT indisvalid")) == 1
    connection.rollback()
    assert migrate_online(empty_engine) == (3, LATEST)
    assert is_finished(empty_engine)


def test_what_was_left_is_finished_without_a_step(empty_engine: Engine, connection: Connection) -> None:
    create_all(connection)
    expected = described(connection)
    connection.execute(text("DROP INDEX awa.ix_jobs_hot_callback, awa.ix_dlq_entries_queue"))
    connection.execute(
        text("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'awa.ix_jobs_hot_finished'::regclass")
    )
    connection.commit()
    assert not is_finished(empty_engine)
    told: list[str] = []
    assert migrate_online(empty_engine, tell=told.append) == (LATEST, LATEST)
    assert told == [
        "index ix_jobs_hot_callback on jobs_hot",
        "index ix_jobs_hot_finished on jobs_hot",
        "index ix_dlq_entries_queue on dlq_entries",
    ]
    assert described(connection) == expected


@pytest.mark.case(40)
def test_an_error_in_a_step_leaves_the_step_before_it(empty_engine: Engine, connection: Connection) -> None:
    at(empty_engine, 4)
    connection.execute(text("CREATE TABLE awa.leaders (mine text)"))  # step 6 cannot make its own
    connection.commit()
    with pytest.raises(DBAPIError, match="already exists"):
        migrate_online(empty_engine)
    assert version_of(empty_engine) == 5
    assert advisory_locks(connection) == 0
    connection.execute(text("DROP TABLE awa.leaders"))
    connection.commit()
    assert migrate_online(empty_engine) == (5, LATEST)


@pytest.mark.case(40)
def test_one_that_is_cancelled_while_it_waits_leaves_no_lock(empty_engine: Engine) -> None:
    with empty_engine.connect() as first, ThreadPoolExecutor(1) as pool:
        create_all(first)
        pids: list[int] = []
        engine = create_engine(empty_engine.url, poolclass=NullPool)
        event.listen(engine, "connect", lambda dbapi, _: pids.append(dbapi.info.backend_pid))
        attempt = pool.submit(migrate_online, engine)
        while len(pids) < 2:
            time.sleep(0.01)
        wait_until_blocked(first, pids[1])
        first.execute(text("SELECT pg_cancel_backend(:pid)"), {"pid": pids[1]})
        with pytest.raises(OperationalError, match="canceling statement"):
            attempt.result(timeout=20)
        first.rollback()
        assert advisory_locks(first) == 0
    assert migrate_online(empty_engine) == (0, LATEST)


@pytest.mark.parametrize("online", [True, False])
def test_what_was_left_unfinished_can_be_taken_back(empty_engine: Engine, connection: Connection, online: bool) -> None:
    create_all(connection)
    for work in (work for step in STEPS for work in step.after if isinstance(work, Index)):
        connection.execute(text(f"DROP INDEX awa.{work.name}"))
    connection.commit()
    if online:
        migrate_online(empty_engine, 0)
    else:
        migrate(connection, 0)
    assert described(connection) == {}


def test_who_holds_the_tables_is_named_to_who_may_not_see_it(empty_engine: Engine) -> None:
    """An owner that is no superuser sees of others only who they are."""
    role = f"awa_test_owner_{os.getpid()}"
    with empty_engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role}"))
        connection.execute(text(f"CREATE SCHEMA awa AUTHORIZATION {role}"))
        connection.execute(text(f"SET LOCAL ROLE {role}"))
        migrate(connection, LATEST - 1)
    with empty_engine.connect() as report, empty_engine.connect() as connection:
        report.execute(text("SELECT count(*) FROM awa.jobs_hot"))
        connection.execute(text(f"SET LOCAL ROLE {role}"))
        with pytest.raises(SchemaLocked) as caught:
            take(connection, locks_between(LATEST - 1, LATEST), "awa", SOON)
    (holder,) = caught.value.holders
    assert holder.startswith("process ")
    assert " of postgres" in holder
    assert "None" not in str(caught.value)
    with empty_engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


# ------------------------------------------------------------------------------------------------------------ refusals
def test_a_newer_schema_is_refused_and_left(empty_engine: Engine, connection: Connection) -> None:
    create_all(connection)
    connection.execute(text("INSERT INTO awa.schema_version (version) VALUES (:new)"), {"new": LATEST + 1})
    connection.execute(text("DROP INDEX awa.ix_dlq_entries_queue"))
    connection.commit()
    before = described(connection)
    connection.rollback()
    for to in (0, LATEST):
        with pytest.raises(SchemaVersionError, match="upgrade awa-sqla"):
            migrate_online(empty_engine, to)
    assert described(connection) == before


SETTINGS = (
    "default_transaction_isolation=serializable",
    "statement_timeout=200ms",
    "idle_in_transaction_session_timeout=100ms",
    "lock_timeout=50ms",
    "search_path=",
)


@pytest.mark.beside
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_settings_of_a_role_do_not_stand_in_the_way(empty_engine: Engine, setting: str) -> None:
    at(empty_engine, 2)
    engine = create_engine(empty_engine.url, poolclass=NullPool, connect_args={"options": f"-c {setting}"})
    with empty_engine.connect() as writer, ThreadPoolExecutor(1) as pool:
        writer.execute(text("INSERT INTO awa.jobs_hot (kind) VALUES ('x')"))
        going = pool.submit(migrate_online, engine, 3)
        with pytest.raises(TimeoutError):
            going.result(timeout=1)  # longer than any of these settings
        writer.rollback()
        assert going.result(timeout=30) == (2, 3)
    assert migrate_online(engine) == (3, LATEST)


# ------------------------------------------------------------------------------------------------------- old rows
def test_old_rows_that_no_driver_could_read_are_mended(empty_engine: Engine, connection: Connection) -> None:
    at(empty_engine, 6)
    connection.execute(
        text("""
            INSERT INTO awa.jobs_hot (kind, state, heartbeat_at, deadline_at, deadline_seconds, created_at) VALUES
                ('a', 'running', 'infinity', 'infinity', 'infinity', '2000-01-01'),
                ('b', 'running', '-infinity', '-infinity', -1, '-infinity'),
                ('c', 'running', NULL, '20000-01-01', 'NaN', '2000-01-01'),
                ('d', 'running', '2000-01-01', '2000-01-01', 5, '2000-01-01')
        """)
    )
    connection.execute(
        text(
            "INSERT INTO awa.queue_meta (queue, paused_at, paused_until, override_deadline_seconds) "
            "VALUES ('q', '2000-01-01', 'infinity', 0)"
        )
    )
    connection.commit()
    told: list[str] = []
    assert migrate_online(empty_engine, tell=told.append) == (6, LATEST)
    assert "rows of jobs_hot for ck_jobs_hot_times, ck_jobs_hot_deadlines" in told
    found = connection.execute(
        text("""
            SELECT kind, heartbeat_at > clock_timestamp() - interval '1 minute' AND heartbeat_at <= clock_timestamp(),
                extract(year FROM deadline_at AT TIME ZONE 'UTC')::int, deadline_seconds,
                extract(year FROM created_at AT TIME ZONE 'UTC')::int FROM awa.jobs_hot ORDER BY kind
        """)
    ).all()
    assert [tuple(row) for row in found] == [
        ("a", True, 9000, 31536000000.0, 2000),
        ("b", False, 1970, None, 1970),
        ("c", None, 9000, 31536000000.0, 2000),
        ("d", False, 2000, 5.0, 2000),
    ]
    assert connection.execute(
        text(
            "SELECT extract(year FROM paused_until AT TIME ZONE 'UTC')::int, override_deadline_seconds "
            "FROM awa.queue_meta"
        )
    ).one() == (9000, None)


def test_old_rows_can_be_worked_with_all_the_time(empty_engine: Engine, connection: Connection) -> None:
    """They are mended before the checks are there, which a change of such a row would break."""
    at(empty_engine, 6)
    connection.execute(text("INSERT INTO awa.jobs_hot (kind, deadline_seconds) VALUES ('old', 0), ('older', -1)"))
    connection.commit()

    def claim(line: str) -> None:
        if line.startswith("rows of"):
            connection.execute(text("UPDATE awa.jobs_hot SET state = 'running' WHERE kind IN ('old', 'older')"))
            connection.commit()

    assert migrate_online(empty_engine, tell=claim) == (6, LATEST)


def test_every_index_on_a_table_that_was_there_is_built_beside_the_traffic() -> None:
    """Step by step: a CREATE INDEX in the short part is only for a table that the same part makes."""
    for number, step in enumerate(STEPS, 1):
        made = " ".join(step.up)
        for statement in step.up:
            if statement.startswith(("CREATE INDEX", "CREATE UNIQUE INDEX")):
                table = statement.split(" ON {schema}.")[1].split()[0]
                assert f"CREATE TABLE {{schema}}.{table} " in made, (number, statement)
    assert sum(isinstance(work, Index) for step in STEPS for work in step.after) >= 7
