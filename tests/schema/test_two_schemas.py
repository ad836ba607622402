"""Two queues side by side in one database: each worker hears of its own jobs, and runs no other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from sqlalchemy import URL, Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session

from awa_sqla import Awa, JobArgs, enqueue
from awa_sqla.models.wakeups import queue_payload
from awa_sqla.schema import create_all

#: Each takes its own database, project or processes; run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside

SCHEMAS = ("awa", "billing")
PATIENCE = 60.0


class Work(JobArgs, kind="work_of_two"):
    number: int


class Side:
    """One queue: its engine, its app, what its worker has heard and run."""

    def __init__(self, url: URL, schema: str) -> None:
        self.schema = schema
        options = {"schema_translate_map": {"awa": schema}}
        self.engine = create_engine(url, execution_options=options, poolclass=NullPool)
        self.app = Awa()
        self.heard: list[str | None] = []
        self.ran: list[tuple[int, float]] = []
        self.app.task(Work)(self.work)

    async def work(self, ctx: Any) -> None:
        self.ran.append((ctx.args.number, time.monotonic()))

    def enqueue(self, number: int) -> None:
        with Session(self.engine) as session, session.begin():
            enqueue(session, Work(number=number))

    def overhear(self, worker: Any) -> None:
        """Note what the worker's listener is told."""
        listener = worker._listener
        told = listener._heard

        def note(payload: str | None) -> None:
            self.heard.append(payload)
            told(payload)

        listener._heard = note

    def states(self) -> list[str]:
        with self.engine.connect() as connection:
            return list(connection.scalars(text(f"SELECT state FROM {self.schema}.jobs_hot ORDER BY id")))


@pytest.fixture
def sides(empty_db_url: URL, empty_engine: Engine) -> Iterator[list[Side]]:
    with empty_engine.begin() as connection:
        for schema in SCHEMAS:
            create_all(connection, schema)
    made = [Side(empty_db_url, schema) for schema in SCHEMAS]
    yield made
    for side in made:
        side.app.follow_ups._specs.clear()
        side.engine.dispose()


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the database
            await asyncio.sleep(0.02)


async def served(sides: list[Side], during: Any) -> None:
    async with AsyncExitStack() as stack:
        workers: list[Any] = [await stack.enter_async_context(side.app.worker(side.engine)) for side in sides]
        for side, worker in zip(sides, workers, strict=True):
            await until(lambda worker=worker: worker._listener.healthy)
            side.overhear(worker)
        await during()


@pytest.mark.parametrize("busy", [0, 1], ids=SCHEMAS)
def test_each_worker_is_woken_by_its_own_jobs_only(sides: list[Side], busy: int) -> None:
    mine, other = sides[busy], sides[1 - busy]
    waits: list[float] = []

    async def during() -> None:
        for number in range(5):
            sent = time.monotonic()
            mine.enqueue(number)
            await until(lambda: len(mine.ran) > number)  # noqa: B023 - awaited in this turn
            waits.append(mine.ran[-1][1] - sent)
        await until(lambda: mine.heard.count(queue_payload("default")) == 5)

    asyncio.run(served(sides, during))
    assert queue_payload("default") not in other.heard
    assert ([number for number, _ in mine.ran], other.ran) == ([0, 1, 2, 3, 4], [])
    assert min(waits) < 0.5  # polling alone would take up to 2 s, each time


def test_each_worker_runs_its_own_jobs_only(sides: list[Side]) -> None:
    async def during() -> None:
        for number in range(6):
            sides[number % 2].enqueue(number)
        await until(lambda: all(side.states() == ["completed"] * 3 for side in sides))

    asyncio.run(served(sides, during))
    assert [sorted(number for number, _ in side.ran) for side in sides] == [[0, 2, 4], [1, 3, 5]]
