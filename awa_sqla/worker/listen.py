"""LISTEN: wake-ups and cancellations, on a connection of its own that is watched and replaced.

A notification is only a hint. While no listener is healthy, the worker polls at each queue's own interval.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from awa_sqla.worker.forks import hold

log = logging.getLogger("awa_sqla.worker")

#: Seconds between proofs that notifications arrive, for one to be sent, and for it to arrive.
PROOF, RING, ECHO = 30.0, 10.0, 5.0
#: Seconds until the next try: at first, at the most, and where notifications do not arrive.
SOON, LATER, DEAF = 0.1, 5.0, 60.0


class DeafError(Exception):
    """The connection is there, and what is sent to the channel does not arrive."""


class Listener:
    """Hears one channel and calls back with each payload; with None once notifications arrive (again).

    That the connection stands is no proof: behind a pooler in transaction mode LISTEN succeeds and nothing is heard. So
    `ring` sends a payload to the channel over another connection, which must come back.
    """

    def __init__(
        self, conninfo: str, channel: str, heard: Callable[[str | None], None], ring: Callable[[str], Awaitable[None]]
    ) -> None:
        self._conninfo = conninfo
        self._channel = channel
        self._heard = heard
        self._ring = ring
        self._token = f"p:{secrets.token_hex(8)}"
        self.healthy = False

    async def serve(self) -> None:
        """Listen for ever, reconnecting with growing pauses."""
        pause = SOON
        while True:
            try:
                await self._listen()
            except DeafError:
                log.warning(
                    "notifications do not arrive, polling instead: is there a pooler in transaction mode in between? "
                    "Then give the worker listen_url, a URL that goes to the server directly, or notify=False"
                )
                pause = DEAF
            except (psycopg.Error, OSError) as exc:
                log.warning("the listener is down, polling instead: %s", _brief(exc))
                pause = SOON if self.healthy else min(pause * 2, LATER)
            finally:
                self.healthy = False
            await asyncio.sleep(pause)

    async def _listen(self) -> None:
        async with await psycopg.AsyncConnection.connect(
            self._conninfo, autocommit=True, application_name="awa_sqla listener"
        ) as connection:
            hold(connection)
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
            while True:
                async with asyncio.timeout(RING):  # books that stand still prove nothing
                    await self._ring(self._token)
                if not await self._echoed(connection):
                    await connection.execute("UNLISTEN *")  # it may be another's by now, whom it would only burden
                    raise DeafError
                async for notification in connection.notifies(timeout=PROOF):
                    self._take(notification.payload)

    async def _echoed(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        echoed = False
        async for notification in connection.notifies(timeout=ECHO):
            echoed = echoed or notification.payload == self._token
            self._take(notification.payload)
        return echoed

    def _take(self, payload: str) -> None:
        if payload != self._token:
            self._heard(payload)
        elif not self.healthy:
            self.healthy = True
            self._heard(None)


async def notify(engine: AsyncEngine, channel: str, payload: str) -> None:
    """Send one payload to a channel, over an engine in AUTOCOMMIT mode."""
    async with engine.connect() as connection:
        await connection.execute(select(func.pg_notify(channel, payload)))


def _brief(exc: Exception) -> str:
    return str(exc).partition("\n")[0] or type(exc).__name__
