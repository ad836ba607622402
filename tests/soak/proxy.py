"""A TCP proxy that understands just enough of PostgreSQL's protocol to cut a connection exactly in a COMMIT.

`before`: the COMMIT is not forwarded, so the transaction is rolled back. `after`: it is, and the connection is cut when
the server has answered, instead of passing the answer on: the transaction is committed, and nobody is told.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

Cut = Literal["before", "after"]
#: What a transaction is for, most telling first.
PURPOSES = ("handler", "claim", "outcome", "other")

_STARTUP = 196608
_COMMITTED = b"COMMIT\x00"


@lru_cache(4096)
def purpose(sql: bytes) -> str | None:
    """What a statement shows its transaction to be for; None for one that shows nothing."""
    if b"soak_" in sql:
        return "handler" if b"INTO soak_effects" in sql else "other"
    if b"run_lease_seq" in sql:
        return "claim"
    if re.search(rb"(UPDATE|INTO|FROM) awa\.(jobs_hot|scheduled_jobs|dlq_entries|follow_up_obligations)", sql):
        writes = re.search(rb"\b(UPDATE|INSERT|DELETE)\b", sql) and b"SET heartbeat_at" not in sql
        return "outcome" if writes and not sql.startswith(b"WITH due") else None
    return None


@dataclass
class Armed:
    """The next COMMIT of a transaction for this purpose is to be cut."""

    how: Cut
    purpose: str
    hit: asyncio.Event = field(default_factory=asyncio.Event)


class Frames:
    """Messages of the client's side, out of chunks of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._started = False

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """(offset in `data`, type, body) of each message that `data` completes; the offset may be negative."""
        old = len(self._rest)
        buffer, at = self._rest + data, 0
        found: list[tuple[int, int, bytes]] = []
        while True:
            head = 1 if self._started else 0
            if len(buffer) - at < head + 4:
                break
            length = int(struct.unpack_from("!I", buffer, at + head)[0])
            if len(buffer) - at < head + length:
                break
            body = buffer[at + head + 4 : at + head + length]
            if self._started:
                found.append((at - old, buffer[at], body))
            elif int.from_bytes(body[:4]) == _STARTUP:  # before it, the client may have asked for TLS
                self._started = True
            at += head + length
        self._rest = buffer[at:]
        return found


class Link:
    """One connection of a client, and ours to the server on its behalf."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.client: asyncio.Transport | None = None
        self.server: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._frames = Frames()
        self._statements: dict[bytes, str | None] = {}
        self._purposes: set[str] = set()
        self._awaiting: Armed | None = None

    def cut(self) -> None:
        """Both sides, at once."""
        for transport in (self.client, self.server):
            if transport is not None:
                transport.abort()

    def connected(self, server: asyncio.Transport) -> None:
        """The server is there."""
        self.server = server
        if self.client is None or self.client.is_closing():
            self.cut()
        for data in self._early:
            server.write(data)
        self._early.clear()

    def from_client(self, data: bytes) -> None:
        """Forward, up to a COMMIT that is to be cut before."""
        for offset, kind, body in self._frames.feed(data):
            armed = self._commits(kind, body)
            if armed is None:
                continue
            if armed.how == "before":
                self._forward(data[: max(offset, 0)])
                self.proxy.happened(armed)
                self.cut()
                return
            self._awaiting = armed
        self._forward(data)

    def from_server(self, data: bytes) -> None:
        """Pass on, unless it is the answer that must not come."""
        if self._awaiting is not None:
            if _COMMITTED in data:
                self.proxy.happened(self._awaiting)
            else:
                self.proxy.arm(self._awaiting)
            self.cut()
        elif self.client is not None:
            self.client.write(data)

    def _forward(self, data: bytes) -> None:
        if self.server is None:
            self._early.append(data)
        else:
            self.server.write(data)

    def _commits(self, kind: int, body: bytes) -> Armed | None:
        """Follow the transaction; the order to cut, if this is the COMMIT that it is about."""
        if kind == ord("P"):
            name, sql = body.split(b"\0", 2)[:2]
            self._statements[name] = purpose(sql)
            return self._simple(sql) if name == b"" else None
        if kind == ord("B"):
            what = self._statements.get(body.split(b"\0", 2)[1])
            if what is not None:
                self._purposes.add(what)
        elif kind == ord("Q"):
            return self._simple(body.rstrip(b"\0"))
        return None

    def _simple(self, sql: bytes) -> Armed | None:
        word = sql[:8].upper()
        if word.startswith((b"BEGIN", b"ROLLBACK")) and b"SAVEPOINT" not in sql.upper():
            self._purposes.clear()
        elif word.startswith(b"COMMIT"):
            what = next((one for one in PURPOSES if one in self._purposes), "other")
            self._purposes.clear()
            return self.proxy.orders(what)
        elif (found := purpose(sql)) is not None:
            self._purposes.add(found)
        return None


class _Client(asyncio.Protocol):
    def __init__(self, proxy: Proxy) -> None:
        self._link = Link(proxy)
        self._proxy = proxy
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._link.client = transport
        self._proxy.links.add(self._link)
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: _Server(self._link), *self._proxy.server)
        except OSError:
            self._link.cut()

    def data_received(self, data: bytes) -> None:
        self._link.from_client(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy.links.discard(self._link)
        if self._link.server is not None:
            self._link.server.close()


class _Server(asyncio.Protocol):
    def __init__(self, link: Link) -> None:
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._link.connected(transport)

    def data_received(self, data: bytes) -> None:
        self._link.from_server(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._link.client is not None:
            self._link.client.close()


class Proxy:
    """What one worker, and whoever takes its place, connects to."""

    def __init__(self, server: tuple[str, int]) -> None:
        self.server = server
        self.port = 0
        self.links: set[Link] = set()
        #: (how, purpose) of the COMMITs that were cut.
        self.cuts: Counter[tuple[str, str]] = Counter()
        #: COMMITs that went through, by purpose.
        self.commits: Counter[str] = Counter()
        self._armed: list[Armed] = []
        self._listening: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, on a port of its own."""
        self._listening = await asyncio.get_running_loop().create_server(lambda: _Client(self), "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Listen no more, and cut what is there."""
        if self._listening is not None:
            self._listening.close()
        self.cut()

    def cut(self) -> int:
        """Cut all connections; returns how many."""
        links = list(self.links)
        for link in links:
            link.cut()
        return len(links)

    def arm(self, armed: Armed) -> None:
        """Cut the next COMMIT of a transaction for that purpose."""
        self._armed.append(armed)

    def disarm(self, armed: Armed) -> None:
        """It takes too long."""
        if armed in self._armed:
            self._armed.remove(armed)

    def orders(self, what: str) -> Armed | None:
        """Whether a COMMIT for this purpose is to be cut; if so, no other is by the same order."""
        for armed in self._armed:
            if armed.purpose == what:
                self._armed.remove(armed)
                return armed
        self.commits[what] += 1
        return None

    def happened(self, armed: Armed) -> None:
        """The order is carried out."""
        self.cuts[armed.how, armed.purpose] += 1
        armed.hit.set()
