"""One worker process: `python -m tests.soak.worker [--sabotage GUARD] [--driver asyncpg]`, the URL on its stdin.

When the pipe that is its stdin ends, because the driver has, so does the process.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import signal
import sys
from contextlib import nullcontext
from datetime import timedelta

from awa_sqla.demo.processes import lifeline
from tests.races.sabotage import GUARDS
from tests.soak.app import awa

HEARTBEAT, STALE_AFTER, GRACE = timedelta(seconds=1), timedelta(seconds=3), timedelta(seconds=10)


def main() -> int:
    """Work until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sabotage", choices=[*GUARDS])
    parser.add_argument("--driver", choices=["psycopg", "asyncpg"], default="psycopg")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.register(signal.SIGUSR1)  # for a process that hangs: where it does
    url = lifeline()
    handlers_url = url.set(drivername="postgresql+psycopg")
    awa.database_url = handlers_url.render_as_string(hide_password=False)
    url = url.set(drivername=f"postgresql+{options.driver}")
    with GUARDS[options.sabotage]() if options.sabotage else nullcontext():
        return awa.run_worker(url, heartbeat=HEARTBEAT, stale_after=STALE_AFTER, grace=GRACE)


if __name__ == "__main__":
    sys.exit(main())
