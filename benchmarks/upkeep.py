"""`python benchmarks/upkeep.py`: what maintenance costs at a million finished jobs.

Fills a database, looks at one pass of every lane (its plans, the rows it reads, its time) with and without statistics,
and with an old snapshot that keeps dead rows from being vacuumed. Then deletes all finished jobs in batches while
others enqueue, claim and complete, and watches dead rows, autovacuum and the latency of claims. Needs
`awa_sqla[embedded]`, or `AWA_BENCH_DATABASE_URL`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

if not __package__:  # run as a script: the checkout is what must be importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from awa_sqla import JobArgs, claim, complete_many, enqueue_many
from awa_sqla.maintenance import prune_jobs
from benchmarks.adapters.app import url
from benchmarks.environments import server
from benchmarks.lasting import database
from benchmarks.upkeep_lanes import LANES, Look, fill, looked_at

#: Rounds of the load in a second, if it can.
ROUNDS = 20
#: Dead rows that an old snapshot keeps, as a part of the finished ones.
KEPT = 10

_DEAD = (
    "SELECT n_live_tup, n_dead_tup, autovacuum_count FROM pg_stat_user_tables "
    "WHERE schemaname = 'awa' AND relname = 'jobs_hot'"
)


class Light(JobArgs):
    """A job of the light load."""

    number: int = 0


class Load:
    """Enqueues, claims and completes a few jobs at a time, in a thread, and remembers how long claims took."""

    def __init__(self, engine: Engine, jobs: int) -> None:
        self._engine = engine
        self._jobs = jobs
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._claims: list[float] = []

    @contextmanager
    def running(self) -> Iterator[Load]:
        """While the block lasts."""
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()

    def taken(self) -> list[float]:
        """The milliseconds of the claims since the last call."""
        claims, self._claims = self._claims, []
        return claims

    def _run(self) -> None:
        requests = [Light(number=n) for n in range(self._jobs)]
        while not self._ended.is_set():
            started = time.perf_counter()
            with Session(self._engine) as session, session.begin():
                enqueue_many(session, requests)
            with Session(self._engine, expire_on_commit=False) as session:
                before = time.perf_counter()
                with session.begin():
                    jobs = claim(session, "default", limit=self._jobs)
                self._claims.append((time.perf_counter() - before) * 1000)
                with session.begin():
                    complete_many(session, jobs)
            self._ended.wait(max(0.0, 1 / ROUNDS - (time.perf_counter() - started)))


def latency(claims: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of some claims, in milliseconds."""
    return {"p50": median(claims), "p99": quantiles(claims, n=100)[98], "claims": len(claims)}


def counters(admin: psycopg.Connection[Any]) -> dict[str, int]:
    """What the statistics say of the table of jobs."""
    admin.execute("SELECT pg_stat_clear_snapshot()")
    row = admin.execute(_DEAD).fetchone()
    live, dead, vacuums = row or (0, 0, 0)
    return {"live": live, "dead": dead, "autovacuums": vacuums}


def passes(engine: Engine) -> dict[str, Look]:
    """One pass of every lane, each taken back."""
    return {lane.name: looked_at(engine, lane) for lane in LANES}


def pruned(engine: Engine, limit: int, seconds: float) -> tuple[int, float]:
    """Delete in batches until a batch is not full, or time is over; how many rows, and in how many seconds."""
    rows, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        with Session(engine) as session, session.begin():
            batch = prune_jobs(session, limit=limit)
        rows += batch
        if batch < limit:
            break
    return rows, time.perf_counter() - started


def plans(own: str, finished: int) -> dict[str, dict[str, Look]]:
    """The passes of a database, in the circumstances that change plans and costs."""
    engine = create_engine(url(own))
    found: dict[str, dict[str, Look]] = {}
    with psycopg.connect(own, autocommit=True) as admin, psycopg.connect(own) as old:
        admin.execute("ALTER TABLE awa.jobs_hot SET (autovacuum_enabled = false)")
        fill(admin, finished)
        found["no statistics"] = _said("no statistics", passes(engine))
        admin.execute("VACUUM ANALYZE")
        found["statistics"] = _said("statistics", passes(engine))
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT count(*) FROM awa.schema_version")
        rows = 0
        while rows < finished // KEPT:
            with Session(engine) as session, session.begin():
                rows += prune_jobs(session)
        admin.execute("VACUUM ANALYZE awa.jobs_hot")  # which can remove nothing of it
        found["old snapshot"] = _said("old snapshot", passes(engine))
    engine.dispose()
    return found


def _said(about: str, looks: dict[str, Look]) -> dict[str, Look]:
    for name, look in looks.items():
        done = f"{look.done!s:.12} in {look.milliseconds:.1f} ms, {look.rows} rows, {look.buffers} buffers"
        print(f"{about}, {name}: {done}, scanned {sorted(look.scanned) or 'none'}", file=sys.stderr, flush=True)
    return looks


