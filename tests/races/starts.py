"""The jobs that races begin with, as far as races are concerned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Job:
    """A job, as far as races are concerned."""

    state: str
    store: str = "hot"
    attempt: int = 0
    max_attempts: int = 5
    lease: int = 0
    """0 is the lease that both racers hold; every further claim counts one up."""
    silent: bool = False
    """Whether the worker has not beaten for long."""
    overdue: bool = False
    """Whether the attempt's deadline has passed; it does not count while its handler waits."""
    priority: int = 2
    aged: int = 0
    """By how much it has risen while it was available."""
    keeps_dead_letters: bool = False
    callback: str | None = None
    """Whose answer it waits for: "known" is the token that both racers have, "other" one that they do not have."""
    expired: bool = False
    """Whether the callback should have come by now."""
    attended: bool = False
    """Whether its handler waits for the callback: then it is still its attempt's."""
    answer: str | None = None
    """To whose callback it has an answer: "known" is that of the token that both racers have."""
    errors: tuple[tuple[str, str, int], ...] = ()
    snoozes: int = 0
    progress: float | None = None
    result: object = None
    reason: str | None = None
    children: tuple[str, ...] = ()
    owed: tuple[str, ...] = ()

    def becomes(self, state: str, **changes: Any) -> Job:
        """The job in another state; its callback ends with its attempt, an answer also when it is parked."""
        callback = self.callback if state in CALLED else None
        answer = self.answer if state == "running" else None
        overdue = self.overdue and (state == "running" or changes.get("attended", False))
        own = {"priority": self.priority + self.aged, "aged": 0}
        kept = {"callback": callback, "attended": False, "answer": answer, "overdue": overdue, **own}
        return replace(self, state=state, **kept | changes)

    @property
    def has_worker(self) -> bool:
        """Whether it is some attempt's: it runs, or its handler waits."""
        return self.state == "running" or self.attended


#: A job in one of these states can have a callback.
CALLED = ("running", "waiting_external")

#: Nobody has called, or will.
PLAIN_STARTS = {
    "available": Job("available"),
    "running": Job("running", attempt=1, silent=True, progress=10),
    "stolen": Job("running", attempt=2, lease=1, silent=True, progress=10),
    "last": Job("running", attempt=5, silent=True, progress=10),
    "last-kept": Job("running", attempt=5, silent=True, progress=10, keeps_dead_letters=True),
    "scheduled": Job("scheduled", "scheduled"),
    "retryable": Job("retryable", "scheduled", attempt=1, errors=(("before", "error", 1),)),
    "owed": Job("completed", attempt=1, owed=("completed",)),
}
_waiting = Job("waiting_external", attempt=1, progress=10, callback="known")
STARTS = PLAIN_STARTS | {
    "registered": replace(PLAIN_STARTS["running"], callback="known"),
    "registered-anew": replace(PLAIN_STARTS["running"], callback="other"),
    "registered-by-thief": replace(PLAIN_STARTS["stolen"], callback="other"),
    "waiting": _waiting,
    "expired": replace(_waiting, expired=True),
    "expired-last": replace(_waiting, expired=True, attempt=5),
    "expired-last-kept": replace(_waiting, expired=True, attempt=5, keeps_dead_letters=True),
}
#: A handler waits, or has its answer.
ATTENDED_STARTS = {
    "attended": replace(_waiting, attended=True),
    "attended-silent": replace(_waiting, attended=True, silent=True),
    "attended-expired": replace(_waiting, attended=True, expired=True),
    "answered": replace(PLAIN_STARTS["running"], answer="known"),
}
#: The worker beats, and the attempt takes too long.
OVERDUE_STARTS = {
    "overdue": replace(PLAIN_STARTS["running"], silent=False, overdue=True, callback="known"),
    "overdue-silent": replace(PLAIN_STARTS["running"], overdue=True),
    "overdue-last": replace(PLAIN_STARTS["last"], silent=False, overdue=True),
    "overdue-last-kept": replace(PLAIN_STARTS["last-kept"], silent=False, overdue=True),
}
#: It has waited, and has risen.
RISEN_STARTS = {"risen": replace(PLAIN_STARTS["available"], priority=1, aged=1)}
STARTS |= ATTENDED_STARTS | OVERDUE_STARTS | RISEN_STARTS
