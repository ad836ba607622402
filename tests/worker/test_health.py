"""Health checks, asked over real connections."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from http.client import HTTPConnection
from typing import Any

import psycopg
import pytest

from awa_sqla import Awa, ConfigurationError, JobArgs, QueueConfig
from awa_sqla.worker import health

pytestmark = pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")

ANY = "127.0.0.1:0"


class Work(JobArgs):
    text: str = ""


async def nothing(ctx: Any) -> None:
    return None


def ask(address: str | None, path: str, method: str = "GET") -> tuple[int, Any, dict[str, str]]:
    """Status, decoded body and headers of an answer."""
    assert address is not None
    host, _, port = address.rpartition(":")
    connection = HTTPConnection(host.strip("[]"), int(port), timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, json.loads(body) if body else None, dict(answer.getheaders())
    finally:
        connection.close()


def sent_raw(address: str, sent: bytes) -> bytes:
    """All that is answered to these bytes."""
    host, port = address.split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        with suppress(ConnectionError):  # it may be refused before all of it is sent
            connection.sendall(sent)
        with suppress(ConnectionError):
            while more := connection.recv(65536):
                answer += more
    return answer


def status(address: str | None, path: str) -> int:
    return ask(address, path)[0]


# ------------------------------------------------------------------ the states


def test_a_ready_worker_says_what_it_does(stage):
    go = asyncio.Event()

    async def work(ctx: Any) -> None:
        await go.wait()

    stage.app.task(Work)(work)
    stage.app.queues["email"] = QueueConfig(concurrency=3)
    stage.enqueue(Work(), Work())

    async def during(worker: Any) -> None:
        await stage.until(lambda: worker.load()["default"] == (2, 50))
        await stage.until(lambda: worker._listener.healthy)
        for path in ("/healthz", "/readyz", "/readyz?verbose=1"):
            code, body, headers = await asyncio.to_thread(ask, worker.health_address, path)
            assert (code, headers["Content-Type"], headers["Cache-Control"]) == (200, "application/json", "no-store")
            assert 0 <= body.pop("heartbeat_age_seconds") < 30
            assert 0 <= body.pop("loop_lag_seconds") < 30
            assert body == {
                "status": "ok",
                "reasons": [],
                "worker": worker.id,
                "version": stage.app.version,
                "state": "running",
                "queues": {"default": {"running": 2, "capacity": 50}, "email": {"running": 0, "capacity": 3}},
                "running": 2,
                "finished": 0,
                "abandoned": 0,
                "listener_healthy": True,
            }
        go.set()
        await stage.until(stage.all_ended)
        await stage.until(lambda: ask(worker.health_address, "/readyz")[1]["finished"] == 2)

    stage.play(during=during, health=ANY)


def test_while_the_lifespan_starts_the_process_is_alive_and_not_ready(stage):
    entered, go, gone = threading.Event(), threading.Event(), threading.Event()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        entered.set()
        await asyncio.to_thread(go.wait)
        yield
        entered.clear()
        await asyncio.to_thread(gone.wait)

    app = Awa(lifespan=lifespan)
    app.task(Work)(nothing)

    async def play() -> None:
        worker = app.worker(stage.url, health=ANY, notify=False)
        assert worker.health_address is None
        life = asyncio.create_task(live(worker))
        await stage.until(entered.is_set)
        assert await asyncio.to_thread(status, worker.health_address, "/healthz") == 200
        code, body, _ = await asyncio.to_thread(ask, worker.health_address, "/readyz")
        assert (code, body["state"], body["reasons"]) == (503, "starting", ["the worker is starting"])
        assert (body["heartbeat_age_seconds"], body["listener_healthy"]) == (None, None)
        go.set()
        await stage.until(lambda: status(worker.health_address, "/readyz") == 200)
        worker.request_stop()
        await stage.until(lambda: not entered.is_set())
        # The heart has stopped by now, as it should.
        code, body, _ = await asyncio.to_thread(ask, worker.health_address, "/readyz")
        assert (code, body["state"], body["reasons"]) == (503, "stopping", ["the worker is stopping"])
        assert await asyncio.to_thread(status, worker.health_address, "/healthz") == 200
        address = worker.health_address
        gone.set()
        await life
        assert worker.health_address is None
        with pytest.raises(ConnectionRefusedError):
            ask(address, "/healthz")

    async def live(worker: Any) -> None:
        async with worker:
            await worker.wait()

    asyncio.run(play())


def test_while_it_drains_it_is_alive_and_not_ready(stage):
    reached, go = asyncio.Event(), asyncio.Event()

    async def work(ctx: Any) -> None:
        reached.set()
        await go.wait()

    stage.app.task(Work)(work)
    stage.enqueue(Work())
    answers: list[Any] = []

    async def during(worker: Any) -> None:
        await reached.wait()
        worker.request_stop()
        asyncio.get_running_loop().create_task(look(worker))

    async def look(worker: Any) -> None:
        await stage.until(lambda: worker._identity.stopping)
        answers.append(await asyncio.to_thread(ask, worker.health_address, "/readyz"))
        answers.append(await asyncio.to_thread(ask, worker.health_address, "/healthz"))
        go.set()

    stage.play(lambda: True, during=during, health=ANY)
    (ready, body, _), (alive, _, _) = answers
    assert (ready, alive, body["state"], body["running"]) == (503, 200, "stopping", 1)
    assert stage.states() == ["completed"]


def test_a_database_that_is_away_makes_a_worker_unready_and_not_dead(stage, quick):
    stage.app.task(Work)(nothing)
    elsewhere = stage.url.set(drivername="postgresql", database="postgres").render_as_string(hide_password=False)

    def allow(whether: str) -> None:
        with psycopg.connect(elsewhere, autocommit=True) as connection:
            connection.execute(f'ALTER DATABASE "{stage.url.database}" ALLOW_CONNECTIONS {whether}')

    async def during(worker: Any) -> None:
        await stage.until(lambda: status(worker.health_address, "/readyz") == 200)
        allow("false")
        try:
            stage.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            await stage.until(lambda: status(worker.health_address, "/readyz") == 503)
            _, body, _ = await asyncio.to_thread(ask, worker.health_address, "/readyz")
            (reason,) = body["reasons"]
            assert reason.startswith("the last contact with the database was ")
            assert body["heartbeat_age_seconds"] > 1
            assert not body["listener_healthy"]
            assert await asyncio.to_thread(status, worker.health_address, "/healthz") == 200
        finally:
            allow("true")
        await stage.until(lambda: status(worker.health_address, "/readyz") == 200)

    stage.play(lambda: True, during=during, health=ANY, **quick)


def test_it_answers_while_a_handler_blocks_the_loop_and_tells_when_that_takes_too_long(stage, quick):
    blocked, go = threading.Event(), threading.Event()

    async def work(ctx: Any) -> None:
        blocked.set()
        go.wait(60)

    stage.app.task(Work)(work)
    stage.enqueue(Work())
    answers: list[Any] = []

    def look(address: str | None) -> None:
        blocked.wait(60)
        answers.append(ask(address, "/healthz"))
        with suppress(AssertionError):
            deadline = time.monotonic() + 30
            while status(address, "/healthz") == 200:
                assert time.monotonic() < deadline
            answers.append(ask(address, "/healthz"))
            answers.append(ask(address, "/readyz"))
        go.set()

    async def during(worker: Any) -> None:
        await asyncio.to_thread(look, worker.health_address)
        await stage.until(lambda: status(worker.health_address, "/healthz") == 200)

    stage.play(during=during, health=ANY, **quick)
    (at_first, _, _), (late, body, _), (unready, _, _) = answers
    assert (at_first, late, unready) == (200, 503, 503)
    (reason,) = body["reasons"]
    assert reason.startswith("the event loop has not turned for ")
    assert body["loop_lag_seconds"] > 1
    assert body["heartbeat_age_seconds"] < 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_heart_is_told(stage, quick):
    stage.app.task(Work)(nothing)

    def die() -> None:
        raise SystemExit

    async def during(worker: Any) -> None:
        assert await asyncio.to_thread(status, worker.health_address, "/healthz") == 200
        worker._heart.beat = die
        await stage.until(lambda: status(worker.health_address, "/healthz") == 503)
        code, body, _ = await asyncio.to_thread(ask, worker.health_address, "/healthz")
        assert (code, body["reasons"]) == (503, ["the heartbeat's thread has died"])

    stage.play(lambda: True, during=during, health=ANY, **quick)


# ------------------------------------------------------------------ the server


@pytest.fixture
def playing(stage):
    """Run a function in a thread, with the address of a worker's health checks."""
    stage.app.task(Work)(nothing)

    def play(look: Any, address: str = ANY) -> None:
        async def during(worker: Any) -> None:
            await asyncio.to_thread(look, worker.health_address)

        stage.play(lambda: True, during=during, health=address)

    return play


