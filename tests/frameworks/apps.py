"""Applications as people write them, behind one face, so that one suite can be told to each of them.

An `App` says what a registry is attached to (`target`), how a piece of work gets its session (`work()`), and which
model holds a business row (`order`). Tests are coroutines; with a synchronous application they never really wait.
Each application is what its framework makes of a database URL; the packages needed are asked for when it is built, and
its tests are skipped, with the reason, where one is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import URL, NullPool, create_engine
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import awa_sqla
import awa_sqla.asyncio
from awa_sqla.models import AwaBase
from tests.app import Base, Order

#: The optional packages, and how each is imported.
PACKAGES = {"sqlmodel": "sqlmodel", "flask-sqlalchemy": "flask_sqlalchemy", "advanced-alchemy": "advanced_alchemy"}


class App:
    """One application. `make` gives what the application calls its session; `scope` surrounds a piece of work."""

    order: Any = Order

    def __init__(self, target: Any, make: Callable[[], Any], end: Callable[[], Any] = lambda: None) -> None:
        self.target = target
        self.make = make
        self.end = end

    @asynccontextmanager
    async def work(self) -> AsyncGenerator[Any, None]:
        """A session for one piece of work, ended as the application ends it: uncommitted work is rolled back."""
        session = self.make()
        try:
            yield session
        finally:
            await self.settle(getattr(session, "remove", session.close)())

    async def settle(self, returned: Any) -> Any:
        """What a method of a session returned, awaited if it is to be."""
        return await returned if inspect.isawaitable(returned) else returned

    async def verb(self, name: str, session: Any, /, *arguments: Any, **options: Any) -> Any:
        """A verb of ours: from `awa_sqla` for a Session, from `awa_sqla.asyncio` for an AsyncSession."""
        is_async = isinstance(session, AsyncSession | async_scoped_session)
        verbs = awa_sqla.asyncio if is_async else awa_sqla
        return await self.settle(getattr(verbs, name)(session, *arguments, **options))

    async def commit(self, session: Any) -> None:
        await self.settle(session.commit())

    async def rollback(self, session: Any) -> None:
        await self.settle(session.rollback())


Built = Generator[App, None, None]


def needs(package: str) -> Any:
    """The module of an optional package, or a visible skip."""
    return pytest.importorskip(PACKAGES[package], reason=f"{package} is not installed")


def _sync(url: URL) -> Any:
    return create_engine(url.set(drivername="postgresql+psycopg"), poolclass=NullPool)


def _async(url: URL, driver: str = "asyncpg") -> Any:
    return create_async_engine(url.set(drivername=f"postgresql+{driver}"), poolclass=NullPool)


# ------------------------------------------------------------------------------------------------ SQLAlchemy alone
def plain(url: URL) -> Built:
    maker = sessionmaker(_sync(url))
    yield App(maker, maker)


def no_autoflush(url: URL) -> Built:
    maker = sessionmaker(_sync(url), autoflush=False)
    yield App(maker, maker)


def no_expiry(url: URL) -> Built:
    maker = sessionmaker(_sync(url), expire_on_commit=False)
    yield App(maker, maker)


def one_session(url: URL) -> Built:
    class Own(Session):
        """A session class of the application."""

    yield App(Own, lambda: Own(_sync(url)))


def thread_local(url: URL) -> Built:
    scoped = scoped_session(sessionmaker(_sync(url)))
    yield App(scoped, lambda: scoped)


def two_phase(url: URL) -> Built:
    maker = sessionmaker(_sync(url), twophase=True)
    yield App(maker, maker)


def several_binds(url: URL) -> Built:
    engine = _sync(url)
    maker = sessionmaker(binds={Base: engine, AwaBase: engine})
    yield App(maker, maker)


def async_plain(url: URL) -> Built:
    maker = async_sessionmaker(_async(url), expire_on_commit=False)
    yield App(maker, maker)


def async_psycopg(url: URL) -> Built:
    maker = async_sessionmaker(_async(url, "psycopg"), expire_on_commit=False)
    yield App(maker, maker)


def async_no_autoflush(url: URL) -> Built:
    maker = async_sessionmaker(_async(url), expire_on_commit=False, autoflush=False)
    yield App(maker, maker)


def async_several_binds(url: URL) -> Built:
    engine = _async(url)
    maker = async_sessionmaker(binds={Base: engine, AwaBase: engine}, expire_on_commit=False)
    yield App(maker, maker)


def task_local(url: URL) -> Built:
    scoped = async_scoped_session(async_sessionmaker(_async(url), expire_on_commit=False), scopefunc=lambda: 1)
    yield App(scoped, lambda: scoped)


# --------------------------------------------------------------------------------------------------------- SQLModel
def sqlmodel(url: URL) -> Built:
    module = needs("sqlmodel")

    class Own(module.Session):
        """SQLModel's tutorial writes `Session(engine)`; a registry goes on a subclass, or on a sessionmaker."""

    engine = _sync(url)
    app = App(Own, lambda: Own(engine))
    app.order = _sqlmodel_order(module)
    yield app


