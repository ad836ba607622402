"""Senders of every kind, over sockets, against a real server: slow, hostile, oversized, in pieces; and frameworks."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from awa_sqla import callback_url, sign_callback
from awa_sqla.web.callbacks import router
from awa_sqla.web.serving import listen
from tests.web.rig import SECRET, Web, in_one_kind, in_two_kinds
from tests.worlds import Database

PATIENCE = timedelta(seconds=0.3)


class Server(uvicorn.Server):
    """uvicorn in a thread; says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        self.listens.set()


@contextmanager
def served(web: Web, app: Any) -> Iterator[tuple[str, int]]:
    """The app on a port, in the event loop of the web's engines."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none"))
    running = web.portal.start_task_soon(server.serve, [listening])
    try:
        assert server.listens.wait(10)
        yield listening.getsockname()
    finally:
        server.should_exit = True
        running.result(20)
        listening.close()


@pytest.fixture
def address(web: Web) -> Iterator[tuple[str, int]]:
    inner = router(web.factory(), secret=SECRET, max_body=1000, read_timeout=PATIENCE)
    with served(web, Starlette(routes=[Mount("/callbacks", inner)])) as found:
        yield found


def said(address: tuple[str, int], *parts: bytes, patience: float = 10) -> bytes:
    """What comes back for raw bytes, to the end of the connection or of the patience."""
    with socket.create_connection(address, timeout=patience) as connection:
        answer = b""
        try:
            for part in parts:
                connection.sendall(part)
            while piece := connection.recv(65536):
                answer += piece
        except (TimeoutError, ConnectionError):
            pass
        return answer


def head(callback: Any, body: bytes, *more: str, action: str = "complete", sign: bool = True) -> bytes:
    lines = [f"POST /callbacks/{callback}/{action} HTTP/1.1", "Host: x", *more]
    if sign:
        lines += [f"{name}: {value}" for name, value in sign_callback(SECRET, callback, action, body).items()]
    return "\r\n".join([*lines, "", ""]).encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@in_two_kinds
def test_a_sender_in_chunks_is_understood(web: Web, address: tuple[str, int], database: Database) -> None:
    waiting = web.parked()
    body = b'{"payload": "in pieces"}'
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(body[i : i + 5]), body[i : i + 5]) for i in range(0, len(body), 5))
    start = head(waiting.callback_id, body, "Transfer-Encoding: chunked", "Connection: close")
    assert status(said(address, start, chunks, b"0\r\n\r\n")) == 200
    assert database.job(waiting.job_id).result == "in pieces"


@in_one_kind
def test_a_sender_that_says_it_sends_too_much_is_told_at_once(web: Web, address: tuple[str, int]) -> None:
    answer = said(address, head(uuid.uuid4(), b"", "Content-Length: 1001"))
    assert status(answer) == 413
    assert b"connection: close" in answer.lower()


@in_one_kind
def test_a_sender_of_endless_chunks_is_cut_off(web: Web, address: tuple[str, int]) -> None:
    chunk = b"64\r\n" + b"x" * 100 + b"\r\n"
    answer = said(address, head(uuid.uuid4(), b"", "Transfer-Encoding: chunked"), *[chunk] * 11)
    assert status(answer) == 413
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_large"


@in_one_kind
def test_a_sender_that_stops_in_the_middle_gets_408(web: Web, address: tuple[str, int]) -> None:
    started = time.monotonic()
    answer = said(address, head(uuid.uuid4(), b"", "Content-Length: 10"), b"{")
    assert status(answer) == 408
    assert time.monotonic() - started < 5
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_slow"


@in_one_kind
def test_a_sender_of_drops_gets_408_too(web: Web, address: tuple[str, int]) -> None:
    """The time is for the whole body, not for each piece of it."""
    gone = threading.Event()
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(head(uuid.uuid4(), b"", "Content-Length: 900"))

        def drip() -> None:
            try:
                while not gone.wait(0.02):
                    connection.sendall(b"x")
            except OSError:
                pass

        dripping = threading.Thread(target=drip)
        dripping.start()
        answer = connection.recv(65536)
        gone.set()
        dripping.join(10)
    assert status(answer) == 408


@in_one_kind
def test_a_sender_that_goes_away_harms_nobody(
    web: Web, address: tuple[str, int], database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = web.parked()
    for _ in range(5):
        with socket.create_connection(address) as connection:
            connection.sendall(head(waiting.callback_id, b"{}", "Content-Length: 2") + b"{")
    with caplog.at_level(logging.ERROR):
        assert (
            status(said(address, head(waiting.callback_id, b"{}", "Content-Length: 2", "Connection: close"), b"{}"))
            == 200
        )
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


HOSTILE = [
    b"\x00" * 50 + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"POST /callbacks/x/complete HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /callbacks/x/complete HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /callbacks/x/complete HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nzz\r\n",
    b"POST /callbacks/%zz/complete HTTP/1.1\r\nHost: x\r\nX-Awa-Signature: \xff\xfe\r\nConnection: close\r\n\r\n",
    b"POST /callbacks/../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"POST " + b"/a" * 4000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"POST /callbacks/x/complete HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 30000 + b"\r\n",
]


@in_one_kind
@pytest.mark.parametrize("request_bytes", HOSTILE, ids=lambda value: repr(value[:30]))
def test_hostile_bytes_are_refused_and_the_server_lives(
    web: Web, address: tuple[str, int], request_bytes: bytes
) -> None:
    answer = said(address, request_bytes, patience=2)
    assert not answer or 400 <= status(answer) < 500
    waiting = web.parked()
    assert status(said(address, head(waiting.callback_id, b"", "Content-Length: 0", "Connection: close"))) == 200


@in_one_kind
def test_two_requests_of_one_connection_are_two(web: Web, address: tuple[str, int]) -> None:
    one, two = web.parked(queue="a"), web.parked(queue="b")
    answer = said(
        address,
        head(one.callback_id, b"{}", "Content-Length: 2") + b"{}",
        head(two.callback_id, b"{}", "Content-Length: 2", "Connection: close") + b"{}",
    )
    assert answer.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_answer_does_not_wait_for_an_acknowledgement(host: str) -> None:
    with listen(host, 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# ---------------------------------------------------------------------------------------------------- frameworks
def starlette(inner: Any) -> Any:
    return Starlette(routes=[Mount("/callbacks", inner)])


def fastapi(inner: Any) -> Any:
    from fastapi import FastAPI

    app = FastAPI()
    app.mount("/callbacks", inner)
    return app


def litestar(inner: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a plugin that comes with it
        from litestar import Litestar, asgi
    return Litestar([asgi("/callbacks", is_mount=True, copy_scope=True)(inner)], openapi_config=None)


def alone(inner: Any) -> Any:
    return inner


@in_two_kinds
@pytest.mark.parametrize(
    ("framework", "prefix"),
    [(starlette, "/callbacks"), (fastapi, "/callbacks"), (litestar, "/callbacks"), (alone, "")],
)
def test_the_router_is_at_home_in_every_framework(web: Web, framework: Any, prefix: str) -> None:
    waiting = web.parked()
    with served(web, framework(router(web.factory(), secret=SECRET))) as (host, port):
        base = f"http://{host}:{port}{prefix}"
        with httpx.Client() as client:
            headers = sign_callback(SECRET, waiting.callback_id, "complete", b"{}")
            reply = client.post(callback_url(base, waiting.callback_id, "complete"), content=b"{}", headers=headers)
            assert (reply.status_code, reply.json()["state"]) == (200, "completed")
            assert client.post(callback_url(base, waiting.callback_id, "complete")).status_code == 401
            assert client.get(f"{base}/nowhere").json()["error"]["code"] == "not_found"
            assert client.get(f"{base}/openapi.json").json()["servers"] == [{"url": prefix or "/"}]
