"""When a periodic schedule fires: a cron expression in a time zone, as instants. No I/O.

    Schedule("30 2 * * MON-FRI", "Europe/Berlin").after(datetime.now(UTC))     # an iterator of aware datetimes, in UTC

Cronsim reads the expression and steps through local time, which knows no clock changes. What a clock change does to a
tick is decided here:

* A schedule of fixed times (neither `*` nor a step in its hours and minutes) fires once for each local time that it
  names: at the first instant at which the local clock has reached it. So a time that is skipped in spring fires at the
  shift, several that the same shift skips fire there together, as one, and a time that comes twice in autumn fires at
  the first.
* Any other fires by elapsed time: at every real instant whose local time matches. What is skipped does not fire, and an
  hour that comes twice fires twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from awa_sqla import limits
from awa_sqla.errors import InvalidJob

#: The usual names of common schedules.
ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

_ACCEPTED = (
    "write minute, hour, day of month, month and day of week, as in '30 2 * * MON-FRI', with seconds in front if you "
    f"like, or one of {', '.join(ALIASES)}"
)

#: How many values the six fields have.
_SIZES = (60, 60, 24, 31, 12, 7)

SECOND, DAY = timedelta(seconds=1), timedelta(days=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: Shifts are looked for in spans of this length, at whose days the offsets are compared. In the whole history of all
#: zones no two changes of a zone's offset are less than 3.9 days apart.
_SPAN = 32 * DAY

#: No zone is further from UTC than this, and no clock was ever set back further.
_FURTHEST = DAY


@dataclass(frozen=True, slots=True)
class Schedule:
    """A cron expression in a time zone, checked when it is built.

    `expr` has five fields (minute, hour, day of month, month, day of week), or six with seconds first. A field holds
    `*`, numbers, ranges `1-5`, lists `1,15`, steps `*/10`; months and days of the week also the names JAN, MON; the day
    of month also `L`, the last, and `LW`, the last working day; the day of week (0 and 7 are Sunday) also `5L`, the
    last Friday, and `5#2`, the second. Where both day fields are given, one of them has to match; where one of them
    starts with `*`, both. `@hourly`, `@daily`, `@weekly`, `@monthly` and `@yearly` stand for the usual. `timezone` is a
    name of the IANA database.

    Raises `InvalidJob` naming `cron_expr` or `timezone`, also for an expression that never fires.
    """

    expr: str
    timezone: str = "UTC"
    _fields: str = field(init=False, repr=False, compare=False)
    _zone: tzinfo = field(init=False, repr=False, compare=False)
    _fixed: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        expr = limits.text("cron_expr", self.expr, longest=1000)
        fields = ALIASES.get(expr.strip().lower(), expr)
        object.__setattr__(self, "_fields", _checked(fields))
        object.__setattr__(self, "_zone", _zone(self.timezone))
        minutes, hours = fields.split()[-5:-3]
        object.__setattr__(self, "_fixed", not {"*", "/"} & {*minutes, *hours})

    def after(self, moment: datetime) -> Iterator[datetime]:
        """The ticks after `moment`, an aware datetime, as aware datetimes in UTC."""
        moment = moment.astimezone(UTC)
        return _until_the_end_of_time(self._fixed_after(moment) if self._fixed else self._elapsed_after(moment))

    def before(self, moment: datetime) -> Iterator[datetime]:
        """The ticks at and before `moment`, an aware datetime, newest first, as aware datetimes in UTC."""
        moment = moment.astimezone(UTC)
        return _until_the_end_of_time(self._fixed_before(moment) if self._fixed else self._elapsed_before(moment))

    def local(self, tick: datetime) -> datetime:
        """A tick in the schedule's own zone."""
        return tick.astimezone(self._zone)

    # -------------------------------------------------------------------------------------------------- fixed times
    def _fixed_after(self, moment: datetime) -> Iterator[datetime]:
        latest = moment
        for wall in self._walls(_wall(moment, self._zone)):
            if (tick := _reached(wall, self._zone)) > latest:
                latest = tick
                yield tick

    def _fixed_before(self, moment: datetime) -> Iterator[datetime]:
        # The local clock has shown more than it shows now, if it was set back lately.
        shown = [_wall(shift - SECOND, self._zone) for shift in _shifts(self._zone, moment - _FURTHEST, moment)]
        earliest = moment + SECOND
        for wall in self._walls_back(max([_wall(moment, self._zone), *shown])):
            if (tick := _reached(wall, self._zone)) < earliest:
                earliest = tick
                yield tick

    # ------------------------------------------------------------------------------------------------- elapsed time
    def _elapsed_after(self, moment: datetime) -> Iterator[datetime]:
        start, walls = moment, self._walls(_wall(moment, self._zone))
        while (wall := next(walls, None)) is not None:
            tick = _at(wall, _offset(start, self._zone))
            if shift := next(_shifts(self._zone, start, tick), None):
                start, walls = shift, self._walls(_wall(shift, self._zone) - SECOND)
                continue
            start = tick
            yield tick

    def _elapsed_before(self, moment: datetime) -> Iterator[datetime]:
        end, walls = moment, self._walls_back(_wall(moment, self._zone))
        while (wall := next(walls, None)) is not None:
            tick = _at(wall, _offset(end, self._zone))
            if shifts := [*_shifts(self._zone, tick, end)]:
                end = shifts[-1] - SECOND
                walls = self._walls_back(_wall(end, self._zone))
                continue
            end = tick
            yield tick

    # ---------------------------------------------------------------------------------------------------- local time
    def _walls(self, wall: datetime) -> Iterator[datetime]:
        """The local times after `wall` that match."""
        return CronSim(self._fields, wall)

    def _walls_back(self, wall: datetime) -> Iterator[datetime]:
        """Those at and before `wall`, newest first."""
        return CronSim(self._fields, wall.replace(microsecond=0) + SECOND, reverse=True)


