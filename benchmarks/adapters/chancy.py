"""Chancy through its synchronous calls, one connection. Its bulk call sends one statement for each job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chancy import Chancy, Queue, job

from benchmarks.adapters.common import Adapter, Payload, Send, SendMany


@job(queue="default")
def send_email(*, user_id: int, email: str) -> None:
    """The job; it is only enqueued here."""


@contextmanager
def opened(dsn: str) -> Iterator[Any]:
    """Its app, for producers."""
    with Chancy(dsn, min_connection_pool_size=1, max_connection_pool_size=1) as own:
        yield own


class ChancyPeer(Adapter):
    """Only what a producer does."""

    distributions = ("chancy", "psycopg")
    remaining = "SELECT count(*) FROM chancy_jobs WHERE state IN ('pending', 'running', 'retrying')"

    async def setup(self, dsn: str) -> None:
        async with Chancy(dsn) as own:
            await own.migrate()
            await own.declare(Queue("default"))

    @contextmanager
    def enqueue_one(self, dsn: str) -> Iterator[Send]:
        with opened(dsn) as own:
            yield lambda item: own.sync_push(send_email.job.with_kwargs(**item))

    @contextmanager
    def enqueue_many(self, dsn: str) -> Iterator[SendMany]:
        def send(items: list[Payload]) -> None:
            jobs = [send_email.job.with_kwargs(**item) for item in items]
            for _ in own.sync_push_many(jobs, batch_size=len(jobs)):
                pass  # one batch, so one transaction

        with opened(dsn) as own:
            yield send
