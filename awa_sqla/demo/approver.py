"""`python -m awa_sqla.demo.approver`: the outside world, which answers for jobs that wait for it.

The summary and the completion of the job that asked for it are one ordinary transaction: if this process dies in the
middle, the job waits as before and the directory has no summary.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from sqlalchemy import BigInteger, ColumnElement, cast, collate, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session, sessionmaker

from awa_sqla import CallbackNotFound, complete_external
from awa_sqla.demo.jobs import awa
from awa_sqla.demo.models import Directory, File, Word, engine_on
from awa_sqla.demo.processes import lifeline

#: Seconds between looks while there is nothing to approve.
PAUSE = 0.1
TOP_WORDS = 5

#: Those that ask, ten at a time; a second approver would take others.
ASKING = (
    select(Directory)
    .where(Directory.approval_id.is_not(None), Directory.summary.is_(None))
    .order_by(Directory.id)
    .limit(10)
    .with_for_update(skip_locked=True)
)


def main() -> int:
    """Approve until SIGTERM."""
    shown_as = {"application_name": application_name(os.getpid())}
    maker = sessionmaker(engine_on(lifeline(), pool_size=1, max_overflow=0, connect_args=shown_as))
    awa.attach(maker)
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    while not stopped.is_set():
        with maker.begin() as session:
            asking = session.scalars(ASKING).all()
            for directory in asking:
                approve(session, directory)
        if not asking:
            stopped.wait(PAUSE)
    return 0


def approve(session: Session, directory: Directory) -> None:
    """Write the summary and complete the job that waits for it."""
    assert directory.approval_id is not None  # noqa: S101 - it asks
    summary = summary_of(session, directory)
    try:
        complete_external(session, directory.approval_id, summary)
    except CallbackNotFound:  # we were too late; the job's next attempt will ask again
        directory.approval_id = None
    else:
        directory.summary = summary


def application_name(pid: int) -> str:
    """What the database calls an approver's connection: how others see that it is there, and in a transaction."""
    return f"awa-sqla demo approver {pid}"


def summary_of(session: Session, directory: Directory) -> dict[str, object]:
    """A directory in one line."""
    files, size, lines = session.execute(
        select(func.count(), _total(File.size), _total(File.lines)).where(File.directory_id == directory.id)
    ).one()
    total = func.sum(Word.count)
    words = session.scalars(
        select(Word.word)
        .join(File, File.id == Word.file_id)
        .where(File.directory_id == directory.id)
        .group_by(Word.word)
        .order_by(total.desc(), collate(Word.word, "C"))
        .limit(TOP_WORDS)
    )
    return {"files": files, "bytes": size, "lines": lines, "words": list(words)}


def _total(column: InstrumentedAttribute[int | None]) -> ColumnElement[int]:
    return cast(func.coalesce(func.sum(column), 0), BigInteger)


if __name__ == "__main__":
    sys.exit(main())
