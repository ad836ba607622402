"""The example `examples/flask_shop`, with its own server and worker, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import httpx
import pytest

from tests.databases import Server
from tests.examples import rig
from tests.examples.rig import PAID, WAITING, Shop, eventually

pytestmark = pytest.mark.slow

PAYMENT = {"amount": 4200}


@pytest.fixture(scope="module")
def shop(postgres_server: Server) -> Iterator[Shop]:
    with rig.shop(
        "flask_shop", postgres_server, queue_app="flask_shop.jobs:awa", web_app="flask_shop.app:app"
    ) as running:
        yield running


def test_an_order_is_charged_paid_and_receipted(shop: Shop) -> None:
    order_id = shop.order()
    answer = shop.webhook(order_id, "webhooks", "complete", PAYMENT)
    assert answer is not None
    assert answer.status_code == 200, answer.text
    assert shop.state(order_id) == PAID
    assert shop.seen(order_id)["status"] == "paid"
    eventually(lambda: shop.seen(order_id)["receipt_sent"])


def test_a_payment_that_fails_declines_the_order(shop: Shop) -> None:
    order_id = shop.order()
    answers = [shop.webhook(order_id, "webhooks", "fail", {}) for _ in range(2)]
    assert [answer.status_code for answer in answers if answer is not None] == [200, 200]
    eventually(lambda: shop.seen(order_id)["status"] == "declined")
    assert shop.state(order_id) == rig.State("declined", "failed", 0)


def test_a_wrong_signature_changes_nothing(shop: Shop) -> None:
    order_id = shop.order()
    answer = shop.webhook(order_id, "webhooks", "complete", PAYMENT, secret=b"x" * 32)
    assert answer is not None
    assert answer.status_code == 401
    assert shop.state(order_id) == WAITING


def test_a_webhook_that_comes_again_is_answered_the_same(shop: Shop) -> None:
    order_id = shop.order()
    answers = [shop.webhook(order_id, "webhooks", "complete", PAYMENT) for _ in range(3)]
    assert len({(answer.status_code, answer.text) for answer in answers if answer is not None}) == 1
    assert shop.state(order_id) == PAID


def test_a_token_that_nobody_knows_is_not_found(shop: Shop) -> None:
    answer = shop.post(str(uuid4()), "webhooks", "complete", PAYMENT)
    assert answer is not None
    assert answer.status_code == 404


def test_a_payment_without_an_amount_is_refused(shop: Shop) -> None:
    order_id = shop.order()
    answer = shop.webhook(order_id, "webhooks", "complete", {})
    assert answer is not None
    assert answer.status_code == 422
    assert shop.state(order_id) == WAITING


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_webhook_is_all_or_nothing_wherever_the_app_dies(shop: Shop, how: str) -> None:
    rig.is_all_or_nothing_wherever_it_dies(shop, how, "webhooks", PAYMENT, rig.STEPS)


@pytest.mark.beside
def test_one_command_runs_it_all() -> None:
    port = rig.free_port()
    with (
        rig.process(rig.environment_of(PORT=str(port)), "flask_shop"),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=httpx.HTTPTransport(retries=12)) as http,
    ):
        for cents in (4200, 42000):
            assert http.post("/orders", json={"email": "ada@example.org", "cents": cents}).status_code == 201
        eventually(lambda: http.get("/orders/1").json()["receipt_sent"])
        eventually(lambda: http.get("/orders/2").json()["status"] == "declined")
