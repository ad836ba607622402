"""The rows of periodic schedules: written by the apps that declare them, read by whoever fires them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice, takewhile
from typing import Any, NamedTuple

from sqlalchemy import Text, bindparam, case, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from awa_sqla.cron import Schedule
from awa_sqla.models.upkeep import CronSchedule
from awa_sqla.periodic import MOST_MISSED, Periodic
from awa_sqla.session.statements import NOW
from awa_sqla.session.target import schema_of
from awa_sqla.stable import as_kept

#: How often it is written that an app still has a schedule.
SEEN = timedelta(minutes=1)

#: How late a tick may be that `skip` still fires.
LATE = timedelta(minutes=1)

#: How many ticks above the bound are counted, for the log.
_COUNTED = 10_000

#: Schedules that one statement writes: each has fifteen parameters, and PostgreSQL takes 65,535.
_CHUNK = 1000

_table = CronSchedule.__table__
_c = _table.c

_TRY = select(func.pg_try_advisory_xact_lock(func.hashtextextended(bindparam("key", type_=Text), 0)))


def sync(session: Session, periodics: Iterable[Periodic]) -> frozenset[str]:
    """Write what an app declares, where the rows say otherwise. Returns the names that could not be written just now.

    Nothing is deleted; pauses and what has fired stay. A schedule whose expression or zone is another counts from now
    on. One statement that reads when nothing has changed. Waits for nobody: while another process writes schedules, or
    an operator's open transaction holds one, those are left to the next call.
    """
    wanted = {periodic.name: periodic.columns() for periodic in periodics}
    if not wanted:
        return frozenset()
    keys = list(next(iter(wanted.values())))
    written = session.execute(select(*(_c[key] for key in keys)).where(_c.name.in_(sorted(wanted))))
    found = {row.name: _told(dict(zip(keys, row, strict=True))) for row in written}
    changed = {name: row for name, row in sorted(wanted.items()) if found.get(name) != _told(row)}
    if not changed:
        return frozenset()
    if not session.scalar(_TRY, {"key": f"awa_sqla.schedules:{schema_of(session)}"}):
        return frozenset(changed)
    mine = select(_c.name).where(_c.name.in_(list(changed))).order_by(_c.name)
    free = set(session.scalars(mine.with_for_update(key_share=True, skip_locked=True)))
    held = (changed.keys() & found.keys()) - free
    rows = [row for name, row in changed.items() if name not in held]
    for start in range(0, len(rows), _CHUNK):
        _upsert(session, rows[start : start + _CHUNK])
    return frozenset(held)


def _upsert(session: Session, rows: list[dict[str, Any]]) -> None:
    statement = insert(_table).values(rows)
    new = statement.excluded
    other = or_(_c.cron_expr != new.cron_expr, _c.timezone != new.timezone)
    values: dict[str, Any] = {name: new[name] for name in rows[0] if name != "name"}
    values |= {"counts_from": case((other, NOW), else_=_c.counts_from), "updated_at": NOW, "last_seen": NOW}
    values |= {"last_error": None, "failed_at": None}
    session.execute(statement.on_conflict_do_update(index_elements=[_c.name], set_=values))


def _told(row: dict[str, Any]) -> str:
    """A row in one form, in which True is not 1."""
    return json.dumps(as_kept(row), sort_keys=True)


_SEEN = (
    select(_c.name)
    .where(_c.name.in_(bindparam("names", expanding=True)), _c.last_seen < func.statement_timestamp() - SEEN)
    .order_by(_c.name)
    .with_for_update(key_share=True, skip_locked=True)
)
_REFRESH = update(_table).where(_c.name.in_(_SEEN)).values(last_seen=NOW)


def seen(session: Session, names: Collection[str]) -> None:
    """Write that an app has these schedules, where that was last written a minute ago. Waits for no lock."""
    session.execute(_REFRESH, {"names": sorted(names)})


_latest = func.greatest(_c.last_enqueued_at, _c.counts_from)
_AHEAD = (
    select(_c.name)
    .where(_latest > func.statement_timestamp() + LATE)
    .order_by(_c.name)
    .with_for_update(key_share=True, skip_locked=True)
)
_REWIND = (
    update(_table)
    .where(_c.name.in_(_AHEAD))
    .values(last_enqueued_at=func.least(_c.last_enqueued_at, NOW), counts_from=func.least(_c.counts_from, NOW))
    .returning(_c.name)
)


def rewind(session: Session) -> list[str]:
    """Let schedules whose marks lie in the future count from now, since the database's clock has gone back; which.

    They would else not fire before that time comes again. Waits for no lock.
    """
    return sorted(session.scalars(_REWIND))


class Stored(NamedTuple):
    """Of a schedule's row, what decides on when it fires."""

    name: str
    cron_expr: str
    timezone: str
    missed_fire_policy: str
    most_missed: int
    last_enqueued_at: datetime | None
    counts_from: datetime
    paused: bool
    builds: bool
    unique: bool
    last_seen: datetime

    @property
    def since(self) -> datetime:
        """Ticks count from after this time."""
        return max(self.counts_from, self.last_enqueued_at or self.counts_from)


_READ = select(
    func.clock_timestamp(),
    _c.name,
    _c.cron_expr,
    _c.timezone,
    _c.missed_fire_policy,
    _c.most_missed,
    _c.last_enqueued_at,
    _c.counts_from,
    _c.paused_at.is_not(None),
    _c.args.is_(None),
    _c.uniqueness.is_not(None),
    _c.last_seen,
).order_by(_c.name)


def schedules(session: Session) -> tuple[datetime | None, list[Stored]]:
    """The database's clock, None where there are no schedules, and all of them by name. One statement."""
    rows = session.execute(_READ).all()
    return (rows[0][0] if rows else None), [Stored(*row[1:]) for row in rows]


class Due(NamedTuple):
    """Which ticks are to be fired, oldest first, how many older ones are dropped, and when the next comes."""

    ticks: list[datetime]
    dropped: int
    next: datetime | None


_schedule = lru_cache(maxsize=4096)(Schedule)


@lru_cache(maxsize=4096)
def _first(schedule: Schedule, after: datetime) -> datetime | None:
    return next(schedule.after(after), None)


def due(row: Stored, now: datetime) -> Due:
    """What of a schedule is due at `now`, by its policy. Raises `InvalidJob` for a stored expression that is none.

    coalesce: the latest tick; catch_up: the latest `most_missed`; skip: the latest, when it is at most a minute late.
    """
    schedule = _schedule(row.cron_expr, row.timezone)
    since = row.since
    first = _first(schedule, since)
    if first is None or first > now:
        return Due([], 0, first)
    missed, dropped = takewhile(lambda tick: tick > since, schedule.before(now)), 0
    if row.missed_fire_policy == "catch_up":
        ticks = list(islice(missed, min(row.most_missed, MOST_MISSED)))
        dropped = sum(1 for _ in islice(missed, _COUNTED))
    else:
        ticks = list(islice(missed, 1))
        if row.missed_fire_policy == "skip" and now - ticks[0] > LATE:
            ticks = []
    return Due(ticks[::-1], dropped, next(schedule.after(now), None))
