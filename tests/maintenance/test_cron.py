"""Periodic schedules on a real database: who fires what, once, and what stays due."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from sqlalchemy import delete, func, select, text, update
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from awa_sqla import (
    Awa,
    EnqueueRequest,
    FollowUps,
    Job,
    JobArgs,
    JobRecord,
    JobState,
    ScheduledJob,
    Unique,
    claim,
    complete,
    enqueue,
    enqueue_many,
    enqueue_unique,
)
from awa_sqla.maintenance import cron as cron_module
from awa_sqla.maintenance import firing
from awa_sqla.maintenance.cron import Cron
from awa_sqla.maintenance.firing import Fired, fire
from awa_sqla.maintenance.schedules import due, schedules, sync
from awa_sqla.models import CronSchedule
from awa_sqla.models.job import SHARED
from awa_sqla.periodic import as_stored
from tests.databases import libpq_url
from tests.maintenance.cron_rig import (
    MINUTE,
    Once,
    Report,
    Tick,
    a_report,
    change,
    coroutine,
    jobs,
    once,
    row,
    since,
    stored,
    times,
    write,
)


# ---------------------------------------------------------------------------------------------- case 35: who fires
@pytest.mark.case(35)
def test_two_evaluators_over_sixty_ticks_make_sixty_jobs(maker, awa, caplog) -> None:
    awa.periodic("x", "* * * * *", Report())
    write(maker, awa)
    start = datetime(2024, 1, 1, 12, tzinfo=UTC)
    change(maker, "x", counts_from=start)
    barrier = threading.Barrier(2)

    def evaluate() -> int:
        won = 0
        for minute in range(1, 61):
            now = start + minute * MINUTE + timedelta(seconds=1)
            with maker.begin() as session:
                _, (found,) = schedules(session)
                ticks = due(found, now).ticks
                assert len(ticks) == 1
                barrier.wait()  # both have seen the same tick
                won += sum(fire(session, found, tick) is not None for tick in ticks)
            barrier.wait()
        return won

    with ThreadPoolExecutor(2) as pool:
        won = [pool.submit(evaluate) for _ in range(2)]
    assert sum(future.result() for future in won) == 60
    assert times(maker) == [f"{start + n * MINUTE:%Y-%m-%dT%H:%M:%SZ}" for n in range(1, 61)]
    assert caplog.records == []


def test_two_leaders_that_catch_up_make_each_job_once(maker, awa, process, caplog) -> None:
    awa.periodic("x", "* * * * *", Report(), missed_fires="catch_up")
    write(maker, awa)
    since(maker, "x", 60 * MINUTE)
    barrier = threading.Barrier(2)

    async def until_done(cron: Cron) -> None:
        barrier.wait()
        for _ in range(20):
            await cron.look()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: process(until_done), range(2)))
    found = times(maker)
    assert found == sorted(set(found))
    assert len(found) in (60, 61)
    assert caplog.records == []


@pytest.mark.case(35)
def test_a_purged_job_is_not_made_again(maker, awa, look, caplog) -> None:
    awa.periodic("x", "* * * * *", Report())
    write(maker, awa)
    since(maker, "x", MINUTE)
    look()
    FollowUps().attach(maker)
    with maker.begin() as session:
        (job,) = claim(session, "default", limit=1)
        complete(session, job)
    with maker.begin() as session:
        session.connection().execute(delete(Job))
    before = row(maker, "x").last_enqueued_at
    look()
    after = row(maker, "x").last_enqueued_at  # the next minute may have begun meanwhile
    assert len(jobs(maker)) == (after - before) // MINUTE
    assert caplog.records == []


# ------------------------------------------------------------------------------------- case 36: mark and job, or none
@pytest.mark.case(36)
def test_a_job_that_cannot_be_inserted_leaves_its_tick_due(maker, awa, process) -> None:
    awa.periodic("x", "0 0 1 1 *", Report())
    awa.periodic("y", "0 0 1 1 *", Report())
    write(maker, awa)
    since(maker, "x", timedelta(days=367))
    since(maker, "y", timedelta(days=367))
    change(maker, "x", priority=9)

    async def fail_then_fire(cron: Cron) -> None:
        assert await cron.look() <= 2.0
        failed = row(maker, "x")
        assert (failed.last_enqueued_at, failed.last_job_id) == (None, None)
        assert "ck_jobs_hot_priority" in failed.last_error
        assert failed.failed_at is not None
        assert [job.meta["cron_name"] for job in jobs(maker)] == ["y"]  # the other went on
        change(maker, "x", priority=2)
        assert 0 < await cron.look() <= 2.0  # not at once
        assert len(jobs(maker)) == 1
        cron._troubles["x"].until = 0
        await cron.look()

    process(fail_then_fire)
    mended = row(maker, "x")
    (job,) = [job for job in jobs(maker) if job.meta["cron_name"] == "x"]
    assert (mended.last_error, mended.failed_at, mended.last_job_id) == (None, None, job.id)
    assert mended.last_enqueued_at is not None


@pytest.mark.case(36)
@pytest.mark.parametrize("unique", [None, Unique()])
def test_a_crash_between_mark_and_commit_leaves_the_tick_due(maker, awa, look, unique) -> None:
    awa.periodic("x", "* * * * *", Report(), unique=unique)
    write(maker, awa)
    since(maker, "x", MINUTE)
    with maker() as session:
        now, (found,) = schedules(session)
        assert fire(session, found, due(found, now).ticks[0]) is not None
        session.rollback()
    assert row(maker, "x").last_enqueued_at is None
    look()
    assert len(jobs(maker)) == 1


# ------------------------------------------------------------------------------------------- case 37: missed ticks
@pytest.mark.case(37)
def test_after_three_hours_each_policy_does_what_it_says(maker, awa, look, caplog) -> None:
    awa.periodic("skip", "* * * * *", Report(), missed_fires="skip")
    awa.periodic("coalesce", "* * * * *", Report(), missed_fires="coalesce")
    awa.periodic("catch_up", "* * * * *", Report(), missed_fires="catch_up", most_missed=10)
    awa.periodic("all", "* * * * *", Report(), missed_fires="catch_up")
    write(maker, awa)
    for name in awa.schedules:
        since(maker, name, timedelta(hours=3))
    look()
    look()
    found = {
        name: [j.meta["cron_fire_time"] for j in jobs(maker) if j.meta["cron_name"] == name] for name in awa.schedules
    }
    assert len(found["skip"]) in (1, 2)  # the tick of this minute is not late; and another may have come
    assert len(found["coalesce"]) in (1, 2)
    assert len(found["catch_up"]) in (10, 11)
    assert len(found["all"]) in (180, 181)
    assert found["catch_up"] == found["all"][-len(found["catch_up"]) :] == sorted(found["catch_up"])
    told = [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()]
    assert [re.sub(r"17[01]", "170", line) for line in told] == [
        "schedule 'catch_up': 170 older missed ticks are dropped"
    ]


@pytest.mark.case(37)
def test_a_tick_is_skipped_when_it_is_more_than_a_minute_late(maker, awa) -> None:
    awa.periodic("x", "0 * * * *", Report(), missed_fires="skip")
    write(maker, awa)
    tick = datetime(2024, 1, 1, 12, tzinfo=UTC)
    change(maker, "x", counts_from=tick - 10 * MINUTE)
    found = stored(maker, "x")
    assert due(found, tick + MINUTE).ticks == [tick]
    late = due(found, tick + MINUTE + timedelta(seconds=1))
    assert (late.ticks, late.next) == ([], tick + 60 * MINUTE)


def test_ticks_count_from_the_latest_of_the_last_and_of_when_it_was_resumed(maker, awa) -> None:
    awa.periodic("x", "0 * * * *", Report(), missed_fires="catch_up")
    write(maker, awa)
    start = datetime(2024, 1, 1, tzinfo=UTC)
    hour = timedelta(hours=1)
    for fired, resumed in [(start + 3 * hour, start), (start, start + 3 * hour + MINUTE)]:
        change(maker, "x", last_enqueued_at=fired, counts_from=resumed)
        found = due(stored(maker, "x"), start + 5 * hour)
        assert found == ([start + 4 * hour, start + 5 * hour], 0, start + 6 * hour)


def test_a_long_way_is_caught_up_in_bursts_that_keep_nobody_waiting(maker, awa, process) -> None:
    awa.periodic("a", "* * * * *", Report(), missed_fires="catch_up")
    awa.periodic("z", "* * * * *", Report())
    write(maker, awa)
    since(maker, "a", 250 * MINUTE)
    since(maker, "z", MINUTE)

    async def go(cron: Cron) -> None:
        assert await cron.look() == cron_module.BREATH
        assert len(jobs(maker)) == cron_module.BURST + 1
        assert jobs(maker)[0].meta["cron_name"] == "z"
        for _ in range(2):
            await cron.look()

    process(go)
    assert len(jobs(maker)) in (251, 252, 253)


def test_a_look_ends_soon_and_the_next_goes_on_with_what_has_waited_longest(maker, awa, process, monkeypatch) -> None:
    monkeypatch.setattr(cron_module, "ENOUGH", 0.0)
    for number, name in enumerate("cab"):
        awa.periodic(name, "* * * * *", Report())
        write(maker, awa)
        since(maker, name, (30 - number) * MINUTE)

    async def go(cron: Cron) -> None:
        for name in "cab":
            assert await cron.look() == cron_module.BREATH
            assert jobs(maker)[-1].meta["cron_name"] == name

    process(go)
    assert len(jobs(maker)) == 3


# -------------------------------------------------------------------- case 38: what is built, and the roads of a job
@pytest.mark.case(38)
def test_a_callable_is_called_for_each_tick(maker, awa, look) -> None:
    ticks: list[datetime] = []

    def build(tick: datetime) -> Tick:
        ticks.append(tick)
        return Tick(number=len(ticks))

    awa.periodic(
        "x", "0 0 * * *", build, timezone="Asia/Kathmandu", missed_fires="catch_up", queue="q", metadata={"a": 1}
    )
    write(maker, awa)
    since(maker, "x", timedelta(days=3))
    look()
    found = jobs(maker)
    assert [job.args for job in found] == [{"number": 1}, {"number": 2}, {"number": 3}]
    assert [tick.isoformat()[10:] for tick in ticks] == ["T00:00:00+05:45"] * 3
    assert [job.meta for job in found] == [
        {"a": 1, "cron_name": "x", "cron_fire_time": f"{tick.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"} for tick in ticks
    ]
    assert {job.queue for job in found} == {"q"}
    assert row(maker, "x").last_enqueued_at == ticks[-1]
    assert row(maker, "x").last_job_id == found[-1].id


def test_a_callable_may_return_a_request_of_any_kind(maker, awa, look) -> None:
    awa.periodic("plain", "* * * * *", lambda: EnqueueRequest(Report(), queue="a", tags=["x"]), queue="b")
    awa.periodic("later", "* * * * *", lambda: EnqueueRequest(Report(), delay=timedelta(hours=1), metadata={"m": 1}))
    awa.periodic("unique", "* * * * *", once)
    write(maker, awa)
    for name in awa.schedules:
        since(maker, name, MINUTE)
    look()
    with maker() as session:
        (later,) = session.scalars(select(ScheduledJob))
    assert later.state is JobState.SCHEDULED
    assert later.meta["m"] == 1
    assert later.meta["cron_name"] == "later"
    assert row(maker, "later").last_job_id == later.id
    by_name = {job.meta["cron_name"]: job for job in jobs(maker)}
    assert (by_name["plain"].queue, by_name["plain"].tags) == ("a", ["x"])
    assert (by_name["unique"].queue, by_name["unique"].unique_states) == ("once", Unique().mask)


ROADS = ["enqueue", "enqueue_unique", "enqueue_many", "follow-up", "cron", "cron, built", "cron, built as a request"]
ROADS += ["trigger", "trigger with arguments"]


@pytest.mark.case(38)
@pytest.mark.parametrize(
    ("args", "options"),
    [
        (Report(), {}),
        (Report(), {"queue": "q", "priority": 4, "max_attempts": 3, "deadline": MINUTE, "tags": ["a"]}),
        (Once(number=3), {}),
        (Once(number=3), {"unique": Unique(by_queue=True, period=timedelta(days=9999)), "queue": "other"}),
        (Report(format="csv"), {"unique": Unique(states=[JobState.AVAILABLE, JobState.RUNNING])}),
    ],
    ids=["defaults", "options", "unique class", "unique by request", "unique by states"],
)
def test_every_road_makes_the_same_row(maker, process, args: JobArgs, options: dict[str, Any]) -> None:
    def row_of(road: str) -> dict[str, Any] | None:
        if road == "enqueue":
            with maker.begin() as session:
                enqueue(session, args, **options)
        elif road == "enqueue_unique":
            if options.get("unique") is None and not isinstance(args, Once):
                return None
            with maker.begin() as session:
                enqueue_unique(session, args, **options)
        elif road == "enqueue_many":
            with maker.begin() as session:
                enqueue_many(session, [EnqueueRequest(args, **options)])
        elif road == "follow-up":
            follow_ups = FollowUps()
            follow_ups.on_completed(Tick, name="f")(lambda event: EnqueueRequest(args, **options))
            attached = sessionmaker(maker.kw["bind"])
            with follow_ups.attached(attached), attached.begin() as session:
                enqueue(session, Tick(number=1), queue="ticks")
                (job,) = claim(session, "ticks", limit=1)
                complete(session, job)
        else:
            app = Awa()
            if road == "cron, built as a request":
                app.periodic("x", "* * * * *", lambda: EnqueueRequest(args, **options))
            else:
                app.periodic("x", "* * * * *", args if road in ("cron", "trigger") else lambda: args, **options)
            write(maker, app)
            since(maker, "x", MINUTE)
            process(lambda cron: cron.look(), app.schedules.values())
        with maker.begin() as session:
            (record,) = session.scalars(select(JobRecord).where(JobRecord.kind == args.__awa__.kind))
            assert abs(record.run_at - session.scalar(select(func.clock_timestamp()))) < MINUTE
            apart = {"id", "created_at", "run_at", "parent_id", "root_id", "parent_outcome"}
            found = {key: getattr(record, key) for key in SHARED if key not in apart}
            found["meta"] = {key: value for key, value in record.meta.items() if key[:5] not in ("cron_", "trigg")}
            for table in ("jobs_hot", "cron_jobs"):
                session.connection().execute(text(f"DELETE FROM awa.{table}"))
        return found

    first = row_of(ROADS[0])
    assert first is not None
    for road in ROADS[1:]:
        if (found := row_of(road)) is not None:
            assert found == first, road


# ------------------------------------------------------------------------------------------------------ unique jobs
@pytest.mark.parametrize("built", [False, True])
def test_a_duplicate_marks_the_tick_and_is_left_out_without_noise(maker, awa, look, caplog, built) -> None:
    awa.periodic("x", "* * * * *", once if built else Once())
    write(maker, awa)
    with maker.begin() as session:
        enqueue(session, Once())
    since(maker, "x", MINUTE)
    look()
    (job,) = jobs(maker)
    assert "cron_name" not in job.meta
    marked = row(maker, "x")
    assert (marked.last_enqueued_at is None, marked.last_job_id, marked.last_error) == (False, None, None)
    assert caplog.records == []


def test_a_key_that_an_open_transaction_has_claimed_keeps_nobody_waiting(maker, awa, process, caplog) -> None:
    awa.periodic("x", "* * * * *", Once())
    awa.periodic("y", "* * * * *", Report())
    write(maker, awa)
    since(maker, "x", MINUTE)
    since(maker, "y", MINUTE)

    async def go(cron: Cron) -> None:
        with maker() as session:
            enqueue(session, Once())
            session.flush()
            began = monotonic()
            assert await cron.look() == cron_module.AGAIN
            assert monotonic() - began < 10
            assert [job.meta["cron_name"] for job in jobs(maker)] == ["y"]
            assert row(maker, "x").last_enqueued_at is None
            session.commit()
        await cron.look()

    process(go)
    assert row(maker, "x").last_enqueued_at is not None
    assert len([job for job in jobs(maker) if job.kind == "once"]) == 1
    assert caplog.records == []


# ------------------------------------------------------------------------------------------- changed in the meantime
@pytest.mark.parametrize("unique", [None, Unique()])
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(
    "meanwhile",
    ["paused", "deleted", "expression", "zone", "resumed", "fired", "locked", "stored otherwise"],
)
def test_a_schedule_that_is_not_as_it_was_read_does_not_fire(maker, awa, meanwhile, built, unique) -> None:
    awa.periodic("x", "* * * * *", a_report if built else Report(), unique=unique)
    write(maker, awa)
    since(maker, "x", MINUTE)
    found = stored(maker, "x")
    tick = datetime.now(UTC).replace(second=0, microsecond=0)
    past = datetime(2024, 1, 1, tzinfo=UTC)
    with maker() as operator, maker.begin() as session:
        changed: dict[str, dict[str, Any]] = {
            "paused": {"paused_at": past},
            "expression": {"cron_expr": "0 * * * *"},
            "zone": {"timezone": "Europe/Berlin"},
            "resumed": {"counts_from": func.clock_timestamp()},
            "fired": {"last_enqueued_at": tick},
            "locked": {"paused_by": "ops"},
            "stored otherwise": {"args": {}, "kind": "k", "queue": "q"} if not built else {"args": {}},
        }
        if meanwhile == "deleted":
            operator.execute(delete(CronSchedule))
        elif meanwhile == "stored otherwise":
            values = {"args": {"format": "x"}, "kind": "k", "queue": "q"} if built else {"args": None}
            operator.execute(update(CronSchedule).values(**values))
        else:
            operator.execute(update(CronSchedule).values(**changed[meanwhile]))
        if meanwhile != "locked":
            operator.commit()
        session.execute(text("SET LOCAL lock_timeout = '1s'"))
        request = awa.schedules["x"].request(tick) if built else None
        assert fire(session, found, tick, request) is None
    assert jobs(maker) == []


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_every_driver_fires_every_kind(maker, awa, process, driver, caplog) -> None:
    awa.periodic("stored", "0 0 1 1 *", Report(), tags=["a"], deadline=MINUTE, metadata={"n": 1})
    awa.periodic("unique", "0 0 1 1 *", Once())
    awa.periodic("built", "0 0 1 1 *", a_report, tags=["a"], deadline=MINUTE, metadata={"n": 1})
    awa.periodic("built unique", "0 0 1 1 *", lambda: Once(number=1))
    awa.periodic("fails", "0 0 1 1 *", Report())
    process(lambda cron: cron.look(), awa.schedules.values(), driver=driver)
    change(maker, "fails", priority=9)
    for name in awa.schedules:
        since(maker, name, timedelta(days=367))
    del awa.schedules["fails"]  # or its row would be mended
    process(lambda cron: cron.look(), awa.schedules.values(), driver=driver)
    assert {job.meta["cron_name"] for job in jobs(maker)} == set(awa.schedules)
    assert "ck_jobs_hot_priority" in row(maker, "fails").last_error


def test_a_paused_schedule_does_not_fire(maker, awa, look) -> None:
    awa.periodic("x", "* * * * *", Report())
    write(maker, awa)
    since(maker, "x", MINUTE)
    change(maker, "x", paused_at=func.clock_timestamp())
    assert look() == cron_module.LOOK
    assert jobs(maker) == []


def test_a_schedule_that_is_deleted_stays_so_until_the_next_start(maker, awa, process) -> None:
    awa.periodic("x", "* * * * *", Report())

    async def go(cron: Cron) -> None:
        await cron.look()
        with maker.begin() as session:
            session.execute(delete(CronSchedule))
        assert await cron.look() == cron_module.IDLE

    process(go, awa.schedules.values())
    process(lambda cron: cron.look(), awa.schedules.values())
    assert row(maker, "x").name == "x"


def test_a_new_schedule_does_not_fire_what_was_before_it(maker, awa, look) -> None:
    awa.periodic("x", "0 0 1 1 *", Report())
    look()
    assert jobs(maker) == []


def test_a_row_that_was_written_by_hand_fires(maker, look) -> None:
    with maker.begin() as session:
        session.add(
            CronSchedule(
                name="x",
                cron_expr="@hourly",
                kind="report",
                queue="q",
                args={},
                counts_from=datetime(2024, 1, 1, tzinfo=UTC),
            )
        )
    look()
    (job,) = jobs(maker)
    assert (job.kind, job.queue, job.priority, job.max_attempts, job.state) == ("report", "q", 2, 25, "available")


# ----------------------------------------------------------------------------------------------------- whose turn it is
def test_what_is_stored_is_the_leaders_and_what_is_built_the_apps(maker, awa, process) -> None:
    awa.periodic("stored", "* * * * *", Report())
    awa.periodic("built", "0 0 1 1 *", a_report)
    write(maker, awa)
    since(maker, "stored", MINUTE)
    since(maker, "built", timedelta(days=367))
    process(lambda cron: cron.look(), [])  # the leader has another app
    assert [job.meta["cron_name"] for job in jobs(maker)] == ["stored"]
    since(maker, "stored", MINUTE)
    process(lambda cron: cron.look(), awa.schedules.values(), leading=False)
    assert [job.meta["cron_name"] for job in jobs(maker)] == ["stored", "built"]


def test_the_leader_has_the_first_go(maker, awa, process) -> None:
    awa.periodic("x", "* * * * * *", a_report)
    write(maker, awa)
    with maker() as session:
        start = session.scalar(select(func.date_trunc("second", func.clock_timestamp())))
    change(maker, "x", counts_from=start)
    found = stored(maker, "x")

    async def go(cron: Cron) -> None:
        tick = start + timedelta(seconds=1)
        for late, waits in [(0.4, 0.6), (0.9, 0.1)]:
            now = tick + timedelta(seconds=late)
            assert await cron._fire_due(found, due(found, now), now, leading=False) == pytest.approx(waits)
        now = tick + timedelta(seconds=1)
        assert await cron._fire_due(found, due(found, now)._replace(ticks=[tick]), now, leading=False) is None
        await cron._tasks["x"]

    process(go, awa.schedules.values())
    assert len(jobs(maker)) == 1


def test_a_process_that_neither_leads_nor_has_schedules_asks_nothing(process) -> None:
    sent: list[str] = []
    assert process(lambda cron: cron.look(), leading=False, statements=sent) == cron_module.LOOK
    assert sent == []


def test_a_look_with_nothing_due_is_one_statement(maker, awa, process) -> None:
    for n in range(5):
        awa.periodic(f"s{n}", "0 0 1 1 *", Report() if n % 2 else a_report)
    sent: list[str] = []

    async def go(cron: Cron) -> None:
        await cron.look()
        sent.clear()
        assert await cron.look() == cron_module.LOOK
        assert len(sent) == 1

    process(go, awa.schedules.values(), statements=sent)


def test_a_plain_tick_is_one_statement_more(maker, awa, process) -> None:
    awa.periodic("a", "0 0 1 1 *", Report())
    awa.periodic("b", "0 0 1 1 *", a_report)
    write(maker, awa)
    sent: list[str] = []

    async def go(cron: Cron) -> None:
        await cron.look()
        for name in awa.schedules:
            since(maker, name, timedelta(days=367))
        sent.clear()
        await cron.look()

    process(go, awa.schedules.values(), statements=sent)
    assert len(jobs(maker)) == 2
    assert len(sent) == 3


def test_an_app_writes_that_it_still_has_its_schedules(maker, awa, process) -> None:
    awa.periodic("x", "0 0 1 1 *", Report())
    write(maker, awa)
    change(maker, "x", last_seen=func.clock_timestamp() - 1.5 * MINUTE)
    past = row(maker, "x").last_seen
    process(lambda cron: cron.look(), [])
    assert row(maker, "x").last_seen == past
    process(lambda cron: cron.look(), awa.schedules.values(), leading=False)
    assert row(maker, "x").last_seen > past


def test_what_could_not_be_written_at_the_start_is_written_later(maker, awa, process) -> None:
    awa.periodic("x", "0 0 1 1 *", Report())

    async def go(cron: Cron) -> None:
        with maker() as stands_still:
            sync(stands_still, awa.schedules.values())
            assert await cron.look() == cron_module.IDLE
            stands_still.rollback()
        await cron.look()

    process(go, awa.schedules.values())
    assert row(maker, "x").name == "x"


# ------------------------------------------------------------------------------------------------ when to look again
def test_the_next_look_is_at_the_next_tick(maker, awa, process) -> None:
    def clock() -> float:
        with maker() as session:
            return float(session.scalar(select(func.extract("epoch", func.clock_timestamp()))))

    awa.periodic("x", "*/2 * * * * *", Report())
    awa.periodic("y", "0 0 1 1 *", Report())

    async def go(cron: Cron) -> None:
        for _ in range(3):
            before = clock()
            wait = await cron.look()
            # A tick is in the interval at whose end the next look would be.
            assert (clock() + wait + 0.05) // 2 * 2 >= before + wait - 0.05
            assert wait <= 2.0

    process(go, awa.schedules.values())


def test_due_is_what_the_database_says(maker, awa, look, monkeypatch) -> None:
    """Whatever this process's clock shows: it is never asked."""

    class NoClock(datetime):
        @classmethod
        def now(cls, *args: Any) -> Any:
            raise AssertionError("the process's clock was asked")

        utcnow = today = now

    from awa_sqla import cron as expressions
    from awa_sqla import periodic
    from awa_sqla.maintenance import firing
    from awa_sqla.maintenance import schedules as rows

    awa.periodic("x", "* * * * *", Report())
    write(maker, awa)
    since(maker, "x", MINUTE)
    for module in (expressions, periodic, firing, rows, cron_module):
        monkeypatch.setattr(module, "datetime", NoClock, raising=False)
    monkeypatch.setattr("time.time", lambda: 0.0)
    look()
    assert len(jobs(maker)) == 1


