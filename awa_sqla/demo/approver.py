"""`python -m awa_sqla.demo.approver`: jobs without a worker.

Claiming, the application's own writes and completing are one ordinary transaction: if this process dies in the
middle, the job is available as before and the directory has no summary.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from sqlalchemy import BigInteger, ColumnElement, cast, collate, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session, sessionmaker

from awa_sqla import Job, claim, complete
from awa_sqla.demo.jobs import APPROVAL, SummariseDirectory, awa
from awa_sqla.demo.models import Directory, File, Word, engine_on
from awa_sqla.demo.processes import lifeline

#: Seconds between looks while there is nothing to approve.
PAUSE = 0.1
TOP_WORDS = 5


def main() -> int:
    """Approve until SIGTERM."""
    maker = sessionmaker(engine_on(lifeline(), pool_size=1, max_overflow=0))
    awa.attach(maker)
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    while not stopped.is_set():
        with maker.begin() as session:
            jobs = claim(session, APPROVAL, limit=10, worker_id=f"approver:{os.getpid()}")
            for job in jobs:
                approve(session, job)
        if not jobs:
            stopped.wait(PAUSE)
    return 0


def approve(session: Session, job: Job) -> None:
    """Complete the job together with what it was for."""
    directory = session.get_one(Directory, job.args_as(SummariseDirectory).directory_id)
    directory.summary = summary_of(session, directory)
    complete(session, job, result=directory.summary)


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
