"""LISTEN: wake-ups and cancellations, on a connection of its own that is watched and replaced.

A notification is only a hint. While no listener is healthy, the worker polls at each queue's own interval.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import psycopg
from psycopg import sql

from awa_sqla.worker.forks import hold

log = logging.getLogger("awa_sqla.worker")

#: Seconds between proofs that the connection still lives.
PROOF = 30.0


class Listener:
    """Hears one channel and calls back with each payload; with None after every (re)connection."""

    def __init__(self, url: str, channel: str, heard: Callable[[str | None], None]) -> None:
        self._url = url
        self._channel = channel
        self._heard = heard
        self.healthy = False

    async def serve(self) -> None:
        """Listen for ever, reconnecting with growing pauses up to 5 s."""
        pause = 0.1
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._url, autocommit=True, connect_timeout=10, application_name="awa_sqla listener"
                ) as connection:
                    hold(connection)
                    await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
                    self.healthy = True
                    pause = 0.1
                    self._heard(None)
                    await self._hear(connection)
            except (psycopg.Error, OSError) as exc:
                log.warning("the listener is down, polling instead: %s", str(exc).partition("\n")[0])
            finally:
                self.healthy = False
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    async def _hear(self, connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        while True:
            async for notification in connection.notifies(timeout=PROOF):
                self._heard(notification.payload)
            async with asyncio.timeout(10):
                await connection.execute("SELECT 1")
