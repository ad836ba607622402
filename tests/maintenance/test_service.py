"""The lanes at work: apart from each other, reported, and where they belong."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import Awa, ConfigurationError, InvalidJob, JobArgs, claim, enqueue
from awa_sqla.maintenance import lanes, leadership, service
from awa_sqla.maintenance.lanes import Lanes, Pass
from awa_sqla.maintenance.leadership import Leadership
from awa_sqla.schema import create_all
from awa_sqla.session import catalogue
from awa_sqla.worker.config import lanes_named

PATIENCE = 30
ASLEEP = (
    "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%pg_sleep(3600)' AND state = 'active' "
    "AND datname = current_database()"
)


class Work(JobArgs):
    pass


class Next(JobArgs):
    pass


class Place:
    """A database, an app, and maintenance over them."""

    def __init__(self, url: URL) -> None:
        self.url = url
        self.app = Awa()
        self.sessions: sessionmaker[Session] = sessionmaker(create_engine(url), expire_on_commit=False)

    def sql(self, statement: str, **parameters: Any) -> list[Any]:
        with self.sessions.begin() as session:
            result: Any = session.execute(text(statement), parameters)
            return list(result) if result.returns_rows else []

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - what is waited for happens in the database
                await asyncio.sleep(0.02)

    def play(self, *scene: Callable[..., Awaitable[None]], count: int = 1, **options: Any) -> None:
        """Run maintenance, in `count` processes' worth of it, around the scene."""

        async def run() -> None:
            made = [self.app.maintenance(self.url, **options) for _ in range(count)]
            for one in made:
                await one.__aenter__()
            try:
                for act in scene:
                    await act(*made)
            finally:
                for one in made:
                    await one.__aexit__(None, None, None)

        asyncio.run(run())

    def once(self, **options: Any) -> Any:
        return asyncio.run(self.app.maintenance(self.url, **options).once())


@pytest.fixture
def place(db_url: URL, an_old_server: None) -> Iterator[Place]:
    catalogue.forget_cache()
    place = Place(db_url)
    yield place
    place.app.follow_ups._specs.clear()
    place.sessions.kw["bind"].dispose()


def dead_attempts(place: Place, number: int = 1) -> None:
    with place.sessions.begin() as session:
        for _ in range(number):
            enqueue(session, Work())
    with place.sessions.begin() as session:
        claim(session, "default", limit=number, worker_id="gone")
    place.sql("UPDATE awa.jobs_hot SET heartbeat_at = clock_timestamp() - interval '1 hour'")


def states(place: Place) -> list[str]:
    return [row.state for row in place.sql("SELECT state FROM awa.jobs ORDER BY id")]


def test_maintenance_alone_keeps_the_tables_moving(place, monkeypatch):
    monkeypatch.setattr(lanes, "OBLIGATIONS", 0.1)
    place.app.on_rescued(Work, name="after")(lambda event: Next())

    async def scene(process: Any) -> None:
        await place.until(lambda: states(place) == ["retryable", "available"])
        assert process.leads
        place.sql("UPDATE awa.scheduled_jobs SET run_at = clock_timestamp()")
        await place.until(lambda: states(place) == ["available", "available"])

    place.sql("INSERT INTO awa.follow_up_specs VALUES ('work', 'rescued', 'after', now() - interval '1 h', now())")
    dead_attempts(place)
    place.play(scene)
    # It has gone in good order, and left the lead to whoever wants it.
    assert place.sql("SELECT 1 FROM awa.runtime_instances") == []
    assert place.sql("SELECT 1 FROM awa.leaders WHERE expires_at > clock_timestamp()") == []


def test_of_several_processes_one_leads_and_another_takes_over(place, monkeypatch):
    monkeypatch.setattr(leadership, "RENEWALS", 300)

    async def scene(*processes: Any) -> None:
        await place.until(lambda: any(one.leads for one in processes))
        (leader,) = [one for one in processes if one.leads]
        others = [one for one in processes if one is not leader]
        assert place.sql("SELECT holder FROM awa.leaders") == [(leader.id,)]
        await leader.__aexit__(None, None, None)
        await place.until(lambda: any(one.leads for one in others))
        dead_attempts(place)
        await place.until(lambda: states(place) == ["retryable"])

    monkeypatch.setattr(lanes, "RESCUE", 0.1)
    place.play(scene, count=3, stale_after=timedelta(seconds=30), heartbeat=timedelta(seconds=10))