def test_workers_are_woken(maker, awa, look, db_url) -> None:
    from awa_sqla.models.wakeups import channel, queue_payload

    awa.periodic("x", "* * * * *", Report(), queue="reports")
    write(maker, awa)
    since(maker, "x", MINUTE)
    with psycopg.connect(libpq_url(db_url), autocommit=True) as listening:
        listening.execute(f"LISTEN {channel('awa')}")
        look()
        heard = [notify.payload for notify in listening.notifies(timeout=10, stop_after=1)]
    assert heard == [queue_payload("reports")]


# ------------------------------------------------------------------------------------------------------- what fails
def test_a_callable_that_raises_stops_nobody_and_is_tried_again_with_growing_pauses(
    maker, awa, process, caplog
) -> None:
    answers: list[Any] = [ValueError("no shop"), SystemExit(3), "text", coroutine(), Report()]

    def build() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    awa.periodic("bad", "0 0 1 1 *", build)
    awa.periodic("good", "0 0 1 1 *", a_report)
    write(maker, awa)
    since(maker, "bad", timedelta(days=367))
    since(maker, "good", timedelta(days=367))

    async def go(cron: Cron) -> None:
        for pause, says in [
            (2, "the callable raised ValueError: no shop"),
            (4, "the callable raised SystemExit: 3"),
            (8, "args: must be built as a JobArgs or an EnqueueRequest, not str"),
            (16, "args: must be built as a JobArgs or an EnqueueRequest, not coroutine"),
        ]:
            assert await cron.look() <= pause
            assert await cron.look() <= pause  # too early
            assert row(maker, "bad").last_error == says
            assert f"tried again in {pause} s" in caplog.messages[-1]
            cron._troubles["bad"].until = 0
        assert [job.meta["cron_name"] for job in jobs(maker)] == ["good"]
        await cron.look()
        assert cron._troubles == {}

    process(go, awa.schedules.values())
    assert [job.meta["cron_name"] for job in jobs(maker)] == ["good", "bad"]
    assert row(maker, "bad").last_error is None
    assert len(caplog.records) == 4
    assert caplog.records[0].exc_info[1].args == ("no shop",)


