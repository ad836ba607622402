"""The web side: orders come in, webhooks come back.

POST /orders                       an order and its charge, in one commit
GET  /orders/{id}
POST /webhooks/{token}/complete    the provider has the money
POST /webhooks/{token}/fail        it will not get it
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from flask import Flask, request
from pydantic import BaseModel, ValidationError
from sqlalchemy import select

from awa_sqla import (
    CallbackNotFound,
    CallbackRefused,
    DeadLetter,
    Job,
    complete_external,
    enqueue,
    fail_external,
    verify_callback,
)

from . import provider
from .database import SessionLocal
from .jobs import ChargeOrder
from .models import Order
from .settings import PAYMENT_SECRET

app = Flask(__name__)


@app.teardown_appcontext
def end_session(_: BaseException | None) -> None:
    """Whatever the request has not committed is rolled back."""
    SessionLocal.remove()


# ---------------------------------------------------------------------------------------------------------- orders
class NewOrder(BaseModel):
    """What a customer sends."""

    email: str
    cents: int


@app.post("/orders")
def place_order() -> tuple[dict[str, Any], int]:
    """The order and the job that charges it: one commit, so neither is ever there without the other."""
    new = NewOrder.model_validate(request.get_json())
    order = Order(email=new.email, cents=new.cents)
    SessionLocal.add(order)
    enqueue(SessionLocal, lambda: ChargeOrder(order_id=order.id, cents=order.cents))  # called when the id is there
    SessionLocal.commit()
    return shown(order), 201


@app.get("/orders/<int:order_id>")
def show_order(order_id: int) -> tuple[dict[str, Any], int]:
    """How far it is."""
    order = SessionLocal.get(Order, order_id)
    return (shown(order), 200) if order else ({"error": "no such order"}, 404)


def shown(order: Order) -> dict[str, Any]:
    """What a customer sees."""
    return {name: getattr(order, name) for name in ("id", "email", "cents", "status", "receipt_sent")}


# ----------------------------------------------------------------- 2. verify, then resolve + own rows in one commit
class Charged(BaseModel):
    """What the provider sends when it has the money."""

    amount: int


@app.post("/webhooks/<uuid:callback_id>/<any(complete, fail):action>")
def webhook(callback_id: UUID, action: str) -> dict[str, int]:
    """Verify the bytes as they came; then the job, its follow-up and the order are one commit."""
    body = request.get_data()
    verify_callback(PAYMENT_SECRET, callback_id, action, body, dict(request.headers))
    job: Job | DeadLetter
    try:
        if action == "complete":
            charged = Charged.model_validate_json(body)
            job = complete_external(SessionLocal, callback_id, charged.model_dump())
        else:
            job = fail_external(SessionLocal, callback_id, "declined by the provider")
    except CallbackNotFound:
        order = SessionLocal.scalar(select(Order).where(Order.settled_by == callback_id))
        if order is None:
            raise
        return {"order": order.id}  # the same webhook again: the same answer
    order = SessionLocal.get_one(Order, job.args_as(ChargeOrder).order_id)
    order.settled_by = callback_id
    if action == "complete":
        order.status = "paid"
    SessionLocal.commit()
    return {"order": order.id}


@app.errorhandler(CallbackRefused)
def unauthorized(_: CallbackRefused) -> tuple[dict[str, str], int]:
    """One answer whatever is wrong with the signature."""
    return {"error": "not signed as it must be"}, 401


@app.errorhandler(CallbackNotFound)
def unknown(_: CallbackNotFound) -> tuple[dict[str, str], int]:
    """Nobody waits for it: to send it again cannot help."""
    return {"error": "no job waits for this"}, 404


@app.errorhandler(ValidationError)
def misshapen(_: ValidationError) -> tuple[dict[str, str], int]:
    """Not what was agreed."""
    return {"error": "not the right shape"}, 422


app.register_blueprint(provider.fake, url_prefix="/fake-provider")  # a shop of yours has a real one
