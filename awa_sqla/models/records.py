"""The tables beside the jobs: keys, queues, the follow-up catalogue, obligations, receipts, processes, version."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy import Double as Float
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from awa_sqla.models.base import AwaBase, deadlines, readable
from awa_sqla.models.job import Json, Moment


class Queue(AwaBase):
    """Settings of one queue: `declared_*` written by workers, `override_*` by operators.

    In force is: the job's own > override > declared > default. Of ageing and retention, infinity is never.
    """

    __tablename__ = "queue_meta"

    queue: Mapped[str] = mapped_column(Text, primary_key=True)
    declared_concurrency: Mapped[int | None] = mapped_column(Integer)
    declared_deadline_seconds: Mapped[float | None] = mapped_column(Float)
    declared_poll_seconds: Mapped[float | None] = mapped_column(Float)
    declared_dead_letters: Mapped[bool | None] = mapped_column(Boolean)
    declared_rate_per_second: Mapped[float | None] = mapped_column(Float)
    declared_rate_burst: Mapped[int | None] = mapped_column(Integer)
    declared_aging_seconds: Mapped[float | None] = mapped_column(Float, sort_order=1)
    declared_keep_completed_seconds: Mapped[float | None] = mapped_column(Float, sort_order=1)
    declared_keep_failed_seconds: Mapped[float | None] = mapped_column(Float, sort_order=1)
    declared_keep_dead_seconds: Mapped[float | None] = mapped_column(Float, sort_order=1)
    override_concurrency: Mapped[int | None] = mapped_column(Integer)
    override_deadline_seconds: Mapped[float | None] = mapped_column(Float)
    override_poll_seconds: Mapped[float | None] = mapped_column(Float)
    override_dead_letters: Mapped[bool | None] = mapped_column(Boolean)
    override_rate_per_second: Mapped[float | None] = mapped_column(Float)
    override_rate_burst: Mapped[int | None] = mapped_column(Integer)
    override_aging_seconds: Mapped[float | None] = mapped_column(Float, sort_order=1)
    override_keep_completed_seconds: Mapped[float | None] = mapped_column(Float, sort_order=1)
    override_keep_failed_seconds: Mapped[float | None] = mapped_column(Float, sort_order=1)
    override_keep_dead_seconds: Mapped[float | None] = mapped_column(Float, sort_order=1)
    paused_at: Mapped[datetime | None] = mapped_column(Moment)
    paused_by: Mapped[str | None] = mapped_column(Text)
    pause_reason: Mapped[str | None] = mapped_column(Text)
    paused_until: Mapped[datetime | None] = mapped_column(Moment)

    __table_args__ = (
        CheckConstraint("length(queue) BETWEEN 1 AND 200", name="ck_queue_meta_queue"),
        CheckConstraint("paused_until IS NULL OR paused_at IS NOT NULL", name="ck_queue_meta_paused"),
        CheckConstraint(
            "declared_rate_per_second > 0 AND declared_rate_burst >= 1 AND override_rate_per_second > 0 "
            "AND override_rate_burst >= 1",
            name="ck_queue_meta_rates",
        ),
        CheckConstraint("declared_aging_seconds > 0 AND override_aging_seconds > 0", name="ck_queue_meta_aging"),
        CheckConstraint(
            "declared_keep_completed_seconds >= 0 AND declared_keep_failed_seconds >= 0 "
            "AND declared_keep_dead_seconds >= 0 AND override_keep_completed_seconds >= 0 "
            "AND override_keep_failed_seconds >= 0 AND override_keep_dead_seconds >= 0",
            name="ck_queue_meta_keep",
        ),
        readable("queue_meta", "paused_at", "paused_until"),
        deadlines("queue_meta", "declared_deadline_seconds", "override_deadline_seconds"),
    )


class UniqueClaim(AwaBase):
    """Which job holds a unique key now. Triggers keep it true: each claim has its row, in one of its unique states."""

    __tablename__ = "job_unique_claims"

    unique_key: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    job_id: Mapped[int] = mapped_column(BigInteger)


class FollowUpSpec(AwaBase):
    """The catalogue: one row for each (kind, outcome, spec name) that some process can dispatch."""

    __tablename__ = "follow_up_specs"

    kind: Mapped[str] = mapped_column(Text, primary_key=True)
    outcome: Mapped[str] = mapped_column(Text, primary_key=True)
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    created_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    last_seen: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())

    __table_args__ = (readable("follow_up_specs", "created_at", "last_seen"),)


class Obligation(AwaBase):
    """A follow-up still owed for a committed transition: plain data from which its spec can be called.

    `next_attempt_at` is null once the dispatch has given up; the row stays listed for an operator.
    """

    __tablename__ = "follow_up_obligations"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    job_id: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(Text)
    outcome: Mapped[str] = mapped_column(Text)
    spec: Mapped[str] = mapped_column(Text)
    snapshot: Mapped[dict[str, Any]] = mapped_column(JSONB)
    context: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default=text("'{}'"))
    attempts: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    next_attempt_at: Mapped[datetime | None] = mapped_column(Moment, server_default=func.clock_timestamp())
    last_error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())

    __table_args__ = (
        Index(
            "ix_follow_up_obligations_due",
            "next_attempt_at",
            "id",
            postgresql_where=text("next_attempt_at IS NOT NULL"),
        ),
        readable("follow_up_obligations", "next_attempt_at", "created_at"),
    )


class CallbackReceipt(AwaBase):
    """What was answered to a callback's request, so that the same request again is answered the same.

    `request` is a digest of what makes two requests the same one.
    """

    __tablename__ = "callback_receipts"

    request: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    callback_id: Mapped[UUID] = mapped_column(Uuid)
    action: Mapped[str] = mapped_column(Text)
    answer: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default=text("'{}'"))
    created_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())

    __table_args__ = (
        Index("ix_callback_receipts_callback", "callback_id"),
        Index("ix_callback_receipts_created", "created_at"),
        readable("callback_receipts", "created_at"),
    )


class RuntimeInstance(AwaBase):
    """A live process of ours: a worker, later also maintenance and callback ingress."""

    __tablename__ = "runtime_instances"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    role: Mapped[str] = mapped_column(Text)
    hostname: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(Integer)
    version: Mapped[str] = mapped_column(Text)
    queues: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=text("'{}'"))
    kinds: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=text("'{}'"))
    unknown_kinds: Mapped[dict[str, int]] = mapped_column(Json, server_default=text("'{}'"))
    concurrency: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    running: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    listening: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    started_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    last_seen: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    stopping_at: Mapped[datetime | None] = mapped_column(Moment)
    stale_after_seconds: Mapped[float | None] = mapped_column(Float)
    lanes: Mapped[dict[str, Any]] = mapped_column(Json, server_default=text("'{}'"))

    __table_args__ = (readable("runtime_instances", "started_at", "last_seen", "stopping_at"),)


class SchemaVersion(AwaBase):
    """One row for each installed step of the schema."""

    __tablename__ = "schema_version"

    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    applied_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
