"""When schedules fire, against an oracle that walks real time and asks each instant what the local clock shows.

The oracle shares with the package no line and not the library that reads expressions; it has a reader of its own.
"""

from __future__ import annotations

import calendar
import re
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from itertools import islice, pairwise, takewhile
from zoneinfo import ZoneInfo, _zoneinfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awa_sqla import InvalidJob, cron
from awa_sqla.cron import Schedule

DAY, HOUR, MINUTE = 86400, 3600, 60
NAMES = {name.upper(): (n + 1) % 7 for n, name in enumerate(calendar.day_abbr)}
NAMES |= {name.upper(): n for n, name in enumerate(calendar.month_abbr) if name}


# ------------------------------------------------------------------------------------------------------ the oracle
def numbers(field: str, low: int, high: int) -> frozenset[int]:
    found: set[int] = set()
    for term in field.split(","):
        match = re.fullmatch(r"(?:(\*)|(\w+)(?:-(\w+))?)(?:/(\d+))?", term)
        assert match, term
        star, first, last, step = match.groups()
        a = low if star else NAMES.get(first) if first in NAMES else int(first)
        b = high if star or (step and not last) else a if not last else NAMES.get(last) if last in NAMES else int(last)
        found |= set(range(a, b + 1, int(step or 1)))
    return frozenset(found)