def test_a_worker_that_is_stopping_lets_another_lead_at_once(place):
    running, go_on = asyncio.Event(), asyncio.Event()
    app = Awa()

    @app.task(Work)
    async def handler(ctx: Any) -> None:
        running.set()
        await go_on.wait()

    async def scene() -> None:
        worker = await app.worker(place.url).__aenter__()
        await running.wait()
        await place.until(lambda: worker._upkeep.leading)
        async with place.app.maintenance(place.url) as process:
            draining = asyncio.create_task(worker.__aexit__(None, None, None))
            await place.until(lambda: process.leads)
            assert not worker._upkeep.leading
            await worker._upkeep._leadership.serve(asyncio.Event().wait)  # it does not stand for election again
            go_on.set()
            await draining

    with place.sessions.begin() as session:
        enqueue(session, Work())
    asyncio.run(scene())
    assert states(place) == ["completed"]


def test_a_process_says_of_itself_what_it_is_and_how_its_lanes_fare(place):
    def row() -> Any:
        return place.sql("SELECT * FROM awa.runtime_instances")[0]

    async def scene(process: Any) -> None:
        await place.until(lambda: process._service.fares().keys() >= {"promote", "rescue_stale"})
        process._heart.soon()
        await place.until(lambda: "rescue_stale" in row().lanes)
        assert (row().id, row().role, row().stale_after_seconds) == (process.id, "maintenance", 120)
        assert row().lanes["promote"]["failures"] == 0
        assert row().lanes["promote"]["error"] is None
        assert row().lanes["promote"]["ago"] < PATIENCE
        assert "leads" in process.dump()
        assert "promote: done 0" in process.dump()

    place.play(scene, stale_after=timedelta(minutes=2))


# ----------------------------------------------------------- slow and failing


def test_a_lane_that_fails_is_reported_and_starves_no_other(place, monkeypatch, caplog):
    failures = [RuntimeError("out of order"), RuntimeError("out of order")]
    real = Lanes.rescue_stale

    async def broken(self: Lanes) -> Pass:
        if failures:
            raise failures.pop()
        return await real(self)

    monkeypatch.setattr(Lanes, "rescue_stale", broken)
    monkeypatch.setattr(service, "PATIENCE", 0.05)

    async def scene(process: Any) -> None:
        await place.until(lambda: states(place) == ["retryable"])
        place.sql("UPDATE awa.scheduled_jobs SET run_at = clock_timestamp()")
        await place.until(lambda: states(place) == ["available"])

    dead_attempts(place)
    with caplog.at_level(logging.INFO, "awa_sqla"):
        place.play(scene)
    said = [record for record in caplog.records if "lane rescue_stale" in record.message]
    assert [record.levelname for record in said] == ["ERROR", "ERROR", "INFO"]
    assert "failed: RuntimeError: out of order (2 in a row)" in said[1].message
    assert said[0].exc_info is not None
    assert said[1].exc_info is None  # the same again
    assert "works again, after 2 failures" in said[2].message


def test_a_lane_that_hangs_is_cut_and_starves_no_other(place, monkeypatch, caplog):
    """Here in the database, where a lock is never given."""
    real = Lanes.rescue_stale
    hung: list[bool] = []

    async def hanging(self: Lanes) -> Pass:
        if not hung:
            hung.append(True)
            await self._means.within(lambda session: session.execute(text("SELECT pg_sleep(3600)")))
        return await real(self)

    monkeypatch.setattr(Lanes, "rescue_stale", hanging)
    monkeypatch.setattr(service, "BUDGET", 0.5)
    monkeypatch.setattr(service, "PATIENCE", 0.05)

    async def scene(process: Any) -> None:
        await place.until(lambda: hung)
        with place.sessions.begin() as session:
            enqueue(session, Next(), delay=timedelta(milliseconds=1))
        await place.until(lambda: "available" in states(place))  # promotion goes on meanwhile
        await place.until(lambda: "retryable" in states(place))
        assert place.sql(ASLEEP) == []

    dead_attempts(place)
    with caplog.at_level(logging.WARNING, "awa_sqla"):
        place.play(scene)
    assert "lane rescue_stale of maintenance took longer than 0.5 s and was cut" in caplog.text


