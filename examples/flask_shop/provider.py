"""The payment provider: `charge()` is what the shop knows of it, the rest a fake one to try things with.

Like many, it takes a reference and the URLs at which it is to report, answers 202, and reports later.
"""

from __future__ import annotations

import json
import threading
from typing import Any
from uuid import UUID

import httpx
from flask import Blueprint, request

from awa_sqla import callback_url, sign_callback

from .settings import PAYMENT_SECRET, PROVIDER_URL, SHOP_URL


def charge(order_id: int, cents: int, token_id: UUID) -> None:
    """Ask for the money of an order. Raises `httpx.HTTPError`: then the job is tried again."""
    asked = {
        "order_id": order_id,
        "cents": cents,
        "reference": str(token_id),
        "paid_url": callback_url(f"{SHOP_URL}/webhooks", token_id, "complete"),
        "declined_url": callback_url(f"{SHOP_URL}/webhooks", token_id, "fail"),
    }
    httpx.post(f"{PROVIDER_URL}/charges", json=asked).raise_for_status()


# ----------------------------------------------------------------------------------------------------- the fake one
fake = Blueprint("fake-provider", __name__)

#: The most that it is willing to take from anybody.
MOST = 10_000


@fake.post("/charges")
def take() -> tuple[str, int]:
    """Answer at once, report afterwards."""
    threading.Thread(target=report, args=(request.get_json(),), daemon=True).start()
    return "", 202


def report(charge: dict[str, Any]) -> None:
    """The webhook. A real provider sends it again until the answer is 2xx."""
    if charge["cents"] <= MOST:
        action, url, content = "complete", charge["paid_url"], {"amount": charge["cents"]}
    else:
        action, url, content = "fail", charge["declined_url"], {}
    body = json.dumps(content).encode()
    httpx.post(url, content=body, headers=sign_callback(PAYMENT_SECRET, charge["reference"], action, body))
