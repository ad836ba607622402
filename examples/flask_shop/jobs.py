"""The shop's jobs: what they carry, what they do, and what follows on which outcome.

ChargeOrder ── completed ──> SendReceipt
            └─ exhausted ──> DeclineOrder
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.orm import Session

from awa_sqla import Awa, Completed, Exhausted, JobArgs, JobContext, QueueConfig, WaitForCallback

from . import provider
from .database import SessionLocal
from .models import Order

# A transactional handler holds a connection while it runs: what the database has is shared out here.
awa = Awa(queues={"payments": QueueConfig(concurrency=10), "mail": QueueConfig(concurrency=5)})


class ChargeOrder(JobArgs, queue="payments", max_attempts=5):
    """Have the provider charge the customer."""

    order_id: int
    cents: int


class SendReceipt(JobArgs, queue="mail"):
    """Mail the receipt of a paid order."""

    order_id: int
    amount: int


class DeclineOrder(JobArgs, queue="payments"):
    """No payment will come."""

    order_id: int
    reason: str


# ------------------------------------------------------------------------------------------- 1. commit, then tell
@awa.task(ChargeOrder)
def charge_order(ctx: JobContext[ChargeOrder]) -> WaitForCallback:
    """Ask for the money, and end: the job waits for the webhook as a row, in no worker.

    It may run again, after a crash or when no webhook came: the provider knows the order by its id, and charges once.
    """
    token = ctx.register_callback(timeout=timedelta(hours=1))  # committed when it returns,
    provider.charge(ctx.args.order_id, ctx.args.cents, token.id)  # so now somebody may answer
    return WaitForCallback(token)


# ----------------------------------------------------------------------------------------------- 3. the follow-ups
@awa.on_completed(ChargeOrder)
def receipt(event: Completed[ChargeOrder]) -> SendReceipt:
    """Commits with the completion, and with the order that is paid."""
    return SendReceipt(order_id=event.args.order_id, amount=event.result["amount"])


@awa.on_exhausted(ChargeOrder)
def decline(event: Exhausted[ChargeOrder]) -> DeclineOrder:
    """The provider said no, or nothing at all, five times."""
    return DeclineOrder(order_id=event.args.order_id, reason=event.error)


@awa.task(SendReceipt, transactional=True)
def send_receipt(ctx: JobContext[SendReceipt]) -> None:
    """Send it and note it."""
    session: Session = ctx.session
    order = session.get_one(Order, ctx.args.order_id)
    print(f"to {order.email}: {ctx.args.amount} cents received, thank you", flush=True)
    order.receipt_sent = True


@awa.task(DeclineOrder, transactional=True)
def decline_order(ctx: JobContext[DeclineOrder]) -> None:
    """Close the order and say why."""
    session: Session = ctx.session
    order = session.get_one(Order, ctx.args.order_id)
    print(f"to {order.email}: your order was declined ({ctx.args.reason})", flush=True)
    order.status = "declined"


awa.attach(SessionLocal)
