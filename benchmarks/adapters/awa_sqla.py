"""awa_sqla through its public names, with nothing a user would not write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.orm import sessionmaker

from awa_sqla import Awa, JobArgs, JobContext, QueueConfig, Unique, enqueue, enqueue_many, schema
from benchmarks.adapters.app import User, connected, engine, url
from benchmarks.adapters.common import Adapter, Handler, Payload, Send, SendMany, setting, stop_event

CONCURRENCY = setting("BENCH_CONCURRENCY", 1000)
BATCH = setting("BENCH_BATCH", 500)
DRIVER = os.environ.get("BENCH_DRIVER", "psycopg")
UVLOOP = os.environ.get("BENCH_UVLOOP", "0") == "1"


class SendEmail(JobArgs):
    """The job."""

    user_id: int
    email: str


class SendOnce(JobArgs, unique=Unique()):
    """The same, refused while one with the same arguments waits or runs."""

    user_id: int
    email: str


class Installed(Adapter):
    """The tables."""

    distributions = ("awa-sqla", "sqlalchemy", "psycopg", "pydantic")
    remaining = "SELECT count(*) FROM awa.jobs_hot WHERE state IN ('available', 'running')"

    def setup(self, dsn: str) -> None:
        own = engine(dsn)
        with own.begin() as connection:
            schema.create_all(connection)
        own.dispose()


class AwaSQLA(Installed):
    """One worker; result rows stay."""

    preload = ("awa_sqla", DRIVER, *(("uvloop",) if UVLOOP else ()))
    kept = "SELECT count(*) FROM awa.jobs_hot WHERE state = 'completed'"
    uvloop = UVLOOP

    @contextmanager
    def enqueue_one(self, dsn: str) -> Iterator[Send]:
        own = engine(dsn)
        maker = sessionmaker(own)

        def send(item: Payload) -> None:
            with maker.begin() as session:
                enqueue(session, SendEmail(**item))

        yield send
        own.dispose()

    @contextmanager
    def enqueue_many(self, dsn: str) -> Iterator[SendMany]:
        own = connected(dsn)
        maker = sessionmaker(own)

        def send(items: list[Payload]) -> None:
            with maker.begin() as session:
                enqueue_many(session, [SendEmail(**item) for item in items])

        yield send
        own.dispose()

    @contextmanager
    def enqueue_in_session(self, dsn: str) -> Iterator[Send]:
        own = engine(dsn)
        maker = sessionmaker(own)

        def send(item: Payload) -> None:
            with maker.begin() as session:
                session.add(User(email=item["email"]))
                enqueue(session, SendEmail(**item))

        yield send
        own.dispose()

    async def drain(self, dsn: str, handler: Handler) -> None:
        told = stop_event()
        awa = Awa(queues={"default": QueueConfig(concurrency=CONCURRENCY)})

        @awa.task(SendEmail)
        async def send_email(ctx: JobContext[SendEmail]) -> None:
            handler(ctx.args.user_id)

        async with awa.worker(url(dsn, DRIVER), claim_batch=BATCH):
            await told.wait()


class UniqueJobs(Installed):
    """What uniqueness costs."""

    @contextmanager
    def enqueue_many(self, dsn: str) -> Iterator[SendMany]:
        own = connected(dsn)
        maker = sessionmaker(own)

        def send(items: list[Payload]) -> None:
            with maker.begin() as session:
                enqueue_many(session, [SendOnce(**item) for item in items])

        yield send
        own.dispose()
