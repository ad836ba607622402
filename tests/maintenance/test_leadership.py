"""Who leads: a lease by the database's clock, which needs no connection of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import URL, Connection, Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from awa_sqla.maintenance import leadership
from awa_sqla.maintenance.leader import Standing, hold, look, release
from awa_sqla.maintenance.leadership import Contact, Leadership

LEASE = timedelta(seconds=15)


@pytest.fixture
def alone(db_url: URL) -> Iterator[Engine]:
    engine = create_engine(db_url, isolation_level="AUTOCOMMIT")
    yield engine
    engine.dispose()


@pytest.fixture
def connection(alone: Engine) -> Iterator[Connection]:
    with alone.connect() as connection:
        yield connection


def expire(connection: Connection, name: str = "maintenance") -> None:
    connection.execute(text("UPDATE awa.leaders SET expires_at = clock_timestamp() WHERE name = :name"), {"name": name})


def test_one_of_several_leads_until_its_lease_ends(connection):
    first = hold(connection, "a", LEASE)
    assert first is not None
    assert (first.leads, first.term) == (True, 1)
    assert hold(connection, "b", LEASE) is None
    again = hold(connection, "a", LEASE)
    assert again is not None
    assert again.term == 1  # renewed: it has not changed hands
    expire(connection)
    second = hold(connection, "b", LEASE)
    assert second is not None
    assert second.term == 2
    assert hold(connection, "a", LEASE) is None


def test_a_lease_that_ended_is_the_same_holders_again_if_nobody_wanted_it(connection):
    hold(connection, "a", LEASE)
    (before,) = connection.execute(text("SELECT acquired_at FROM awa.leaders")).one()
    expire(connection)
    again = hold(connection, "a", LEASE)
    assert again is not None
    assert again.term == 1
    (after,) = connection.execute(text("SELECT acquired_at FROM awa.leaders")).one()
    assert after > before


@pytest.mark.parametrize("style", ["iso_8601", "sql_standard"])
def test_how_the_database_writes_an_interval_does_not_matter(connection, style):
    connection.execute(text(f"SET IntervalStyle = {style}"))
    standing = hold(connection, "a", LEASE)
    assert standing is not None
    assert timedelta(0) < standing.up < timedelta(days=1)
    assert look(connection, "a")[0].up >= standing.up


def test_what_is_given_up_can_be_had_at_once(connection):
    hold(connection, "a", LEASE)
    release(connection, "b")  # not its own
    assert hold(connection, "b", LEASE) is None
    release(connection, "a")
    assert hold(connection, "b", LEASE) is not None


def test_a_lease_from_before_the_databases_clock_went_back_holds_nobody_up(connection):
    hold(connection, "a", LEASE)
    connection.execute(text("UPDATE awa.leaders SET expires_at = clock_timestamp() + interval '1 hour'"))
    assert not look(connection, "b")[1]
    second = hold(connection, "b", LEASE)
    assert second is not None
    assert second.term == 2


def test_leases_of_several_names_are_apart(connection):
    assert hold(connection, "a", LEASE, "one") is not None
    assert hold(connection, "b", LEASE, "two") is not None
    assert look(connection, "b", "one")[1]
    assert not look(connection, "b", "three")[1]


def test_a_standby_reads_only(connection):
    hold(connection, "a", LEASE)
    before = connection.scalar(text("SELECT xmin::text || xmax::text || ctid::text FROM awa.leaders"))
    standing, taken = look(connection, "b")
    assert (standing.leads, taken, standing.term) == (False, True, 1)
    assert look(connection, "a")[0].leads
    assert connection.scalar(text("SELECT xmin::text || xmax::text || ctid::text FROM awa.leaders")) == before
    assert standing.up > timedelta(0)


def test_a_race_for_a_free_lease_has_one_winner(alone):
    """Fifty rounds, two connections that ask in the same moment."""

    async def round_(engines: list[AsyncEngine], name: str) -> list[Any]:
        async def ask(engine: AsyncEngine, holder: str) -> Any:
            async with engine.connect() as connection:
                return await connection.run_sync(hold, holder, LEASE, name)

        return await asyncio.gather(*(ask(engine, str(n)) for n, engine in enumerate(engines)))

    async def play() -> None:
        engines = [create_async_engine(alone.url, isolation_level="AUTOCOMMIT") for _ in range(3)]
        for number in range(50):
            won = await round_(engines, f"race {number}")
            assert sum(one is not None for one in won) == 1
        for engine in engines:
            await engine.dispose()

    asyncio.run(play())


# ------------------------------------------------------------------ over time


class Candidates:
    """Several candidates in one loop, over one database, with a clock that can be moved."""

    def __init__(self, url: URL, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
        self.now = 1000.0
        monkeypatch.setattr(leadership, "clock", lambda: self.now)

    def make(self, name: str, stale_after: timedelta = timedelta(seconds=90)) -> Leadership:
        return Leadership(self.engine, name, stale_after)

    def play(self, scene: Callable[[], Awaitable[None]]) -> None:
        async def scene_then_close() -> None:
            try:
                await scene()
            finally:
                await self.engine.dispose()

        asyncio.run(scene_then_close())

    async def sql(self, statement: str) -> Any:
        async with self.engine.connect() as connection:
            return (await connection.execute(text(statement))).all()


@pytest.fixture
def candidates(db_url: URL, monkeypatch: pytest.MonkeyPatch) -> Candidates:
    monkeypatch.setattr(leadership, "RENEWALS", 500)
    return Candidates(db_url, monkeypatch)


def test_a_leader_stops_before_its_lease_ends(candidates):
    """Counted from before the renewal was sent, so a slow answer makes it stop sooner, never later."""

    async def play() -> None:
        one = candidates.make("a")
        assert await one.seek()
        sent = candidates.now
        candidates.now = sent + 12.8
        assert one.leading()
        candidates.now = sent + 12.9
        assert not one.leading()
        (lease,) = await candidates.sql(
            "SELECT extract(epoch FROM expires_at - clock_timestamp()) AS left FROM awa.leaders"
        )
        assert lease.left > 14  # the database's clock, which nobody moved

    candidates.play(play)


@pytest.mark.parametrize(("stale_after", "lease"), [(3600, 15), (90, 15), (60, 10), (6, 1), (0.5, 1)])
def test_a_lease_is_no_longer_than_fits_the_patience_with_workers(candidates, stale_after, lease):
    async def play() -> None:
        one = candidates.make("a", timedelta(seconds=stale_after))
        assert await one.seek()
        (found,) = await candidates.sql(
            "SELECT extract(epoch FROM expires_at - clock_timestamp()) AS left FROM awa.leaders"
        )
        assert lease - 0.9 < found.left <= lease

    candidates.play(play)


def test_the_lanes_of_a_leader_that_cannot_renew_are_cut_before_the_lease_ends(candidates, monkeypatch, caplog):
    ran: list[str] = []
    cut = asyncio.Event()

    async def play() -> None:
        one = candidates.make("a")

        async def lead() -> None:
            ran.append("begins")

            async def away(*_: Any) -> Any:
                candidates.now += 5
                raise ConnectionError("gone")

            monkeypatch.setattr(one, "_ask", away)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ran.append(f"cut after {candidates.now - 1000:g}")
                cut.set()
                raise

        serving = asyncio.create_task(one.serve(lead))
        await asyncio.wait_for(cut.wait(), 20)
        serving.cancel()

    with caplog.at_level(logging.WARNING):
        candidates.play(play)
    assert ran == ["begins", "cut after 15"]  # three tries of five seconds; the lease ends at 15, the margin at 12.9
    assert "could not be renewed" in caplog.text


def test_a_leader_whose_lease_was_taken_stops_at_its_next_renewal(candidates, caplog):
    async def play() -> None:
        one = candidates.make("a")
        began, cut = asyncio.Event(), asyncio.Event()

        async def lead() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                cut.set()

        serving = asyncio.create_task(one.serve(lead))
        await asyncio.wait_for(began.wait(), 20)
        await candidates.sql("UPDATE awa.leaders SET holder = 'b' RETURNING 1")
        await asyncio.wait_for(cut.wait(), 20)
        assert not one.leading()
        # And takes it again when it is free.
        began.clear()
        await candidates.sql("UPDATE awa.leaders SET expires_at = clock_timestamp() RETURNING 1")
        await asyncio.wait_for(began.wait(), 20)
        assert one.term == 2
        serving.cancel()
        await asyncio.wait([serving])
        await one.release()
        assert not one.leading()

    with caplog.at_level(logging.WARNING):
        candidates.play(play)
    assert "another process leads maintenance now" in caplog.text


def test_a_candidate_that_resigns_while_it_asks_does_not_lead_and_holds_nobody_up(candidates, monkeypatch):
    led: list[bool] = []

    async def play() -> None:
        one = candidates.make("a")
        real = one._hold

        async def resigns_meanwhile() -> bool:
            held = await real()
            one.resign()
            return held

        async def lead() -> None:
            led.append(True)

        monkeypatch.setattr(one, "_hold", resigns_meanwhile)
        await asyncio.wait_for(one.serve(lead), 20)
        assert led == []
        assert not one.leading()
        assert await candidates.make("b").seek()

    candidates.play(play)


# ---------------------------------------------------------------- the hearts


def test_after_a_gap_rescue_waits_for_the_hearts(candidates):
    start = datetime.now(UTC)
    contact = Contact(30.0)

    def after(seconds: float, *, database: float | None = None, up: float | None = None) -> float:
        candidates.now = 1000 + seconds
        now = start + timedelta(seconds=seconds if database is None else database)
        since = timedelta(seconds=10_000 + seconds if up is None else up)
        contact.note(candidates.now, Standing(False, 0, now, since))
        return contact.lasted()

    assert after(0) == 10_000  # a fresh process knows only how long the server has been up
    assert after(20) == 10_020
    assert after(51) == 0  # 31 s without an answer
    assert after(60) == 9
    assert after(65, database=67) == 14  # clocks do not run alike
    assert after(70, database=3600) == 0  # the database's clock jumped
    assert after(75, database=3605) == 5
    assert after(80, database=10) == 10  # back: nothing looks older than it is
    assert after(85, database=15, up=4) == 4  # another server, or a restarted one