class Expression:
    """A cron expression as the oracle reads it."""

    def __init__(self, text: str) -> None:
        fields = text.split()
        seconds, minutes, hours, self.days, months, self.weekdays = fields if len(fields) == 6 else ["0", *fields]
        s, m, h = numbers(seconds, 0, 59), numbers(minutes, 0, 59), numbers(hours, 0, 23)
        self.times = frozenset(a * HOUR + b * MINUTE + c for a in h for b in m for c in s)
        self.months = numbers(months, 1, 12)
        self.fixed = not re.search(r"[*/]", minutes + hours)
        self.both = self.days[0] == "*" or self.weekdays[0] == "*"
        self.on = lru_cache(None)(self._on)

    def _on(self, ordinal: int) -> bool:
        day = date.fromordinal(ordinal)
        if day.month not in self.months:
            return False
        by_day = any(self._is_day(day, term) for term in self.days.split(","))
        by_weekday = any(self._is_weekday(day, term) for term in self.weekdays.split(","))
        return (by_day and by_weekday) if self.both else (by_day or by_weekday)

    @staticmethod
    def _is_day(day: date, term: str) -> bool:
        last = calendar.monthrange(day.year, day.month)[1]
        if term == "L":
            return day.day == last
        if term == "LW":
            working = [n for n in range(1, last + 1) if day.replace(day=n).weekday() < 5]
            return day.day == working[-1]
        return day.day in numbers(term, 1, 31)

    @staticmethod
    def _is_weekday(day: date, term: str) -> bool:
        today = day.isoweekday() % 7
        if term.endswith("L"):
            return today == int(term[:-1]) % 7 and (day + timedelta(days=7)).month != day.month
        if "#" in term:
            which, count = term.split("#")
            number = NAMES[which] if which in NAMES else int(which)
            return today == number % 7 and (day.day - 1) // 7 + 1 == int(count)
        return today in {n % 7 for n in numbers(term, 0, 7)}

    def matches(self, wall: int) -> bool:
        """`wall`: seconds of local time since the epoch of ordinals."""
        return wall % DAY in self.times and self.on(wall // DAY)


EPOCH = date(1970, 1, 1).toordinal() * DAY


class Walk:
    """Every instant of a stretch of time and what the local clock shows then."""

    def __init__(self, name: str, start: datetime, days: float, step: int = MINUTE) -> None:
        zone = ZoneInfo(name)
        self.name, self.step = name, step
        self.start = int(start.replace(tzinfo=UTC).timestamp())
        self.instants = range(self.start, self.start + int(days * DAY), step)
        self.walls = [EPOCH + at + round(_offset(at, zone)) for at in self.instants]
        # What the clock has shown before the start: it may have been set back a moment ago.
        shown = max(EPOCH + at + round(_offset(at, zone)) for at in range(self.start - 2 * DAY, self.start, step))
        # By time of day: all instants, and those at which the clock shows what it has not shown before.
        self.at: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.new: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.skipped: list[tuple[int, range]] = []
        for at, wall in zip(self.instants, self.walls, strict=True):
            self.at[wall % DAY].append((at, wall // DAY))
            if wall > shown:
                self.new[wall % DAY].append((at, wall // DAY))
                if wall - shown > step:
                    self.skipped.append((at, range(shown + step, wall, step)))
                shown = wall

    def ticks(self, text: str) -> list[datetime]:
        expression = Expression(text)
        shown = self.new if expression.fixed else self.at
        found = {at for time in expression.times for at, day in shown[time] if expression.on(day)}
        if expression.fixed:
            found |= {at for at, walls in self.skipped if any(map(expression.matches, walls))}
        return [datetime.fromtimestamp(at, UTC) for at in sorted(found)]


def _offset(at: int, zone: ZoneInfo) -> float:
    offset = datetime.fromtimestamp(at, zone).utcoffset()
    assert offset is not None
    return offset.total_seconds()


def check(walk: Walk, text: str) -> int:
    """Both directions of `Schedule` agree with the oracle; how many ticks there were."""
    expected = walk.ticks(text)
    schedule = Schedule(text, walk.name)
    before_it = datetime.fromtimestamp(walk.start, UTC) - timedelta(microseconds=1)
    last = datetime.fromtimestamp(walk.instants[-1], UTC)
    told = f"{text!r} in {walk.name}"
    forwards = list(takewhile(lambda tick: tick <= last, schedule.after(before_it)))
    assert forwards == expected, told
    backwards = list(takewhile(lambda tick: tick > before_it, schedule.before(last)))
    assert backwards == expected[::-1], told
    return len(expected)


#: Zones, and a start from which on 400 days hold what is odd about them.
ZONES = [
    ("UTC", datetime(2024, 1, 1)),
    ("Europe/Berlin", datetime(2024, 3, 1)),
    ("America/New_York", datetime(2024, 3, 1)),
    ("Australia/Lord_Howe", datetime(2024, 3, 1)),  # by half an hour
    ("Pacific/Auckland", datetime(2024, 3, 1)),
    ("Africa/Casablanca", datetime(2024, 3, 1)),  # set back for Ramadan
    ("America/Sao_Paulo", datetime(2017, 10, 1)),  # shifts at midnight
    ("Asia/Kathmandu", datetime(1985, 12, 1)),  # by a quarter of an hour, for good
    ("Pacific/Apia", datetime(2011, 3, 1)),  # 30 December 2011 does not exist
]
SPARSE = [
    "0 3 * * *",
    "30 2 * * *",
    "15 1 * * *",
    "0 0 * * *",
    "59 23 * * *",
    "0,15,30,45 1-3 * * *",
    "0-10 0,2 * * SUN",
    "5 0 30 12 *",
    "0 * * * *",
    "30 */2 * * *",
    "10-20/5 1,2,3 * * *",
    "*/20 2 * * *",
    "0 9-17 * * MON-FRI",
    "0 2 L * *",
    "0 2 LW * *",
    "0 1 13 * 5",
    "0 1 */2 * 0",
    "0 2 * * 7L",
    "0 2 * MAR,OCT SUN#2",
    "0 0 29 2 *",
]
DENSE = ["* * * * *", "*/7 * * * *", "5/10 * 1-15 * *", "0-29 * * * *"]


#: These are walked in full beside the quick suite, and around their shifts in it.
LATER = {name for name, *_ in ZONES} - {"Australia/Lord_Howe", "Europe/Berlin"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(zone, id=zone[0], marks=[pytest.mark.beside] * (zone[0] in LATER)) for zone in ZONES],
)
def walk(request: pytest.FixtureRequest) -> Walk:
    return Walk(*request.param, days=400)


def test_400_days_are_as_the_oracle_says(walk: Walk) -> None:
    assert sum(check(walk, text) for text in SPARSE) > 10_000


@pytest.mark.beside
@pytest.mark.parametrize("text", DENSE)
def test_400_days_of_dense_schedules_are_as_the_oracle_says(walk: Walk, text: str) -> None:
    assert check(walk, text) > 20_000


#: Zones and the moments of their shifts, in UTC.
SHIFTS = [
    ("Europe/Berlin", datetime(2024, 3, 31, 1)),
    ("Europe/Berlin", datetime(2024, 10, 27, 1)),
    ("America/New_York", datetime(2024, 3, 10, 7)),
    ("America/New_York", datetime(2024, 11, 3, 6)),
    ("Australia/Lord_Howe", datetime(2024, 4, 6, 15)),
    ("Australia/Lord_Howe", datetime(2024, 10, 5, 15, 30)),
    ("Pacific/Auckland", datetime(2024, 9, 28, 14)),
    ("Africa/Casablanca", datetime(2024, 3, 10, 2)),
    ("Africa/Casablanca", datetime(2024, 4, 14, 2)),
    ("America/Sao_Paulo", datetime(2017, 10, 15, 3)),
    ("America/Sao_Paulo", datetime(2018, 2, 18, 2)),
    ("Asia/Kathmandu", datetime(1985, 12, 31, 18, 30)),
    ("Pacific/Apia", datetime(2011, 12, 30, 10)),
    ("Pacific/Kwajalein", datetime(1969, 9, 30, 13)),  # set back by 23 hours
    ("Antarctica/Troll", datetime(2024, 3, 31, 1)),  # two hours
    ("Antarctica/Troll", datetime(2024, 10, 27, 1)),
]


@lru_cache
def around(name: str, shift: datetime, step: int = MINUTE, days: float = 3) -> Walk:
    return Walk(name, shift - timedelta(days=days / 2), days, step)


@pytest.mark.parametrize(("name", "shift"), SHIFTS)
def test_the_oracle_walks_over_shifts(name: str, shift: datetime) -> None:
    walls = around(name, shift).walls
    assert any(b - a != MINUTE for a, b in pairwise(walls))


@pytest.mark.parametrize(("name", "shift"), SHIFTS)
def test_dense_schedules_around_a_shift_are_as_the_oracle_says(name: str, shift: datetime) -> None:
    for text in DENSE:
        check(around(name, shift), text)


SECONDS = ["*/10 30 2 * * *", "0,30 59 0-3 * * *", "5/20 * * * * *", "59 */10 1-3 * * *", "30 14 0 7 1 *"]


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("Europe/Berlin", datetime(2024, 3, 31, 1)),
        ("Australia/Lord_Howe", datetime(2024, 4, 6, 15)),
        ("America/Sao_Paulo", datetime(2017, 10, 15, 3)),
        ("Africa/Monrovia", datetime(1972, 1, 7, 0, 44, 30)),  # by 44 minutes and 30 seconds
    ],
)
def test_schedules_of_seconds_are_as_the_oracle_says(name: str, shift: datetime) -> None:
    walk = around(name, shift, 1, 0.5)
    for text in SECONDS:
        check(walk, text)


@st.composite
def fields(draw: st.DrawFn, low: int, high: int, *, star: bool = True) -> str:
    def term() -> str:
        a, b = sorted([draw(st.integers(low, high)), draw(st.integers(low, high))])
        step = f"/{draw(st.integers(1, max(high - low, 1)))}" if star and draw(st.booleans()) else ""
        body = draw(st.sampled_from(["*", f"{a}-{b}", f"{a}"] if star else [f"{a}-{b}", f"{a}"]))
        return body + step

    return ",".join(term() for _ in range(draw(st.integers(1, 3))))


@st.composite
def expressions(draw: st.DrawFn) -> str:
    star = draw(st.booleans())
    minutes, hours = draw(fields(0, 59, star=star)), draw(fields(0, 23, star=star))
    days = draw(st.sampled_from(["*", "*", "*/2", "31,30,15,1-7", "L", "8-14"]))
    weekdays = draw(st.sampled_from(["*", "*", "SUN", "0-3", "7", "SAT,2"]))
    return f"{minutes} {hours} {days} * {weekdays}"


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SHIFTS), expressions())
def test_any_schedule_around_a_shift_is_as_the_oracle_says(shift: tuple[str, datetime], text: str) -> None:
    check(around(*shift), text)


