"""Attempts that are late in one way or another, and the rescue that takes each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.orm import Session

from awa_sqla import Attempt, park, register_callback
from awa_sqla.maintenance import rescue_callbacks, rescue_overdue, rescue_stale
from awa_sqla.session.attending import attend
from tests.session.steps import HOUR, running
from tests.worlds import Database

Lane = Callable[..., list[Attempt]]
LANES: tuple[Lane, ...] = (rescue_stale, rescue_overdue, rescue_callbacks)
in_each_lane = pytest.mark.parametrize("lane", LANES)

#: As they are late: dead, too slow, and not called in time.
SILENT = "heartbeat_at = now() - interval '1 hour'"
OVERDUE = "deadline_at = now() - interval '1 s'"
EXPIRED = "callback_timeout_at = now() - interval '1 s'"


def runs(session: Session, database: Database, late: str = "", **options: Any) -> Attempt:
    """An attempt that runs, and is late in these ways."""
    return late_by(database, Attempt.of(running(session, **options)), late)


def waits(session: Session, database: Database, late: str = "", *, attended: bool = False, **options: Any) -> Attempt:
    """One that waits for its callback."""
    held = Attempt.of(running(session, **options))
    token = register_callback(session, held, timeout=HOUR)
    (attend if attended else park)(session, held, token)
    session.commit()
    return late_by(database, held, late)


def late_by(database: Database, held: Attempt, late: str) -> Attempt:
    if late:
        database.execute(f"UPDATE jobs_hot SET {late} WHERE id = {held.id}")
    return held


#: What each rescue takes, by a job of its own.
TAKES: dict[Lane, Callable[..., Attempt]] = {
    rescue_stale: lambda session, database, **options: runs(session, database, SILENT, **options),
    rescue_overdue: lambda session, database, **options: runs(session, database, OVERDUE, **options),
    rescue_callbacks: lambda session, database, **options: waits(session, database, EXPIRED, **options),
}
