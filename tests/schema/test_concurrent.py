"""Many processes migrate at once, and some of them die of it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from awa_sqla.models import SCHEMA
from awa_sqla.schema import LATEST, create_all, installed_version, lock_version, run

PROCESSES = 8


def pid_of(connection: Connection) -> int:
    return int(connection.scalar(text("SELECT pg_backend_pid()")) or 0)


def wait_until_blocked(connection: Connection, pid: int) -> None:
    """Return once the other backend waits for a lock; fail after 20 s."""
    deadline = time.monotonic() + 20
    while not connection.scalar(
        text("SELECT EXISTS (SELECT FROM pg_locks WHERE pid = :pid AND NOT granted)"), {"pid": pid}
    ):
        assert time.monotonic() < deadline, "it does not wait for a lock"


def advisory_locks(connection: Connection) -> int:
    """How many advisory locks anybody holds or awaits in this database."""
    query = (
        "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database "
        "WHERE locktype = 'advisory' AND datname = current_database()"
    )
    return int(connection.scalar(text(query)) or 0)


@pytest.mark.case(39)
def test_of_eight_that_install_at_once_all_succeed_and_one_does_it(empty_engine: Engine) -> None:
    start = threading.Barrier(PROCESSES)

    def install() -> None:
        with empty_engine.begin() as connection:
            pid_of(connection)  # the transaction is open, as it is in a migration that has begun
            start.wait(30)
            create_all(connection)
            assert installed_version(connection) == LATEST

    with ThreadPoolExecutor(PROCESSES) as pool:
        for done in [pool.submit(install) for _ in range(PROCESSES)]:
            done.result()
    with empty_engine.connect() as connection:
        versions = connection.scalars(text("SELECT version FROM awa.schema_version ORDER BY 1")).all()
        assert versions == list(range(1, LATEST + 1))
        assert advisory_locks(connection) == 0


@pytest.mark.case(39)
def test_schemas_of_different_names_do_not_wait_for_each_other(empty_engine: Engine) -> None:
    with empty_engine.connect() as one, empty_engine.connect() as other:
        create_all(one, "first")
        other.execute(text("SET LOCAL lock_timeout = '5s'"))
        create_all(other, "second")


@pytest.mark.case(40)
def test_one_that_is_cancelled_while_it_waits_leaves_no_lock(empty_engine: Engine) -> None:
    with empty_engine.connect() as first, empty_engine.connect() as waiting, ThreadPoolExecutor(1) as pool:
        pid = pid_of(waiting)
        create_all(first)
        attempt = pool.submit(create_all, waiting)
        wait_until_blocked(first, pid)
        first.execute(text("SELECT pg_cancel_backend(:pid)"), {"pid": pid})
        with pytest.raises(OperationalError, match="canceling statement"):
            attempt.result()
        waiting.rollback()
        first.rollback()
        assert advisory_locks(waiting) == 0
        create_all(waiting)  # the connection is as good as before
        waiting.commit()
        assert installed_version(first) == LATEST


@pytest.mark.case(40)
def test_one_that_is_killed_half_way_leaves_nothing(empty_engine: Engine) -> None:
    with empty_engine.connect() as observer:
        with empty_engine.connect() as doomed:
            pid = pid_of(doomed)
            found = lock_version(doomed, SCHEMA)
            run(doomed, found, LATEST, SCHEMA)
            observer.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
            with pytest.raises(OperationalError):
                doomed.execute(text("SELECT 1"))
        assert advisory_locks(observer) == 0
        assert installed_version(observer) == 0
        create_all(observer)
        assert installed_version(observer) == LATEST


@pytest.mark.case(40)
def test_a_transaction_that_works_with_jobs_does_not_hold_up_a_repeated_install(empty_engine: Engine) -> None:
    with empty_engine.begin() as connection:
        create_all(connection)
        connection.execute(text("INSERT INTO awa.jobs_hot (kind) VALUES ('busy')"))
    with empty_engine.connect() as worker, empty_engine.connect() as deploying:
        worker.execute(text("UPDATE awa.jobs_hot SET state = 'running' WHERE kind = 'busy'"))
        deploying.execute(text("SET LOCAL lock_timeout = '5s'"))
        create_all(deploying)
        deploying.commit()
        worker.commit()
