"""`python -m tests.soak --jobs 20000 --seed 42 --kills 300`: exit status 1 when anything was lost or doubled."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from tests.races.sabotage import GUARDS
from tests.soak.soak import Settings, soak


def main() -> int:
    """Run it, print what came of it, and say whether all is well."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000, help="how many to enqueue (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the jobs and of the schedule (%(default)s)")
    parser.add_argument("--kills", type=int, default=300, help="how many kill -9; all else in proportion (%(default)s)")
    parser.add_argument("--minutes", type=float, help="how long to go on hurting (two seconds for each kill)")
    parser.add_argument("--workers", type=int, default=3, help="how many at a time (%(default)s)")
    parser.add_argument("--failovers", type=int, default=0, help="how often the server takes no writes (%(default)s)")
    parser.add_argument("--sabotage", choices=[*GUARDS], help="take this guard out of the workers")
    parser.add_argument("--database-url", help="an empty database of somebody else's server, which is not restarted")
    parser.add_argument("--logs", type=Path, help="directory for the workers' logs (a new one)")
    settings = Settings(**vars(parser.parse_args()))
    logging.getLogger("awa_sqla").setLevel(logging.ERROR)
    report = soak(settings)
    if not report.clean:
        print("violations:")
        print(report.violations())
    print("also:", ", ".join(f"{what} {count}" for what, count in sorted(report.did.items())))
    print("cuts in COMMIT:", ", ".join(f"{how} {what} {n}" for (how, what), n in sorted(report.commits.items())))
    print(report.summary)
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
