"""The operator verbs on periodic schedules: each in the caller's transaction, with its entry in the audit log."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import URL, Engine, func, select, update
from sqlalchemy import inspect as inspected
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import (
    Awa,
    InvalidJob,
    Job,
    JobArgs,
    Unique,
    UniqueConflict,
    UnsupportedSession,
    admin,
    enqueue,
)
from awa_sqla.asyncio import admin as async_admin
from awa_sqla.cron import Schedule
from awa_sqla.maintenance.firing import fire
from awa_sqla.maintenance.schedules import due, schedules, sync
from awa_sqla.models import AuditEntry, CronSchedule
from awa_sqla.session import lineage

PAST = datetime(2024, 1, 1, tzinfo=UTC)


class Report(JobArgs, tags=("r",), deadline=timedelta(minutes=1), version=3):
    format: str = "pdf"


class Once(JobArgs, unique=Unique()):
    number: int = 0


def built() -> JobArgs:
    return Report(format="built")


@pytest.fixture
def maker(engine: Engine) -> sessionmaker[Session]:
    """With schedules "nightly", whose arguments are stored, "built" and "once"."""
    awa, maker = Awa(), sessionmaker(engine)
    awa.periodic("nightly", "0 3 * * *", Report(), timezone="Europe/Berlin", metadata={"a": 1}, queue="q")
    awa.periodic("built", "0 3 * * *", built, queue="b", priority=1, tags=["x"], metadata={"b": 2})
    awa.periodic("once", "0 3 * * *", Once())
    with maker.begin() as session:
        sync(session, awa.schedules.values())
        session.execute(update(CronSchedule).values(counts_from=PAST))
    return maker


def audit(maker: sessionmaker[Session]) -> list[tuple[Any, ...]]:
    with maker() as session:
        entries = session.scalars(select(AuditEntry).order_by(AuditEntry.id))
        return [(e.source, e.verb, e.target, e.count, e.actor, e.reason) for e in entries]


def row(maker: sessionmaker[Session], name: str) -> CronSchedule:
    with maker() as session:
        return session.get_one(CronSchedule, name)


def test_schedules_are_listed_whole_and_belong_to_no_session(maker) -> None:
    with maker() as session:
        mine = session.get_one(CronSchedule, "once")
        mine.paused_by = "a change of my own"
        found = admin.list_schedules(session)
        assert mine in session
    assert [schedule.name for schedule in found] == ["built", "nightly", "once"]
    assert found[2].paused_by == "a change of my own"
    assert all(inspected(schedule).detached and not inspected(schedule).unloaded for schedule in found)
    assert (found[1].kind, found[1].args, found[1].args_version) == ("report", {"format": "pdf"}, 3)
    assert audit(maker) == []


def test_pause_and_resume(maker) -> None:
    with maker.begin() as session:
        mine = session.get_one(CronSchedule, "nightly")
        paused = admin.pause_schedule(session, "nightly", actor="ada", reason="stocktaking")
        assert (paused.paused_by, mine.paused_by) == ("ada", "ada")
        assert inspected(paused).detached
        again = admin.pause_schedule(session, "nightly", actor="bob")
        assert (again.paused_at, again.paused_by) == (paused.paused_at, "ada")
    with maker.begin() as session:
        resumed = admin.resume_schedule(session, "nightly")
        assert (resumed.paused_at, resumed.paused_by) == (None, None)
        assert resumed.counts_from > paused.paused_at
        again = admin.resume_schedule(session, "nightly")
        assert again.counts_from == resumed.counts_from
    assert audit(maker) == [
        ("python", "pause_schedule", "nightly", 1, "ada", "stocktaking"),
        ("python", "pause_schedule", "nightly", 1, "bob", None),
        ("python", "resume_schedule", "nightly", 1, None, None),
        ("python", "resume_schedule", "nightly", 1, None, None),
    ]


def test_what_was_missed_while_paused_does_not_fire(maker) -> None:
    with maker.begin() as session:
        session.execute(update(CronSchedule).values(last_enqueued_at=PAST))
        admin.pause_schedule(session, "nightly")
    with maker.begin() as session:
        admin.resume_schedule(session, "nightly")
        now, rows = schedules(session)
    found = {stored.name: due(stored, now).ticks for stored in rows}
    assert (found["nightly"], len(found["once"])) == ([], 1)


@pytest.mark.parametrize("paused", [False, True])
def test_triggering_makes_a_job_now_and_touches_no_tick(maker, paused) -> None:
    with maker.begin() as session:
        if paused:
            admin.pause_schedule(session, "nightly")
        job = admin.trigger_schedule(session, "nightly", actor="ada")
        assert job.id
        assert job in session
    with maker() as session:
        (job,) = session.scalars(select(Job))
        now = session.scalar(select(func.clock_timestamp()))
    fired_at = datetime.fromisoformat(job.meta["cron_fire_time"])
    assert timedelta(0) <= now - fired_at < timedelta(minutes=1)
    assert job.meta == {
        "a": 1,
        "cron_name": "nightly",
        "cron_fire_time": f"{fired_at:%Y-%m-%dT%H:%M:%SZ}",
        "triggered_manually": True,
    }
    assert (job.kind, job.queue, job.args, job.args_version) == ("report", "q", {"format": "pdf"}, 3)
    assert (job.tags, job.deadline_seconds, job.state) == (["r"], 60.0, "available")
    assert (row(maker, "nightly").last_enqueued_at, row(maker, "nightly").last_job_id) == (None, None)
    assert audit(maker)[-1] == ("python", "trigger_schedule", "nightly", 1, "ada", None)


def test_the_job_of_a_trigger_is_that_of_a_tick(maker) -> None:
    with maker.begin() as session:
        by_hand = admin.trigger_schedule(session, "nightly").id
        now, rows = schedules(session)
        stored = next(stored for stored in rows if stored.name == "nightly")
        fired = fire(session, stored, due(stored, now).ticks[0])
    apart = {"id", "created_at", "run_at", "meta"}
    with maker() as session:
        rows_of = [session.get_one(Job, job_id) for job_id in (by_hand, fired.job_id)]
        keys = [key for key in inspected(Job).column_attrs.keys() if key not in apart]  # noqa: SIM118
        first, second = [{key: getattr(job, key) for key in keys} for job in rows_of]
    assert first == second


def test_other_arguments_have_the_schedules_options(maker) -> None:
    with maker.begin() as session:
        job = admin.trigger_schedule(session, "built", args=Report(format="csv"))
        other = admin.trigger_schedule(session, "nightly", args=Report(format="csv"))
        assert (job.args, job.queue, job.priority, job.tags) == ({"format": "csv"}, "b", 1, ["x"])
        assert (job.meta["b"], job.meta["triggered_manually"]) == (2, True)
        assert (other.args, other.queue, other.tags, other.deadline_seconds) == ({"format": "csv"}, "q", ["r"], 60.0)
        with pytest.raises(
            InvalidJob, match="are of kind 'once', and schedule 'nightly' is of kind 'report'"
        ) as caught:
            admin.trigger_schedule(session, "nightly", args=Once())
        assert caught.value.field == "args"


def test_arguments_that_the_app_builds_must_be_given(maker) -> None:
    with maker.begin() as session, pytest.raises(InvalidJob, match="pass args=") as caught:
        admin.trigger_schedule(session, "built")
    assert caught.value.field == "args"
    assert audit(maker) == []


def test_a_unique_job_that_is_there_already_is_a_conflict_and_costs_nothing(maker) -> None:
    with maker.begin() as session:
        first = admin.trigger_schedule(session, "once")
        kept = enqueue(session, Report())
        session.flush()
        ids = [first.id, kept.id]
        for args in (None, Once()):
            with pytest.raises(UniqueConflict) as caught:
                admin.trigger_schedule(session, "once", args=args)
            assert caught.value.existing_id == first.id
    with maker() as session:
        assert [job.id for job in session.scalars(select(Job).order_by(Job.id))] == ids
    assert len(audit(maker)) == 1


def test_a_trigger_inside_a_handler_makes_a_child(maker) -> None:
    with maker.begin() as session:
        parent = enqueue(session, Report())
        session.flush()

        def handler(args: JobArgs | None) -> Job:
            lineage.run_under(lineage.Parent.of(parent))
            return admin.trigger_schedule(session, "nightly", args=args)

        for args in (None, Report()):
            job = copy_context().run(handler, args)
            assert (job.parent_id, job.root_id) == (parent.id, parent.id)


def test_a_deleted_schedule_is_gone(maker) -> None:
    with maker.begin() as session:
        mine = session.get_one(CronSchedule, "nightly")
        assert admin.delete_schedule(session, "nightly", actor="ada") is True
        assert mine not in session
        assert admin.delete_schedule(session, "nightly") is False
    with maker() as session:
        assert session.get(CronSchedule, "nightly") is None
    assert audit(maker) == [("python", "delete_schedule", "nightly", 1, "ada", None)]


@pytest.mark.parametrize("verb", [admin.pause_schedule, admin.resume_schedule, admin.trigger_schedule])
def test_a_name_that_is_not_there_is_told_with_its_neighbours(maker, verb) -> None:
    with maker.begin() as session:
        with pytest.raises(InvalidJob, match="there is no schedule 'nihtly'; did you mean 'nightly'") as caught:
            verb(session, "nihtly")
        assert caught.value.field == "name"
        assert session.scalar(select(1)) == 1
    assert audit(maker) == []


VERBS = [admin.pause_schedule, admin.resume_schedule, admin.trigger_schedule, admin.delete_schedule]


@pytest.mark.parametrize("verb", VERBS)
def test_what_an_operator_did_is_the_callers_transaction(maker, verb) -> None:
    with maker() as session:
        before = admin.list_schedules(session)
        verb(session, "nightly")
        session.rollback()
        assert [vars_of(s) for s in admin.list_schedules(session)] == [vars_of(s) for s in before]
        assert session.scalar(select(func.count()).select_from(Job)) == 0
    assert audit(maker) == []


def vars_of(schedule: CronSchedule) -> dict[str, Any]:
    return {key: value for key, value in vars(schedule).items() if not key.startswith("_")}


@pytest.mark.parametrize("verb", VERBS)
def test_actor_and_reason_are_checked(maker, verb) -> None:
    with maker.begin() as session:
        for field, value in [
            ("actor", ""),
            ("actor", 7),
            ("actor", "x" * 201),
            ("reason", "\x00"),
            ("reason", "x" * 2001),
        ]:
            with pytest.raises(InvalidJob) as caught:
                verb(session, "nightly", **{field: value})
            assert caught.value.field == field
    assert audit(maker) == []


@pytest.mark.parametrize("verb", [admin.list_schedules, *VERBS])
def test_another_kind_of_session_is_refused_with_the_right_name(verb) -> None:
    name = verb.__name__
    given = [] if name == "list_schedules" else ["x"]
    with pytest.raises(UnsupportedSession, match=rf"await awa_sqla.asyncio.admin.{name}"):
        verb(AsyncSession(), *given)
    with pytest.raises(UnsupportedSession, match=rf"use `awa_sqla.admin.{name}"):
        asyncio.run(getattr(async_admin, name)(Session(), *given))


# ------------------------------------------------------------------------------------------------------------- async
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_the_async_verbs_do_the_same(maker, db_url: URL, driver: str) -> None:
    async def main() -> None:
        engine = create_async_engine(db_url.set(drivername=f"postgresql+{driver}"))
        async with AsyncSession(engine, expire_on_commit=False) as session, session.begin():
            assert [s.name for s in await async_admin.list_schedules(session)] == ["built", "nightly", "once"]
            assert (await async_admin.pause_schedule(session, "nightly", actor="ada")).paused_by == "ada"
            assert (await async_admin.resume_schedule(session, "nightly", reason="r")).paused_at is None
            job = await async_admin.trigger_schedule(session, "built", args=Report())
            assert (job.queue, job.run_at is None) == ("b", False)
            assert await async_admin.delete_schedule(session, "once")
        await engine.dispose()

    asyncio.run(main())
    assert [entry[1] for entry in audit(maker)] == [
        "pause_schedule",
        "resume_schedule",
        "trigger_schedule",
        "delete_schedule",
    ]


def test_the_async_verbs_take_what_the_sync_ones_take() -> None:
    assert async_admin.__all__ == admin.__all__ == sorted(admin.__all__)
    for name in admin.__all__:
        ours: Callable[..., Any] = getattr(admin, name)
        theirs: Callable[..., Awaitable[Any]] = getattr(async_admin, name)
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)
        assert inspect.iscoroutinefunction(theirs) is (name != "next_fires")
        assert inspect.getdoc(ours)


# -------------------------------------------------------------------------------------------------------- next_fires
def test_the_next_ticks_are_told_in_the_schedules_zone(maker) -> None:
    start = datetime(2024, 3, 30, 12, tzinfo=UTC)
    schedule = row(maker, "nightly")
    told = ["2024-03-31T03:00:00+02:00", "2024-04-01T03:00:00+02:00"]
    assert [tick.isoformat() for tick in admin.next_fires(schedule, 2, after=start)] == told
    same = Schedule("0 3 * * *", "Europe/Berlin")
    assert [tick.isoformat() for tick in admin.next_fires(same, 2, after=start)] == told
    assert admin.next_fires(same)[0] > datetime.now(UTC)
    with pytest.raises(InvalidJob, match="naive"):
        admin.next_fires(same, after=datetime(2024, 1, 1))
    with pytest.raises(InvalidJob, match="cron_expr"):
        admin.next_fires(CronSchedule(name="x", cron_expr="nonsense", timezone="UTC"))
