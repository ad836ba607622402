"""One worker or maintenance process, from its first line to its exit status.

Each is forked from a process that has imported this module and done nothing else: importing is two thirds of what a
start costs, and a run starts hundreds. What happens after the fork is what `awa.run_worker()` and
`awa.run_maintenance()` do anywhere, but for how soon maintenance is due.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import asyncpg  # noqa: F401 - what engines import when they are made
import psycopg  # noqa: F401
from sqlalchemy import make_url
from sqlalchemy.orm import configure_mappers

from tests.soak import upkeep
from tests.soak.app import awa
from tests.soak.sabotage import GUARDS

HEARTBEAT, STALE_AFTER, GRACE = timedelta(seconds=1), timedelta(seconds=3), timedelta(seconds=10)

configure_mappers()


@dataclass(frozen=True)
class Role:
    """What a process is for: a worker, which may maintain beside its jobs, or one that only maintains (`alone`).

    One that is `forced` believes that it leads, whoever else does. `stale_after` is a worker's own.
    """

    name: str
    maintains: bool = True
    alone: bool = False
    forced: bool = False
    stale_after: timedelta = STALE_AFTER

    @property
    def begun(self) -> str:
        """What its log says when it is there."""
        return "maintenance process" if self.alone else " serves "


def live(role: Role, url: str, log: str, sabotage: str | None) -> None:
    """Work until told to stop, or until the driver is gone; the process ends with the status of the package's own."""
    # A group of its own, so that Ctrl-C reaches the driver alone. When the driver is gone, so is the process that
    # forked us, unless we hold its lifeline; and the kernel ends groups that are frozen and have lost their parent.
    os.setpgid(0, 0)
    os.close(forkserver._forkserver._forkserver_alive_fd)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    with Path(log).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=2)  # for a process that hangs: where it does
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    awa.database_url = make_url(url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    upkeep.hurry(forced=role.forced)
    with GUARDS[sabotage]() if sabotage else nullcontext():
        if role.alone:
            status = awa.run_maintenance(url, heartbeat=HEARTBEAT, stale_after=role.stale_after)
        else:
            options = {"stale_after": role.stale_after, "maintenance": role.maintains}
            status = awa.run_worker(url, heartbeat=HEARTBEAT, grace=GRACE, **options)
    sys.exit(status)


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    assert driver is not None
    multiprocessing.connection.wait([driver.sentinel])
    os._exit(1)
