"""Unique jobs: what makes two jobs the same, and the key by which the database tells.

    class Reindex(JobArgs, unique=Unique(period=timedelta(hours=1))):
        shop: int

While a job is in one of the `states`, its key is taken: no second job of the same kind, arguments and period can
be in one of its own. The key is a hash of the stored arguments, so two processes of any version agree on it.

Nothing here knows the database; `models.records.UniqueClaim` is the table of the keys that are taken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

from blake3 import blake3

from awa_sqla import limits
from awa_sqla.errors import InvalidJob
from awa_sqla.stable import as_kept
from awa_sqla.states import LIVE_STATES, JobState

#: What happens to a duplicate: `UniqueConflict` out of the flush, or left out of it.
OnConflict = Literal["raise", "skip"]

#: A job comes into the first state only out of the others: without them it would find its key taken half-way.
_REACHED_FROM = {
    JobState.RUNNING: {JobState.AVAILABLE},
    JobState.WAITING_EXTERNAL: {JobState.RUNNING},
    JobState.COMPLETED: {JobState.RUNNING},
    JobState.FAILED: {JobState.RUNNING, JobState.WAITING_EXTERNAL},
    JobState.CANCELLED: LIVE_STATES,
}


@dataclass(frozen=True, slots=True)
class Unique:
    """What makes two jobs of one kind the same, and how long.

    With `by_args` (the default) they must have equal arguments, all fields as stored; with `by_queue` also the same
    queue. `period`, a positive timedelta, cuts time into buckets, counted from the Unix epoch by the clock of the
    process that enqueues: jobs of different buckets differ. `states` are those in which a job holds its key: by
    default, while it is not finished. They may be chosen freely, except that a state which is only reached from
    another needs that one too: running needs available, completed needs running.

    Does no I/O. Raises `InvalidJob` naming the field, "unique.period" for instance. (DESIGN 7)
    """

    by_args: bool = True
    by_queue: bool = False
    period: timedelta | None = None
    states: Iterable[JobState] = LIVE_STATES

    def __post_init__(self) -> None:
        for name in ("by_args", "by_queue"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidJob(f"unique.{name}", f"must be True or False, not {getattr(self, name)!r}")
        if self.period is not None:
            limits.duration("unique.period", self.period)
        object.__setattr__(self, "states", _checked(self.states))

    @property
    def mask(self) -> int:
        """The states as `unique_states` stores them."""
        return sum(state.bit for state in cast("frozenset[JobState]", self.states))

    def key(self, kind: str, queue: str, args: dict[str, Any], *, now: float | None = None) -> bytes:
        """The 16 bytes that two equal jobs share; `args` as stored, `now` in seconds since the Unix epoch.

        Numbers are told apart as they are written: 1 from 1.0, and neither from the text "1".
        """
        digest = blake3(kind.encode())
        if self.by_queue:
            digest.update(b"\0" + queue.encode())
        if self.by_args:
            compact = json.dumps(as_kept(args), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            digest.update(b"\0" + compact.encode())
        if self.period is not None:
            digest.update(b"\0" + self._bucket(now).to_bytes(8, "little", signed=True))
        return digest.digest(16)

    def _bucket(self, now: float | None) -> int:
        assert self.period is not None  # noqa: S101
        nanoseconds = time.time_ns() if now is None else int(now * 1_000_000_000)
        return nanoseconds // (self.period // timedelta(microseconds=1) * 1000)


def _checked(states: object) -> frozenset[JobState]:
    if isinstance(states, str | bytes) or not isinstance(states, Iterable):
        raise InvalidJob("unique.states", f"must be several job states, not {limits.type_name(states)}")
    try:
        found = frozenset(JobState(state) for state in cast("Iterable[str]", states))
    except ValueError as exc:
        raise InvalidJob("unique.states", f"{exc}; there are {', '.join(JobState)}") from None
    if not found:
        raise InvalidJob("unique.states", "must name at least one state")
    for state, sources in _REACHED_FROM.items():
        if state in found and (missing := sorted(sources - found)):
            raise InvalidJob(
                "unique.states",
                f"{state} is reached from {' and '.join(missing)}: add what is missing, or leave {state} out",
            )
    return found


def checked(value: object) -> Unique | None:
    """A `Unique` or None."""
    if value is not None and not isinstance(value, Unique):
        raise InvalidJob("unique", f"must be a Unique, not {limits.type_name(value)}; write Unique(by_args=...)")
    return value


def on_conflict(value: object) -> OnConflict:
    """ "raise" or "skip"."""
    if value not in ("raise", "skip"):
        raise InvalidJob("on_conflict", f'must be "raise" or "skip", not {value!r}')
    return value