def test_a_callable_that_hangs_keeps_nobody_waiting_and_is_not_called_again(
    maker, awa, process, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(cron_module, "TAKES", 0.2)
    monkeypatch.setattr(cron_module, "WAITS", 0.05)
    release, calls = threading.Event(), []

    def hang() -> JobArgs:
        calls.append(1)
        release.wait(20)
        return Report()

    awa.periodic("hangs", "0 0 1 1 *", hang)
    awa.periodic("good", "0 0 1 1 *", a_report)
    awa.periodic("stored", "0 0 1 1 *", Report())
    write(maker, awa)
    for name in awa.schedules:
        since(maker, name, timedelta(days=367))

    async def go(cron: Cron) -> None:
        began = monotonic()
        assert await cron.look() <= cron_module.FIRST_GO
        assert monotonic() - began < 10
        assert sorted(job.meta["cron_name"] for job in jobs(maker)) == ["good", "stored"]
        await asyncio.wait(cron._tasks.values())
        for _ in range(3):
            await cron.look()
            if "hangs" in cron._troubles:
                cron._troubles["hangs"].until = 0
        assert len(calls) == 1
        assert "has not returned within 0.2 s" in row(maker, "hangs").last_error
        release.set()
        while "hangs" in cron._running:  # noqa: ASYNC110 - its thread has no event to tell
            await asyncio.sleep(0)
        assert len(jobs(maker)) == 2  # what it returned too late is not fired
        await cron.look()
        assert len(calls) == 2

    process(go, awa.schedules.values())
    assert len(jobs(maker)) == 3
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_a_schedule_that_still_fires_is_not_begun_again(maker, awa, process) -> None:
    awa.periodic("x", "0 0 1 1 *", a_report)
    write(maker, awa)
    since(maker, "x", timedelta(days=367))

    async def go(cron: Cron) -> None:
        fires = asyncio.Event()
        first = cron._tasks["x"] = asyncio.ensure_future(fires.wait())
        assert await cron.look() <= cron_module.FIRST_GO
        assert cron._tasks == {"x": first}
        assert jobs(maker) == []
        fires.set()
        del cron._tasks["x"]
        await cron.look()

    process(go, awa.schedules.values())
    assert len(jobs(maker)) == 1


def test_callables_that_find_no_thread_are_not_called_after_all(maker, awa, process, monkeypatch) -> None:
    monkeypatch.setattr(cron_module, "TAKES", 0.05)
    calls: list[int] = []
    awa.periodic("x", "0 0 1 1 *", lambda: calls.append(1) or Report())
    write(maker, awa)
    since(maker, "x", timedelta(days=367))
    waiting: list[Callable[[], Any]] = []

    async def go(cron: Cron) -> None:
        def busy(build: Callable[[], Any]) -> Awaitable[Any]:
            waiting.append(build)
            return asyncio.get_running_loop().create_future()

        cron._call = busy
        await cron.look()
        assert cron._running == {"x"}
        waiting[0]()
        assert (calls, cron._running) == ([], set())

        async def refuse(build: Callable[[], Any]) -> Any:
            raise RuntimeError("can't start new thread")

        cron._call, cron._troubles["x"].until = refuse, 0
        await cron.look()
        assert "can't start new thread" in row(maker, "x").last_error
        assert cron._running == set()

    process(go, awa.schedules.values())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"cron_expr": "61 * * * *"}, "bad minute"),
        ({"timezone": "Mars/Olympus"}, "IANA"),
        ({"max_attempts": 0}, "ck_jobs_hot_max_attempts"),
        ({"uniqueness": {"states": ["dreaming"]}}, "not what a schedule's row holds"),
        ({"uniqueness": 5}, "not what a schedule's row holds"),
        ({"uniqueness": {**as_stored(Unique()), "period": 1e300}}, "not what a schedule's row holds"),
    ],
)
def test_a_bad_row_is_told_once_and_stops_nobody(maker, awa, process, caplog, values, says) -> None:
    awa.periodic("bad", "0 0 1 1 *", Report())
    awa.periodic("good", "0 0 1 1 *", Report())
    write(maker, awa)
    for name in awa.schedules:
        since(maker, name, timedelta(days=367))
    change(maker, "bad", **values)

    async def go(cron: Cron) -> None:
        for _ in range(3):
            await cron.look()
        assert says in row(maker, "bad").last_error
        assert len(caplog.records) == 1
        change(maker, "bad", cron_expr="0 0 1 1 *", timezone="UTC", max_attempts=1, uniqueness=None)
        if "max_attempts" in values or "uniqueness" in values:
            cron._troubles["bad"].until = 0
        await cron.look()  # another definition is tried at once

    process(go)
    assert sorted(job.meta["cron_name"] for job in jobs(maker)) == ["bad", "good"]


