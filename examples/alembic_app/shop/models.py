"""The tables of the shop, on a base of its own. Nothing here knows of jobs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Identity, Integer, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The base whose MetaData Alembic compares with the database."""


class Order(Base):
    """What a customer has bought."""

    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    email: Mapped[str] = mapped_column(Text)
    cents: Mapped[int] = mapped_column(Integer)
    # The id of a job, and no foreign key: a job moves between tables, and retention removes it.
    receipt_job_id: Mapped[int | None] = mapped_column(BigInteger)