@pytest.mark.parametrize(("name", "shift"), SHIFTS)
def test_the_neighbours_of_any_moment_around_a_shift_are_those_of_the_oracle(name: str, shift: datetime) -> None:
    for text in ["30 * * * *", "15,45 0-4,22 * * *", "0-59/3 2 * * *", "10 0,1,2,3 * * *"]:
        ticks, schedule = around(name, shift).ticks(text), Schedule(text, name)
        for minutes in range(-300, 300, 7):
            moment = shift.replace(tzinfo=UTC) + timedelta(minutes=minutes)
            told = f"{text!r} in {name} at {moment}"
            assert next(schedule.before(moment)) == max(tick for tick in ticks if tick <= moment), told
            assert next(schedule.after(moment)) == min(tick for tick in ticks if tick > moment), told


# ------------------------------------------------------------------------------------------------ the rule, in words
def told(schedule: Schedule, day: str, count: int = 3) -> list[str]:
    start = datetime.fromisoformat(day).replace(tzinfo=UTC)
    ticks = [tick for tick, _ in zip(schedule.after(start), range(count), strict=False)]
    return [schedule.local(tick).isoformat() for tick in ticks]


def test_a_fixed_time_that_is_skipped_fires_at_the_shift() -> None:
    assert told(Schedule("30 2 * * *", "Europe/Berlin"), "2024-03-30T12:00") == [
        "2024-03-31T03:00:00+02:00",
        "2024-04-01T02:30:00+02:00",
        "2024-04-02T02:30:00+02:00",
    ]