def test_other_paths_and_methods_are_refused(playing):
    def look(address: str) -> None:
        for path in ("/", "/healthz/", "/healthz/../readyz", "//readyz2"):
            assert ask(address, path)[:2] == (404, {"error": "Not Found"})
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "BREW"):
            code, body, headers = ask(address, "/healthz", method)
            assert (code, body, headers["Allow"]) == (405, {"error": "Method Not Allowed"}, "GET, HEAD")
        code, body, headers = ask(address, "/readyz", "HEAD")
        assert (code, body) == (200, None)
        assert int(headers["Content-Length"]) > 100
        assert sent_raw(address, b"HEAD /readyz HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")

    playing(look)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03garbage\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(200)) + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /<script> HTTP/1.1\r\n\r\n",
        b"GET / <script> HTTP/1.1\r\n\r\n",
        b"<script> / HTTP/1.1\r\n\r\n",
    ],
    ids=[
        "tls",
        "no path",
        "version",
        "long header",
        "many headers",
        "long path",
        "markup",
        "words",
        "markup as method",
    ],
)
def test_bad_requests_are_refused_without_repeating_them(playing, sent):
    def look(address: str) -> None:
        answer = sent_raw(address, sent)
        assert b"200 OK" not in answer
        assert b"script" not in answer
        assert b"aaaa" not in answer
        assert status(address, "/healthz") == 200

    playing(look)