def emptied(own: str, given: argparse.Namespace, *, snapshot: bool) -> dict[str, Any]:
    """Delete all finished jobs beside a light load; counters and latencies before, during and after."""
    engine = create_engine(url(own))
    result: dict[str, Any] = {}
    with psycopg.connect(own, autocommit=True) as admin, psycopg.connect(own) as old:
        fill(admin, given.jobs)
        for setting in given.set:
            admin.execute(f"ALTER TABLE awa.jobs_hot SET ({setting})".encode())
        admin.execute("VACUUM ANALYZE")
        if snapshot:
            old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            old.execute("SELECT count(*) FROM awa.schema_version")
        with Load(engine, given.load).running() as load:
            time.sleep(2)
            load.taken()
            time.sleep(given.seconds)
            result["before"] = latency(load.taken()) | counters(admin)
            rows, lasted = pruned(engine, given.limit, given.longest)
            time.sleep(1.1)  # a session tells of what it has done once in a second
            result["during"] = latency(load.taken()) | counters(admin) | {"rows": rows, "seconds": lasted}
            limit = time.monotonic() + given.patience
            while counters(admin)["autovacuums"] == result["before"]["autovacuums"] and time.monotonic() < limit:
                time.sleep(1)
            result["vacuumed after"] = given.patience - (limit - time.monotonic())
            load.taken()
            time.sleep(given.seconds)
            result["after"] = latency(load.taken()) | counters(admin)
    engine.dispose()
    return result


def markdown(about: Mapping[str, Any], found: Mapping[str, Any], deleted: Mapping[str, Any]) -> str:
    """The tables."""
    head = (
        f"{about['when']}, PostgreSQL {about['postgresql']}, {about['cores']} cores shared with the server, load "
        f"{about['load'][0]:.1f} before and {about['load'][1]:.1f} after; {about['jobs']:,} finished jobs."
    )
    lines = [
        head,
        "",
        "| lane | rows done | ms without statistics | ms with | ms with an old snapshot | rows read | indexes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for lane in LANES:
        one, two, three = (found[key][lane.name] for key in ("no statistics", "statistics", "old snapshot"))
        times = " | ".join(f"{look.milliseconds:.1f}" for look in (one, two, three))
        indexes = ", ".join(f"`{name}`" for name in sorted(one.indexes | two.indexes | three.indexes))
        done = two.done if isinstance(two.done, int) and not isinstance(two.done, bool) else ""
        lines.append(f"| {lane.name} | {done} | {times} | {max(one.rows, two.rows, three.rows):,} | {indexes} |")
    scanned = {table for looks in found.values() for look in looks.values() for table in look.scanned}
    lines += ["", f"Large tables read from end to end: {', '.join(sorted(scanned)) or 'none'}.", ""]
    lines += [
        "| all of them deleted | claim p50 ms | claim p99 ms | dead rows | autovacuums |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, result in deleted.items():
        for when in ("before", "during", "after"):
            row = result[when]
            figures = f"{row['p50']:.1f} | {row['p99']:.1f} | {row['dead']:,} | {row['autovacuums']}"
            lines.append(f"| {name}, {when} | {figures} |")
        row = result["during"]
        rate = row["rows"] / row["seconds"]
        lines += [f"| … {row['rows']:,} rows in {row['seconds']:.0f} s, {rate:,.0f} in a second | | | | |"]
    return "\n".join(lines) + "\n"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1_000_000, help="finished jobs (1,000,000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long claims are timed before and after (10)")
    parser.add_argument("--patience", type=float, default=90.0, help="how long an autovacuum is waited for (90)")
    parser.add_argument("--limit", type=int, default=1000, help="rows of a batch (1000)")
    parser.add_argument("--longest", type=float, default=120.0, help="seconds after which deleting stops (120)")
    parser.add_argument("--load", type=int, default=10, help="jobs of each of the 20 rounds in a second (10)")
    parser.add_argument("--set", action="append", default=[], help="a storage parameter of jobs_hot")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["plans", "plain", "snapshot"])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    given = parsed(arguments)
    found: dict[str, dict[str, Look]] = {}
    deleted: dict[str, Any] = {}
    load = os.getloadavg()[0]
    with server() as given_server:
        with psycopg.connect(given_server) as admin:
            row = admin.execute("SHOW server_version").fetchone()
        if "plans" in given.parts:
            with database(given_server, "bench_upkeep") as own:
                found = plans(own, given.jobs)
        for part, name in (("plain", "nothing else"), ("snapshot", "an old snapshot")):
            if part in given.parts:
                with database(given_server, "bench_upkeep") as own:
                    deleted[name] = emptied(own, given, snapshot=part == "snapshot")
                print(name, json.dumps(deleted[name]), file=sys.stderr, flush=True)
    about = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "postgresql": str(row[0]) if row else "",
        "cores": os.cpu_count(),
        "load": [load, os.getloadavg()[0]],
        "jobs": given.jobs,
    }
    if found:
        text = markdown(about, found, deleted)
        print(text)
        if given.markdown:
            given.markdown.write_text(text)
    if given.json:
        looks = {key: {name: vars_of(look) for name, look in one.items()} for key, one in found.items()}
        given.json.write_text(json.dumps({"about": about, "passes": looks, "deleted": deleted}, indent=1) + "\n")
    return 0


def vars_of(look: Look) -> dict[str, Any]:
    """A look as JSON."""
    return {
        name: sorted(value) if isinstance(value := getattr(look, name), set) else str(value) for name in Look.__slots__
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