def test_times_that_one_shift_skips_fire_there_once() -> None:
    assert told(Schedule("15,30,45 2,3 * * *", "Europe/Berlin"), "2024-03-30T12:00", 2) == [
        "2024-03-31T03:00:00+02:00",
        "2024-03-31T03:15:00+02:00",
    ]


def test_a_fixed_time_that_comes_twice_fires_at_the_first() -> None:
    assert told(Schedule("30 2 * * *", "Europe/Berlin"), "2024-10-26T12:00", 2) == [
        "2024-10-27T02:30:00+02:00",
        "2024-10-28T02:30:00+01:00",
    ]


def test_an_hour_that_comes_twice_fires_twice_by_elapsed_time() -> None:
    assert told(Schedule("30 * * * *", "Europe/Berlin"), "2024-10-26T23:45") == [
        "2024-10-27T02:30:00+02:00",
        "2024-10-27T02:30:00+01:00",
        "2024-10-27T03:30:00+01:00",
    ]


def test_a_moment_that_is_a_tick_is_before_and_not_after() -> None:
    schedule, tick = Schedule("0 3 * * *"), datetime(2024, 5, 1, 3, tzinfo=UTC)
    assert next(schedule.before(tick)) == tick
    assert next(schedule.after(tick)) == tick + timedelta(days=1)
    assert next(schedule.before(tick - timedelta(microseconds=1))) == tick - timedelta(days=1)
    assert next(schedule.after(tick - timedelta(microseconds=1))) == tick


