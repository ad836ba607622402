"""The shop's own table. Nothing here knows of jobs."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The shop's base."""


class Order(Base):
    """What a customer has bought. `settled_by` is the token of the webhook that has settled it."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    cents: Mapped[int]
    status: Mapped[str] = mapped_column(default="new")  # then paid, or declined
    receipt_sent: Mapped[bool] = mapped_column(default=False)
    settled_by: Mapped[UUID | None] = mapped_column(unique=True)
