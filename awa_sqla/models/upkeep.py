"""The tables of maintenance: who leads, periodic schedules, counts of finished jobs, what operators did."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Double, Identity, Index, Integer, SmallInteger, Text, func, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from awa_sqla.models.base import AwaBase, deadlines, readable
from awa_sqla.models.job import Json, Moment


class Leader(AwaBase):
    """Which process does what one process should do: a lease, renewed while it lives.

    `term` grows with each change of the holder.
    """

    __tablename__ = "leaders"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    holder: Mapped[str] = mapped_column(Text)
    term: Mapped[int] = mapped_column(BigInteger, server_default=text("1"))
    acquired_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    expires_at: Mapped[datetime] = mapped_column(Moment)

    __table_args__ = (readable("leaders", "acquired_at", "expires_at"),)


class CronSchedule(AwaBase):
    """A periodic schedule: when, and which job. The job's columns are as they will be stored.

    `args` is null where the app builds them when it fires. Ticks count from the latest of `last_enqueued_at` (the tick
    that fired last, not when it did) and `counts_from` (when it was made, changed or resumed).
    """

    __tablename__ = "cron_jobs"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    cron_expr: Mapped[str] = mapped_column(Text)
    timezone: Mapped[str] = mapped_column(Text, server_default=text("'UTC'"))
    kind: Mapped[str | None] = mapped_column(Text)
    queue: Mapped[str | None] = mapped_column(Text)
    args: Mapped[dict[str, Any] | None] = mapped_column(Json)
    args_version: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"))
    priority: Mapped[int | None] = mapped_column(SmallInteger)
    max_attempts: Mapped[int | None] = mapped_column(SmallInteger)
    deadline_seconds: Mapped[float | None] = mapped_column(Double)
    tags: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=text("'{}'"))
    meta: Mapped[dict[str, Any]] = mapped_column("metadata", Json, server_default=text("'{}'"))
    uniqueness: Mapped[dict[str, Any] | None] = mapped_column(Json)
    missed_fire_policy: Mapped[str] = mapped_column(Text, server_default=text("'coalesce'"))
    most_missed: Mapped[int] = mapped_column(Integer, server_default=text("1000"))
    last_enqueued_at: Mapped[datetime | None] = mapped_column(Moment)
    last_job_id: Mapped[int | None] = mapped_column(BigInteger)
    last_error: Mapped[str | None] = mapped_column(Text)
    failed_at: Mapped[datetime | None] = mapped_column(Moment)
    counts_from: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    paused_at: Mapped[datetime | None] = mapped_column(Moment)
    paused_by: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    updated_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    last_seen: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())

    __table_args__ = (
        CheckConstraint("length(name) BETWEEN 1 AND 200", name="ck_cron_jobs_name"),
        CheckConstraint("missed_fire_policy IN ('coalesce', 'catch_up', 'skip')", name="ck_cron_jobs_policy"),
        CheckConstraint("most_missed >= 1", name="ck_cron_jobs_most_missed"),
        CheckConstraint("args IS NULL OR (kind IS NOT NULL AND queue IS NOT NULL)", name="ck_cron_jobs_job"),
        CheckConstraint("jsonb_typeof(metadata) = 'object'", name="ck_cron_jobs_metadata"),
        deadlines("cron_jobs", "deadline_seconds"),
        # One row that a driver cannot read would keep all schedules from firing.
        *(
            CheckConstraint(
                f"{bound}(last_enqueued_at, failed_at, counts_from, paused_at, created_at, updated_at, last_seen) "
                f"{limit}",
                name=f"ck_cron_jobs_{name}",
            )
            for name, bound, limit in (
                ("earliest", "least", ">= '1970-01-01 00:00:00+00'"),
                ("latest", "greatest", "<= '9000-01-01 00:00:00+00'"),
            )
        ),
    )


class JobCount(AwaBase):
    """How many finished jobs a queue has in a state, as they were counted last."""

    __tablename__ = "job_counts"

    queue: Mapped[str] = mapped_column(Text, primary_key=True)
    state: Mapped[str] = mapped_column(Text, primary_key=True)
    jobs: Mapped[int] = mapped_column(BigInteger)
    counted_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())

    __table_args__ = (readable("job_counts", "counted_at"),)


class AuditEntry(AwaBase):
    """What an operator did. Written in the transaction of the deed."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    actor: Mapped[str | None] = mapped_column(Text)
    source: Mapped[str] = mapped_column(Text)
    verb: Mapped[str] = mapped_column(Text)
    target: Mapped[str] = mapped_column(Text)
    count: Mapped[int] = mapped_column(BigInteger, server_default=text("1"))
    reason: Mapped[str | None] = mapped_column(Text)

    __table_args__ = (Index("ix_audit_log_at", "at"), readable("audit_log", "at"))
