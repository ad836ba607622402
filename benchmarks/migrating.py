"""`python benchmarks/migrating.py`: what writers notice of an upgrade, in one transaction and beside the traffic.

Fills `jobs_hot` with finished jobs, takes the schema two steps back (their indexes and checks are what takes long), and
brings it to the latest version in either way, while threads insert jobs and note how long each insert took. Needs
`awa_sqla[embedded]`, or `AWA_BENCH_DATABASE_URL`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import psycopg
from sqlalchemy import Engine, NullPool, create_engine

if not __package__:  # run as a script: the checkout is what must be importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from awa_sqla.schema import LATEST, create_all, migrate, migrate_online
from benchmarks.adapters.app import url
from benchmarks.environments import server
from benchmarks.lasting import database

#: Steps that are taken again.
STEPS = 2
WRITERS = 4
#: Seconds between two inserts of one writer.
PAUSE = 0.002

FILL = """
    INSERT INTO awa.jobs_hot (kind, queue, state, attempt, attempted_at, finalized_at, args)
    SELECT 'old', 'queue' || i % 50, (ARRAY['completed', 'completed', 'failed', 'cancelled'])[1 + i % 4], 1,
        now(), now(), jsonb_build_object('number', i)
    FROM generate_series(1, {rows}) AS i
"""


def in_transaction(engine: Engine) -> None:
    """As `op.awa_migrate` does it."""
    with engine.begin() as connection:
        create_all(connection)


WAYS: dict[str, Callable[[Engine], object]] = {"one transaction": in_transaction, "beside the traffic": migrate_online}


@contextmanager
def writing(own: str) -> Iterator[list[float]]:
    """Writers during the block; the milliseconds of their inserts."""
    took: list[float] = []
    ended = threading.Event()

    def write() -> None:
        with psycopg.connect(own, autocommit=True) as connection:
            while not ended.wait(PAUSE):
                began = time.perf_counter()
                connection.execute("INSERT INTO awa.jobs_hot (kind) VALUES ('new')")
                took.append((time.perf_counter() - began) * 1000)

    threads = [threading.Thread(target=write) for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1)
        yield took
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def measured(address: str, way: str, rows: int) -> dict[str, Any]:
    """One upgrade of a new database: its seconds, and the milliseconds of the inserts beside it and before it."""
    with database(address, "bench_migrating") as own:
        engine = create_engine(url(own), poolclass=NullPool)
        with psycopg.connect(own, autocommit=True) as admin:
            admin.execute(FILL.format(rows=rows).encode())
            with engine.begin() as connection:
                migrate(connection, LATEST - STEPS)
            admin.execute("VACUUM ANALYZE awa.jobs_hot")
        with writing(own) as took:
            before = list(took)
            took.clear()
            began = time.perf_counter()
            WAYS[way](engine)
            seconds = time.perf_counter() - began
        return {
            "seconds": round(seconds, 2),
            "inserts": len(took),
            "p99 before": round(quantiles(before, n=100)[98], 1),
            "p99": round(quantiles(took, n=100)[98], 1),
            "slowest": round(max(took), 1),
        }


def main(arguments: list[str] | None = None) -> None:
    """Print a JSON object for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="finished jobs in the table; default: a million")
    options = parser.parse_args(arguments)
    with server() as address:
        for way in WAYS:
            print(json.dumps({"way": way, "rows": options.rows} | measured(address, way, options.rows)))


if __name__ == "__main__":
    main()
