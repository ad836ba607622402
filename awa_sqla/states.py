"""The states a job can be in and the outcomes of its transitions: plain words that every room uses."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job stands. Stored by value; bit n of `unique_states` is the n-th state of this order."""

    SCHEDULED = "scheduled"
    AVAILABLE = "available"
    RUNNING = "running"
    COMPLETED = "completed"
    RETRYABLE = "retryable"
    FAILED = "failed"
    CANCELLED = "cancelled"
    WAITING_EXTERNAL = "waiting_external"

    @property
    def bit(self) -> int:
        """The value of this state in a mask of states."""
        return _BITS[self]


_BITS = {state: 1 << n for n, state in enumerate(JobState)}


class Outcome(StrEnum):
    """What a committed transition meant for the job: the key under which follow-ups are registered."""

    COMPLETED = "completed"
    RETRIED = "retried"
    EXHAUSTED = "exhausted"
    CANCELLED = "cancelled"
    WAITING_FOR_CALLBACK = "waiting_for_callback"
    RESCUED = "rescued"


#: The states of a job that is not finished.
LIVE_STATES = frozenset(
    {
        JobState.SCHEDULED,
        JobState.AVAILABLE,
        JobState.RUNNING,
        JobState.RETRYABLE,
        JobState.WAITING_EXTERNAL,
    }
)