@pytest.mark.parametrize("made", [OSError("connection lost"), Pass(0, 5)], ids=["an error", "a result"])
def test_a_stop_that_a_driver_has_swallowed_is_a_stop(place, monkeypatch, made):
    """In a lane, in one that runs everywhere, and where the lease is renewed."""
    swallowing: list[str] = []

    async def swallow(name: str) -> Any:
        swallowing.append(name)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if isinstance(made, Exception):
                raise made from None
        return made

    monkeypatch.setattr(Lanes, "promote", lambda self: swallow("promote"))
    monkeypatch.setattr(Lanes, "rescue_stale", lambda self: swallow("rescue_stale"))
    monkeypatch.setattr(leadership, "RENEWALS", 150)
    real = Leadership._hold

    async def held(self: Leadership) -> bool:
        return bool(await swallow("hold")) if self.leading() else await real(self)

    monkeypatch.setattr(Leadership, "_hold", held)

    async def scene(process: Any) -> None:
        await place.until(lambda: {*swallowing} == {"promote", "rescue_stale", "hold"})
        async with asyncio.timeout(5):
            await process.__aexit__(None, None, None)

    place.play(scene)


def test_lanes_that_hang_hold_up_neither_the_lease_nor_the_heart(place, monkeypatch):
    """All of them at once, each with a connection of its own."""

    async def hanging(self: Lanes) -> Pass:
        await self._means.within(lambda session: session.execute(text("SELECT pg_sleep(3600)")))
        raise AssertionError

    for name in lanes.LANES:
        monkeypatch.setattr(Lanes, name, hanging)
    monkeypatch.setattr(leadership, "RENEWALS", 150)
    place.app.on_completed(Work, name="spec")(lambda event: Next())

    def lease() -> Any:
        return place.sql("SELECT expires_at FROM awa.leaders")[0].expires_at

    async def scene(process: Any) -> None:
        await place.until(lambda: len(place.sql(ASLEEP)) == len(lanes.LANES))
        before = lease()
        await place.until(lambda: lease() > before)
        process._heart.soon()
        await place.until(lambda: place.sql("SELECT 1 FROM awa.runtime_instances WHERE last_seen > started_at"))

    place.play(scene)


@pytest.mark.case(37)
def test_no_tick_waits_for_lanes_that_are_busy(place, monkeypatch):
    """All other lanes hang in the database, and every second's tick fires."""

    async def hanging(self: Lanes) -> Pass:
        await self._means.within(lambda session: session.execute(text("SELECT pg_sleep(3600)")))
        raise AssertionError

    for name in lanes.LANES:
        if name != "cron":
            monkeypatch.setattr(Lanes, name, hanging)
    place.app.periodic("each second", "* * * * * *", Next())
    place.app.periodic("built", "* * * * * *", lambda tick: Next())

    def ticks(name: str) -> list[str]:
        rows = place.sql(
            "SELECT metadata ->> 'cron_fire_time' AS tick, metadata ->> 'cron_name' AS name FROM awa.jobs_hot"
        )
        return sorted(row.tick for row in rows if row.name == name)

    async def scene(process: Any) -> None:
        await place.until(lambda: len(ticks("each second")) >= 4 and len(ticks("built")) >= 4)

    place.play(scene)
    for name in ("each second", "built"):
        fired = [datetime.fromisoformat(tick) for tick in ticks(name)]
        assert [later - earlier for earlier, later in pairwise(fired)] == [timedelta(seconds=1)] * (len(fired) - 1)


def test_callables_that_hang_keep_no_other_from_being_called(place):
    hangs = threading.Event()
    for number in range(6):
        place.app.periodic(f"hangs {number}", "* * * * * *", lambda: hangs.wait(PATIENCE) and Next())
    place.app.periodic("works", "* * * * * *", lambda tick: Next())

    async def scene(process: Any) -> None:
        try:
            await place.until(lambda: len(states(place)) >= 2)
        finally:
            hangs.set()

    place.play(scene)


def test_a_leader_without_the_app_fires_what_a_worker_has_declared(place):
    app = Awa()
    app.task(Next)(lambda ctx: None)
    app.periodic("each second", "* * * * * *", Next())

    async def scene() -> None:
        async with app.worker(place.url, maintenance=False), place.app.maintenance(place.url):
            await place.until(lambda: states(place)[:2] == ["completed", "completed"])

    asyncio.run(scene())
    assert {row.name for row in place.sql("SELECT metadata ->> 'cron_name' AS name FROM awa.jobs")} == {"each second"}


