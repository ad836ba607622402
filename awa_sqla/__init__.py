"""A background-job queue inside your SQLAlchemy session.

Jobs are rows of mapped classes, every change of a job's state is an operation of **your** transaction, and
durable side effects are follow-up jobs that the session adds before it flushes, so that they commit with the
transition or not at all.

    from awa_sqla import FollowUps, JobArgs, claim, complete, enqueue

    class Signup(JobArgs):
        email: str

    with SessionLocal.begin() as session:
        session.add(User(email="ada@example.org"))
        enqueue(session, Signup(email="ada@example.org"))       # both rows, or neither

Declare jobs with `JobArgs`; add them with `enqueue`; run them with `Awa` and a worker, or claim and finish
them yourself with `claim`, `complete`, `fail`, `retry_after`, `snooze`, `cancel`; say what follows with
`FollowUps`. `awa_sqla.asyncio` holds the same verbs for `AsyncSession`, `awa_sqla.schema` and
`awa_sqla.alembic` install the tables.
"""

from awa_sqla.app import Awa
from awa_sqla.args import Backoff, JobArgs
from awa_sqla.cel.policy import CallbackPolicy, DefaultAction, Resolution
from awa_sqla.errors import (
    AwaError,
    CallbackNotFound,
    CallbackRefused,
    ConfigurationError,
    DuplicateKind,
    FollowUpError,
    FollowUpsNotAttached,
    InvalidJob,
    InvalidState,
    JobFailed,
    JobNotFound,
    SchemaLocked,
    SchemaVersionError,
    StaleJobError,
    TerminalError,
    UniqueConflict,
    UnknownKind,
    UnmanagedWriteError,
    UnsupportedSession,
)
from awa_sqla.models import (
    Attempt,
    DeadLetter,
    Job,
    JobRecord,
    JobSnapshot,
    JobState,
    Outcome,
    RuntimeInstance,
    ScheduledJob,
)
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session.batch import CompletedBatch, Completion, complete_many
from awa_sqla.session.bulk import enqueue_many
from awa_sqla.session.callbacks import (
    CallbackToken,
    cancel_callback,
    complete_external,
    fail_external,
    heartbeat_callback,
    park,
    register_callback,
    resume_external,
    retry_external,
)
from awa_sqla.session.cancel import cancel
from awa_sqla.session.enqueue import EnqueueResult, enqueue, enqueue_unique
from awa_sqla.session.events import (
    Cancelled,
    Completed,
    Exhausted,
    Rescued,
    RescueReason,
    Retried,
    Started,
    WaitingForCallback,
)
from awa_sqla.session.follow_ups import FollowUps
from awa_sqla.session.hooks import Hooks
from awa_sqla.session.resolving import resolve_callback
from awa_sqla.session.tree import lineage
from awa_sqla.session.verbs import claim, complete, fail, retry_after, set_progress, snooze
from awa_sqla.signing import callback_url, sign_callback, verify_callback
from awa_sqla.states import LIVE_STATES
from awa_sqla.unique import Unique
from awa_sqla.waiting import wait_for
from awa_sqla.worker import (
    Cancel,
    JobContext,
    QueueConfig,
    RateLimit,
    Retention,
    RetryAfter,
    Snooze,
    WaitForCallback,
    Worker,
)

__version__ = "0.1.0"

__all__ = [
    "Attempt",
    "Awa",
    "AwaError",
    "Backoff",
    "CallbackNotFound",
    "CallbackPolicy",
    "CallbackRefused",
    "CallbackToken",
    "Cancel",
    "Cancelled",
    "Completed",
    "CompletedBatch",
    "Completion",
    "ConfigurationError",
    "DeadLetter",
    "DefaultAction",
    "DuplicateKind",
    "EnqueueRequest",
    "EnqueueResult",
    "Exhausted",
    "FollowUpError",
    "FollowUps",
    "FollowUpsNotAttached",
    "Hooks",
    "InvalidJob",
    "InvalidState",
    "Job",
    "JobArgs",
    "JobContext",
    "JobFailed",
    "JobNotFound",
    "JobRecord",
    "JobSnapshot",
    "JobState",
    "LIVE_STATES",
    "Outcome",
    "QueueConfig",
    "RateLimit",
    "RescueReason",
    "Rescued",
    "Resolution",
    "Retention",
    "Retried",
    "RetryAfter",
    "RuntimeInstance",
    "ScheduledJob",
    "SchemaLocked",
    "SchemaVersionError",
    "Snooze",
    "StaleJobError",
    "Started",
    "TerminalError",
    "Unique",
    "UniqueConflict",
    "UnknownKind",
    "UnmanagedWriteError",
    "UnsupportedSession",
    "WaitForCallback",
    "WaitingForCallback",
    "Worker",
    "callback_url",
    "cancel",
    "cancel_callback",
    "claim",
    "complete",
    "complete_external",
    "complete_many",
    "enqueue",
    "enqueue_many",
    "enqueue_unique",
    "fail",
    "fail_external",
    "heartbeat_callback",
    "lineage",
    "park",
    "register_callback",
    "resolve_callback",
    "resume_external",
    "retry_after",
    "retry_external",
    "set_progress",
    "sign_callback",
    "snooze",
    "verify_callback",
    "wait_for",
]
