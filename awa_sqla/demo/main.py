"""The whole story, from the command line's plan to the exit status."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Generator
from types import FrameType
from typing import NoReturn

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla.demo import Plan
from awa_sqla.demo.check import Check, check_all, shown
from awa_sqla.demo.database import Database, NoDatabaseError, open_database
from awa_sqla.demo.jobs import awa
from awa_sqla.demo.processes import ProcessDiedError, Processes
from awa_sqla.demo.records import Records
from awa_sqla.demo.report import Display, Result, say, write_json, write_tables
from awa_sqla.demo.seed import BadDirectoryError, Listing, listings, seed
from awa_sqla.demo.watch import Watch

OFF, BAD_DIRECTORY, NO_DATABASE, INTERRUPTED = 1, 2, 3, 130


def main(plan: Plan) -> int:
    """See `awa_sqla.demo.run`."""
    try:
        with _ended_by_signals():
            return _catalogue(plan)
    except BadDirectoryError as exc:
        say(f"awa-sqla: {shown(exc)}")
        return BAD_DIRECTORY
    except NoDatabaseError as exc:
        say(f"awa-sqla: {exc}")
        return NO_DATABASE
    except OperationalError as exc:
        say(f"awa-sqla: the database went away: {shown(exc.orig)}")
        return OFF
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _catalogue(plan: Plan) -> int:
    tree = listings(plan.directory)
    files = sum(len(listing.files) for listing in tree)
    say(f"{shown(tree[0].path)}: {files} files in {len(tree)} directories")
    if plan.keep and plan.database_url is None:
        say("--keep has no effect without a database URL: a private server goes with all that is in it")
    with open_database(plan.database_url, workers=plan.workers, keep=plan.keep, say=say) as database:
        begun = time.monotonic()
        try:
            stopping, killed, seconds = _work(plan, database, tree, files)
        except ProcessDiedError as exc:
            say(shown_lines(exc))
            stopping, killed, seconds = Check("processes", ok=False, detail=shown(exc)), 0, time.monotonic() - begun
        with Session(database.engine) as session:
            records = Records.read(session)
        result = Result.of(records, [*check_all(records), stopping], killed=killed, seconds=seconds)
    if plan.as_json:
        write_json(result)
    else:
        write_tables(result, records)
    return 0 if result.ok else OFF


def _work(plan: Plan, database: Database, tree: list[Listing], files: int) -> tuple[Check, int, float]:
    """Workers and approver do what is seeded meanwhile. Returns how they stopped, how many were killed, seconds."""
    begun = time.monotonic()
    maker = sessionmaker(database.engine)
    awa.attach(maker)
    with Processes(database.url) as processes, Display() as display:
        for name in ["worker"] * plan.workers + ["approver"]:
            processes.start(name)
        watch = Watch(database.engine, processes, display, files=files, kill=plan.kill)
        seed(maker, tree, after_each=watch.look)
        watch.until_done()
        seconds = time.monotonic() - begun
        wrong = processes.stop()
        fine = "all workers and the approver stopped when they were told to"
        return Check("processes", ok=not wrong, detail=shown("; ".join(wrong)) or fine), processes.killed, seconds


def shown_lines(text: object) -> str:
    """Text of several lines, each fit for a terminal."""
    return "\n".join(map(shown, str(text).splitlines()))


@contextlib.contextmanager
def _ended_by_signals() -> Generator[None]:
    """Let SIGTERM and SIGHUP end us as Ctrl-C does, by an exception, so that everything is cleared up."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
