"""One measurement: a fresh database, a peer's process on it, and what the server counted meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from benchmarks.adapters.common import Board, peak_mb
from benchmarks.environments import CHECKOUT, HOME, PEERS

Figures = dict[str, float]

#: Seconds one command of a peer, and one drain, may take.
PATIENCE = 180.0


class PeerError(RuntimeError):
    """A peer's process failed; the text is the end of what it said."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The server's counters for one database, at one moment."""

    commits: int
    statements: int
    wal: int


@dataclass(frozen=True, slots=True)
class Drained:
    """What a watched worker did, in nanoseconds of the shared clock."""

    start: int
    end: int
    begun: list[int]
    cpu_seconds: float
    peak_mb: float
    polls: int


class Harness:
    """Templates, fresh databases, processes and counters of one run.

    The counting connection sits in another database than the measured one, so that it does not count itself.
    """

    def __init__(self, url: str, peers: list[str]) -> None:
        self._url = url
        self._admin = psycopg.connect(url, autocommit=True)
        self._admin.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        self._scratch = HOME / "scratch"
        self._scratch.mkdir(parents=True, exist_ok=True)
        #: What each peer says of itself; those that cannot be set up are in `skipped`, with the reason.
        self.about: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, str] = {}
        for peer in peers:
            try:
                self._make_template(peer)
            except (PeerError, subprocess.TimeoutExpired) as exc:
                self.skipped[peer] = str(exc).strip().splitlines()[-1]

    @property
    def server_version(self) -> str:
        """Such as 18.6."""
        row = self._admin.execute("SHOW server_version").fetchone()
        return str(row[0]) if row else ""

    def dsn(self, database: str) -> str:
        """The URL of another database of the server."""
        return urlsplit(self._url)._replace(path=f"/{database}").geturl()

    # -------------------------------------------------------------- databases

    def _make_template(self, peer: str) -> None:
        name = f"bench_template_{peer}"
        self._drop(name)
        self._admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        lacking = self.command(peer, "setup", self.dsn(name)).get("unsupported")
        if lacking:
            raise PeerError(lacking)
        with psycopg.connect(self.dsn(name), autocommit=True) as own:
            own.execute("CREATE TABLE IF NOT EXISTS app_users (id serial PRIMARY KEY, email text NOT NULL)")
            own.execute("VACUUM ANALYZE")
        self.about[peer] = self.command(peer, "meta", "")
        self._wait_until_unused(name)

    def fresh(self, peer: str) -> str:
        """A new database from the peer's template, and a checkpoint; returns its name."""
        name = f"bench_run_{peer}"
        self._drop(name)
        self._admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(f"bench_template_{peer}")
            )
        )
        self._admin.execute("CHECKPOINT")
        return name

    def _drop(self, name: str) -> None:
        self._admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def vacuum(self, database: str) -> None:
        """Statistics and visibility as a settled table has them."""
        with psycopg.connect(self.dsn(database), autocommit=True) as own:
            own.execute("VACUUM ANALYZE")

    def count(self, database: str, query: str) -> int:
        """The number that a query gives there."""
        with psycopg.connect(self.dsn(database), autocommit=True) as own:
            return _number(own, query)

    # --------------------------------------------------------------- counters

    def read(self, database: str) -> Reading:
        """The counters, once every client has left: a backend reports what it did when it ends."""
        self._wait_until_unused(database)
        row = self._admin.execute(
            """
            SELECT d.xact_commit, pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0'),
                (SELECT coalesce(sum(s.calls), 0) FROM pg_stat_statements AS s WHERE s.dbid = d.datid)
            FROM pg_stat_database AS d WHERE d.datname = %s
            """,
            (database,),
        ).fetchone()
        if row is None:
            raise RuntimeError(f"the database {database} has gone")
        return Reading(commits=int(row[0]), wal=int(row[1]), statements=int(row[2]))

    def spent(self, database: str, before: Reading, jobs: int, *, polls: int = 0) -> Figures:
        """For each job since `before`; `polls` of the watcher's own queries do not count."""
        after = self.read(database)
        return {
            "statements": max(0, after.statements - before.statements - polls) / jobs,
            "commits": max(0, after.commits - before.commits - polls) / jobs,
            "wal_bytes": (after.wal - before.wal) / jobs,
        }

    def _wait_until_unused(self, database: str) -> None:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"
        limit = time.monotonic() + 10
        while _number(self._admin, query, database) and time.monotonic() < limit:
            time.sleep(0.02)

    # -------------------------------------------------------------- processes

    def command(self, peer: str, command: str, dsn: str, **options: object) -> dict[str, Any]:
        """Run one command of a peer's adapter to its end. Raises `PeerError`."""
        out = self._scratch / f"{peer}.{command}.json"
        out.unlink(missing_ok=True)
        argv = [*_started(peer, command, dsn, **options), "--out", str(out)]
        done = subprocess.run(argv, check=False, cwd=CHECKOUT, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode or not out.exists():
            raise PeerError(f"{peer} {command} ended with status {done.returncode}: {done.stderr[-800:]}")
        answer: dict[str, Any] = json.loads(out.read_text())
        return answer

    def drain(self, peer: str, database: str, jobs: int) -> Drained:
        """Start one worker, watch until every job is stored as done, stop it. Raises `PeerError`."""
        log = self._scratch / f"{peer}.worker.log"
        with psycopg.connect(self.dsn(database), autocommit=True) as own, self._worker(peer, database, log) as worker:
            process, board = worker
            limit = time.monotonic() + PATIENCE
            cpu_before = cpu_seconds(process.pid)
            board.cells[Board.GO] = 1
            while board.cells[0] < jobs:
                _still_alive(process, log, limit)
                time.sleep(0.005)
            polls = 1
            while _number(own, self.about[peer]["remaining_sql"]):
                _still_alive(process, log, limit)
                time.sleep(0.005)
                polls += 1
            return Drained(
                start=board.cells[1],
                end=time.monotonic_ns(),
                begun=board.begun,
                cpu_seconds=cpu_seconds(process.pid) - cpu_before,
                peak_mb=peak_mb(process.pid),
                polls=polls,
            )

    @contextmanager
    def _worker(self, peer: str, database: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], Board]]:
        path = self._scratch / f"{peer}.board"
        board = Board(path, create=True)
        argv = _started(peer, "drain", self.dsn(database), counter=path)
        with log.open("wb") as said, subprocess.Popen(argv, cwd=CHECKOUT, stdout=said, stderr=said) as process:
            try:
                limit = time.monotonic() + 30
                while not board.cells[Board.READY]:
                    _still_alive(process, log, limit)
                    time.sleep(0.002)
                yield process, board
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()

    def close(self) -> None:
        """Drop what was made and leave."""
        for peer in [*self.about, *self.skipped]:
            self._drop(f"bench_run_{peer}")
            self._drop(f"bench_template_{peer}")
        self._admin.close()


def _started(peer: str, command: str, dsn: str, **options: object) -> list[str]:
    known = PEERS[peer]
    extra = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [str(known.python), "-m", "benchmarks.adapters", known.adapter, command, "--dsn", dsn, *extra]


def _number(connection: psycopg.Connection[Any], query: str, *parameters: object) -> int:
    row = connection.execute(query.encode(), parameters or None).fetchone()
    return int(row[0]) if row else 0


def _still_alive(process: subprocess.Popen[bytes], log: Path, limit: float) -> None:
    if process.poll() is not None:
        raise PeerError(f"the worker ended with status {process.returncode}: {log.read_text()[-800:]}")
    if time.monotonic() > limit:
        raise PeerError(f"the worker took too long: {log.read_text()[-800:]}")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process; 0 where there is no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
