"""What is measured: one function for each measure, its columns, and the goals it is held to.

A new measure is one function that takes the harness, a peer and a number of jobs and returns figures for each job,
and one entry in `MEASURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.harness import Figures, Harness, PeerError

WARM_UP = 20


class NotOfferedError(Exception):
    """The peer cannot do this."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure of awa_sqla is held to.

    `how` takes the figure alone, or its ratio to, or difference from, the same round's figure of `against`.
    """

    figure: str
    how: Literal["value", "ratio", "difference"]
    against: str = ""
    at_least: float | None = None
    at_most: float | None = None
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Measure:
    """One table: how it is got, for how many jobs, and how its columns are headed."""

    title: str
    jobs: int
    take: Callable[[Harness, str, int], Figures]
    columns: Mapping[str, str]
    goals: Sequence[Goal] = ()


def _sent(command: str) -> Callable[[Harness, str, int], Figures]:
    """One job for each transaction, on one connection."""

    def take(harness: Harness, peer: str, jobs: int) -> Figures:
        database = _fresh(harness, peer, command)
        before = harness.read(database)
        found = harness.command(peer, command, harness.dsn(database), n=jobs, warm=WARM_UP)
        milliseconds = sorted(found["lat_ms"])
        return {
            "rate": jobs / found["total_s"],
            "p50_ms": _percentile(milliseconds, 50),
            "p99_ms": _percentile(milliseconds, 99),
            **harness.spent(database, before, jobs + WARM_UP),
        }

    return take


def bulk(harness: Harness, peer: str, jobs: int) -> Figures:
    """All jobs in one call and one transaction, the first of its process, on a connection that is open."""
    database = _fresh(harness, peer, "enqueue_many")
    before = harness.read(database)
    found = harness.command(peer, "enqueue_many", harness.dsn(database), n=jobs)
    costs = harness.spent(database, before, jobs)
    stored = harness.count(database, harness.about[peer]["remaining_sql"])
    if stored != jobs:
        raise PeerError(f"{stored} of {jobs} jobs are stored")
    return {"rate": jobs / found["total_s"], "peak_mb": found["peak_mb"], **costs}


def drained(harness: Harness, peer: str, jobs: int) -> Figures:
    """A backlog of no-op jobs through one worker process, from its start to the last stored completion."""
    database = _fresh(harness, peer, "enqueue_many", "drain")
    harness.command(peer, "enqueue_many", harness.dsn(database), n=jobs)
    harness.vacuum(database)
    before = harness.read(database)
    seen = harness.drain(peer, database, jobs)
    costs = harness.spent(database, before, jobs, polls=seen.polls)
    first, last = min(seen.begun), max(seen.begun)
    return {
        "rate": jobs / ((seen.end - seen.start) / 1e9),
        "steady_rate": (jobs - 1) / max((last - first) / 1e9, 1e-9),
        "first_ms": (first - seen.start) / 1e6,
        "cpu_us": seen.cpu_seconds / jobs * 1e6,
        "peak_mb": seen.peak_mb,
        "kept": harness.count(database, harness.about[peer]["kept_sql"]) / jobs,
        **costs,
    }


def _fresh(harness: Harness, peer: str, *commands: str) -> str:
    missing = set(commands).difference(harness.about[peer]["offers"])
    if missing:
        raise NotOfferedError(", ".join(sorted(missing)))
    return harness.fresh(peer)


def _percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


_COSTS = {"statements": "statements", "commits": "commits", "wal_bytes": "WAL bytes"}
_TIMES = {"p50_ms": "p50 ms", "p99_ms": "p99 ms"}

MEASURES: dict[str, Measure] = {
    "a": Measure(
        "(a) enqueue, one job for each transaction",
        1_000,
        _sent("enqueue_one"),
        {"rate": "jobs/s", **_TIMES, **_COSTS},
        [Goal("rate", "ratio", "sqlalchemy", at_least=0.85)],
    ),
    "b": Measure(
        "(b) bulk enqueue, one call, one transaction",
        20_000,
        bulk,
        {"rate": "jobs/s", "peak_mb": "peak RSS MB", **_COSTS},
        [Goal("rate", "ratio", "raw", at_least=0.5), Goal("rate", "ratio", "awa_pg", at_least=1.8)],
    ),
    "c": Measure(
        "(c) a row of the app and a job in the user's session, one commit",
        1_000,
        _sent("enqueue_in_session"),
        {"rate": "tx/s", **_TIMES, **_COSTS},
        [
            Goal("rate", "ratio", "sqlalchemy", at_least=0.9, floor=0.85),
            Goal("statements", "difference", "app_only", at_most=1.0),
        ],
    ),
    "d": Measure(
        "(d) drain a backlog in one worker process",
        10_000,
        drained,
        {
            "rate": "jobs/s",
            "first_ms": "first handler ms",
            "cpu_us": "worker CPU µs",
            "peak_mb": "peak RSS MB",
            "kept": "job rows kept",
            **_COSTS,
        },
        [
            Goal("rate", "ratio", "pgqueuer", at_least=1.25, floor=1.0),
            Goal("statements", "value", at_most=0.02),
            Goal("commits", "value", at_most=0.02),
            Goal("wal_bytes", "value", at_most=750),
            Goal("peak_mb", "value", at_most=80),
        ],
    ),
}
