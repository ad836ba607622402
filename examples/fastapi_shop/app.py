"""The web side: orders come in, webhooks come back.

POST /orders                        an order and its charge, in one commit
GET  /orders/{id}
POST /callbacks/{token}/complete    the webhook, received by the router of awa_sqla: the main road
POST /webhooks/{token}/complete     the webhook, received by hand: for a provider that sends what it likes
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal
from uuid import UUID

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, ValidationError
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from awa_sqla import CallbackNotFound, CallbackRefused, DeadLetter, Job, enqueue, verify_callback
from awa_sqla import asyncio as awa_async
from awa_sqla.web.callbacks import CallbackCall, router

from . import provider
from .database import SessionLocal, engine
from .jobs import ChargeOrder, awa
from .models import Order
from .settings import DATABASE_URL, PAYMENT_SECRET, RUN_WORKER


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    """With SHOP_WORKER=1 this process runs jobs too; in production `awa-sqla worker` does, as often as you need it."""
    if RUN_WORKER:
        async with awa.worker(DATABASE_URL):  # with connections of its own, so that requests need not wait for jobs
            yield
    else:
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


# ---------------------------------------------------------------------------------------------------------- orders
class NewOrder(BaseModel):
    """What a customer sends."""

    email: str
    cents: int


class OrderOut(BaseModel):
    """What a customer sees."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    email: str
    cents: int
    status: str
    receipt_sent: bool


@app.post("/orders", status_code=201)
async def place_order(new: NewOrder) -> OrderOut:
    """The order and the job that charges it: one commit, so neither is ever there without the other."""
    async with SessionLocal.begin() as session:
        order = Order(email=new.email, cents=new.cents)
        session.add(order)
        enqueue(session, lambda: ChargeOrder(order_id=order.id, cents=order.cents))  # called when the id is there
    return OrderOut.model_validate(order)


@app.get("/orders/{order_id}")
async def show_order(order_id: int) -> OrderOut:
    """How far it is."""
    async with SessionLocal() as session:
        order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404)
    return OrderOut.model_validate(order)


# ----------------------------------------------------------------- 2. verify, then resolve + own rows in one commit
class Charged(BaseModel):
    """What the provider says when it has the money."""

    amount: int


async def settle(session: AsyncSession, call: CallbackCall, job: Job | DeadLetter) -> None:
    """The router has verified the request and resolved the job in this session; it commits when we return."""
    if job.kind != "charge_order" or call.action != "complete":
        return
    try:
        Charged.model_validate(call.payload)
    except ValidationError:
        raise CallbackRefused("the payload has no amount") from None  # 422, and nothing has changed
    order = await session.get_one(Order, job.args_as(ChargeOrder).order_id)
    order.status = "paid"


app.mount("/callbacks", router(SessionLocal, secret=PAYMENT_SECRET, after=settle))


# ------------------------------------------------------------------------------------------- the same steps by hand
@app.post("/webhooks/{callback_id}/{action}")
async def webhook(callback_id: UUID, action: Literal["complete", "fail"], request: Request) -> dict[str, int]:
    """Verify the bytes as they came, then resolve the job and settle the order in one commit."""
    body = await request.body()
    verify_callback(PAYMENT_SECRET, callback_id, action, body, request.headers)
    async with SessionLocal.begin() as session:
        job: Job | DeadLetter
        try:
            if action == "complete":
                charged = Charged.model_validate_json(body)
                job = await awa_async.complete_external(session, callback_id, charged.model_dump())
            else:
                job = await awa_async.fail_external(session, callback_id, "declined by the provider")
        except CallbackNotFound:
            order = await session.scalar(select(Order).where(Order.settled_by == callback_id))
            if order is None:
                raise
            return {"order": order.id}  # the same webhook again: the same answer
        order = await session.get_one(Order, job.args_as(ChargeOrder).order_id)
        order.settled_by = callback_id
        if action == "complete":
            order.status = "paid"
    return {"order": order.id}


@app.exception_handler(CallbackRefused)
async def unauthorized(_: Request, __: Exception) -> JSONResponse:
    """One answer whatever is wrong with the signature."""
    return JSONResponse({"detail": "not signed as it must be"}, 401)


@app.exception_handler(CallbackNotFound)
async def unknown(_: Request, __: Exception) -> JSONResponse:
    """Nobody waits for it: to send it again cannot help."""
    return JSONResponse({"detail": "no job waits for this"}, 404)


@app.exception_handler(ValidationError)
async def misshapen(_: Request, __: Exception) -> JSONResponse:
    """Signed, and not what was agreed."""
    return JSONResponse({"detail": "not the right shape"}, 422)


app.mount("/fake-provider", provider.fake)  # a shop of yours has a real one
