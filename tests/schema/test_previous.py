"""A deployment in motion: processes of the version before beside a schema of this one, and the other way round.

`frozen/N/` holds the wheel of the last version of this package that had schema N. It is run as it is: put before all
else on the path of a process of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import URL, Connection, Engine, text

from awa_sqla.schema import LATEST, installed_version, migrate
from tests.databases import libpq_url
from tests.schema.catalog import described

#: Each takes its own database, project or processes; run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside

#: The schema version of the one before, and its wheel.
BEFORE = LATEST - 1
WHEEL = next((Path(__file__).parent / "frozen" / str(BEFORE)).glob("*.whl"))

APP = """
from datetime import timedelta

from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from awa_sqla import Awa, Completed, JobArgs, JobContext, QueueConfig, TerminalError, Unique, enqueue, enqueue_many


class Work(JobArgs):
    n: int
    fails: bool = False


class After(JobArgs):
    n: int


class Only(JobArgs, unique=Unique()):
    n: int


awa = Awa(queues={"default": QueueConfig(concurrency=4, poll_interval=timedelta(seconds=0.2), dead_letters=True)})


@awa.follow_ups.on_completed(Work)
def after(event: Completed[Work]) -> After:
    return After(n=event.args.n)


@awa.task(Work, transactional=True)
def work(ctx: JobContext[Work]) -> None:
    if ctx.args.fails:
        raise TerminalError("as asked")
    ctx.session.execute(text("INSERT INTO ran (job, n) VALUES (:job, :n)"), {"job": ctx.job.id, "n": ctx.args.n})


@awa.task(After)
async def afterwards(ctx: JobContext[After]) -> None:
    pass


@awa.task(Only)
async def only(ctx: JobContext[Only]) -> None:
    pass


def produce(url: str, first: int, last: int) -> None:
    factory = sessionmaker(create_engine(url))
    awa.follow_ups.attach(factory)
    with factory.begin() as session:
        for n in range(first, last, 2):
            enqueue(session, Work(n=n))
        enqueue_many(session, [Work(n=n) for n in range(first + 1, last, 2)])
        for _ in range(2):
            enqueue(session, Only(n=first), on_conflict="skip")
        enqueue(session, Work(n=-1, fails=True))
        enqueue(session, Work(n=last), delay=timedelta(milliseconds=300))
"""


class Deployment:
    """Processes of the version before and of this one, on one database."""

    def __init__(self, directory: Path, url: URL) -> None:
        self.directory = directory
        self.url = url
        (directory / "queue_app.py").write_text(APP)

    def environment(self, old: bool) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.endswith("DATABASE_URL") and k != "PYTHONPATH"}
        root = WHEEL if old else Path(__file__).parents[2]
        return inherited | {"PYTHONPATH": f"{root}{os.pathsep}{self.directory}", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, *arguments: str, old: bool) -> subprocess.CompletedProcess[str]:
        """`awa-sqla ...` to its end."""
        return subprocess.run(
            [sys.executable, "-m", "awa_sqla", "-d", libpq_url(self.url), *arguments],
            cwd=self.directory,
            env=self.environment(old),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def produce(self, first: int, last: int, *, old: bool) -> None:
        """Enqueue jobs in every way."""
        url = self.url.render_as_string(hide_password=False)
        code = f"import queue_app; queue_app.produce({url!r}, {first}, {last})"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.directory,
            env=self.environment(old),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    @contextmanager
    def worker(self, *, old: bool) -> Iterator[subprocess.Popen[str]]:
        """A worker that runs during the block, and ends well."""
        process = subprocess.Popen(
            [sys.executable, "-m", "awa_sqla", "-d", libpq_url(self.url), "-A", "queue_app:awa", "worker"],
            cwd=self.directory,
            env=self.environment(old),
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0, said
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def deployment(tmp_path: Path, empty_db_url: URL, empty_engine: Engine) -> Deployment:
    """A database at the version before, with a table of the app's."""
    with empty_engine.begin() as connection:
        migrate(connection, BEFORE)
        connection.execute(text("CREATE TABLE ran (job bigint, n int)"))
    return Deployment(tmp_path, empty_db_url)


