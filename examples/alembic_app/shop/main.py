"""The shop at work: an order and its receipt job are stored together, or not at all.

Run it with `python -m shop.main`; the database is `DATABASE_URL`.
"""

from __future__ import annotations

import os

from sqlalchemy import create_engine, func, make_url, select
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import Completed, FollowUps, Job, JobArgs, JobRecord, claim, complete, enqueue

from .models import Order


class SendReceipt(JobArgs, queue="mail"):
    """Mail the receipt of an order."""

    order_id: int
    email: str


class TellBooks(JobArgs):
    """Tell the bookkeeping that a receipt was sent."""

    order_id: int


follow_ups = FollowUps()


@follow_ups.on_completed(SendReceipt)
def tell_books(event: Completed[SendReceipt]) -> TellBooks:
    """Commits with the completion of the receipt job, whoever completes it."""
    return TellBooks(order_id=event.args.order_id)


def place_order(session: Session, email: str, cents: int) -> Order:
    """Store an order and its receipt job in the caller's transaction."""
    order = Order(email=email, cents=cents)
    session.add(order)
    session.flush()  # gives the order its id
    job = enqueue(session, SendReceipt(order_id=order.id, email=email))
    session.flush()  # gives the job its id
    order.receipt_job_id = job.id
    return order


def send_receipts(session: Session) -> list[str]:
    """Send what is due; a worker process does this better."""
    sent: list[str] = []
    for job in claim(session, "mail", limit=10):
        args = job.args_as(SendReceipt)
        sent.append(args.email)
        complete(session, job, result={"to": args.email})
    return sent


def main() -> None:
    """Place two orders, one of which fails, and send the receipts."""
    url = make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+psycopg")
    engine = create_engine(url)
    sessions = sessionmaker(engine)
    follow_ups.attach(sessions)

    with sessions.begin() as session:
        place_order(session, "ada@example.org", 4200)

    with sessions() as session:
        place_order(session, "eve@example.org", 1)
        session.rollback()  # the card was refused: no order, and no receipt for it

    with sessions.begin() as session:
        sent = send_receipts(session)

    with sessions() as session:
        order = session.scalars(select(Order)).one()
        receipt = session.get_one(JobRecord, order.receipt_job_id)
        following = session.scalars(select(Job).where(Job.parent_id == receipt.id)).one()
        assert sent == [order.email] == ["ada@example.org"]
        assert (receipt.state, receipt.result) == ("completed", {"to": order.email})
        assert (following.kind, following.args) == ("tell_books", {"order_id": order.id})
        assert session.scalar(select(func.count()).select_from(JobRecord)) == 2
    engine.dispose()
    print("one order, one receipt, one entry in the books")


if __name__ == "__main__":
    main()
