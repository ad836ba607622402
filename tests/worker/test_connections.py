"""Connections: how many, through what, and what becomes of them when the server changes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, AssertionPool, Delete, Engine, Insert, StaticPool, Update, create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import Backoff, ConfigurationError, JobArgs, QueueConfig, cancel
from awa_sqla.worker import engines, listen, runner
from awa_sqla.worker.engines import PATIENCE, Engines
from tests.worker.poolers import between, pgbouncer

# Connections that a test cuts are dropped by their drivers without a close.
pytestmark = pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")


class Work(JobArgs, backoff=Backoff(base=timedelta(0), jitter=0)):
    pass


class Slow(JobArgs):
    pass


# ------------------------------------------------------------------ how many


@pytest.mark.parametrize("road", ["async", "def"])
@pytest.mark.parametrize("given", ["factory", "engine"])
def test_a_pool_too_small_for_the_queues_is_refused_with_the_sum(stage, road, given):
    async def later(ctx: Any) -> None: ...

    def now(ctx: Any) -> None: ...

    stage.app.queues |= {"default": QueueConfig(concurrency=10), "email": QueueConfig(concurrency=20)}
    stage.app.task(Work, transactional=True)(later if road == "async" else now)

    def options() -> dict[str, Any]:
        engine: Any = create_async_engine(stage.url) if road == "async" else create_engine(stage.url)
        if given == "engine":
            return {"url": engine}
        if road == "async":
            return {"async_session_factory": async_sessionmaker(engine)}
        return {"session_factory": sessionmaker(engine)}

    stage.enqueue(Work())
    with pytest.raises(ConfigurationError, match=r"10 \(default\) \+ 20 \(email\) = 30 .* gives 15 .* to 15 in all"):
        stage.play(**options())
    assert stage.states() == ["available"]
    stage.play(queues=["default"], **options())
    assert stage.states() == ["completed"]


def test_the_sum_is_that_of_the_engine_that_writes_and_of_a_pool_of_one(stage):
    primary = create_engine(stage.url, pool_size=1, max_overflow=0)
    replica = create_engine(stage.url, pool_size=100)
    seen: list[tuple[int, int]] = []

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Engine:
            return primary if self._flushing or isinstance(clause, Insert | Update | Delete) else replica

    @stage.app.task(Work, transactional=True)
    def now(ctx: Any) -> None:
        seen.append((primary.pool.checkedout(), replica.pool.checkedout()))  # type: ignore[attr-defined]

    stage.app.queues["default"] = QueueConfig(concurrency=2)
    for factory in (
        sessionmaker(class_=Routing),
        sessionmaker(create_engine(stage.url, poolclass=StaticPool)),
        sessionmaker(create_engine(stage.url, poolclass=AssertionPool)),
    ):
        with pytest.raises(ConfigurationError, match=r"gives 1 \("):
            stage.play(session_factory=factory)
    stage.app.queues["default"] = QueueConfig(concurrency=1)
    stage.enqueue(Work())
    stage.play(session_factory=sessionmaker(class_=Routing))
    assert seen == [(1, 0)]
    primary.dispose()
    replica.dispose()


def test_a_pool_without_a_limit_and_handlers_without_a_session_need_no_sum(stage):
    stage.app.queues["default"] = QueueConfig(concurrency=30)
    stage.app.task(Work, transactional=True)(lambda ctx: None)
    boundless = create_engine(stage.url, pool_size=1, max_overflow=-1)
    stage.enqueue(Work())
    stage.play(url=boundless, async_session_factory=async_sessionmaker(create_async_engine(stage.url)))
    assert stage.states() == ["completed"]
    boundless.dispose()


def test_more_handlers_than_the_server_has_connections_is_warned_of(stage, caplog):
    stage.app.queues["default"] = QueueConfig(concurrency=1000)
    stage.app.task(Work, transactional=True)(lambda ctx: None)
    with caplog.at_level(logging.WARNING):
        stage.play()
    assert "may want 1022 connections at once (1000 transactional handlers and 22 of its own)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        stage.play(maintenance=False)
    assert "and 12 of its own)" in caplog.text


@pytest.mark.parametrize("road", ["async", "def"])
def test_handlers_that_hold_all_connections_still_write_their_progress(stage, road):
    """What a handler writes beside its own transaction never waits for a connection of another handler's."""
    together: list[Any] = []

    async def later(ctx: Any) -> None:
        together.append(ctx)
        await stage.until(lambda: len(together) == 4)
        await ctx.session.execute(text("SELECT 1"))
        await ctx.set_progress(50)

    def now(ctx: Any) -> None:
        together.append(ctx)
        while len(together) < 4:
            time.sleep(0.01)
        ctx.session.execute(text("SELECT 1"))
        ctx.set_progress(50)

    stage.app.queues["default"] = QueueConfig(concurrency=4)
    stage.app.task(Work, transactional=True)(later if road == "async" else now)
    make: Any = create_async_engine if road == "async" else create_engine
    engine = make(stage.url, pool_size=4, max_overflow=0, pool_timeout=1)
    stage.enqueue(*[Work() for _ in range(4)])
    stage.play(url=engine)
    assert [(job.state, job.attempt) for job in stage.jobs()] == [("completed", 1)] * 4
    if road == "def":
        engine.dispose()