def test_after_an_outage_rescue_waits_until_the_living_have_beaten(place, monkeypatch):
    """A database that was away for long makes every attempt look as if its worker were gone."""
    monkeypatch.setattr(leadership, "RENEWALS", 300)
    waits: list[float] = []
    real = Lanes.rescue_stale

    async def noted(self: Lanes) -> Pass:
        found = await real(self)
        waits.append(found.pause or 0)
        return found

    monkeypatch.setattr(Lanes, "rescue_stale", noted)
    moved = [0.0]
    clock = leadership.clock
    monkeypatch.setattr(leadership, "clock", lambda: clock() + moved[0])

    async def scene(process: Any) -> None:
        await place.until(lambda: waits)
        dead_attempts(place)
        moved[0] = 40.0  # seconds without a word from the database, more than a third of stale_after
        await place.until(lambda: process._service._leadership.contact.lasted() < 35)
        found = await process._service.lanes[1].work()
        assert 40 < found.pause <= 45
        assert states(place) == ["running"]
        moved[0] += 20.0
        moved[0] += 26.0
        process._service._leadership.contact._since -= 46
        found = await process._service.lanes[1].work()
        assert found.done == 1
        assert states(place) == ["retryable"]

    place.play(scene)


def test_due_jobs_that_somebody_holds_are_not_asked_for_without_a_breath(place):
    with place.sessions.begin() as session:
        enqueue(session, Next(), delay=timedelta(milliseconds=1))

    async def scene(process: Any) -> None:
        assert await process._service._lanes.promote() == (0, lanes.HELD)

    with place.sessions() as holder:
        holder.execute(text("SELECT 1 FROM awa.scheduled_jobs FOR UPDATE"))
        place.play(scene)
    assert states(place) == ["scheduled"]


# ----------------------------------------------------------------------- once


def test_once_runs_every_lane_until_there_is_no_more_to_do(place, monkeypatch):
    monkeypatch.setattr(lanes, "RESCUES", 2)
    place.app.on_rescued(Work, name="after")(lambda event: Next())
    place.sql("INSERT INTO awa.follow_up_specs VALUES ('work', 'rescued', 'after', now() - interval '1 h', now())")
    dead_attempts(place, 5)
    done = place.once()
    assert set(done) == set(lanes.LANES)
    assert (done["rescue_stale"]["done"], done["obligations"]["done"]) == (5, 5)
    assert sorted(states(place)) == ["available"] * 5 + ["retryable"] * 5
    assert all(fare["failures"] == 0 for fare in done.values())
    again = place.once()
    assert again["rescue_stale"]["done"] == 0
    assert place.sql("SELECT 1 FROM awa.runtime_instances") == []


def test_once_does_nothing_while_another_process_leads(place):
    dead_attempts(place)
    place.sql(
        "INSERT INTO awa.leaders (name, holder, expires_at) VALUES ('maintenance', 'x', now() + interval '1 min')"
    )
    assert place.once() is None
    assert states(place) == ["running"]
    place.sql("UPDATE awa.leaders SET expires_at = now()")
    assert place.once() is not None
    assert states(place) == ["retryable"]


def test_once_fires_schedules_also_those_that_take_a_while_to_build(place):
    def built() -> Next:
        time.sleep(1.5)
        return Next()

    place.app.periodic("stored", "0 0 1 1 *", Next())
    place.app.periodic("built", "0 0 1 1 *", built)
    assert place.once()["cron"]["done"] == 0  # declared just now
    place.sql("UPDATE awa.cron_jobs SET counts_from = now() - interval '2 years'")
    assert place.once()["cron"]["done"] == 2
    assert states(place) == ["available", "available"]
    assert place.once()["cron"]["done"] == 0


def test_once_catches_up_all_that_was_missed(place):
    place.app.periodic("c", "0 * * * *", Next(), missed_fires="catch_up")
    place.once()
    place.sql("UPDATE awa.cron_jobs SET counts_from = now() - interval '250 hours'")
    assert place.once()["cron"]["done"] in (250, 251)


