"""Migrations among other migrations, and after those that have broken off."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, text

from awa_sqla import ConfigurationError
from awa_sqla.alembic import one_at_a_time
from awa_sqla.schema import LATEST, create_all, migrate_online
from awa_sqla.schema.alone import alone
from awa_sqla.schema.steps import STEPS, Index
from tests.databases import libpq_url
from tests.schema.catalog import described
from tests.schema.test_concurrent import advisory_locks
from tests.schema.test_concurrently import concurrent_project
from tests.schema.test_online import at, is_finished, version_of
from tests.worker.poolers import pgbouncer

#: Run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside

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
