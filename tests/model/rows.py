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


@dataclass(frozen=True)
class Row:
    """One job. `certain` is whether a statement of its own transaction must see it; `due` is for scheduled ones."""

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

    def comes_in(self, after: Row) -> bool:
        """Whether it has to claim its key on the way to what it is `after`."""
        return after.holds and not self.holds

    def stored(self, job_id: int) -> Row:
        """With the id that it has got."""
        return replace(self, id=job_id)

    # What the verbs do to it.
    def claimed(self, job_id: int, lease: int) -> Row:
        """Running, under a new lease."""
        return replace(self, state="running", attempt=self.attempt + 1, lease=lease, id=job_id, silent=False)

    def completed(self, result: Any) -> Row:
        """Finished with success."""
        return replace(self, state="completed", result=result, progress=None, silent=False)

    def failed(self, error: str, *, terminal: bool = False, due: bool = False) -> Row:
        """The attempt failed: tried again, failed for good, or kept as a dead letter."""
        ended = replace(self, errors=(*self.errors, error), silent=False)
        if not terminal and self.attempt < self.max_attempts:
            return replace(ended, state="retryable", store="scheduled", due=due)
        return replace(ended, state="failed", store="dead" if self.queue == DEAD else "hot")

    def put_back(self, *, due: bool, counts: int) -> Row:
        """Snoozed, or put back without counting it as a snooze."""
        left = {"attempt": self.attempt - 1, "snoozes": self.snoozes + counts, "silent": False}
        return replace(self, state="scheduled", store="scheduled", due=due, **left)  # type: ignore[arg-type]

    def cancelled(self, reason: str) -> Row:
        """Cancelled, wherever it was."""
        errors = (*self.errors, f"cancelled: {reason}")
        return replace(self, state="cancelled", store="hot", errors=errors, silent=False)

    def promoted(self) -> Row:
        """Available again."""
        return replace(self, state="available", store="hot")

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
