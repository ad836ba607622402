"""`python benchmarks/memory.py`: whether a worker's memory stays flat over a million jobs.

One worker drains jobs of many kinds, most of them async no-ops, the others threads, failures, retries, put-backs,
follow-ups, and jobs nobody here knows; now and then its connections are cut. After each 100,000 jobs its resident
memory and its objects are counted. Needs `awa_sqla[embedded]`, or `AWA_BENCH_DATABASE_URL`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import linear_regression
from typing import Any

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

if not __package__:  # run as a script: the checkout is what must be importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from awa_sqla import EnqueueRequest, JobArgs, enqueue_many
from benchmarks.adapters.app import url
from benchmarks.environments import server
from benchmarks.lasting import Process, database, started
from benchmarks.lasting_apps import KINDS, Stranger

#: Jobs of one transaction, and how many may wait for the worker at a time.
CHUNK, BACKLOG = 5_000, 20_000
#: Jobs of kinds that the worker does not know, each put back every 30 s, in all.
STRANGERS = 100
#: Seconds that one step may take.
PATIENCE = 1_800.0

_LIVE = "SELECT count(*) FROM awa.jobs WHERE state IN ('available', 'running', 'retryable', 'scheduled') AND kind <> %s"
_WAITING = "SELECT count(*) FROM awa.jobs_hot WHERE state = 'available'"
_ENDED = "DELETE FROM awa.jobs_hot WHERE state IN ('completed', 'failed', 'cancelled')"
_CUT = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> ALL (%s) AND backend_type = 'client backend'"
)


def jobs(count: int) -> Iterator[JobArgs]:
    """So many jobs, each kind as often as its share of a thousand says."""
    kinds = [kind for kind, share in KINDS.items() for _ in range(share)]
    for n in range(count):
        yield kinds[n * 7919 % len(kinds)](number=n)


class Supply:
    """Enqueues what the worker drains, and looks after the tables."""

    def __init__(self, dsn: str) -> None:
        self._admin = psycopg.connect(dsn, autocommit=True)
        self._engine = create_engine(url(dsn))

    def add(self, requests: Sequence[JobArgs | EnqueueRequest]) -> None:
        """Enqueue in one transaction."""
        with Session(self._engine) as session, session.begin():
            enqueue_many(session, requests)

    def until(self, query: str, most: int, *parameters: Any) -> None:
        """Wait until a number has come down."""
        limit = time.monotonic() + PATIENCE
        while self._number(query, *parameters) > most:
            if time.monotonic() > limit:
                raise TimeoutError(f"still {self._number(query, *parameters)}: {query}")
            time.sleep(0.1)

    def drained(self, count: int, *, cut: bool) -> None:
        """Enqueue `count` jobs, cut the worker's connections on the way, wait for the last, and clear up."""
        source = jobs(count)
        for start in range(0, count, CHUNK):
            self.until(_WAITING, BACKLOG)
            self.add([next(source) for _ in range(min(CHUNK, count - start))])
            if cut and start == count // CHUNK // 2 * CHUNK:
                self.cut()
        self.until(_LIVE, 0, Stranger.__awa__.kind)
        self._admin.execute(_ENDED)
        self._admin.execute("VACUUM ANALYZE awa.jobs_hot")

    def cut(self) -> None:
        """End all connections but our own."""
        with Session(self._engine) as session:
            own = session.connection().connection.dbapi_connection
            assert own is not None
            self._admin.execute(_CUT, ([own.info.backend_pid, self._admin.info.backend_pid],))

    def _number(self, query: str, *parameters: Any) -> int:
        row = self._admin.execute(query.encode(), parameters or None).fetchone()
        return int(row[0]) if row else 0

    def close(self) -> None:
        """Leave."""
        self._engine.dispose()
        self._admin.close()


def sample(process: Process, done: int, start: float) -> dict[str, Any]:
    """What the worker weighs now."""
    objects: dict[str, int] = json.loads(process.ask("objects"))
    return {
        "jobs": done,
        "seconds": time.monotonic() - start,
        "rss": process.rss_bytes(),
        "objects": objects,
        "all_objects": sum(objects.values()),
    }


def measured(dsn: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """A sample before the first job and after each step."""
    supply = Supply(dsn)
    samples: list[dict[str, Any]] = []
    try:
        with started("mixed", dsn, "trace" if given.trace else "plain") as process:
            start = time.monotonic()
            samples.append(sample(process, 0, start))
            supply.add([EnqueueRequest(Stranger(number=n)) for n in range(STRANGERS)])
            for done in range(given.step, given.jobs + 1, given.step):
                supply.drained(given.step, cut=done // given.step % 2 == 0)
                samples.append(sample(process, done, start))
                last = samples[-1]
                print(
                    f"{done:,} jobs: {last['rss'] / 1e6:.1f} MB, {last['seconds']:.0f} s", file=sys.stderr, flush=True
                )
                if given.trace:
                    print(process.ask("trace").replace(" | ", "\n"), file=sys.stderr, flush=True)
    finally:
        supply.close()
    return samples


def slope(samples: Sequence[Mapping[str, Any]], figure: str, warm_up: int) -> float:
    """How much a figure grows with each job, once warm: the least-squares line."""
    warm = [one for one in samples if one["jobs"] >= warm_up]
    return linear_regression([one["jobs"] for one in warm], [one[figure] for one in warm]).slope


def markdown(about: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
    """The table, the slopes, and what there is more of."""
    lines = [
        f"{about['when']}, PostgreSQL {about['postgresql']}, {about['cores']} cores shared with the server.",
        "",
        "| jobs | seconds | RSS MB | objects |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one['jobs']:,} | {one['seconds']:.0f} | {one['rss'] / 1e6:.1f} | {one['all_objects']:,} |"
        for one in samples
    ]
    warm = [one for one in samples if one["jobs"] >= about["warm_up"]]
    if len(warm) > 1:
        heavier, more = (slope(samples, figure, about["warm_up"]) for figure in ("rss", "all_objects"))
        lines += ["", f"- after {about['warm_up']:,} jobs: {heavier:.2f} bytes and {more:.5f} objects for each job"]
        first, last = warm[0]["objects"], warm[-1]["objects"]
        grown = sorted(((last[name] - first.get(name, 0), name) for name in last), reverse=True)[:8]
        lines += [f"- {count:+,} {name}" for count, name in grown if count > 0]
    return "\n".join(lines) + "\n"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1_000_000, help="how many in all (1,000,000)")
    parser.add_argument("--step", type=int, default=100_000, help="how many between two samples (100,000)")
    parser.add_argument("--warm-up", type=int, help="how many before the slope begins (a fifth of all)")
    parser.add_argument("--trace", action="store_true", help="also say which lines allocated what has grown (slow)")
    parser.add_argument("--json", type=Path, help="write the samples here")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    given = parser.parse_args(arguments)
    given.warm_up = given.jobs // 5 if given.warm_up is None else given.warm_up
    return given


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    given = parsed(arguments)
    with server() as dsn, database(dsn, "bench_memory") as own:
        samples = measured(own, given)
        with psycopg.connect(dsn) as admin:
            row = admin.execute("SHOW server_version").fetchone()
    about = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "postgresql": str(row[0]) if row else "",
        "cores": os.cpu_count(),
        "warm_up": given.warm_up,
    }
    text = markdown(about, samples)
    print(text)
    if given.markdown:
        given.markdown.write_text(text)
    if given.json:
        given.json.write_text(json.dumps({"about": about, "samples": samples}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
