"""The reference of the race matrix: what must come of every race, in plain Python.

It knows no SQL and nothing of the package.  An operation is a `Rule`: which job it takes, what it makes of it, what it
answers when there is nothing for it to take, and whether it waits for a row that another transaction holds.  Two rules
and a starting job give the one `Verdict` that is right:

* the first runs on the starting job, and holds the row if it took it;
* the second looks at what is committed, which is the starting job; a held row it waits for, or passes over;
* one that has waited goes on with the job as the first has left it: changed after a commit, as before after a rollback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Answer(StrEnum):
    """What an operation tells its caller."""

    WON = "won"
    STALE = "StaleJobError"
    LISTED = "listed in .stale"
    NONE = "None"
    NOTHING = "nothing taken"
    SKIPPED = "left out as a duplicate"
    REFUSED = "UniqueConflict"


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
    keeps_dead_letters: bool = False
    errors: tuple[tuple[str, str, int], ...] = ()
    snoozes: int = 0
    progress: float | None = None
    result: object = None
    reason: str | None = None
    children: tuple[str, ...] = ()
    owed: tuple[str, ...] = ()


STARTS = {
    "available": Job("available"),
    "running": Job("running", attempt=1, silent=True, progress=10),
    "stolen": Job("running", attempt=2, lease=1, silent=True, progress=10),
    "last": Job("running", attempt=5, silent=True, progress=10),
    "last-kept": Job("running", attempt=5, silent=True, progress=10, keeps_dead_letters=True),
    "scheduled": Job("scheduled", "scheduled"),
    "retryable": Job("retryable", "scheduled", attempt=1, errors=(("before", "error", 1),)),
    "owed": Job("completed", attempt=1, owed=("completed",)),
}


# ------------------------------------------------------------------------------------------------------ the rules
@dataclass(frozen=True)
class Rule:
    """One operation."""

    takes: Callable[[Job], bool]
    does: Callable[[Job], Job]
    otherwise: Answer
    waits: bool = True
    row: str = "job"
    """What it locks: the job, or the obligation."""


def _held(job: Job) -> bool:
    return job.state == "running" and job.lease == 0


def _fenced(does: Callable[[Job], Job], otherwise: Answer = Answer.STALE, *, waits: bool = True) -> Rule:
    return Rule(_held, does, otherwise, waits)


def _claim(job: Job) -> Job:
    return replace(job, state="running", attempt=job.attempt + 1, lease=job.lease + 1, silent=False)


def _complete(job: Job) -> Job:
    return replace(job, state="completed", progress=None, result=1, children=(*job.children, "completed"))


def _noted(job: Job, error: str, sort: str) -> Job:
    return replace(job, errors=(*job.errors, (error, sort, job.attempt)))


def _gone(job: Job, reason: str) -> Job:
    kept = job.keeps_dead_letters
    return replace(job, state="failed", store="dead" if kept else "hot", reason=reason if kept else None)


def _fail(job: Job) -> Job:
    noted = _noted(job, "no", "error")
    if job.attempt < job.max_attempts:
        return replace(noted, state="retryable", store="scheduled", children=(*job.children, "retried"))
    return replace(_gone(noted, "max_attempts_exhausted"), children=(*job.children, "exhausted"))


def _fail_for_good(job: Job) -> Job:
    return replace(_gone(_noted(job, "no", "error"), "terminal_error"), children=(*job.children, "exhausted"))


def _rescue(job: Job) -> Job:
    noted = _noted(job, "heartbeat stale: worker presumed dead", "rescue")
    if job.attempt < job.max_attempts:
        return replace(noted, state="retryable", store="scheduled", owed=(*job.owed, "rescued"))
    return replace(_gone(noted, "heartbeat_stale"), owed=(*job.owed, "exhausted", "rescued"))


def _snooze(job: Job) -> Job:
    return replace(job, state="scheduled", store="scheduled", attempt=job.attempt - 1, snoozes=job.snoozes + 1)


def _put_back(job: Job) -> Job:
    return replace(job, state="scheduled", store="scheduled", attempt=job.attempt - 1)


def cancelled(job: Job, reason: str, *, owed: bool = False) -> Job:
    """A cancelled job; its follow-up has come, or is owed."""
    noted = replace(_noted(job, f"cancelled: {reason}", "cancelled"), state="cancelled", store="hot")
    if owed:
        return replace(noted, owed=(*job.owed, "cancelled"))
    return replace(noted, children=(*job.children, "cancelled"))


def _cancel(job: Job) -> Job:
    return cancelled(job, "enough")


_by_id = Rule(
    lambda job: job.state in ("available", "running", "scheduled", "retryable"), _cancel, otherwise=Answer.NONE
)

RULES = {
    "claim": Rule(lambda job: job.state == "available", _claim, Answer.NOTHING, waits=False),
    "complete": _fenced(_complete),
    "complete_many": _fenced(_complete, Answer.LISTED),
    "fail": _fenced(_fail),
    "fail_terminal": _fenced(_fail_for_good),
    "retry_after": _fenced(_fail),
    "snooze": _fenced(_snooze),
    "put_back": _fenced(_put_back),
    "cancel_id": _by_id,
    "cancel_object": _by_id,
    "cancel_attempt": _fenced(_cancel),
    "set_progress": _fenced(lambda job: replace(job, progress=50)),
    "beat": _fenced(lambda job: replace(job, silent=False), Answer.NOTHING, waits=False),
    "rescue": Rule(lambda job: job.state == "running" and job.silent, _rescue, Answer.NOTHING, waits=False),
    "promote": Rule(
        lambda job: job.store == "scheduled",
        lambda job: replace(job, state="available", store="hot"),
        Answer.NOTHING,
        waits=False,
    ),
    "dispatch": Rule(
        lambda job: bool(job.owed),
        lambda job: replace(job, owed=job.owed[1:], children=(*job.children, job.owed[0])),
        Answer.NONE,
        waits=False,
        row="obligation",
    ),
    "thief": Rule(lambda job: job.state == "running", _claim, Answer.NOTHING),
}

#: The verbs of an attempt that raise when it has ended.
FENCED = [name for name, rule in RULES.items() if rule.otherwise in (Answer.STALE, Answer.LISTED)]


# ---------------------------------------------------------------------------------------------------- the verdict
@dataclass(frozen=True)
class Verdict:
    """What must come of a race."""

    first: Answer
    second: Answer
    waits: bool
    """Whether the second is held up until the first has ended."""
    met: Job
    """The job that the second found."""
    end: Job
    winner: str
    """Whose work is committed: one of `WINNERS`."""


def judge(start: Job, first: str, second: str, *, commits: bool) -> Verdict:
    """What must come of two operations on one job, the first of which then commits or rolls back."""
    one, two = RULES[first], RULES[second]
    took = one.takes(start)
    left = one.does(start) if took and commits else start
    in_the_way = took and one.row == two.row
    waits = in_the_way and two.waits and two.takes(start)
    met = left if waits else start
    wins = two.takes(met) and (waits or not in_the_way)
    works = {(True, True): "both", (True, False): "first", (False, True): "second", (False, False): "neither"}
    return Verdict(
        first=Answer.WON if took else one.otherwise,
        second=Answer.WON if wins else two.otherwise,
        waits=waits,
        met=met,
        end=two.does(left) if wins else left,
        winner=works[took and commits, wins],
    )


# ------------------------------------------------------------------------------------------------------ the cells
ENDS = ("commit", "rollback", "rollback to a savepoint")
WINNERS = ("first", "second", "both", "neither")


@dataclass(frozen=True)
class Cell:
    """One race of the matrix."""

    start: str
    first: str
    second: str
    end: str
    """How the first one's transaction ends: one of `ENDS`."""
    flushed: bool
    """Whether the first has also sent its follow-ups and moved rows before the second begins."""

    def __str__(self) -> str:
        sent = "" if self.flushed else " unflushed"
        return f"{self.start}: {self.first} ends by {self.end}{sent}, {self.second} races"

    @property
    def commits(self) -> bool:
        """Whether what the first has done stays."""
        return self.end == "commit"

    @property
    def verdict(self) -> Verdict:
        """What must come of it."""
        return judge(STARTS[self.start], self.first, self.second, commits=self.commits)


def cells(*, long: bool = False) -> Iterator[Cell]:
    """Every ordered pair in every starting state, committed and rolled back.

    Flushed before the race or not alternates from pair to pair, and from state to state; a `long` matrix has both, and
    rolls back to a savepoint as well.
    """
    for at, start in enumerate(STARTS):
        for row, first in enumerate(RULES):
            for column, second in enumerate(RULES):
                flushed = (at + row + column) % 2 == 0
                for end in ENDS if long else ENDS[:2]:
                    for also in (flushed, not flushed) if long else (flushed,):
                        yield Cell(start, first, second, end, also)
