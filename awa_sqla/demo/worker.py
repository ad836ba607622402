"""`python -m awa_sqla.demo.worker`: a worker process of the application."""

from __future__ import annotations

import logging
import sys
from datetime import timedelta

from awa_sqla.demo.jobs import CONCURRENCY, awa
from awa_sqla.demo.models import engine_on
from awa_sqla.demo.processes import lifeline


def main() -> int:
    """Serve until SIGTERM. Heartbeats are frequent, so that a killed worker's jobs are soon rescued."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    engine = engine_on(lifeline(), pool_size=sum(CONCURRENCY.values()), max_overflow=0)
    return awa.run_worker(
        engine,
        heartbeat=timedelta(seconds=1),
        stale_after=timedelta(seconds=4),
        grace=timedelta(seconds=10),
    )


if __name__ == "__main__":
    sys.exit(main())
