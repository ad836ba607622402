"""advanced-alchemy: its configured makers, its listeners and its repositories work beside ours."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import URL, NullPool, create_engine, event
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from awa_sqla import FollowUps, Job, claim, complete, enqueue
from awa_sqla import asyncio as awa_async
from tests.app import Order, Signup
from tests.worlds import Database

pytest.importorskip("advanced_alchemy", reason="advanced-alchemy is not installed")


@pytest.fixture
def config(db_url: URL) -> Any:
    from advanced_alchemy.config import SQLAlchemySyncConfig

    return SQLAlchemySyncConfig(engine_instance=create_engine(db_url, poolclass=NullPool))


@pytest.fixture
def async_config(db_url: URL) -> Any:
    from advanced_alchemy.config import AsyncSessionConfig, SQLAlchemyAsyncConfig

    engine = create_async_engine(db_url.set(drivername="postgresql+asyncpg"), poolclass=NullPool)
    return SQLAlchemyAsyncConfig(engine_instance=engine, session_config=AsyncSessionConfig(expire_on_commit=False))


def test_a_repository_and_a_job_share_the_session(config: Any, database: Database) -> None:
    from advanced_alchemy.repository import SQLAlchemySyncRepository

    class Orders(SQLAlchemySyncRepository[Order]):
        model_type = Order

    with config.get_session() as session:
        Orders(session=session).add(Order(note="paid"))
        enqueue(session, Signup())
        session.commit()
    assert database.kinds() == ["signup"]
    assert database.value("SELECT note FROM app_order") == "paid"


async def test_an_async_repository_and_a_job_share_the_session(async_config: Any, database: Database) -> None:
    from advanced_alchemy.repository import SQLAlchemyAsyncRepository

    class Orders(SQLAlchemyAsyncRepository[Order]):
        model_type = Order

    async with async_config.get_session() as session:
        await Orders(session=session).add(Order(note="paid"))
        enqueue(session, Signup())
        await session.commit()
    assert database.kinds() == ["signup"]
    assert database.value("SELECT note FROM app_order") == "paid"


async def test_the_makers_own_listeners_still_hear_its_sessions(
    async_config: Any, follow_ups: FollowUps, database: Database
) -> None:
    maker = async_config.create_session_maker()
    seen: list[list[str]] = []
    event.listen(
        maker.kw["sync_session_class"],
        "before_flush",
        lambda session, *_: seen.append([getattr(row, "kind", "order") for row in session.new]),
    )
    follow_ups.attach(maker)
    async with maker() as session:
        session.add(Order(note="paid"))
        await session.commit()
        enqueue(session, Signup())
        await session.commit()
        [job] = await awa_async.claim(session, "default", limit=1)
        await awa_async.complete(session, job)
        await session.commit()
    assert isinstance(maker.kw["sync_session_class"], sessionmaker)
    assert seen[:2] == [["order"], ["signup"]]
    assert seen[-1] == ["welcome"]


async def test_the_configs_own_sessions_have_what_its_maker_was_given(
    async_config: Any, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.attach(async_config.create_session_maker())
    async with async_config.get_session() as session:
        enqueue(session, Signup())
        await session.commit()
        [job] = await awa_async.claim(session, "default", limit=1)
        await awa_async.complete(session, job)
        await session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_the_sync_configs_sessions_have_what_its_maker_was_given(
    config: Any, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.attach(config.create_session_maker())
    with config.get_session() as session:
        enqueue(session, Signup())
        session.commit()
        [job] = claim(session, "default", limit=1)
        complete(session, job)
        session.commit()
        assert session.get_one(Job, job.id).state == "completed"
    assert database.kinds() == ["signup", "welcome"]


def test_a_routing_maker_is_no_sessionmaker_and_is_told_what_is(db_url: URL, follow_ups: FollowUps) -> None:
    from advanced_alchemy.config import SQLAlchemySyncConfig
    from advanced_alchemy.config.routing import RoutingConfig

    from awa_sqla import ConfigurationError

    address = db_url.render_as_string(hide_password=False)
    routing = RoutingConfig(primary_connection_string=address, read_replicas=[address])
    maker = SQLAlchemySyncConfig(routing_config=routing).create_session_maker()
    with pytest.raises(ConfigurationError, match="a Session subclass"):
        follow_ups.attach(maker)