def test_what_a_trigger_or_the_code_makes_of_one_job_stops_nobody(maker, awa, process, monkeypatch) -> None:
    """Whatever it raises: an error of the application's own, or one that nobody has thought of."""
    awa.periodic("bad", "0 0 1 1 *", Report(format="bad"))
    awa.periodic("good", "0 0 1 1 *", Report())
    awa.periodic("odd", "0 0 1 1 *", Once())
    write(maker, awa)
    for name in awa.schedules:
        since(maker, name, timedelta(days=367))

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("out of order")

    monkeypatch.setattr(firing, "job_of", broken)
    with maker.begin() as session:
        session.execute(
            text(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'AB123'; END $$"
            )
        )
        session.execute(
            text(
                "CREATE TRIGGER refuse BEFORE INSERT ON awa.jobs_hot FOR EACH ROW "
                "WHEN (NEW.args ->> 'format' = 'bad') EXECUTE FUNCTION refuse()"
            )
        )
    try:
        process(lambda cron: cron.look())
    finally:
        with maker.begin() as session:
            session.execute(text("DROP FUNCTION refuse CASCADE"))
    assert [job.meta["cron_name"] for job in jobs(maker)] == ["good"]
    assert (row(maker, "bad").last_error, row(maker, "odd").last_error) == ("no", "ZeroDivisionError: out of order")


