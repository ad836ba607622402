"""River's client for Python, on SQLAlchemy and psycopg. Its tables come from River's own command, written in Go."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import ClassVar

from riverqueue import Client
from riverqueue.driver import riversqlalchemy
from sqlalchemy import Engine

from benchmarks.adapters.app import connected
from benchmarks.adapters.common import Adapter, Payload, Send, SendMany, UnsupportedError


@dataclass
class SendEmail:
    """The job."""

    kind: ClassVar[str] = "send_email"

    user_id: int
    email: str

    def to_json(self) -> str:
        """The arguments, as its client asks for them."""
        return json.dumps(asdict(self))


@contextmanager
def opened(dsn: str) -> Iterator[tuple[Engine, Client]]:
    """Its client, and the engine under it."""
    own = connected(dsn)
    yield own, Client(riversqlalchemy.Driver(own))
    own.dispose()


class Riverqueue(Adapter):
    """Only what a producer does."""

    distributions = ("riverqueue", "sqlalchemy", "psycopg")
    remaining = "SELECT count(*) FROM river_job WHERE finalized_at IS NULL"

    def setup(self, dsn: str) -> None:
        command = shutil.which("river")
        if command is None:
            raise UnsupportedError("`river`, the command that makes its tables, is not on the PATH")
        subprocess.run([command, "migrate-up", "--database-url", dsn], check=True, stdout=subprocess.DEVNULL)

    @contextmanager
    def enqueue_one(self, dsn: str) -> Iterator[Send]:
        with opened(dsn) as (_, client):
            yield lambda item: client.insert(SendEmail(**item))

    @contextmanager
    def enqueue_many(self, dsn: str) -> Iterator[SendMany]:
        def send(items: list[Payload]) -> None:
            with own.begin() as connection:
                client.insert_many_tx(connection, [SendEmail(**item) for item in items])

        with opened(dsn) as (own, client):
            yield send
