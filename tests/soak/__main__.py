"""`python -m tests.soak --jobs 20000 --seed 42 --kills 200`: exit status 1 when anything was lost or doubled."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from pathlib import Path

from tests.soak.sabotage import GUARDS
from tests.soak.soak import DONE, Settings, soak


def main() -> int:
    """Run it, print what came of it, and say whether all is well."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000, help="how many to enqueue (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the jobs and of the schedule (%(default)s)")
    parser.add_argument("--kills", type=int, default=200, help="how many kill -9; all else in proportion (%(default)s)")
    parser.add_argument("--stops", type=int, help="how many processes are frozen for a while (a tenth of the kills)")
    parser.add_argument(
        "--slow", type=float, default=0.1, help="share of jobs that take up to two seconds (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, help="how long to go on hurting (two seconds for each kill)")
    parser.add_argument("--workers", type=int, default=3, help="how many at a time (%(default)s)")
    parser.add_argument("--failovers", type=int, default=0, help="how often the server takes no writes (%(default)s)")
    parser.add_argument(
        "--fight",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one process maintains whoever leads, so that there are two (%(default)s)",
    )
    parser.add_argument("--sabotage", choices=[*GUARDS], help="take this guard out of the workers")
    parser.add_argument("--database-url", help="an empty database of somebody else's server, which is not restarted")
    parser.add_argument("--logs", type=Path, help="directory for the workers' logs (a new one)")
    settings = Settings(**vars(parser.parse_args()))
    logging.getLogger("awa_sqla").setLevel(logging.ERROR)
    report = soak(settings)
    if not report.clean:
        print("violations:")
        print(report.violations())
    counts = Counter(report.findings.counts) + Counter({what: n for what, n in report.did.items() if what not in DONE})
    print("also:", ", ".join(f"{what} {n}" for what, n in sorted(counts.items())))
    print("cuts in COMMIT:", ", ".join(f"{how} {what} {n}" for (how, what), n in sorted(report.commits.items())))
    print(report.summary)
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
