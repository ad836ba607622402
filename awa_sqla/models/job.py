"""The three tables a job's row lives in, over one set of columns, and the read-only view of all three.

`Job` holds what is available, running, waiting or finished; `ScheduledJob` what waits for its time;
`DeadLetter` what failed for good in a queue that keeps such jobs. A row moves between them with its id.
They are plain classes with no inheritance between them, and no foreign key may point at a job: rows
move and are pruned. Store the `job_id` and use a viewonly relationship to `JobRecord`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Double,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Text,
    Uuid,
    event,
    func,
    inspect,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, declared_attr, mapped_column

from awa_sqla.args import A, JobArgs
from awa_sqla.errors import ConfigurationError, InvalidJob
from awa_sqla.models.base import AwaBase, JobState, Outcome, StateText, ViewBase, deadlines, jobs_id_seq, readable
from awa_sqla.requests import EnqueueRequest
from awa_sqla.stored import decode
from awa_sqla.unique import OnConflict

Json = JSONB(none_as_null=True)
Moment = DateTime(timezone=True)


class Attempt(NamedTuple):
    """One run of one job: the fencing token of every transition out of `running`.

    Take it with `Attempt.of(job)` when the job object itself should not be carried along.
    """

    id: int
    run_lease: int

    @staticmethod
    def of(job: object) -> Attempt:
        """The attempt under which `job` was claimed or first loaded; needs no I/O and never loads.

        The lease is the one that was current then, whatever the row says now: a refreshed `run_lease`
        may be another worker's. Raises `InvalidJob` for anything that was never seen running.
        """
        if isinstance(job, Attempt):
            return job
        held = job.held_attempt if isinstance(job, Job) else None
        if held is None:
            raise InvalidJob(
                "job",
                f"{job!r} was not claimed and not loaded while running; pass the claimed Job or its Attempt",
            )
        return held


class JobColumns:
    """The columns that all three tables share."""

    # With the sequence named as the client's default too, a flush sends its new rows as one INSERT.
    id: Mapped[int] = mapped_column(
        BigInteger, jobs_id_seq, server_default=jobs_id_seq.next_value(), primary_key=True, autoincrement=True
    )
    parent_id: Mapped[int | None] = mapped_column(BigInteger)
    root_id: Mapped[int | None] = mapped_column(BigInteger)
    run_lease: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    run_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    created_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    attempted_at: Mapped[datetime | None] = mapped_column(Moment)
    heartbeat_at: Mapped[datetime | None] = mapped_column(Moment)
    deadline_at: Mapped[datetime | None] = mapped_column(Moment)
    finalized_at: Mapped[datetime | None] = mapped_column(Moment)
    callback_timeout_at: Mapped[datetime | None] = mapped_column(Moment)
    deadline_seconds: Mapped[float | None] = mapped_column(Double)
    snoozes: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("2"))
    attempt: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    max_attempts: Mapped[int] = mapped_column(SmallInteger, server_default=text("25"))
    unique_states: Mapped[int | None] = mapped_column(SmallInteger)
    callback_id: Mapped[UUID | None] = mapped_column(Uuid)
    state: Mapped[JobState] = mapped_column(StateText, server_default=text("'available'"))
    kind: Mapped[str] = mapped_column(Text)
    queue: Mapped[str] = mapped_column(Text, server_default=text("'default'"))
    worker_id: Mapped[str | None] = mapped_column(Text)
    parent_outcome: Mapped[str | None] = mapped_column(Text)
    unique_key: Mapped[bytes | None] = mapped_column(LargeBinary)
    args: Mapped[dict[str, Any]] = mapped_column(Json, server_default=text("'{}'"))
    meta: Mapped[dict[str, Any]] = mapped_column("metadata", Json, server_default=text("'{}'"))
    progress: Mapped[dict[str, Any] | None] = mapped_column(Json)
    result: Mapped[Any | None] = mapped_column(Json)
    tags: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=text("'{}'"))
    errors: Mapped[list[dict[str, Any]]] = mapped_column(ARRAY(JSONB), server_default=text("'{}'"))
    callback_filter: Mapped[str | None] = mapped_column(Text)
    callback_on_complete: Mapped[str | None] = mapped_column(Text)
    callback_on_fail: Mapped[str | None] = mapped_column(Text)
    callback_transform: Mapped[str | None] = mapped_column(Text)
    # Last, also in the view: CREATE OR REPLACE VIEW keeps what others built on it, and can only append.
    args_version: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"), sort_order=2)
    # Since when a handler waits for its callback, its job waiting_external and still its own; and what came back.
    attended_at: Mapped[datetime | None] = mapped_column(Moment, sort_order=3)
    callback_answer: Mapped[dict[str, Any] | None] = mapped_column(Json, sort_order=3)

    # Not mapped. Of a row that was enqueued: what becomes of it if its key is taken, and by which job it was; of a
    # follow-up: the (spec, job, kind, outcome) that it is due to; and whether it comes from another table.
    if TYPE_CHECKING:
        on_conflict: OnConflict | None
        duplicate_of: int | None
        origin: tuple[str, int, str, Outcome] | None
        moved: bool
    else:
        on_conflict = duplicate_of = origin = None
        moved = False

    def args_as(self, args_class: type[A], /) -> A:
        """The arguments as an instance of `args_class`; unknown fields are ignored. Does no I/O once loaded.

        A row of an older version goes through the class's `upcast`. Raises pydantic's `ValidationError` when it does
        not fit the class, and `InvalidJob` when it is of a newer version or `upcast` raises.
        """
        return decode(args_class, self.args, self.args_version)


_TIMES = (
    "created_at",
    "attempted_at",
    "heartbeat_at",
    "finalized_at",
    "attended_at",
    "deadline_at",
    "callback_timeout_at",
)


def constraints(table: str, states: str, *indexes: Index, times: tuple[str, ...] = _TIMES) -> tuple[Any, ...]:
    """The checks and lineage indexes of one job table; `states` is SQL for the states it may hold."""
    return (
        CheckConstraint(f"state IN ({states})", name=f"ck_{table}_state"),
        CheckConstraint("length(kind) BETWEEN 1 AND 200", name=f"ck_{table}_kind"),
        CheckConstraint("length(queue) BETWEEN 1 AND 200", name=f"ck_{table}_queue"),
        CheckConstraint("priority BETWEEN 1 AND 4", name=f"ck_{table}_priority"),
        CheckConstraint("attempt >= 0", name=f"ck_{table}_attempt"),
        CheckConstraint("max_attempts BETWEEN 1 AND 1000", name=f"ck_{table}_max_attempts"),
        CheckConstraint("cardinality(tags) <= 20", name=f"ck_{table}_tags"),
        # One row that a driver cannot read would keep a whole queue from being claimed.
        CheckConstraint(
            "run_at BETWEEN '1970-01-01 00:00:00+00' AND '9000-01-01 00:00:00+00'", name=f"ck_{table}_run_at"
        ),
        readable(table, *times),
        deadlines(table, "deadline_seconds"),
        Index(f"ix_{table}_parent_id", "parent_id", postgresql_where=text("parent_id IS NOT NULL")),
        Index(f"ix_{table}_root_id", "root_id", postgresql_where=text("root_id IS NOT NULL")),
        *indexes,
    )


class Job(JobColumns, AwaBase):
    """A job that is available, running, waiting for a callback, or finished."""

    __tablename__ = "jobs_hot"

    # By how many levels waiting has raised the priority, while the job is available.
    aged: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"), sort_order=4)

    #: The attempt under which this instance was claimed or first loaded. Not mapped: expiry, refresh and
    #: populate_existing do not touch it, so a stale holder never picks up the thief's lease.
    if TYPE_CHECKING:
        held_attempt: Attempt | None
    else:
        held_attempt = None

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return constraints(
            "jobs_hot",
            "'available', 'running', 'waiting_external', 'completed', 'failed', 'cancelled'",
            Index(
                "ix_jobs_hot_claim",
                "queue",
                "priority",
                "run_at",
                "id",
                postgresql_where=text("state = 'available'"),
            ),
            Index("ix_jobs_hot_running", "id", postgresql_where=text("state = 'running'")),
            Index("ix_jobs_hot_callback", "callback_id", unique=True, postgresql_where=text("callback_id IS NOT NULL")),
            Index(
                "ix_jobs_hot_callback_timeout",
                "callback_timeout_at",
                postgresql_where=text("state = 'waiting_external'"),
            ),
            # Not by heartbeat_at: a beat that changes an indexed column writes to every index.
            Index("ix_jobs_hot_attended", "id", postgresql_where=text("attended_at IS NOT NULL")),
            Index(
                "ix_jobs_hot_finished",
                "state",
                "queue",
                "finalized_at",
                postgresql_where=text("state IN ('completed', 'failed', 'cancelled')"),
            ),
            Index(
                "ix_jobs_hot_aged",
                "queue",
                "priority",
                "aged",
                "run_at",
                postgresql_where=text("state = 'available' AND aged > 0"),
            ),
        )

    @classmethod
    def of(
        cls,
        args: JobArgs,
        /,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        deadline: timedelta | None = None,
        tags: Iterable[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Self:
        """A transient job for `session.add()`, with the options of `enqueue()`. Does no I/O.

        For plain jobs only; `enqueue()` makes scheduled, unique and late-bound ones. Raises `InvalidJob` naming the
        field, `ConfigurationError` for a job that is not plain.
        """
        if not isinstance(args, JobArgs | type) and callable(args):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError("Job.of() takes plain arguments: enqueue(session, callable) binds them late")
        request = EnqueueRequest(
            args,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            deadline=deadline,
            tags=tags,
            metadata=metadata,
        )
        if request.uniqueness is not None:
            raise ConfigurationError(
                f"Job.of() makes plain jobs, and {type(args).__name__} is unique: use enqueue(session, ...)"
            )
        return cls(**request.columns())


#: Deferred rows that hold no claim and need one to become available: as `unique_states`, 1 is scheduled, 2 available,
#: 16 retryable.
CLAIMS_AT_PROMOTION = "unique_states & 2 <> 0 AND unique_states & CASE state WHEN 'scheduled' THEN 1 ELSE 16 END = 0"


class ScheduledJob(JobColumns, AwaBase):
    """A job that waits for its time: scheduled for later, snoozed, or retryable after a failure."""

    __tablename__ = "scheduled_jobs"

    # No default: a missing due time must be an error, not "now".
    run_at: Mapped[datetime] = mapped_column(Moment)
    state: Mapped[JobState] = mapped_column(StateText, server_default=text("'scheduled'"))

    #: Wait that becomes `run_at` in the flush, by the database's clock. Not mapped.
    if TYPE_CHECKING:
        pending_delay: timedelta | None
    else:
        pending_delay = None

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return constraints(
            "scheduled_jobs",
            "'scheduled', 'retryable'",
            Index("ix_scheduled_jobs_due", "run_at", "id"),
            Index("ix_scheduled_jobs_claiming", "run_at", "id", postgresql_where=text(CLAIMS_AT_PROMOTION)),
        )


class DeadLetter(JobColumns, AwaBase):
    """A job that failed for good in a queue that keeps such jobs for an operator."""

    __tablename__ = "dlq_entries"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    state: Mapped[JobState] = mapped_column(StateText, server_default=text("'failed'"))
    original_run_lease: Mapped[int] = mapped_column(BigInteger)
    dlq_at: Mapped[datetime] = mapped_column(Moment, server_default=func.clock_timestamp())
    dlq_reason: Mapped[str] = mapped_column(Text)

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return constraints(
            "dlq_entries", "'failed'", Index("ix_dlq_entries_queue", "queue", "dlq_at"), times=(*_TIMES, "dlq_at")
        )


class JobRecord(JobColumns, ViewBase):
    """A job wherever its row lives: the read-only view `jobs` over the three tables.

    For `select()` and `session.get()` by id, and as the target of viewonly relationships. `stored_in` is
    "hot", "scheduled" or "dead".
    """

    __tablename__ = "jobs"

    stored_in: Mapped[str] = mapped_column(Text, sort_order=1)


def _remember_attempt(job: Job, context: object) -> None:  # noqa: ARG001 - SQLAlchemy's signature
    """The first load of a running row fixes the attempt that this instance stands for."""
    loaded: dict[str, Any] = inspect(job).dict
    if loaded.get("state") is JobState.RUNNING and "run_lease" in loaded:
        job.held_attempt = Attempt(loaded["id"], loaded["run_lease"])


event.listen(Job, "load", _remember_attempt)

#: The tables a row can move between.
JOB_TABLES: tuple[type[Job | ScheduledJob | DeadLetter], ...] = (Job, ScheduledJob, DeadLetter)

#: The attributes that the three tables share.
SHARED: tuple[str, ...] = tuple(a.key for a in inspect(JobRecord).column_attrs if a.key != "stored_in")