def test_the_trouble_of_a_schedule_that_is_gone_wakes_nobody(maker, awa, process) -> None:
    awa.periodic("bad", "0 0 1 1 *", Report())
    awa.periodic("good", "0 0 1 1 *", Report())
    write(maker, awa)
    change(maker, "bad", cron_expr="nonsense")

    async def go(cron: Cron) -> None:
        assert 0.1 < await cron.look() <= 2
        assert 0.1 < await cron.look() <= 2
        with maker.begin() as session:
            session.execute(delete(CronSchedule).where(CronSchedule.name == "bad"))
        cron._troubles["bad"].until = 0
        assert await cron.look() == cron_module.LOOK

    process(go)


def test_what_is_wrong_with_the_database_is_the_callers_matter(maker, awa, process) -> None:
    awa.periodic("x", "0 0 1 1 *", Report())
    awa.periodic("y", "0 0 1 1 *", a_report)
    write(maker, awa)
    since(maker, "x", timedelta(days=367))

    async def go(cron: Cron) -> None:
        from sqlalchemy.exc import DBAPIError

        maker_of = cron._maker
        cron._maker = async_sessionmaker(maker_of.kw["bind"].execution_options(postgresql_readonly=True))
        with pytest.raises(DBAPIError):
            await cron.look()
        since(maker, "y", timedelta(days=367))
        change(maker, "x", paused_at=func.clock_timestamp())
        with pytest.raises(DBAPIError):
            await cron.look()
        cron._maker = maker_of
        await cron.look()
        assert cron._troubles == {}

    process(go, awa.schedules.values())
    assert [job.meta["cron_name"] for job in jobs(maker)] == ["y"]
    assert row(maker, "y").last_error is None


