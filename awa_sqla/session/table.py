"""The table of transitions: the one place that says what may change how.

The statements are built from it, the tests walk it, and `docs/reference/transitions.md` prints it. A
transition names the states it starts from, what guards it, the state and table it leads to, the columns it
clears, whether it sets `finalized_at`, the outcomes whose follow-ups it brings, and how many statements it
costs (with a warm catalogue, without the INSERTs of follow-ups).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from awa_sqla.models.base import JobState, Outcome


class Guard(StrEnum):
    """What a row must match besides its state."""

    LEASE = "id and run_lease"
    ID = "id"
    DUE = "due, queue not paused, not locked"
    STALE = "heartbeat too old, not locked"
    CALLBACK = "callback_id, and run_lease if given"


class Store(StrEnum):
    """The table a row is in: the values of `JobRecord.stored_in`."""

    HOT = "hot"
    SCHEDULED = "scheduled"
    DEAD = "dead"


#: What a callback leaves behind when it is used up.
CALLBACK_COLUMNS = (
    "callback_id",
    "callback_timeout_at",
    "callback_filter",
    "callback_on_complete",
    "callback_on_fail",
    "callback_transform",
)

#: What every exit from `running` clears.
ATTEMPT_COLUMNS = ("heartbeat_at", "deadline_at", *CALLBACK_COLUMNS, "callback_answer", "attended_at")


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table."""

    verb: str
    sources: tuple[JobState, ...]
    guard: Guard
    target: JobState
    store: Store = Store.HOT
    clears: tuple[str, ...] = ATTEMPT_COLUMNS
    finalizes: bool = False
    outcomes: tuple[Outcome, ...] = ()
    statements: int | None = None


_S = JobState
_HELD = (JobState.RUNNING,)
_LIVE = (JobState.AVAILABLE, JobState.RUNNING, JobState.WAITING_EXTERNAL)
_CALLED = (_S.RUNNING, _S.WAITING_EXTERNAL)
_DEFERRED = (JobState.SCHEDULED, JobState.RETRYABLE)
_LEASE = Guard.LEASE

TRANSITIONS: dict[str, Transition] = {
    "claim": Transition("claim", (_S.AVAILABLE,), Guard.DUE, _S.RUNNING, clears=(), statements=1),
    "complete": Transition(
        "complete",
        _HELD,
        _LEASE,
        _S.COMPLETED,
        clears=(*ATTEMPT_COLUMNS, "progress"),
        finalizes=True,
        outcomes=(Outcome.COMPLETED,),
        statements=1,
    ),
    "retry": Transition(
        "fail, retry_after",
        _HELD,
        _LEASE,
        _S.RETRYABLE,
        Store.SCHEDULED,
        finalizes=True,
        outcomes=(Outcome.RETRIED,),
        statements=3,
    ),
    "exhaust": Transition(
        "fail, retry_after",
        _HELD,
        _LEASE,
        _S.FAILED,
        finalizes=True,
        outcomes=(Outcome.EXHAUSTED,),
        statements=2,
    ),
    "bury": Transition(
        "fail, retry_after",
        _HELD,
        _LEASE,
        _S.FAILED,
        Store.DEAD,
        finalizes=True,
        outcomes=(Outcome.EXHAUSTED,),
        statements=3,
    ),
    "snooze": Transition("snooze", _HELD, _LEASE, _S.SCHEDULED, Store.SCHEDULED, statements=2),
    "cancel": Transition(
        "cancel", _LIVE, Guard.ID, _S.CANCELLED, finalizes=True, outcomes=(Outcome.CANCELLED,), statements=1
    ),
    "cancel_held": Transition(
        "Cancel(reason) returned by the handler",
        _HELD,
        _LEASE,
        _S.CANCELLED,
        finalizes=True,
        outcomes=(Outcome.CANCELLED,),
        statements=1,
    ),
    "cancel_deferred": Transition(
        "cancel",
        _DEFERRED,
        Guard.ID,
        _S.CANCELLED,
        finalizes=True,
        outcomes=(Outcome.CANCELLED,),
        statements=3,
    ),
    "register": Transition("register_callback", _HELD, _LEASE, _S.RUNNING, clears=(), statements=1),
    "park": Transition(
        "park, WaitForCallback(token) returned by the handler",
        _HELD,
        _LEASE,
        _S.WAITING_EXTERNAL,
        clears=("heartbeat_at", "deadline_at", "callback_answer", "attended_at"),
        outcomes=(Outcome.WAITING_FOR_CALLBACK,),
        statements=1,
    ),
    "attend": Transition(
        "ctx.wait_for_callback",
        _HELD,
        _LEASE,
        _S.WAITING_EXTERNAL,
        clears=(),
        outcomes=(Outcome.WAITING_FOR_CALLBACK,),
        statements=1,
    ),
    "go_on": Transition(
        "ctx.wait_for_callback given up by the handler",
        (_S.WAITING_EXTERNAL,),
        _LEASE,
        _S.RUNNING,
        clears=("attended_at",),
        statements=1,
    ),
    "complete_external": Transition(
        "complete_external",
        _CALLED,
        Guard.CALLBACK,
        _S.COMPLETED,
        clears=(*ATTEMPT_COLUMNS, "progress"),
        finalizes=True,
        outcomes=(Outcome.COMPLETED,),
        statements=1,
    ),
    "fail_external": Transition(
        "fail_external",
        _CALLED,
        Guard.CALLBACK,
        _S.FAILED,
        finalizes=True,
        outcomes=(Outcome.EXHAUSTED,),
        statements=2,
    ),
    "bury_external": Transition(
        "fail_external",
        _CALLED,
        Guard.CALLBACK,
        _S.FAILED,
        Store.DEAD,
        finalizes=True,
        outcomes=(Outcome.EXHAUSTED,),
        statements=3,
    ),
    "resume_external": Transition(
        "resume_external",
        _CALLED,
        Guard.CALLBACK,
        _S.RUNNING,
        clears=(*CALLBACK_COLUMNS, "attended_at"),
        statements=1,
    ),
    "retry_external": Transition(
        "retry_external",
        (_S.WAITING_EXTERNAL,),
        Guard.CALLBACK,
        _S.AVAILABLE,
        outcomes=(Outcome.RETRIED,),
        statements=1,
    ),
    "prolong": Transition(
        "heartbeat_callback",
        (_S.WAITING_EXTERNAL,),
        Guard.CALLBACK,
        _S.WAITING_EXTERNAL,
        clears=(),
        statements=1,
    ),
    "promote": Transition("promote", _DEFERRED, Guard.DUE, _S.AVAILABLE),
    "rescue": Transition(
        "rescue",
        _HELD,
        Guard.STALE,
        _S.RETRYABLE,
        Store.SCHEDULED,
        finalizes=True,
        outcomes=(Outcome.RESCUED,),
    ),
    "rescue_spent": Transition(
        "rescue",
        _HELD,
        Guard.STALE,
        _S.FAILED,
        finalizes=True,
        outcomes=(Outcome.RESCUED, Outcome.EXHAUSTED),
    ),
    "rescue_dead": Transition(
        "rescue",
        _HELD,
        Guard.STALE,
        _S.FAILED,
        Store.DEAD,
        finalizes=True,
        outcomes=(Outcome.RESCUED, Outcome.EXHAUSTED),
    ),
    "postpone_unknown": Transition("unknown kind", _HELD, _LEASE, _S.SCHEDULED, Store.SCHEDULED, statements=2),
}

TERMINAL = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})
