"""PgQueuer on asyncpg and uvloop, with the batch that was its fastest.

It deletes a job's row when the job succeeds, and writes rows to a log.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pgqueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from benchmarks.adapters.common import Adapter, Handler, Payload, Send, SendMany, setting, stop_event

BATCH = setting("BENCH_BATCH", 500)


@asynccontextmanager
async def queries(dsn: str) -> AsyncIterator[Queries]:
    """Its queries on a connection of their own."""
    connection = await asyncpg.connect(dsn)
    try:
        yield Queries(AsyncpgDriver(connection))
    finally:
        await connection.close()


def encoded(item: Payload) -> bytes:
    """Payloads are bytes there."""
    return json.dumps(item).encode()


class PgQueuer(Adapter):
    """One manager on one connection."""

    distributions = ("pgqueuer", "asyncpg", "uvloop")
    preload = ("pgqueuer.qm", "uvloop")
    remaining = "SELECT count(*) FROM pgqueuer"
    kept = "SELECT count(*) FROM pgqueuer"
    uvloop = True

    async def setup(self, dsn: str) -> None:
        async with queries(dsn) as own:
            await own.install()
            await own.optimize_autovacuum()

    @asynccontextmanager
    async def enqueue_one(self, dsn: str) -> AsyncIterator[Send]:
        async with queries(dsn) as own:
            yield lambda item: own.enqueue("send_email", encoded(item), 0)

    @asynccontextmanager
    async def enqueue_many(self, dsn: str) -> AsyncIterator[SendMany]:
        async def send(items: list[Payload]) -> None:
            count = len(items)
            await own.enqueue(["send_email"] * count, [encoded(item) for item in items], [0] * count)

        async with queries(dsn) as own:
            yield send

    @asynccontextmanager
    async def enqueue_in_session(self, dsn: str) -> AsyncIterator[Send]:
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        from benchmarks.adapters.app import User, url

        own = create_async_engine(url(dsn, "asyncpg"))

        async def send(item: Payload) -> None:
            async with AsyncSession(own) as session, session.begin():
                session.add(User(email=item["email"]))
                await session.flush()
                # It knows nothing of SQLAlchemy: its driver goes on the session's own connection.
                fairy = await (await session.connection()).get_raw_connection()
                raw: Any = fairy.driver_connection
                await Queries(AsyncpgDriver(raw)).enqueue("send_email", encoded(item), 0)

        yield send
        await own.dispose()

    async def drain(self, dsn: str, handler: Handler) -> None:
        told = stop_event()
        manager = pgqueuer.PgQueuer.from_asyncpg_connection(await asyncpg.connect(dsn))

        @manager.entrypoint("send_email")
        async def send_email(job: Any) -> None:
            handler(json.loads(job.payload)["user_id"])

        running = asyncio.create_task(manager.run(batch_size=BATCH))
        stopping = asyncio.create_task(told.wait())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        manager.shutdown.set()
        await asyncio.wait([running], timeout=5)
        if running.done():
            running.result()