def sqlmodel_maker(url: URL) -> Built:
    module = needs("sqlmodel")
    maker = sessionmaker(_sync(url), class_=module.Session)
    app = App(maker, maker)
    app.order = _sqlmodel_order(module)
    yield app


def sqlmodel_async(url: URL) -> Built:
    module = needs("sqlmodel")
    from sqlmodel.ext.asyncio.session import AsyncSession as SQLModelAsyncSession

    maker = async_sessionmaker(_async(url), class_=SQLModelAsyncSession, expire_on_commit=False)
    app = App(maker, maker)
    app.order = _sqlmodel_order(module)
    yield app


def _sqlmodel_order(module: Any) -> Any:
    from tests.frameworks.sqlmodel_models import SQLModelOrder

    return SQLModelOrder


# ------------------------------------------------------------------------------------------------- Flask-SQLAlchemy
class FlaskApp(App):
    """Each piece of work is an application context, whose teardown removes the session, as after a request."""

    def __init__(self, flask: Any, db: Any, order: Any) -> None:
        super().__init__(db.session, lambda: db.session)
        self.flask, self.db, self.order = flask, db, order

    @asynccontextmanager
    async def work(self) -> AsyncGenerator[Any, None]:
        with self.flask.app_context():
            yield self.db.session


def flask(url: URL) -> Built:
    yield from _flask(url)


def flask_with_binds(url: URL) -> Built:
    """A second database for other tables: the jobs stay with the default one."""
    yield from _flask(url, {"elsewhere": url.render_as_string(hide_password=False)})


def _flask(url: URL, binds: dict[str, str] | None = None) -> Built:
    needs("flask-sqlalchemy")
    from flask import Flask
    from flask_sqlalchemy import SQLAlchemy

    db = SQLAlchemy(model_class=Base, engine_options={"poolclass": NullPool})
    made = Flask("shop")
    made.config["SQLALCHEMY_DATABASE_URI"] = url.set(drivername="postgresql+psycopg")
    made.config["SQLALCHEMY_BINDS"] = binds or {}
    db.init_app(made)
    yield FlaskApp(made, db, Order)


# ------------------------------------------------------------------------------------------------- advanced-alchemy
def advanced(url: URL) -> Built:
    needs("advanced-alchemy")
    from advanced_alchemy.config import SQLAlchemySyncConfig

    config = SQLAlchemySyncConfig(engine_instance=_sync(url))
    maker = config.create_session_maker()
    yield App(maker, maker)


def advanced_async(url: URL) -> Built:
    """Its maker passes a sessionmaker as `sync_session_class`."""
    needs("advanced-alchemy")
    from advanced_alchemy.config import AsyncSessionConfig, SQLAlchemyAsyncConfig

    config = SQLAlchemyAsyncConfig(
        engine_instance=_async(url), session_config=AsyncSessionConfig(expire_on_commit=False)
    )
    maker = config.create_session_maker()
    assert isinstance(maker, async_sessionmaker)
    assert isinstance(maker.kw["sync_session_class"], sessionmaker)
    yield App(maker, maker)


def advanced_own_class(url: URL) -> Built:
    needs("advanced-alchemy")
    from advanced_alchemy.config import AsyncSessionConfig, SQLAlchemyAsyncConfig

    class Own(AsyncSession):
        """An AsyncSession subclass of the application."""

    config = SQLAlchemyAsyncConfig(
        engine_instance=_async(url), session_config=AsyncSessionConfig(class_=Own, expire_on_commit=False)
    )
    maker = config.create_session_maker()
    yield App(maker, maker)


def advanced_routing(url: URL) -> Built:
    """Reads go to a replica, writes to the primary; a verb of ours is a write, whatever it looks like."""
    needs("advanced-alchemy")
    from advanced_alchemy.config.routing import RoutingConfig
    from advanced_alchemy.routing import RoutingSyncSession
    from advanced_alchemy.routing.selectors import RoundRobinSelector

    address = url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    config = RoutingConfig(primary_connection_string=address, read_replicas=[address])
    primary = _sync(url)
    replica = create_engine(
        address, poolclass=NullPool, connect_args={"options": "-c default_transaction_read_only=on"}
    )
    selectors = {"default": RoundRobinSelector([primary]), "read": RoundRobinSelector([replica])}
    maker = sessionmaker(class_=RoutingSyncSession, routing_config=config, selectors=selectors, default_engine=primary)
    yield App(maker, maker)


#: What an application may be made with, each by its name.
APPS: dict[str, Callable[[URL], Built]] = {
    build.__name__.replace("_", "-"): build
    for build in (
        plain,
        no_autoflush,
        no_expiry,
        one_session,
        thread_local,
        two_phase,
        several_binds,
        async_plain,
        async_psycopg,
        async_no_autoflush,
        async_several_binds,
        task_local,
        sqlmodel,
        sqlmodel_maker,
        sqlmodel_async,
        flask,
        flask_with_binds,
        advanced,
        advanced_async,
        advanced_own_class,
        advanced_routing,
    )
}
