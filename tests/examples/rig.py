"""A shop of the examples at work: its server, its worker, and a provider that reports only when a test says so."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import httpx
from sqlalchemy import URL, NullPool, create_engine, text

from awa_sqla import sign_callback
from tests.databases import DBNAME, Server, libpq_url
from tests.examples.served import HEADER

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECRET = bytes(range(32))
PATIENCE = 20.0

T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """What an order has come to: all of it is written by one commit."""

    order: str
    charge: str
    receipts: int


WAITING = State("new", "waiting_external", 0)
PAID = State("paid", "completed", 1)


class Provider:
    """Takes charges over HTTP and remembers them."""

    def __init__(self) -> None:
        self._charges: dict[int, dict[str, Any]] = {}
        took = self._charges

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                charge = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                took[charge["order_id"]] = charge
                self.send_response(202)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def charge(self, order_id: int) -> dict[str, Any] | None:
        return self._charges.get(order_id)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Shop:
    """What a test does with a shop."""

    def __init__(self, http: httpx.Client, url: URL, provider: Provider) -> None:
        self.http, self.provider = http, provider
        self._engine = create_engine(url, poolclass=NullPool)

    def order(self, cents: int = 4200) -> int:
        """A new order, whose charge has reached the provider and waits."""
        answer = self.http.post("/orders", json={"email": "ada@example.org", "cents": cents})
        assert answer.status_code == 201, answer.text
        order_id: int = answer.json()["id"]
        eventually(lambda: self.provider.charge(order_id))
        eventually(lambda: self.state(order_id) == WAITING)
        return order_id

    def webhook(
        self, order_id: int, road: str, action: str, content: Any, *, die: str = "", secret: bytes = SECRET
    ) -> httpx.Response | None:
        """The provider's report; None when nobody answers."""
        charge = self.provider.charge(order_id)
        assert charge is not None
        return self.post(charge["reference"], road, action, content, die=die, secret=secret)

    def post(
        self, reference: str, road: str, action: str, content: Any, *, die: str = "", secret: bytes = SECRET
    ) -> httpx.Response | None:
        body = json.dumps(content).encode()
        headers = sign_callback(secret, reference, action, body) | ({HEADER: die} if die else {})
        try:
            return self.http.post(f"/{road}/{reference}/{action}", content=body, headers=headers)
        except httpx.TransportError:
            assert die.startswith("kill"), f"no answer to {die!r}"
            return None

    def seen(self, order_id: int) -> dict[str, Any]:
        """The order as its customer sees it."""
        found: dict[str, Any] = self.http.get(f"/orders/{order_id}").json()
        return found

    def state(self, order_id: int) -> State:
        """The order as the database has it."""
        with self._engine.connect() as connection:
            row = connection.execute(
                text(
                    "SELECT o.status, c.state::text, (SELECT count(*) FROM awa.jobs_hot r WHERE r.kind = 'send_receipt'"
                    " AND r.parent_id = c.id) FROM orders o JOIN awa.jobs_hot c ON c.kind = 'charge_order'"
                    " AND (c.args->>'order_id')::bigint = o.id WHERE o.id = :id"
                ),
                {"id": order_id},
            ).one()
        return State(*row)


@contextmanager
def shop(name: str, postgres_server: Server, *, queue_app: str, web_app: str) -> Iterator[Shop]:
    """The example `name` in a database of its own: tables made, a server and a worker process at work."""
    dbname = f"{DBNAME}{os.environ.get('PYTEST_XDIST_WORKER', '')}_{name}"
    janitor = postgres_server.janitor(dbname, template_dbname="template0")
    janitor.drop()
    with ExitStack() as stack:
        stack.enter_context(janitor)
        url = postgres_server.url(dbname)
        provider = Provider()
        stack.callback(provider.close)
        environment = environment_of(DATABASE_URL=libpq_url(url), PROVIDER_URL=provider.url)
        server = stack.enter_context(process(environment, "tests.examples.served", web_app, f"{name}.database"))
        run(environment, f"{name}.database")
        stack.enter_context(process(environment, "awa_sqla", "-q", "-A", queue_app, "worker"))
        assert server.stdout is not None
        port = int(server.stdout.readline())
        # No connection is used twice: after an exception uvicorn closes it, which could be heard too late.
        limits = httpx.Limits(max_keepalive_connections=0)
        http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, limits=limits)
        stack.enter_context(http)
        yield Shop(http, url, provider)


def environment_of(**more: str) -> dict[str, str]:
    """The environment of an example's processes."""
    ours = {
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PAYMENT_SECRET": SECRET.hex(),
    }
    return {name: value for name, value in os.environ.items() if name != "DATABASE_URL"} | ours | more


def run(environment: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], env=environment, cwd=EXAMPLES, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def process(environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the block lasts."""
    started = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        cwd=EXAMPLES,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if "tests.examples.served" in arguments else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with started:
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(PATIENCE)
            finally:
                started.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def eventually(look: Callable[[], T | None]) -> T:
    """What `look()` gives as soon as it gives something."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


# ------------------------------------------------------------------------------------- what both shops must bear
#: The steps of a webhook: the verb, the order, the follow-up, the commit. Before each the app dies.
STEPS = ("UPDATE awa.jobs_hot", "SELECT orders", "UPDATE orders", "INSERT INTO awa.jobs_hot", "COMMIT")


def is_all_or_nothing_wherever_it_dies(shop: Shop, how: str, road: str, content: Any, steps: tuple[str, ...]) -> None:
    """Die before every step in turn; the sender sends the webhook again each time, until it is through."""
    order_id = shop.order()
    for step in steps:
        answer = shop.webhook(order_id, road, "complete", content, die=f"{how} {step}")
        assert (answer is None) == (how == "kill"), step
        assert answer is None or answer.status_code in (500, 503), step
        assert shop.state(order_id) == WAITING, step
    if how == "kill":  # after the commit, of which the sender does not hear
        assert shop.webhook(order_id, road, "complete", content, die="kill ANSWER") is None
        assert shop.state(order_id) == PAID
    again = shop.webhook(order_id, road, "complete", content)
    assert again is not None
    assert again.status_code == 200
    assert shop.state(order_id) == PAID
    eventually(lambda: shop.seen(order_id)["receipt_sent"])
