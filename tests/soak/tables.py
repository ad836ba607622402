"""What handlers leave behind, and what the driver remembers. No table has a unique constraint: doubles must show."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger, DateTime, Integer, MetaData, Text, Uuid, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    metadata = MetaData()


class _Trace:
    """Which attempt, in which process, wrote the row."""

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    job_id: Mapped[int] = mapped_column(BigInteger, index=True)
    run_lease: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int] = mapped_column(Integer)
    pid: Mapped[int] = mapped_column(Integer)
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.clock_timestamp())


class Effect(_Trace, Base):
    """By a transactional handler, in `ctx.session`: one for each outcome that it returned. `void`: it raised."""

    __tablename__ = "soak_effects"
    mark: Mapped[str] = mapped_column(Text)


class Try(_Trace, Base):
    """By any other handler, in a transaction of its own, when it begins: one or more for each outcome."""

    __tablename__ = "soak_tries"


class Step(_Trace, Base):
    """By a handler with checkpoints, in transactions of its own: where it began, and each durable checkpoint."""

    __tablename__ = "soak_steps"
    mark: Mapped[str] = mapped_column(Text)
    step: Mapped[int] = mapped_column(Integer)


class Present(_Trace, Base):
    """By a handler that waits until all slots of its queue are taken."""

    __tablename__ = "soak_present"
    queue: Mapped[str] = mapped_column(Text)


class Asked(Base):
    """By the driver, in the transaction that enqueues the job."""

    __tablename__ = "soak_asked"
    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    batch: Mapped[int] = mapped_column(Integer, index=True)


class Withdrawn(Base):
    """By the driver, in the transaction that cancels the job."""

    __tablename__ = "soak_withdrawn"
    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    by: Mapped[str] = mapped_column(Text)


class Answered(Base):
    """By the driver, in the transaction that answers a callback."""

    __tablename__ = "soak_answers"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    job_id: Mapped[int] = mapped_column(BigInteger, index=True)
    run_lease: Mapped[int] = mapped_column(BigInteger)
    callback_id: Mapped[UUID] = mapped_column(Uuid)
    how: Mapped[str] = mapped_column(Text)


class Expected(Base):
    """By the driver, at the start: which specs are registered, and send a note for each outcome."""

    __tablename__ = "soak_specs"
    kind: Mapped[str] = mapped_column(Text, primary_key=True)
    outcome: Mapped[str] = mapped_column(Text, primary_key=True)
    spec: Mapped[str] = mapped_column(Text, primary_key=True)
