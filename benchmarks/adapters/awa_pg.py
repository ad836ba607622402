"""awa-pg: a Rust core behind PyO3, through its synchronous client on one connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import awa

from benchmarks.adapters.common import Adapter, Payload, Send, SendMany


@dataclass
class SendEmail:
    """The job."""

    user_id: int
    email: str


@contextmanager
def client(dsn: str) -> Iterator[awa.Client]:
    """Its client for producers."""
    own = awa.Client(dsn, max_connections=1)
    try:
        yield own
    finally:
        own.close()


class AwaPg(Adapter):
    """Only what a producer does."""

    distributions = ("awa-pg",)
    remaining = "SELECT count(*) FROM awa.ready_entries"

    async def setup(self, dsn: str) -> None:
        own = awa.AsyncClient(dsn)
        await own.migrate()

        @own.task(SendEmail, queue="default")
        async def send_email(job: object) -> None:
            """Nothing."""

        # The first worker of a new installation switches it to the storage that the bulk call needs.
        await own.start([("default", 1)])
        await own.shutdown()
        await own.close()

    @contextmanager
    def enqueue_one(self, dsn: str) -> Iterator[Send]:
        with client(dsn) as own:
            yield lambda item: own.insert(SendEmail(**item))

    @contextmanager
    def enqueue_many(self, dsn: str) -> Iterator[SendMany]:
        def send(items: list[Payload]) -> None:
            own.enqueue_many_copy([SendEmail(**item) for item in items])

        with client(dsn) as own:
            yield send
