"""One job in plain Python, what the verbs make of it, and what follows on its outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from awa_sqla import Outcome
from tests.model.application import (
    DEAD,
    SPECS,
    Cause,
    Claim,
    Followed,
    Key,
    brought_by,
    claim_of,
    follow_up,
    holds_in,
    key_of,
)

RESCUED = "heartbeat stale: worker presumed dead"
EXPIRED = "callback timed out"
UNCALLED = "wait_for_callback without a registered callback"

#: What is left of an attempt when it has ended.
_ENDED: dict[str, Any] = {"silent": False, "callback": None, "expired": False, "attended": False, "answer": None}
_WAITS: dict[str, Any] = {"state": "waiting_external", "waited": True}


@dataclass(frozen=True)
class Row:
    """One job. `certain` is whether a statement of its own transaction must see it; `due` is for scheduled ones.

    `waited` is whether the attempt has begun a wait: what follows on a second one would have the same identity.
    """

    key: Key
    queue: str
    priority: int = 2
    max_attempts: int = 25
    poison: bool = False
    state: str = "available"
    store: str = "hot"
    attempt: int = 0
    snoozes: int = 0
    lease: int = 0
    errors: tuple[str, ...] = ()
    progress: dict[str, Any] | None = None
    result: Any = None
    due: bool = True
    silent: bool = False
    callback: str | None = None
    expired: bool = False
    attended: bool = False
    answer: dict[str, Any] | None = None
    waited: bool = False
    certain: bool = True
    id: int | None = None
    parent: int | None = None
    root: int | None = None
    parent_outcome: str | None = None

    @property
    def kind(self) -> str:
        """Its kind."""
        return str(self.key[0])

    @property
    def claim(self) -> Claim | None:
        """Its unique key, if it has one."""
        return claim_of(self.key)

    @property
    def holds(self) -> bool:
        """Whether it holds its unique key."""
        return holds_in(self.kind, self.state)

    @property
    def is_held(self) -> bool:
        """Whether it is some attempt's: it runs, or its handler waits for a callback."""
        return self.state == "running" or self.attended

    @property
    def is_lost(self) -> bool:
        """Whether a rescue takes it."""
        return (self.silent and self.is_held) or (self.expired and self.state == "waiting_external")

    @property
    def may_wait(self) -> bool:
        """Whether a wait may begin: what follows on it has no other identity than what followed on the last one."""
        return not self.waited or (self.kind, Outcome.WAITING_FOR_CALLBACK) not in SPECS

    def comes_in(self, after: Row) -> bool:
        """Whether it has to claim its key on the way to what it is `after`."""
        return after.holds and not self.holds

    def stored(self, job_id: int) -> Row:
        """With the id that it has got."""
        return replace(self, id=job_id)

    # What the verbs do to it.
    def claimed(self, job_id: int, lease: int) -> Row:
        """Running, under a new lease."""
        return replace(self, state="running", attempt=self.attempt + 1, lease=lease, id=job_id, waited=False, **_ENDED)

    def completed(self, result: Any) -> Row:
        """Finished with success."""
        return replace(self, state="completed", result=result, progress=None, **_ENDED)

    def failed(self, error: str, *, terminal: bool = False, due: bool = False) -> Row:
        """The attempt failed: tried again, failed for good, or kept as a dead letter."""
        ended = replace(self, errors=(*self.errors, error), **_ENDED)
        if not terminal and self.attempt < self.max_attempts:
            return replace(ended, state="retryable", store="scheduled", due=due)
        return replace(ended, state="failed", store="dead" if self.queue == DEAD else "hot")

    def put_back(self, *, due: bool, counts: int) -> Row:
        """Snoozed, or put back without counting it as a snooze."""
        left = _ENDED | {"attempt": self.attempt - 1, "snoozes": self.snoozes + counts}
        return replace(self, state="scheduled", store="scheduled", due=due, **left)

    def cancelled(self, reason: str) -> Row:
        """Cancelled, wherever it was."""
        errors = (*self.errors, f"cancelled: {reason}")
        return replace(self, state="cancelled", store="hot", errors=errors, **_ENDED)

    def promoted(self) -> Row:
        """Available again."""
        return replace(self, state="available", store="hot")

    def parked(self) -> Row:
        """Waiting, and nobody's attempt any more."""
        return replace(self, **_ENDED | {"callback": self.callback, "expired": self.expired}, **_WAITS)

    def waits(self) -> Row:
        """Waiting, and its attempt's."""
        return replace(self, attended=True, **_WAITS)

    def goes_on(self) -> Row:
        """The handler waits no longer."""
        return replace(self, state="running", attended=False)

    def registered(self, callback: str) -> Row:
        """With a callback."""
        return replace(self, callback=callback, expired=False, answer=None)

    def withdrawn(self) -> Row:
        """Without one."""
        return replace(self, callback=None, expired=False)

    def answered(self, payload: Any) -> Row:
        """With what the outside has said, for its handler."""
        return replace(self.goes_on().withdrawn(), answer={"callback": self.callback, "payload": payload})

    def retried(self) -> Row:
        """Available from the start."""
        return replace(self, state="available", attempt=0, **_ENDED)

    def progressed(self, percent: float | None, message: str | None, metadata: dict[str, Any]) -> Row:
        """What is None stays as it was; metadata is merged."""
        old = self.progress or {"percent": None, "message": None, "metadata": {}}
        new = {
            "percent": old["percent"] if percent is None else percent,
            "message": old["message"] if message is None else message,
            "metadata": old["metadata"] | metadata,
        }
        return replace(self, progress=new)


@dataclass(frozen=True)
class Happened:
    """One outcome of one job, with what its follow-ups take over."""

    job: int
    key: Key
    outcome: Outcome
    lease: int
    root: int
    poison: bool

    @property
    def kind(self) -> str:
        """The kind of the job."""
        return str(self.key[0])

    @property
    def specs(self) -> tuple[Followed, ...]:
        """What follows on it, wherever the spec is registered."""
        return SPECS.get((self.kind, self.outcome), ())

    def cause(self, spec: Followed) -> Cause:
        """The identity of one follow-up of it."""
        return self.job, self.outcome.value, self.lease, spec.name

    def follow_ups(self, spec: Followed) -> Iterator[Row]:
        """The jobs that a spec brings: the first at once, the others later."""
        for part in range(spec.parts):
            request = follow_up(self.key, spec, self.cause(spec), part)
            options = type(request.args).__awa__
            later: dict[str, Any] = {"state": "scheduled", "store": "scheduled", "due": False} if part else {}
            yield Row(
                key_of(options.kind, request.args.model_dump(), dict(request.metadata or {})),
                options.queue,
                max_attempts=options.max_attempts,
                certain=False,
                parent=self.job,
                root=self.root,
                parent_outcome=self.outcome.value,
                **later,
            )


def may_claim(row: Row) -> set[Claim]:
    """The unique keys that an end of this job's attempt may claim: its own once more, and those of its follow-ups."""
    own = {row.claim} if row.claim is not None and not row.holds else set[Claim]()
    follow = [spec for (kind, _), specs in SPECS.items() if kind == row.kind for spec in specs]
    return own | {brought_by(row.key) for spec in follow if spec.unique and spec.local}
