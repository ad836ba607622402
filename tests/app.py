"""The test application: a table of its own, a few kinds of jobs."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from awa_sqla import Backoff, JobArgs


class Base(DeclarativeBase):
    """The app's own base: no connection to ours."""


class Order(Base):
    """A business row that must commit with its job, or not at all."""

    __tablename__ = "app_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(Text)


class Signup(JobArgs):
    email: str = "ada@example.org"


class Welcome(JobArgs):
    email: str = "ada@example.org"


class Charge(
    JobArgs,
    queue="payments",
    priority=1,
    max_attempts=3,
    deadline=timedelta(minutes=2),
    tags=("billing",),
    backoff=Backoff(base=timedelta(seconds=5), factor=3, max=timedelta(hours=1), jitter=0),
):
    order_id: int
    cents: int = 100


class NotifyOps(JobArgs):
    job_id: int
    text: str = ""