def test_ticks_end_with_the_calendar() -> None:
    assert list(Schedule("0 0 1 1 *", "Europe/Berlin").after(datetime(9998, 1, 1, tzinfo=UTC)))[1:] == []
    assert list(Schedule("0 * 1 1 *", "Europe/Berlin").before(datetime(2, 1, 1, tzinfo=UTC)))[24:] == []


def test_a_schedule_of_a_rare_day_finds_it() -> None:
    assert told(Schedule("0 12 * 2 MON#5"), "2024-01-01", 1) == ["2044-02-29T12:00:00+00:00"]


def test_no_zone_changes_twice_within_the_days_that_are_compared() -> None:
    """What the search for shifts takes for granted, in every zone and all of its history."""
    for name in available_timezones():
        zone = _zoneinfo.ZoneInfo.no_cache(name)
        changes, old = [], zone._tti_before.utcoff if zone._tti_before else None
        for at, info in zip(zone._trans_utc, zone._ttinfos, strict=True):
            if info.utcoff != old:
                changes.append(at)
            old = info.utcoff
        assert all(b - a > 3 * DAY for a, b in pairwise(changes)), name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must not be empty"),
        ("* * * *", "wrong number of fields"),
        ("0 0 0 1 1 * *", "wrong number of fields"),
        ("60 * * * *", "bad minute"),
        ("* 24 * * *", "bad hour"),
        ("0 0 */31 * SAT#5", "never fires"),
        ("0 0 31 2 *", "comes in none of these months"),
        ("0 0 * 13 *", "bad month"),
        ("0 0 * * 8", "bad day-of-week"),
        ("0 0 * * MON#6", "bad day-of-week"),
        ("*/90 * * * *", "step of 90 in '*/90', where there are 60 values"),
        ("0 */25 * * *", "step of 25"),
        ("0 0 ? * *", "bad day-of-month"),
        ("@reboot", "@daily"),
        ("\x00", "NUL"),
    ],
)
def test_a_bad_expression_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidJob, match=re.escape(says)) as caught:
        Schedule(text)
    assert caught.value.field == "cron_expr"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Europe/Berln", "did you mean 'Europe/Berlin'?"),
        ("Europe", "IANA"),
        ("../etc/passwd", "IANA"),
        ("x" * 201, "at most 200"),
        (3, "must be text"),
    ],
)
def test_a_bad_zone_is_refused(name: str, says: str) -> None:
    with pytest.raises(InvalidJob, match=re.escape(says)) as caught:
        Schedule("0 0 * * *", name)
    assert caught.value.field == "timezone"


def test_a_machine_without_time_zones_says_which_package_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cron, "available_timezones", set)
    with pytest.raises(InvalidJob, match="Install the package tzdata"):
        Schedule("0 0 * * *", "Nowhere/Land")
    monkeypatch.setattr(cron, "ZoneInfo", None)
    assert next(Schedule("0 0 * * *", "UTC").after(datetime(2024, 1, 1, tzinfo=UTC)))


def test_a_range_of_one_has_one_value_whatever_its_step() -> None:
    walk = around("Europe/Berlin", datetime(2024, 3, 31, 1))
    for text in ["0 3-3/2 * * *", "10-10/5 * * * *", "0 0 * * 1-1/2", "0 0 * MAR-MAR/2 *"]:
        check(walk, text)


def test_aliases_and_names_of_any_case() -> None:
    moment = datetime(2024, 5, 1, tzinfo=UTC)
    for alias, fields in cron.ALIASES.items():
        three = islice(Schedule(alias.upper()).after(moment), 3)
        assert [*three] == [*islice(Schedule(fields).after(moment), 3)]
    assert next(Schedule("0 0 * jan mon").after(moment)) == next(Schedule("0 0 * 1 1").after(moment))


def test_a_moment_may_be_in_any_zone() -> None:
    moment = datetime(2024, 5, 1, 12, tzinfo=ZoneInfo("Asia/Kathmandu"))
    assert next(Schedule("0 12 * * *", "Asia/Kathmandu").before(moment)) == moment
