"""The payment provider: `charge()` is what the shop knows of it, the rest a fake one to try things with.

Like many, it takes a reference and the URLs at which it is to report, answers 202, and reports later.
"""

from __future__ import annotations

import json
from uuid import UUID

import httpx
from fastapi import BackgroundTasks, FastAPI
from pydantic import BaseModel

from awa_sqla import callback_url, sign_callback

from .settings import PAYMENT_SECRET, PROVIDER_URL, SHOP_URL


class Charge(BaseModel):
    """What the shop sends it."""

    order_id: int
    cents: int
    reference: UUID
    paid_url: str
    declined_url: str


async def charge(order_id: int, cents: int, token_id: UUID) -> None:
    """Ask for the money of an order. Raises `httpx.HTTPError`: then the job is tried again."""
    request = Charge(
        order_id=order_id,
        cents=cents,
        reference=token_id,
        paid_url=callback_url(f"{SHOP_URL}/callbacks", token_id, "complete"),
        declined_url=callback_url(f"{SHOP_URL}/callbacks", token_id, "fail"),
    )
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{PROVIDER_URL}/charges", json=request.model_dump(mode="json"))
        response.raise_for_status()


# ----------------------------------------------------------------------------------------------------- the fake one
fake = FastAPI()

#: The most that it is willing to take from anybody.
MOST = 10_000


@fake.post("/charges", status_code=202)
async def take(charge: Charge, later: BackgroundTasks) -> None:
    """Answer at once, report afterwards."""
    later.add_task(report, charge)


async def report(charge: Charge) -> None:
    """The webhook. A real provider sends it again until the answer is 2xx."""
    if charge.cents <= MOST:
        action, url, body = "complete", charge.paid_url, json.dumps({"payload": {"amount": charge.cents}}).encode()
    else:
        action, url, body = "fail", charge.declined_url, json.dumps({"error": f"more than {MOST} cents"}).encode()
    headers = sign_callback(PAYMENT_SECRET, charge.reference, action, body)
    async with httpx.AsyncClient() as client:
        await client.post(url, content=body, headers=headers)
