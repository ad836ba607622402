"""procrastinate through its synchronous psycopg connector, one connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from procrastinate import App, SyncPsycopgConnector

from benchmarks.adapters.common import Adapter, Payload, Send, SendMany


@contextmanager
def opened(dsn: str) -> Iterator[tuple[App, Any]]:
    """An app and its task."""
    app = App(connector=SyncPsycopgConnector(conninfo=dsn, min_size=1, max_size=1))

    @app.task(name="send_email")
    def send_email(user_id: int, email: str) -> None:
        """The job; it is only enqueued here."""

    with app.open():
        yield app, send_email


class Procrastinate(Adapter):
    """Only what a producer does."""

    distributions = ("procrastinate", "psycopg")
    remaining = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"

    def setup(self, dsn: str) -> None:
        with opened(dsn) as (app, _):
            app.schema_manager.apply_schema()

    @contextmanager
    def enqueue_one(self, dsn: str) -> Iterator[Send]:
        with opened(dsn) as (_, task):
            yield lambda item: task.defer(**item)

    @contextmanager
    def enqueue_many(self, dsn: str) -> Iterator[SendMany]:
        def send(items: list[Payload]) -> None:
            task.batch_defer(*items)

        with opened(dsn) as (_, task):
            yield send