# ------------------------------------------------------------------ over what


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_the_databases_default_isolation_is_not_that_of_the_books(stage, driver):
    """With another, what several workers write when they start would conflict."""
    stage.sql(f"ALTER DATABASE \"{stage.url.database}\" SET default_transaction_isolation TO 'repeatable read'")
    stage.app.task(Work)(lambda ctx: None)
    stage.app.on_completed(Work, name="spec")(lambda event: [])
    url = stage.url.set(drivername=f"postgresql+{driver}")

    async def levels() -> set[str]:
        async with stage.app.worker(url) as one, stage.app.worker(url) as other:
            found = set()
            for worker in (one, other):
                for engine in (worker._engines.book, worker._engines.upkeep):
                    async with engine.connect() as connection:
                        found.add(await connection.scalar(text("SHOW transaction_isolation")))
                with worker._engines.heart.connect() as beating:
                    found.add(beating.scalar(text("SHOW transaction_isolation")))
            return found

    try:
        assert asyncio.run(levels()) == {"read committed"}
    finally:
        stage.sql(f'ALTER DATABASE "{stage.url.database}" RESET default_transaction_isolation')


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_process_that_is_frozen_in_a_transaction_does_not_hold_its_rows_for_ever(stage, driver):
    async def options() -> list[str]:
        engines = Engines(stage.url.set(drivername=f"postgresql+{driver}"), 1)
        found = []
        for engine in (engines.book, engines.upkeep):
            async with engine.connect() as connection:
                await connection.rollback()
                found.append(await connection.scalar(text("SHOW idle_in_transaction_session_timeout")))
        engines.pooled = True  # the server's connections are others' too
        await engines.upkeep.dispose()
        async with engines.upkeep.connect() as connection:
            found.append(await connection.scalar(text("SHOW idle_in_transaction_session_timeout")))
        await engines.dispose()
        return found

    assert asyncio.run(options()) == ["1min", "1min", "0"]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_connections_of_our_own_notice_a_peer_that_has_gone(stage, driver):
    async def options() -> tuple[int, ...]:
        engines = Engines(stage.url.set(drivername=f"postgresql+{driver}"), 1)
        with engines.heart.connect() as connection:
            held: Any = connection.connection.driver_connection
            with socket.socket(fileno=socket.dup(held.fileno())) as wire:
                found = tuple(
                    wire.getsockopt(level, option)
                    for level, option in (
                        (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                    )
                )
        await engines.dispose()
        return found

    assert asyncio.run(options()) == (1, PATIENCE["keepalives_idle"], PATIENCE["tcp_user_timeout"])


def test_what_the_url_says_of_a_connection_holds(stage):
    url = stage.url.update_query_dict({"keepalives_idle": "77", "connect_timeout": "3"})
    engines = Engines(url, 1)
    assert "keepalives_idle=77" in engines.conninfo()
    assert "connect_timeout=3" in engines.conninfo()
    assert engines.conninfo().count("tcp_user_timeout=30000") == 1
    with engines.heart.connect() as connection:
        held: Any = connection.connection.driver_connection
        assert held.info.get_parameters()["keepalives_idle"] == "77"
    asyncio.run(engines.dispose())


def test_of_several_hosts_the_one_that_writes_is_taken(stage, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = taken.getsockname()[1]
    hosts = (f"127.0.0.1:{dead}", f"{stage.url.host}:{stage.url.port}")
    url = URL.create(  # set() cannot take a host away
        "postgresql+psycopg",
        stage.url.username,
        stage.url.password,
        database=stage.url.database,
        query={"host": hosts, "target_session_attrs": "read-write"},
    )
    assert played_through(stage, url, caplog) == [{"pooled": False, "listening": True}]


def played_through(stage: Any, url: Any, caplog: Any, **options: Any) -> list[dict[str, Any]]:
    """Jobs of each kind of handler, many enough to prepare statements, and what the process said of itself."""
    said: list[dict[str, Any]] = []
    sums: list[int] = []

    async def later(ctx: Any) -> None:
        sums.append(await ctx.session.scalar(text("SELECT 1 + :one"), {"one": 1}))
        await ctx.set_progress(10)

    def now(ctx: Any) -> None:
        sums.append(ctx.session.scalar(text("SELECT 1 + :one"), {"one": 1}))

    async def during(worker: Any) -> None:
        await stage.until(stage.all_ended)
        worker._heart.soon()
        await stage.until(lambda: stage.sql("SELECT true FROM awa.runtime_instances WHERE last_seen > started_at"))
        await stage.until(lambda: worker._listener.healthy or "notifications do not arrive" in caplog.text)
        said.append({"pooled": worker._engines.pooled, "listening": worker._listener.healthy})

    stage.app.queues["default"] = QueueConfig(concurrency=4, poll_interval=timedelta(milliseconds=20))
    stage.app.task(Work, transactional=True)(later)
    stage.app.task(Slow, transactional=True)(now)
    for _ in range(20):
        stage.enqueue(Work(), Slow())
    stage.play(url=url, during=during, **options)
    assert [(job.state, job.attempt) for job in stage.jobs()] == [("completed", 1)] * 40
    assert sums == [2] * 40
    return said


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_a_worker_works_behind_pgbouncer(stage, tmp_path, monkeypatch, mode, caplog):
    monkeypatch.setattr(listen, "ECHO", 0.5)
    with pgbouncer(stage.url, tmp_path, mode) as through:
        said = played_through(stage, through, caplog)
        assert said == [{"pooled": True, "listening": mode == "session"}]
        assert ("notifications do not arrive" in caplog.text) == (mode == "transaction")


def test_behind_a_pooler_listen_url_goes_to_the_server_itself(stage, tmp_path, caplog):
    with pgbouncer(stage.url, tmp_path) as through:
        [said] = played_through(
            stage,
            through,
            caplog,
            listen_url=stage.url.set(drivername="postgresql").render_as_string(hide_password=False),
        )
        assert said == {"pooled": True, "listening": True}


def test_a_pooler_is_told_from_a_server(stage, caplog):
    with between(stage.url) as through:
        assert played_through(stage, through, caplog) == [{"pooled": True, "listening": True}]


def test_a_server_is_told_from_a_pooler(stage, caplog):
    assert played_through(stage, stage.url, caplog) == [{"pooled": False, "listening": True}]


def test_a_listener_that_hears_nothing_is_not_trusted(stage, monkeypatch, caplog):
    monkeypatch.setattr(listen, "ECHO", 0.2)
    monkeypatch.setattr(runner, "POLL", 3600)
    with between(stage.url, deaf=True) as through:
        assert played_through(stage, through, caplog) == [{"pooled": True, "listening": False}]
    assert caplog.text.count("notifications do not arrive, polling instead") == 1


def test_without_a_listener_a_cancelled_handler_is_told_before_the_next_beat(stage):
    told = threading.Event()

    async def handler(ctx: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            told.set()
            raise

    stage.app.task(Work)(handler)
    [job_id] = stage.enqueue(Work())

    async def during(worker: Any) -> None:
        await stage.until(lambda: stage.states() == ["running"])
        with stage.sessions.begin() as session:
            cancel(session, job_id, reason="not needed")
        await stage.until(told.is_set)

    stage.play(during=during, notify=False, heartbeat=timedelta(minutes=10), stale_after=timedelta(hours=1))
    assert stage.states() == ["cancelled"]


# ------------------------------------------------------------------ to which server


def read_only(stage: Any, *, only: bool) -> None:
    """What a failover to a server that only reads looks like to those who connect."""
    database = stage.url.database
    stage.sql(f'ALTER DATABASE "{database}" SET default_transaction_read_only = {"on" if only else "off"}')


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_connections_to_a_server_that_only_reads_are_left_behind(stage, quick, driver):
    """The server changes its mind, the connections that were made meanwhile do not: they must not be kept."""
    stage.app.task(Work)(lambda ctx: None)

    async def during(worker: Any) -> None:
        stage.enqueue(Work())
        await stage.until(lambda: stage.states() == ["completed"])
        read_only(stage, only=True)
        try:
            stage.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid()"
            )
            stage.sql("SET default_transaction_read_only = off")
            stage.sql("INSERT INTO awa.jobs_hot (kind, queue, args) VALUES ('work', 'default', '{}')")
            await asyncio.sleep(1)
            assert stage.states() == ["completed", "available"]
        finally:
            read_only(stage, only=False)
        await stage.until(lambda: stage.states() == ["completed"] * 2)
        beaten = stage.sql("SELECT last_seen FROM awa.runtime_instances")[0].last_seen
        await stage.until(lambda: stage.sql("SELECT last_seen FROM awa.runtime_instances")[0].last_seen > beaten)

    stage.play(during=during, url=stage.url.set(drivername=f"postgresql+{driver}"), **quick)


def test_a_listener_whose_connection_was_cut_hears_again(stage):
    stage.app.task(Work)(lambda ctx: None)

    async def during(worker: Any) -> None:
        await stage.until(lambda: worker._listener.healthy)
        stage.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'awa_sqla listener'")
        await stage.until(lambda: not worker._listener.healthy)
        await stage.until(lambda: worker._listener.healthy)

    stage.play(during=during)


def test_a_server_that_is_not_there_is_said_so_at_the_start(stage):
    stage.app.task(Work)(lambda ctx: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises((psycopg.OperationalError, Exception), match="refused"):
        stage.play(url=stage.url.set(port=port))


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_connections_are_closed_within_seconds_when_the_server_does_not_answer(
    db_url, postgres_server, monkeypatch, driver
):
    if postgres_server.local is None:
        pytest.skip("another machine's processes cannot be stopped")
    monkeypatch.setattr(engines, "CLOSING", 0.5)
    pids: list[int] = []

    async def run() -> float:
        made = Engines(db_url.set(drivername=f"postgresql+{driver}"), 1)
        async with made.book.connect() as one, made.book.connect() as two:
            pids.extend([await each.scalar(text("SELECT pg_backend_pid()")) for each in (one, two)])
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        await made.dispose()
        return time.monotonic() - began

    try:
        assert asyncio.run(run()) < 5
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
