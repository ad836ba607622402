"""The router as a process of its own: what `awa-sqla callbacks serve` runs, on uvicorn."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvicorn
from sqlalchemy.ext.asyncio import async_sessionmaker
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount

from awa_sqla.app import Awa
from awa_sqla.web.callbacks import not_here, router
from awa_sqla.worker.engines import Engines, Given

#: Requests that wait for the database at once; the others wait for a connection.
CONNECTIONS = 20
#: What running requests get at a stop, in seconds.
GRACE = 30


@dataclass(frozen=True, slots=True)
class Ingress:
    """What is served: a database, maybe the app whose follow-ups are made, the keys (None: unsigned), the path."""

    database: Given
    app: Awa | None
    secret: Sequence[bytes] | None
    prefix: str


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound; port 0 is any free one. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=2048)
    # Its connections inherit it. asyncio sets it on sockets of its own only, and without it each answer on a connection
    # that is kept waits for the other side's delayed ACK: 45 ms were measured instead of 2.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def serve(ingress: Ingress, listening: socket.socket, ready: Callable[[str, int], None]) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests end. Calls `ready(host, port)` once it listens.

    Raises `SchemaVersionError` when the database is behind, `ConfigurationError`, and what the driver raises when the
    database cannot be reached.
    """
    engines = Engines(ingress.database, CONNECTIONS)
    sessions = async_sessionmaker(engines.async_work())
    if ingress.app is not None:
        ingress.app.attach(sessions)
    inner = router(sessions, secret=ingress.secret, allow_unsigned=ingress.secret is None)
    outer = Starlette(routes=[Mount(ingress.prefix, inner)], exception_handlers={HTTPException: not_here})
    outer.router.redirect_slashes = False
    config = uvicorn.Config(
        outer,
        access_log=False,
        lifespan="off",
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
        ws="none",
    )
    server = _Server(config, ready)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The server raises again what has stopped it, which would end the process with the signal's status.
        signal.signal(number, server.handle_exit)
    asyncio.run(_serve(engines, server, listening))


async def _serve(engines: Engines, server: uvicorn.Server, listening: socket.socket) -> None:
    try:
        await engines.check()
        await server.serve(sockets=[listening])
    finally:
        await engines.dispose()
        listening.close()


class _Server(uvicorn.Server):
    """Says when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[str, int], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._ready(host, port)