def test_a_fired_tick_tells_its_job(maker, awa) -> None:
    awa.periodic("x", "* * * * *", Report())
    write(maker, awa)
    since(maker, "x", MINUTE)
    with maker.begin() as session:
        now, (found,) = schedules(session)
        fired = fire(session, found, due(found, now).ticks[0])
    (job,) = jobs(maker)
    assert fired == Fired(job.id)
    assert (job.parent_id, job.root_id, job.args_version) == (None, None, 1)


def test_a_clock_of_the_database_that_went_back_stops_no_schedule(maker, awa, look, caplog) -> None:
    """It was a day ahead, and schedules fired or were declared in that time."""
    for name in ("fired", "declared", "fine"):
        awa.periodic(name, "* * * * *", Report())
    write(maker, awa)
    tomorrow = func.clock_timestamp() + timedelta(days=1)
    change(maker, "fired", last_enqueued_at=tomorrow)
    change(maker, "declared", counts_from=tomorrow)
    before = row(maker, "fine").counts_from
    assert look() < 1
    assert re.findall("gone back: schedules (.*) count from now", caplog.text) == ["['declared', 'fired']"]
    with maker() as session:
        now, rows = schedules(session)
    assert now is not None
    assert all(found.since <= now for found in rows)
    assert row(maker, "fine").counts_from == before
    caplog.clear()
    since(maker, "declared", 2 * MINUTE)
    look()
    assert len(jobs(maker)) == 1
    assert caplog.records == []


def test_a_mark_in_the_future_that_somebody_holds_is_left_for_later_and_keeps_nobody_waiting(maker, awa, look) -> None:
    awa.periodic("x", "* * * * *", Report())
    awa.periodic("y", "0 0 1 1 *", Report())
    write(maker, awa)
    since(maker, "y", timedelta(days=367))
    change(maker, "x", last_enqueued_at=func.clock_timestamp() + timedelta(days=1))
    with maker.begin() as session:
        session.get_one(CronSchedule, "x", with_for_update=True)
        assert look() == cron_module.LOOK
        assert [job.meta["cron_name"] for job in jobs(maker)] == ["y"]
    assert look() < 1
