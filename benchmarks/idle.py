"""`python benchmarks/idle.py`: what a worker costs that has nothing to do.

Starts a worker with 1, 10 and 50 empty queues, with notifications and poll-only, lets it settle, and counts for a
minute what the server executes and how much CPU the worker's process takes. Needs `awa_sqla[embedded]`, or
`AWA_BENCH_DATABASE_URL`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

if not __package__:  # run as a script: the checkout is what must be importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.environments import server
from benchmarks.lasting import Process, database, started
from benchmarks.report import number

#: For each second: what a worker with a healthy listener may send, and the share of a core it may take.
GOAL_QUERIES, GOAL_CPU_PERCENT = 2.0, 1.0

CONTROL = "transaction control"

#: Who sends a statement, by the first of these that is found in it.
SENDERS: Mapping[str, str] = {
    CONTROL: r"^(BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE)",
    "pings and proofs": r"^SELECT \$1$|^;?$",
    "poll for work": r"unnest\(\$1::TEXT\[\]\)",
    "claims": r"SKIP LOCKED.*claimed|run_lease_seq",
    "lease": r"leaders SET|FROM awa.leaders|INTO awa.leaders",
    "schedules": r"cron_jobs",
    "rescue": r"FOR NO KEY UPDATE OF jobs_hot",
    "ageing": r"aged",
    "retention": r"DELETE FROM",
    "counts": r"job_counts",
    "promotion": r"scheduled_jobs",
    "obligations": r"follow_up_obligations",
    "heartbeat": r"runtime_instances|follow_up_specs|AS flight",
    "listener": r"^LISTEN",
}


def sender(statement: str) -> str:
    """Which part of a worker sends this statement; its beginning when no part is known to."""
    flat = " ".join(statement.split())
    for name, pattern in SENDERS.items():
        if re.search(pattern, flat):
            return name
    return flat[:60]


def executed(admin: psycopg.Connection[Any], name: str) -> tuple[Counter[str], int]:
    """By sender, how many statements the database has executed, and how many transactions it has committed."""
    found: Counter[str] = Counter()
    for statement, calls in admin.execute(
        "SELECT s.query, s.calls FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid "
        "WHERE d.datname = %s AND s.toplevel",
        (name,),
    ):
        found[sender(statement)] += calls
    row = admin.execute("SELECT xact_commit FROM pg_stat_database WHERE datname = %s", (name,)).fetchone()
    return found, int(row[0]) if row else 0


def watched(admin: psycopg.Connection[Any], name: str, process: Process, seconds: float) -> dict[str, Any]:
    """What the worker costs in each of the next seconds."""
    before, commits = executed(admin, name)
    cpu, start = process.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    cpu, lasted = process.cpu_seconds() - cpu, time.monotonic() - start
    after, committed = executed(admin, name)
    sent = {who: calls / lasted for who, calls in (after - before).items()}
    return {
        "queries": sum(rate for who, rate in sent.items() if who != CONTROL),
        "with_control": sum(sent.values()),
        "commits": (committed - commits) / lasted,
        "cpu_percent": 100 * cpu / lasted,
        "rss_mb": process.rss_bytes() / 1e6,
        "senders": dict(sorted(sent.items(), key=lambda item: -item[1])),
    }


def measured(url: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of queues, with notifications and without."""
    rows: list[dict[str, Any]] = []
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        for mode in given.modes:
            for queues in given.queues:
                with database(url, "bench_idle") as own, started("idle", own, str(queues), mode) as process:
                    time.sleep(given.settle)
                    costs = watched(admin, urlsplit(own).path[1:], process, given.seconds)
                rows.append({"mode": mode, "queues": queues, **costs})
                print(f"{mode}, {queues} queues: {costs['queries']:.2f} queries/s", file=sys.stderr, flush=True)
    return rows


def markdown(about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables, and whether the goals are reached."""
    head = (
        f"{about['when']}, PostgreSQL {about['postgresql']}, {about['cores']} cores shared with the server, load "
        f"{about['load'][0]:.1f} before and {about['load'][1]:.1f} after. A worker with empty queues, "
        f"{about['seconds']:g} s each; all figures but the last two are for each second."
    )
    lines = [
        head,
        "",
        "|  | queues | queries | with transaction control | commits | CPU % of a core | RSS MB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    figures = ("queries", "with_control", "commits", "cpu_percent", "rss_mb")
    lines += [
        f"| {row['mode']} | {row['queues']} | {' | '.join(number(row[figure]) for figure in figures)} |" for row in rows
    ]
    lines += ["", *verdicts(rows), "", "Queries by sender:", ""]
    senders = sorted({who for row in rows for who in row["senders"]})
    lines.append(f"|  | {' | '.join(', '.join((row['mode'], str(row['queues']))) for row in rows)} |")
    lines.append(f"| --- |{' --- |' * len(rows)}")
    lines += [f"| {who} | {' | '.join(number(row['senders'].get(who, 0.0)) for row in rows)} |" for who in senders]
    return "\n".join(lines) + "\n"


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The goals are for workers with notifications, and hold for every number of queues."""
    held = [row for row in rows if row["mode"] == "notify"]
    if not held:
        return []
    queries, cpu = max(row["queries"] for row in held), max(row["cpu_percent"] for row in held)
    said = {True: "reached", False: "not reached"}
    few, idle = said[queries <= GOAL_QUERIES], said[cpu < GOAL_CPU_PERCENT]
    return [
        f"- queries/s with notifications: at most {number(queries)} (goal ≤ {GOAL_QUERIES:g}): {few}",
        f"- CPU %: at most {number(cpu)} (goal < {GOAL_CPU_PERCENT:g}): {idle}",
    ]


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each worker is watched (60)")
    parser.add_argument("--settle", type=float, default=5.0, help="how long it may settle before (5)")
    parser.add_argument("--queues", type=lambda text: [int(n) for n in text.split(",")], default=[1, 10, 50])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["notify", "poll-only"])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    given = parsed(arguments)
    load = os.getloadavg()[0]
    with server() as url:
        rows = measured(url, given)
        with psycopg.connect(url) as admin:
            row = admin.execute("SHOW server_version").fetchone()
    about = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "postgresql": str(row[0]) if row else "",
        "cores": os.cpu_count(),
        "load": [load, os.getloadavg()[0]],
        "seconds": given.seconds,
    }
    text = markdown(about, rows)
    print(text)
    if given.markdown:
        given.markdown.write_text(text)
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