def _checked(expr: str) -> str:
    """An expression that fires at some time, as cronsim is to read it. Raises `InvalidJob`."""
    # Cronsim takes 3-3/2 for 3/2, which goes on to the end of the field.
    fields = re.sub(r"\b(\w+)-\1/\d+", r"\1", expr)
    try:
        first = next(CronSim(fields, datetime(2000, 1, 1)), None)  # noqa: DTZ001 - local time
    except (CronSimError, AssertionError) as exc:  # it asserts that some parts are numbers
        wrong = str(exc).lower() or "bad field"
        hint = ", or one that comes in none of these months" if "month" in wrong else ""
        raise InvalidJob("cron_expr", f"{expr!r} has a {wrong}{hint}: {_ACCEPTED}") from None
    parts = fields.split()
    for part, size in zip(parts, _SIZES[-len(parts) :], strict=True):
        for term in part.split(","):
            step = term.partition("/")[2]
            if step and int(step) > size:
                raise InvalidJob(
                    "cron_expr",
                    f"{expr!r} has a step of {step} in {part!r}, where there are {size} values: steps begin anew there",
                )
    if first is None:
        raise InvalidJob("cron_expr", f"{expr!r} never fires: no day is like this")
    return fields


def _zone(name: object) -> tzinfo:
    """The time zone of an IANA name. Raises `InvalidJob`."""
    name = limits.text("timezone", name)
    if name == "UTC":
        return UTC  # needs no data
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):  # not there; a path; a directory
        known = available_timezones()
    if not known:
        raise InvalidJob(
            "timezone",
            f"{name!r} cannot be looked up: this machine has no time zone database. Install the package tzdata",
        )
    close = get_close_matches(name, known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ", as Europe/Berlin is"
    raise InvalidJob("timezone", f"{name!r} is not a name of the IANA time zone database{hint}")


def _until_the_end_of_time(ticks: Iterator[datetime]) -> Iterator[datetime]:
    try:
        yield from ticks
    except (OverflowError, ValueError):  # before year 1, after year 9999
        return


def _offset(moment: datetime, zone: tzinfo) -> timedelta:
    offset = moment.astimezone(zone).utcoffset()
    assert offset is not None  # noqa: S101
    return offset


def _wall(moment: datetime, zone: tzinfo) -> datetime:
    """What the local clock shows, as a naive datetime."""
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)


def _at(wall: datetime, offset: timedelta) -> datetime:
    """The instant at which a clock with this offset shows `wall`."""
    return (wall - offset).replace(tzinfo=UTC)


def _reached(wall: datetime, zone: tzinfo) -> datetime:
    """The first instant at which the local clock shows `wall` or more."""
    local = wall.replace(tzinfo=zone)
    before, after = local.utcoffset(), local.replace(fold=1).utcoffset()
    assert before is not None  # noqa: S101
    assert after is not None  # noqa: S101
    if before >= after:  # it comes once, or twice
        return _at(wall, before)
    return _shift(zone, _at(wall, after), _at(wall, before))


def _shift(zone: tzinfo, before: datetime, after: datetime) -> datetime:
    """The instant, after `before` and at or before `after`, at which the zone's offset changes."""
    old, low, high = _offset(before, zone), 0, int((after - before) / SECOND)
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(before + middle * SECOND, zone) == old:
            low = middle
        else:
            high = middle
    return before + high * SECOND


def _shifts(zone: tzinfo, start: datetime, end: datetime) -> Iterator[datetime]:
    """The instants after `start`, and at or before `end`, from which on the zone's offset is another."""
    if zone is UTC:
        return
    first, last = ((moment - _EPOCH) // _SPAN for moment in (start, end))
    for number in range(first, last + 1):
        for shift in _shifts_in(zone, number):
            if start < shift <= end:
                yield shift


@lru_cache(maxsize=4096)
def _shifts_in(zone: tzinfo, number: int) -> tuple[datetime, ...]:
    start = _EPOCH + number * _SPAN
    days = [start + n * DAY for n in range(_SPAN // DAY)]
    pairs = [(day, day + DAY) for day in days if _offset(day, zone) != _offset(day + DAY, zone)]
    return tuple(_shift(zone, *pair) for pair in pairs)
