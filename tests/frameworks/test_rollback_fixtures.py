"""Tests of applications: a session that joins an outer transaction, which is rolled back at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import URL, NullPool, create_engine, select, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from awa_sqla import FollowUpError, FollowUps, Hooks, Job
from tests.app import Order, Signup
from tests.frameworks.apps import App
from tests.worlds import Database

KINDS = pytest.mark.parametrize("kind", ["sync", "async"])
MODES = pytest.mark.parametrize("mode", ["create_savepoint", "conditional_savepoint", "rollback_only"])


class Fixture(App):
    """An application whose sessions join `connection`, on which `outer` is open."""

    connection: Any
    outer: Any


@asynccontextmanager
async def joined(url: URL, kind: str, mode: str) -> AsyncGenerator[Fixture, None]:
    """The usual fixture, synchronous or not; the outer transaction is rolled back if it is still open."""
    if kind == "sync":
        with create_engine(url, poolclass=NullPool).connect() as connection:
            maker = sessionmaker(connection, join_transaction_mode=mode)
            app = Fixture(maker, maker)
            app.connection, app.outer = connection, connection.begin()
            yield app
            if app.outer.is_active:
                app.outer.rollback()
    else:
        asynchronous = url.set(drivername="postgresql+asyncpg")
        async with create_async_engine(asynchronous, poolclass=NullPool).connect() as connection:
            maker = async_sessionmaker(connection, join_transaction_mode=mode, expire_on_commit=False)
            app = Fixture(maker, maker)
            app.connection, app.outer = connection, await connection.begin()
            yield app
            if app.outer.is_active:
                await app.outer.rollback()


async def kinds(app: Fixture) -> list[str]:
    """The jobs as the outer transaction sees them."""
    found = await app.settle(app.connection.execute(select(Job.kind).order_by(Job.id)))
    return list(found.scalars())


async def enqueue_and_complete(app: Fixture) -> None:
    """Two pieces of work of the application under test."""
    async with app.work() as session:
        session.add(Order(note="paid"))
        await app.verb("enqueue", session, Signup())
        await app.commit(session)
    async with app.work() as session:
        [job] = await app.verb("claim", session, "default", limit=1)
        await app.verb("complete", session, job)
        await app.commit(session)


@KINDS
@MODES
async def test_the_follow_up_is_seen_inside_and_gone_with_the_outer_transaction(
    db_url: URL, follow_ups: FollowUps, database: Database, kind: str, mode: str
) -> None:
    async with joined(db_url, kind, mode) as app:
        follow_ups.attach(app.target)
        await enqueue_and_complete(app)
        assert await kinds(app) == ["signup", "welcome"]
        assert app.outer.is_active
    assert database.jobs() == []
    assert database.rows("SELECT * FROM app_order") == []


@KINDS
async def test_a_rollback_of_the_application_takes_back_its_own_work_only(
    db_url: URL, follow_ups: FollowUps, kind: str
) -> None:
    async with joined(db_url, kind, "create_savepoint") as app:
        follow_ups.attach(app.target)
        async with app.work() as session:
            await app.verb("enqueue", session, Signup())
            await app.commit(session)
            [job] = await app.verb("claim", session, "default", limit=1)
            await app.verb("complete", session, job)
            await app.settle(session.flush())
            assert await kinds(app) == ["signup", "welcome"]
            await app.rollback(session)
        assert await kinds(app) == ["signup"]
        assert await app.settle(app.connection.scalar(text("SELECT state FROM awa.jobs_hot"))) == "available"


@KINDS
async def test_a_rollback_under_rollback_only_ends_the_outer_transaction(
    db_url: URL, database: Database, kind: str
) -> None:
    async with joined(db_url, kind, "rollback_only") as app:
        async with app.work() as session:
            await app.verb("enqueue", session, Signup())
            await app.settle(session.flush())
            await app.rollback(session)
        assert not app.outer.is_active
    assert database.jobs() == []


@KINDS
async def test_control_fully_commits_the_follow_up_with_the_outer_transaction(
    db_url: URL, follow_ups: FollowUps, database: Database, kind: str
) -> None:
    async with joined(db_url, kind, "control_fully") as app:
        follow_ups.attach(app.target)
        async with app.work() as session:
            await app.verb("enqueue", session, Signup())
            await app.settle(session.flush())
            [job] = await app.verb("claim", session, "default", limit=1)
            await app.verb("complete", session, job)
            await app.commit(session)
        assert not app.outer.is_active
    assert database.kinds() == ["signup", "welcome"]


@KINDS
async def test_control_fully_rolls_the_outer_transaction_back(
    db_url: URL, follow_ups: FollowUps, database: Database, kind: str
) -> None:
    async with joined(db_url, kind, "control_fully") as app:
        follow_ups.attach(app.target)
        async with app.work() as session:
            await app.verb("enqueue", session, Signup())
            await app.settle(session.flush())
            await app.rollback(session)
        assert not app.outer.is_active
    assert database.jobs() == []


@KINDS
@MODES
async def test_hooks_are_told_at_the_applications_own_commit(
    db_url: URL, hooks: Hooks, told: list[Any], kind: str, mode: str
) -> None:
    async with joined(db_url, kind, mode) as app:
        hooks.attach(app.target)
        await enqueue_and_complete(app)
        assert len(told) == 1


@KINDS
@MODES
async def test_a_savepoint_of_the_application_confines_its_work(
    db_url: URL, follow_ups: FollowUps, kind: str, mode: str
) -> None:
    async with joined(db_url, kind, mode) as app:
        follow_ups.attach(app.target)
        async with app.work() as session:
            await app.verb("enqueue", session, Signup())
            await app.settle(session.flush())
            savepoint = await app.settle(session.begin_nested())
            [job] = await app.verb("claim", session, "default", limit=1)
            await app.verb("complete", session, job)
            await app.settle(savepoint.rollback())
            await app.commit(session)
        assert await kinds(app) == ["signup"]


@KINDS
async def test_a_spec_that_fails_stops_the_commit_and_leaves_the_outer_transaction_usable(
    db_url: URL, follow_ups: FollowUps, kind: str
) -> None:
    @follow_ups.on_completed(Signup, name="broken")
    def broken(event: Any) -> Any:
        raise LookupError("no template")

    async with joined(db_url, kind, "create_savepoint") as app:
        follow_ups.attach(app.target)
        with pytest.raises(FollowUpError, match="broken"):
            await enqueue_and_complete(app)
        assert await kinds(app) == ["signup"]
        assert app.outer.is_active
