"""A stage for worker tests: an app, a worker on a real database, and a look at what is committed."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from sqlalchemy import URL, Engine
from sqlalchemy.orm import sessionmaker

from awa_sqla import Awa, JobArgs, Worker, enqueue
from awa_sqla.maintenance import lanes
from awa_sqla.session import catalogue

PATIENCE = 60.0


class Stage:
    """One app and its database."""

    def __init__(self, url: URL, engine: Engine) -> None:
        self.url = url
        self.app = Awa()
        self.sessions = sessionmaker(engine)
        self._look = psycopg.connect(
            url.set(drivername="postgresql").render_as_string(hide_password=False),
            autocommit=True,
            row_factory=namedtuple_row,
        )

    def enqueue(self, *args: JobArgs, **options: Any) -> list[int]:
        """Enqueue and commit; the ids."""
        with self.sessions.begin() as session:
            jobs = [enqueue(session, one, **options) for one in args]
            session.flush()
            return [job.id for job in jobs]

    def sql(self, query: str, *parameters: Any) -> list[Any]:
        """Rows of a query on a connection of its own."""
        cursor = self._look.execute(query, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def jobs(self, *kinds: str) -> list[Any]:
        """Rows of the view, by id."""
        rows = self.sql("SELECT * FROM awa.jobs ORDER BY id")
        return [row for row in rows if not kinds or row.kind in kinds]

    def states(self, *kinds: str) -> list[str]:
        """Their states."""
        return [row.state for row in self.jobs(*kinds)]

    def obligations(self) -> list[Any]:
        """What is owed."""
        return self.sql("SELECT * FROM awa.follow_up_obligations ORDER BY id")

    def all_ended(self) -> bool:
        """Whether no job is live."""
        return all(row.state in ("completed", "failed", "cancelled") for row in self.jobs())

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait, at most a minute, until `condition()` holds."""
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - what is waited for happens in the database
                await asyncio.sleep(0.02)

    def play(
        self,
        condition: Callable[[], object] | None = None,
        *,
        during: Callable[[Worker], Awaitable[None]] | None = None,
        url: URL | str | Engine | None = None,
        **options: Any,
    ) -> Worker:
        """Run a worker until `condition()` holds (by default: until no job is live), then stop it gracefully."""

        async def run() -> Worker:
            async with self.app.worker(url or self.url, **options) as worker:
                if during is not None:
                    await during(worker)
                await self.until(condition or self.all_ended)
            return worker

        return asyncio.run(run())

    def close(self) -> None:
        self._look.close()


@pytest.fixture
def stage(db_url: URL, engine: Engine, monkeypatch: pytest.MonkeyPatch, an_old_server: None) -> Iterator[Stage]:
    catalogue.forget_cache()
    monkeypatch.setattr(lanes, "OBLIGATIONS", 0.2)  # looks more often than every five seconds
    stage = Stage(db_url, engine)
    stage.app.attach(stage.sessions)
    yield stage
    stage.app.follow_ups._specs.clear()  # the process remembers every registry that was ever attached
    stage.close()
    # What a cut or cancelled connection leaves behind is this test's, not the next one's.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def quick() -> dict[str, Any]:
    """Options of a worker that notices dead workers soon."""
    return {"heartbeat": timedelta(seconds=0.2), "stale_after": timedelta(seconds=1)}
