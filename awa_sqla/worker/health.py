"""Health checks over HTTP, for what restarts workers (`/healthz`) and for what waits for them (`/readyz`).

The server has threads of its own and asks neither the event loop nor the database, so it answers also while a handler
blocks the one, or the other is away. It speaks plain HTTP to anybody who can reach its address and tells no secrets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, Self, cast

from awa_sqla.errors import ConfigurationError
from awa_sqla.worker.config import host_and_port
from awa_sqla.worker.forks import in_child
from awa_sqla.worker.heartbeat import Heart
from awa_sqla.worker.listen import Listener

log = logging.getLogger("awa_sqla.worker")

#: Seconds between turns of the event loop that are noticed.
PULSE = 0.5
#: Connections at a time, and seconds that each may take: the oldest is cut for a new one.
CONNECTIONS, SECONDS = 32, 5.0


class Vitals(Protocol):
    """What the answers tell of a worker. Asked from threads of the server."""

    id: str
    version: str
    finished: int
    abandoned: int

    @property
    def stopping(self) -> bool: ...

    def load(self) -> Mapping[str, tuple[int, int]]:
        """For each queue, how many attempts run and how many may."""
        ...


class Health:
    """The server of one worker, for `async with`; without an address it does nothing."""

    def __init__(self, address: str | None, stale_after: timedelta, worker: Vitals) -> None:
        self._wanted = address
        self._stale = stale_after.total_seconds()
        self._worker = worker
        self._server: _Server | None = None
        #: Where it listens, as `host:port`, while it does.
        self.address: str | None = None
        self._heart: Heart | None = None
        self._listener: Listener | None = None
        self._turned = time.monotonic()

    async def __aenter__(self) -> Self:
        if self._wanted is not None:
            self._server = _Server(self._wanted, self)
            self.address = self._server.reached_at()
            self._forget = in_child(self._server.socket.close)
            self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="awa_sqla health")
            self._thread.daemon = True
            self._thread.start()
            self._pulse = asyncio.create_task(self._beat())
            log.info("health checks at http://%s/healthz and /readyz", self.address)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._pulse.cancel()
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()
            self.address = None
            self._forget()

    def started(self, heart: Heart, listener: Listener | None) -> None:
        """The worker has begun to claim."""
        self._heart, self._listener = heart, listener

    async def _beat(self) -> None:
        while True:
            self._turned = time.monotonic()
            await asyncio.sleep(PULSE)

    # ------------------------------------------------- from the server's threads

    @property
    def state(self) -> str:
        """Whether the worker is starting, running or stopping."""
        return "stopping" if self._worker.stopping else "starting" if self._heart is None else "running"

    def alive(self) -> list[str]:
        """What only a new process can cure; empty when nothing."""
        reasons: list[str] = []
        if self._heart is not None and self._heart.dead:
            reasons.append("the heartbeat's thread has died")
        if (lag := self._lag()) > self._stale:
            reasons.append(f"the event loop has not turned for {lag:.1f} s: a handler blocks it")
        return reasons

    def ready(self) -> list[str]:
        """Why it is not ready for work; empty when it is."""
        reasons = self.alive()
        if self.state != "running":
            reasons.append(f"the worker is {self.state}")
        if (age := self._silence()) is not None and age > self._stale:
            reasons.append(f"the last contact with the database was {age:.1f} s ago")
        return reasons

    def body(self, reasons: list[str]) -> dict[str, Any]:
        """What both tell."""
        load, age = self._worker.load(), self._silence()
        return {
            "status": "unavailable" if reasons else "ok",
            "reasons": reasons,
            "worker": self._worker.id,
            "version": self._worker.version,
            "state": self.state,
            "queues": {name: {"running": running, "capacity": most} for name, (running, most) in load.items()},
            "running": sum(running for running, _ in load.values()),
            "finished": self._worker.finished,
            "abandoned": self._worker.abandoned,
            "listener_healthy": None if self._listener is None else self._listener.healthy,
            "heartbeat_age_seconds": None if age is None else round(age, 3),
            "loop_lag_seconds": round(self._lag(), 3),
        }

    def _lag(self) -> float:
        return max(time.monotonic() - self._turned - PULSE, 0.0)

    def _silence(self) -> float | None:
        return None if self._heart is None else time.monotonic() - self._heart.last_beat


class _Server(ThreadingHTTPServer):
    """Bounded: nobody can hold its threads, and who holds connections loses the oldest."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, wanted: str, health: Health) -> None:
        self.health = health
        self._open: dict[Any, float] = {}
        self._lock = threading.Lock()
        host, port = host_and_port(wanted)
        where: Any
        try:
            if host == "" and socket.has_dualstack_ipv6():
                self.address_family, where = socket.AF_INET6, ("::", port, 0, 0)
            else:
                found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
                self.address_family, _, _, _, where = found[0]
            super().__init__(where, _Handler)
        except (OSError, UnicodeError) as exc:
            raise ConfigurationError(f"health={wanted!r} cannot be served: {exc}") from exc

    def server_bind(self) -> None:
        """Without the look-up of our own name that `HTTPServer` does; both families for an address without host."""
        if self.address_family == socket.AF_INET6:
            only = self.server_address[0] != "::"
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        socketserver.TCPServer.server_bind(self)

    def reached_at(self) -> str:
        """As `host:port`."""
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if self.address_family == socket.AF_INET6 else f"{host}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = time.monotonic()
            oldest = next(iter(self._open)) if len(self._open) > CONNECTIONS else None
            if oldest is not None:
                self._cut(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called several times in a second."""
        with self._lock:
            for request, since in list(self._open.items()):
                if time.monotonic() - since > SECONDS:
                    self._cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        log.debug("a health check broke off", exc_info=True)  # noqa: LOG014 - called while handling it

    def _cut(self, request: Any) -> None:
        """Its thread reads the end, and ends."""
        del self._open[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = SECONDS
    server_version, sys_version = "awa-sqla", ""

    def do_GET(self) -> None:
        health, path = cast("_Server", self.server).health, self.path.partition("?")[0]
        if path not in ("/healthz", "/readyz"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        reasons = health.alive() if path == "/healthz" else health.ready()
        self._send(HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK, health.body(reasons))

    do_HEAD = do_GET  # noqa: N815 - the name is http.server's

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """As JSON, and without what was asked for."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:  # no method of that name here
            status = HTTPStatus.METHOD_NOT_ALLOWED
        self._send(status, {"error": status.phrase})

    def _send(self, status: HTTPStatus, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
        log.debug("health check: %s", format % args)