def test_a_slow_client_is_cut_off(playing, monkeypatch):
    monkeypatch.setattr(health, "SECONDS", 0.5)

    def look(address: str) -> None:
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            started, cut = time.monotonic(), False
            while not cut and time.monotonic() - started < 20:
                try:
                    connection.sendall(b"G")  # each byte in time, all of them never
                except ConnectionError:
                    cut = True
                time.sleep(0.05)
            assert cut
            assert time.monotonic() - started > 0.4

    playing(look)


def test_idle_connections_keep_nobody_from_asking_and_hold_few_threads(playing):
    def look(address: str) -> None:
        host, port = address.split(":")
        before = threading.active_count()
        with ExitStack() as stack:
            for _ in range(100):
                connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
                connection.sendall(b"GET /heal")
            assert status(address, "/healthz") == 200
            assert threading.active_count() - before <= health.CONNECTIONS + 2
        assert status(address, "/readyz") == 200

    playing(look)


def test_a_body_is_ignored(playing):
    def look(address: str) -> None:
        host, port = address.split(":")
        connection = HTTPConnection(host, int(port), timeout=20)
        connection.request("GET", "/healthz", body=b"x" * 10)
        assert connection.getresponse().status == 200
        connection.close()

    playing(look)


# ---------------------------------------------------------------- the address


@pytest.mark.parametrize(
    ("given", "reached"), [("localhost:0", "localhost"), (":0", "127.0.0.1"), ("[::1]:0", "[::1]"), (":0", "[::1]")]
)
def test_an_address_may_name_a_host_all_interfaces_or_ipv6(playing, given, reached):
    if reached == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")

    def look(address: str) -> None:
        assert status(f"{reached}:{address.rpartition(':')[2]}", "/healthz") == 200

    playing(look, given)


@pytest.mark.parametrize("address", ["8081", "localhost", "::1:80", "host:99999", "http://h:80", "h:", "", 8081, "h:x"])
def test_an_address_that_is_none_is_refused(stage, address):
    stage.app.task(Work)(nothing)
    with pytest.raises(ConfigurationError, match="health="):
        stage.app.worker(stage.url, health=address)


def test_a_taken_port_and_a_host_that_is_not_here_name_the_option(stage):
    stage.app.task(Work)(nothing)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "192.0.2.1:8081", "nosuch.invalid:8081", "a..b:1"):
            with pytest.raises(ConfigurationError, match=r"health=.*cannot be served"):
                stage.play(lambda: True, health=address)
    assert stage.sql("SELECT * FROM awa.runtime_instances") == []


def test_without_the_option_nothing_listens(stage):
    stage.app.task(Work)(nothing)
    before = {thread.name for thread in threading.enumerate()}

    async def during(worker: Any) -> None:
        assert worker.health_address is None
        assert "awa_sqla health" not in {thread.name for thread in threading.enumerate()} - before

    stage.play(lambda: True, during=during)
