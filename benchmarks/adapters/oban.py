"""Oban for Python, the open source package, on uvloop. Its bulk call sends one statement for each job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from oban import Oban, worker
from oban.schema import install

from benchmarks.adapters.common import Adapter, Payload, Send, SendMany


@worker(queue="default")
class SendEmail:
    """The job; it is only enqueued here."""

    async def process(self, job: object) -> None:
        """Nothing."""


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[Oban]:
    """An instance that runs no queue."""
    pool = await Oban.create_pool(dsn=dsn, min_size=1, max_size=1)
    try:
        yield Oban(pool=pool)
    finally:
        await pool.close()


class ObanPy(Adapter):
    """Only what a producer does."""

    distributions = ("oban", "psycopg", "uvloop")
    remaining = "SELECT count(*) FROM oban_jobs WHERE state IN ('available', 'executing', 'scheduled', 'retryable')"
    uvloop = True

    async def setup(self, dsn: str) -> None:
        pool = await Oban.create_pool(dsn=dsn)
        await install(pool)
        await pool.close()

    @asynccontextmanager
    async def enqueue_one(self, dsn: str) -> AsyncIterator[Send]:
        async with opened(dsn) as own:
            yield lambda item: own.enqueue(SendEmail.new(item))

    @asynccontextmanager
    async def enqueue_many(self, dsn: str) -> AsyncIterator[SendMany]:
        async def send(items: list[Payload]) -> None:
            await own.enqueue_many(SendEmail.new(item) for item in items)

        async with opened(dsn) as own:
            yield send