def test_once_does_not_wait_for_what_somebody_holds(place):
    with place.sessions.begin() as session:
        enqueue(session, Next(), delay=timedelta(milliseconds=1))
    with place.sessions.begin() as session:
        session.execute(text("SELECT id FROM awa.scheduled_jobs FOR UPDATE"))
        began = time.monotonic()
        assert place.once()["promote"]["done"] == 0
        assert time.monotonic() - began < service.BUDGET / 2


def test_once_tells_what_it_has_done_when_it_loses_the_lead(place, monkeypatch, caplog):
    real = Lanes.rescue_stale

    async def overtaken(self: Lanes) -> Pass:
        found = await real(self)
        place.sql("UPDATE awa.leaders SET holder = 'another', expires_at = now() + interval '1 min'")
        return found._replace(pause=0)

    monkeypatch.setattr(Lanes, "rescue_stale", overtaken)
    dead_attempts(place)
    with caplog.at_level(logging.WARNING, "awa_sqla"):
        done = place.once()
    assert done is not None
    assert {name: fare["done"] for name, fare in done.items()} == {"promote": 0, "rescue_stale": 1}
    assert "another process leads maintenance now" in caplog.text


def test_a_pass_over_obligations_ends_soon_and_the_next_comes_at_once(place, monkeypatch):
    monkeypatch.setattr(lanes, "SETTLING", -1)
    place.app.on_rescued(Work, name="after")(lambda event: Next())
    place.sql("INSERT INTO awa.follow_up_specs VALUES ('work', 'rescued', 'after', now() - interval '1 h', now())")
    dead_attempts(place, 3)
    passes: list[Pass] = []
    real = Lanes.obligations

    async def noted(self: Lanes) -> Pass:
        passes.append(await real(self))
        return passes[-1]

    monkeypatch.setattr(Lanes, "obligations", noted)
    assert place.once()["obligations"]["done"] == 3
    assert passes == [Pass(1, 0)] * 3 + [Pass(0, lanes.OBLIGATIONS)]


def test_once_runs_the_other_lanes_when_one_fails(place, monkeypatch):
    async def broken(self: Lanes) -> Pass:
        raise RuntimeError("out of order")

    monkeypatch.setattr(Lanes, "promote", broken)
    dead_attempts(place)
    done = place.once()
    assert done["promote"]["error"] == "RuntimeError: out of order"
    assert done["rescue_stale"]["done"] == 1


def test_a_maintenance_process_lives_once(place):
    process = place.app.maintenance(place.url)
    asyncio.run(process.once())
    with pytest.raises(ConfigurationError, match="lives once"):
        asyncio.run(process.once())


# ----------------------------------------------------------------------- only


def test_only_some_lanes_run_where_that_is_asked_for(place):
    dead_attempts(place)
    with place.sessions.begin() as session:
        enqueue(session, Next(), delay=timedelta(milliseconds=1))
    done = place.once(only=["promote"])
    assert set(done) == {"promote"}
    assert states(place) == ["running", "available"]


def test_a_process_with_only_some_lanes_keeps_no_other_from_leading(place):
    async def scene(process: Any) -> None:
        await place.until(lambda: process.leads)
        other = place.app.maintenance(place.url)
        async with other:
            await place.until(lambda: other.leads)

    place.play(scene, only=["promote"])


@pytest.mark.parametrize("only", ["promote", ["promot"], [], 5])
def test_lanes_that_there_are_not_are_refused(only):
    with pytest.raises(ConfigurationError, match="lanes"):
        lanes_named(only)


def test_options_are_checked_when_it_is_made(place):
    with pytest.raises(InvalidJob, match="stale_after"):
        place.app.maintenance(place.url, stale_after=0)
    with pytest.raises(ConfigurationError, match="health"):
        place.app.maintenance(place.url, health="nowhere")
    with pytest.raises(ConfigurationError, match="no database"):
        place.app.maintenance()


def test_maintenance_finds_the_other_schema(place, engine: Engine):
    with engine.begin() as connection:
        create_all(connection, "other")
    translated = engine.execution_options(schema_translate_map={"awa": "other"})
    with Session(translated) as session, session.begin():
        enqueue(session, Work(), delay=timedelta(milliseconds=1))
    assert asyncio.run(place.app.maintenance(translated).once()) is not None
    assert place.sql("SELECT state FROM other.jobs_hot") == [("available",)]
    assert place.sql("SELECT 1 FROM awa.leaders") == []
