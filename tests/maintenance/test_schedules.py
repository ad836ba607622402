"""Periodic schedules as they are declared and written."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, text

from awa_sqla import (
    Awa,
    ConfigurationError,
    EnqueueRequest,
    InvalidJob,
    JobArgs,
    Unique,
)
from awa_sqla.maintenance.schedules import seen, sync
from awa_sqla.models import CronSchedule
from tests.maintenance.cron_rig import (
    MINUTE,
    Report,
    Tick,
    a_report,
    change,
    coroutine,
    row,
    write,
)


# ------------------------------------------------------------------------------------------------------ registering
def test_registering_does_no_io_and_keeps_what_was_said(awa: Awa) -> None:
    made = awa.periodic("nightly", "0 3 * * *", Report(format="csv"), timezone="Pacific/Auckland", queue="reports")
    assert awa.schedules == {"nightly": made}
    assert made.columns() == {
        "name": "nightly",
        "cron_expr": "0 3 * * *",
        "timezone": "Pacific/Auckland",
        "kind": "report",
        "queue": "reports",
        "args": {"format": "csv"},
        "args_version": 1,
        "priority": 2,
        "max_attempts": 25,
        "deadline_seconds": None,
        "tags": [],
        "metadata": {},
        "uniqueness": None,
        "missed_fire_policy": "coalesce",
        "most_missed": 1000,
    }


class Called:
    async def __call__(self) -> JobArgs:
        return Report()


def two(a: int, b: int) -> JobArgs:
    return Report()


def by_keyword(*, needed: int) -> JobArgs:
    return Report()


@pytest.mark.parametrize("source", [coroutine, Called(), two, by_keyword])
def test_a_callable_that_cannot_be_called_is_refused(awa: Awa, source: Any) -> None:
    with pytest.raises(ConfigurationError, match="periodic 'x'"):
        awa.periodic("x", "* * * * *", source)
    assert awa.schedules == {}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("name", {"name": ""}),
        ("cron_expr", {"expr": "nonsense"}),
        ("timezone", {"timezone": "Mars/Olympus"}),
        ("args", {"args": Report}),
        ("args", {"args": EnqueueRequest(Report())}),
        ("args", {"args": 7}),
        ("args.number", {"args": Tick.model_construct(number=float("nan"))}),
        ("missed_fires", {"missed_fires": "always"}),
        ("most_missed", {"most_missed": 0}),
        ("most_missed", {"most_missed": 10_001}),
        ("queue", {"queue": ""}),
        ("priority", {"priority": 5}),
        ("max_attempts", {"max_attempts": 0}),
        ("deadline", {"deadline": 5}),
        ("tags", {"tags": "text"}),
        ("metadata", {"metadata": 3}),
        ("unique", {"unique": True}),
    ],
)
def test_a_bad_option_is_refused_by_its_name(awa: Awa, field: str, given: dict[str, Any]) -> None:
    options: dict[str, Any] = {"name": "x", "expr": "* * * * *", "args": Report(), **given}
    with pytest.raises(InvalidJob) as caught:
        awa.periodic(options.pop("name"), options.pop("expr"), options.pop("args"), **options)
    assert caught.value.field == field
    assert awa.schedules == {}


def test_a_name_is_given_once_and_options_are_known(awa: Awa) -> None:
    awa.periodic("x", "* * * * *", Report())
    with pytest.raises(ConfigurationError, match="two periodic schedules 'x'"):
        awa.periodic("x", "0 * * * *", Report())
    with pytest.raises(TypeError, match="takes no run_at"):
        awa.periodic("y", "* * * * *", Report(), run_at=None)  # type: ignore[call-arg]


def test_a_callable_gets_the_tick_in_its_zone_only_when_it_needs_an_argument(awa: Awa) -> None:
    got: list[Any] = []
    tick = datetime(2024, 7, 1, 1, tzinfo=UTC)
    awa.periodic("needs", "0 3 * * *", lambda at: got.append(at) or Report(), timezone="Europe/Berlin")
    awa.periodic("closes", "0 3 * * *", lambda at="mine": got.append(at) or Report())
    for periodic in awa.schedules.values():
        periodic.request(tick)
    assert [got[0].isoformat(), got[1]] == ["2024-07-01T03:00:00+02:00", "mine"]


# ------------------------------------------------------------------------------------------------ writing the rows
def test_what_is_written_once_is_not_written_again(maker, awa) -> None:
    awa.periodic("a", "0 3 * * *", Report(), unique=Unique(period=timedelta(hours=1)), deadline=MINUTE)
    awa.periodic("b", "0 3 * * *", a_report, tags=["x"], metadata={"n": 1e30})
    write(maker, awa)
    with maker.begin() as session:
        session.execute(text("SET TRANSACTION READ ONLY"))
        assert sync(session, awa.schedules.values()) == frozenset()


def test_a_changed_schedule_counts_from_now_and_keeps_its_pause_and_its_last_tick(maker, awa) -> None:
    awa.periodic("x", "0 3 * * *", Report())
    write(maker, awa)
    past = datetime(2024, 1, 1, tzinfo=UTC)
    change(maker, "x", last_enqueued_at=past, paused_at=past, paused_by="ops", counts_from=past, failed_at=past)
    other = Awa()
    other.periodic("x", "0 3 * * *", Report(format="csv"))
    write(maker, other)
    now = row(maker, "x")
    assert (now.args, now.counts_from, now.last_enqueued_at) == ({"format": "csv"}, past, past)
    assert (now.paused_at, now.paused_by, now.failed_at) == (past, "ops", None)
    for expr, timezone in [("0 4 * * *", "UTC"), ("0 4 * * *", "Asia/Kathmandu")]:
        change(maker, "x", counts_from=past)
        another = Awa()
        another.periodic("x", expr, Report(), timezone=timezone)
        write(maker, another)
        assert row(maker, "x").counts_from > past
        assert row(maker, "x").paused_at == past


def test_true_is_not_one(maker, awa) -> None:
    awa.periodic("x", "0 3 * * *", Report(), metadata={"n": 1})
    write(maker, awa)
    other = Awa()
    other.periodic("x", "0 3 * * *", Report(), metadata={"n": True})
    write(maker, other)
    assert row(maker, "x").meta["n"] is True


def test_what_an_app_no_longer_has_stays(maker, awa) -> None:
    awa.periodic("x", "0 3 * * *", Report())
    write(maker, awa)
    write(maker, Awa())
    assert row(maker, "x").cron_expr == "0 3 * * *"


def test_a_start_waits_for_no_process_that_stands_still(maker, awa) -> None:
    awa.periodic("x", "0 3 * * *", Report())
    awa.periodic("y", "0 3 * * *", Report())
    with maker() as stands_still, maker.begin() as session:
        session.execute(text("SET LOCAL lock_timeout = '1s'"))
        sync(stands_still, awa.schedules.values())
        assert sync(session, awa.schedules.values()) == {"x", "y"}
        stands_still.rollback()
    write(maker, awa)
    other = Awa()
    other.periodic("x", "0 4 * * *", Report())
    other.periodic("y", "0 4 * * *", Report())
    with maker() as operator, maker.begin() as session:
        session.execute(text("SET LOCAL lock_timeout = '1s'"))
        operator.get_one(CronSchedule, "x").paused_by = "ops"
        operator.flush()
        assert sync(session, other.schedules.values()) == {"x"}
    assert (row(maker, "x").cron_expr, row(maker, "y").cron_expr) == ("0 3 * * *", "0 4 * * *")


def test_starts_at_the_same_time_do_not_deadlock(maker) -> None:
    barrier, apps = threading.Barrier(4), [Awa() for _ in range(4)]
    for number, app in enumerate(apps):
        for n in range(40) if number % 2 else reversed(range(40)):
            app.periodic(f"s{n}", "0 3 * * *", Report(format=str(number)))

    def start(app: Awa) -> None:
        barrier.wait()
        left = frozenset(app.schedules)
        while left:
            with maker.begin() as session:
                left = sync(session, [app.schedules[name] for name in left])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(start, apps))
    with maker() as session:
        assert len({row.args["format"] for row in session.scalars(select(CronSchedule))}) == 1


def test_that_a_schedule_is_seen_is_written_once_a_minute_and_waits_for_no_lock(maker, awa) -> None:
    for name in ("old", "new", "held"):
        awa.periodic(name, "0 3 * * *", Report())
    write(maker, awa)
    past = datetime(2024, 1, 1, tzinfo=UTC)
    change(maker, "old", last_seen=past)
    change(maker, "held", last_seen=past)
    new = row(maker, "new").last_seen
    with maker() as operator, maker.begin() as session:
        operator.get_one(CronSchedule, "held", with_for_update=True)
        session.execute(text("SET LOCAL lock_timeout = '1s'"))
        seen(session, ["old", "new", "held", "unknown"])
    assert row(maker, "old").last_seen > past
    assert (row(maker, "new").last_seen, row(maker, "held").last_seen) == (new, past)
