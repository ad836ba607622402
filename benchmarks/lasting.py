"""A worker that is watched for longer than one backlog: its process, its database, and what it costs meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import urlsplit

import psycopg
from psycopg import sql
from sqlalchemy import create_engine

from awa_sqla import schema
from benchmarks.adapters.app import url
from benchmarks.environments import CHECKOUT
from benchmarks.harness import cpu_seconds


class WorkerError(RuntimeError):
    """The worker's process failed; the text is the end of what it said."""


@contextmanager
def database(server: str, name: str) -> Generator[str]:
    """The URL of a new database with our tables in it, which goes away with the block."""
    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(drop)
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        own = urlsplit(server)._replace(path=f"/{name}").geturl()
        engine = create_engine(url(own))
        with engine.begin() as connection:
            schema.create_all(connection)
        engine.dispose()
        try:
            yield own
        finally:
            admin.execute(drop)


class Process:
    """One worker, from its first line on, "ready", to SIGTERM. Made by `started`."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.pid = popen.pid
        self._popen = popen

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        return cpu_seconds(self.pid)

    def rss_bytes(self) -> int:
        """Resident memory now; 0 where there is no /proc."""
        status = Path(f"/proc/{self.pid}/statm")
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0

    def ask(self, line: str) -> str:
        """Send a line, wait for the answer."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """The next line it says."""
        assert self._popen.stdout is not None
        said = self._popen.stdout.readline()
        if not said:
            raise WorkerError("the worker has ended")
        return said.strip()


@contextmanager
def started(*command: str) -> Generator[Process]:
    """`python -m benchmarks.lasting_apps *command`, ready. Raises `WorkerError`."""
    argv = [sys.executable, "-m", "benchmarks.lasting_apps", *command]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])}
    with (
        TemporaryFile("w+") as said,
        subprocess.Popen(
            argv, cwd=CHECKOUT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        ) as popen,
    ):
        process = Process(popen)
        try:
            if process.answer() != "ready":
                raise WorkerError("the worker is not ready")
            yield process
        except WorkerError as exc:
            popen.wait(5)
            said.seek(0)
            raise WorkerError(f"{exc}: {said.read()[-2000:]}") from None
        finally:
            popen.send_signal(signal.SIGTERM)
            try:
                popen.wait(20)
            except subprocess.TimeoutExpired:
                popen.kill()
