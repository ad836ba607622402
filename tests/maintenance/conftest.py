"""Tests that ask for a world run in every world of `tests.worlds`; and processes that look after schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from sqlalchemy import URL, Engine, event
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import Awa
from awa_sqla.maintenance.cron import Cron
from awa_sqla.periodic import Periodic
from awa_sqla.worker.threads import Threads
from tests.worlds import database, follow_ups, other, pytest_pyfunc_call, session, world

__all__ = ["database", "follow_ups", "other", "pytest_pyfunc_call", "session", "world"]


@pytest.fixture
def maker(engine: Engine) -> sessionmaker[Session]:
    return sessionmaker(engine)


@pytest.fixture
def awa() -> Awa:
    return Awa()


@pytest.fixture
def process(db_url: URL) -> Callable[..., Any]:
    """Run something in a process of its own, as far as schedules can tell: a loop, an engine, a `Cron`."""

    def run(
        act: Callable[[Cron], Awaitable[Any]],
        periodics: Iterable[Periodic] = (),
        *,
        leading: bool = True,
        statements: list[str] | None = None,
        driver: str = "psycopg",
    ) -> Any:
        async def main() -> Any:
            engine = create_async_engine(db_url.set(drivername=f"postgresql+{driver}"))
            if statements is not None:
                event.listen(engine.sync_engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
            threads = Threads(8)
            cron = Cron(async_sessionmaker(engine), periodics, leading=lambda: leading, call=threads.run)
            try:
                return await act(cron)
            finally:
                await cron.close()
                threads.close()
                await engine.dispose()

        return asyncio.run(main())

    return run


@pytest.fixture
def look(process: Callable[..., Any], awa: Awa) -> Callable[..., float]:
    """One look of a new process of the app."""

    def once(*, leading: bool = True) -> float:
        return process(lambda cron: cron.look(), awa.schedules.values(), leading=leading)

    return once