def settled(connection: Connection, process: subprocess.Popen[str], works: int) -> None:
    """Return once every job has ended; fail after 60 s, or when the process has ended."""
    deadline = time.monotonic() + 60
    left = "SELECT kind, state, errors FROM awa.jobs WHERE state NOT IN ('completed', 'failed')"
    while connection.execute(text(left)).all() or count(connection, "SELECT count(*) FROM ran") < works:
        connection.rollback()
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, connection.execute(text(left)).all()[:5]
        time.sleep(0.1)
    connection.rollback()


def count(connection: Connection, query: str) -> int:
    return int(connection.scalar(text(query)) or 0)


def ran_once(connection: Connection, works: int, batches: int) -> None:
    """Each job has run once, has its follow-up, and failed only where it was asked to."""
    assert count(connection, "SELECT count(*) FROM ran") == works
    assert count(connection, "SELECT count(DISTINCT n) FROM ran") == works
    assert count(connection, "SELECT count(*) FROM awa.jobs WHERE kind = 'after' AND state = 'completed'") == works
    assert count(connection, "SELECT count(*) FROM awa.jobs WHERE kind = 'only' AND state = 'completed'") == batches
    assert count(connection, "SELECT count(*) FROM awa.dlq_entries") == batches
    assert count(connection, "SELECT count(*) FROM awa.jobs WHERE attempt > 1 OR cardinality(errors) > 1") == 0
    assert count(connection, "SELECT count(*) FROM awa.follow_up_obligations") == 0


def test_the_frozen_package_is_what_runs(deployment: Deployment) -> None:
    code = "import awa_sqla, awa_sqla.schema as s; print(awa_sqla.__file__, s.LATEST)"
    for old, version in ((True, BEFORE), (False, LATEST)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=deployment.directory,
            env=deployment.environment(old),
            capture_output=True,
            text=True,
            check=True,
        )
        assert (".whl" in done.stdout, int(done.stdout.split()[-1])) == (old, version)


@pytest.mark.beside
def test_the_version_before_works_on_this_schema(deployment: Deployment, connection: Connection) -> None:
    assert deployment.run("migrate", old=False).returncode == 0
    deployment.produce(0, 20, old=True)
    with deployment.worker(old=True) as process:
        settled(connection, process, 21)
    ran_once(connection, 21, 1)
    connection.rollback()
    done = deployment.run("maintenance", "--once", old=True)
    assert done.returncode == 0, done.stderr
    assert installed_version(connection) == LATEST


@pytest.mark.beside
def test_an_upgrade_under_workers_of_the_version_before(deployment: Deployment, connection: Connection) -> None:
    """Rolling: schema first, beside the traffic, then the code; jobs of either version run in either."""
    deployment.produce(0, 200, old=True)
    with deployment.worker(old=True) as old:
        done = deployment.run("migrate", old=False)
        assert (done.returncode, done.stdout) == (0, f"schema awa: {BEFORE} -> version {LATEST}\n"), done.stderr
        deployment.produce(300, 400, old=True)
        with deployment.worker(old=False) as new:
            deployment.produce(500, 600, old=False)
            settled(connection, new, 403)
            assert old.poll() is None
    ran_once(connection, 403, 3)


@pytest.mark.beside
def test_the_version_before_refuses_to_change_this_schema(deployment: Deployment, connection: Connection) -> None:
    assert deployment.run("migrate", old=False).returncode == 0
    before = described(connection)
    connection.rollback()
    for arguments, status in ((["migrate"], 2), (["migrate", "--to", "0", "--yes"], 4), (["migrate", "--check"], 4)):
        done = deployment.run(*arguments, old=True)
        assert done.returncode == status, done.stderr
    assert described(connection) == before


@pytest.mark.beside
@pytest.mark.parametrize("verb", [["-A", "queue_app:awa", "worker"], ["maintenance", "--once"], ["maintenance"]])
def test_this_version_refuses_the_schema_before(
    deployment: Deployment, connection: Connection, verb: list[str]
) -> None:
    deployment.produce(0, 4, old=True)
    done = deployment.run(*verb, old=False)
    assert done.returncode == 4, done.stderr
    assert f"schema 'awa' is at version {BEFORE}, {LATEST} is needed: run your migrations" in done.stderr
    assert count(connection, "SELECT count(*) FROM awa.jobs_hot WHERE state <> 'available'") == 0
    assert count(connection, "SELECT count(*) FROM awa.runtime_instances") == 0
