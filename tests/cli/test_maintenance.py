"""`awa-sqla maintenance`, as a user meets it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from sqlalchemy import URL, NullPool, create_engine, text
from sqlalchemy.orm import Session

from awa_sqla import JobArgs, claim, enqueue
from awa_sqla.cli import cli


class Work(JobArgs):
    pass


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("AWA_APP", "AWA_DATABASE_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def url(db_url: URL) -> str:
    return db_url.render_as_string(hide_password=False)


def attempts_of_the_dead(url: str) -> None:
    with Session(create_engine(url, poolclass=NullPool)) as session, session.begin():
        enqueue(session, Work())
        session.flush()
        claim(session, "default", limit=1, worker_id="gone")
        session.execute(text("UPDATE awa.jobs_hot SET heartbeat_at = clock_timestamp() - interval '1 hour'"))


def state(url: str) -> str:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        return str(connection.scalar(text("SELECT state FROM awa.jobs")))


def test_maintenance_once_prints_what_each_lane_did(here, url, an_old_server):
    attempts_of_the_dead(url)
    result = CliRunner().invoke(cli, ["-d", url, "maintenance", "--once"])
    assert result.exit_code == 0, result.output
    lines = dict(line.split("\t", 1) for line in result.stdout.splitlines())
    assert lines["rescue_stale"].startswith("1\t")
    assert lines["promote"].startswith("0\t")
    assert state(url) == "retryable"
    only = CliRunner().invoke(cli, ["maintenance", "-d", url, "--once", "--only", "promote,prune"])
    assert [line.split("\t")[0] for line in only.stdout.splitlines()] == ["promote", "prune"]


def test_maintenance_once_leaves_with_4_while_another_leads(here, url):
    attempts_of_the_dead(url)
    with create_engine(url, poolclass=NullPool).begin() as connection:
        connection.execute(
            text("INSERT INTO awa.leaders VALUES ('maintenance', 'x', 1, now(), now() + interval '1 min')")
        )
    result = CliRunner().invoke(cli, ["-d", url, "maintenance", "--once"])
    assert (result.exit_code, result.stdout) == (4, "")
    assert "another process leads" in result.stderr
    assert state(url) == "running"


def test_maintenance_says_which_lanes_there_are_and_what_is_missing(here, url):
    wrong = CliRunner().invoke(cli, ["-d", url, "maintenance", "--once", "--only", "prun"])
    assert wrong.exit_code == 2
    assert "promote, rescue_stale" in wrong.stderr
    assert CliRunner().invoke(cli, ["maintenance", "--once"]).exit_code == 3
    away = CliRunner().invoke(cli, ["-d", "postgresql://127.0.0.1:1/x", "maintenance", "--once"])
    assert away.exit_code == 6


def test_maintenance_stops_at_a_signal_with_status_0(here, url):
    command = [sys.executable, "-m", "awa_sqla", "-d", url, "maintenance"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "leads maintenance" in line:
            break
    process.send_signal(signal.SIGUSR1)
    for line in process.stderr:
        if "leads" in line:
            break
    process.terminate()
    assert process.wait(20) == 0, process.stderr.read()
    process.stderr.close()
    with create_engine(url, poolclass=NullPool).connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM awa.leaders WHERE expires_at > clock_timestamp()")) == 0
        assert connection.scalar(text("SELECT count(*) FROM awa.runtime_instances")) == 0


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.beside), signal.SIGTERM])
def test_a_signal_cuts_once_and_another_process_may_lead_at_once(here, url, number):
    engine = create_engine(url, poolclass=NullPool)
    leads = text("SELECT 1 FROM awa.leaders WHERE expires_at > clock_timestamp()")
    with engine.begin() as holder, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as look:
        holder.execute(text("LOCK TABLE awa.jobs_hot IN ACCESS EXCLUSIVE MODE"))
        process = subprocess.Popen(
            [sys.executable, "-m", "awa_sqla", "maintenance", "-d", url, "--once"],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            while look.execute(leads).one_or_none() is None:
                assert process.poll() is None
            process.send_signal(number)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
        assert (process.returncode, said) == (128 + number, "awa-sqla: cut before the round was over\n")
        assert look.execute(leads).one_or_none() is None
