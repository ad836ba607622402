"""The cells of the race matrix: which operation meets which other, in which job, and how the first one ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.races.matrix import ATTENDING_RULES, CALLBACK_RULES, RESCUES, RULES, Verdict, judge
from tests.races.starts import ATTENDED_STARTS, OVERDUE_STARTS, PLAIN_STARTS, RISEN_STARTS, STARTS

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


#: What these do depends on the attempts that are left, or on the queue's dead letters.
LIMITED = {*RESCUES, "fail_external"}

#: What the races are about where a handler waits, or has its answer: in the others it is as if it ran.
ABOUT = {
    "attended": {"attend", "go_on", "resume_external", "thief"},
    "attended-silent": {"rescue_stale"},
    "attended-expired": {"rescue_callbacks"},
    "answered": {"attend", "park"},
}


#: The lanes of maintenance of which the short matrix has one for each job, and the jobs that it has not.
LANES = {*RESCUES, "age"}
BESIDE_STARTS = OVERDUE_STARTS | RISEN_STARTS


def other_lanes(start: str) -> set[str]:
    """The lanes that the short matrix leaves out: all but the one that takes the job, or a rescue if none does."""
    return LANES - set([name for name in LANES if RULES[name].takes(STARTS[start])] or ["rescue_stale"])


def ends_beside(start: str, first: str, second: str) -> tuple[str, ...]:
    """How the first's transaction ends, of what the short matrix leaves out: every lane meets every operation in every
    job, if either of the two finds something to do; everything meets in a job that has risen.
    """
    raced = RULES.keys() if start in RISEN_STARTS else LANES if start in OVERDUE_STARTS else other_lanes(start)
    takes = any(RULES[name].takes(STARTS[start]) for name in (first, second))
    return ENDS[:2] if raced & {first, second} and takes else ()


def ends_raced(start: str, first: str, second: str) -> tuple[str, ...]:
    """How the first's transaction ends, in the short matrix; not at all where another race comes to the same.

    * Without callbacks the matrix is whole; where a job waits, those of the old operations race that both take it.
    * A verb of callbacks meets every operation where the job has a callback, or runs without one, if either of the two
      finds something to do; once, if the first does not.
    * In the last attempt, one of the two is of those that it makes a difference to.
    * A verb of waits meets those that find something to do as well. Where a handler waits, the job is its attempt's as
      if it ran: raced is what the start is `ABOUT`, with everything, and everything with itself.
    * One lane of maintenance, and no job that is overdue or has risen: `ends_beside` has the others.
    """
    job, pair = STARTS[start], {first, second}
    one, two = (RULES[name].takes(job) for name in (first, second))
    if start in BESIDE_STARTS or other_lanes(start) & pair:
        raced = False
    elif start in ATTENDED_STARTS:
        raced = (one or two) and (first == second or bool(ABOUT[start] & pair))
    elif ATTENDING_RULES.keys() & pair:
        raced = one and two
    elif not CALLBACK_RULES.keys() & pair:
        raced = start in PLAIN_STARTS or (job.state == "waiting_external" and one and two)
    else:
        raced = (start not in PLAIN_STARTS or start == "running") and (one or two)
    if job.callback and job.attempt == job.max_attempts and not LIMITED & pair:
        raced = False
    once = (CALLBACK_RULES.keys() & pair or start in ATTENDED_STARTS) and not (one and (two or not job.attended))
    return () if not raced else ENDS[:1] if once else ENDS[:2]


def cells(*, long: bool = False, beside: bool = False) -> Iterator[Cell]:
    """Every ordered pair in every starting state, committed and rolled back, but for those that tell nothing more.

    Flushed before the race or not alternates from pair to pair, and from state to state; a `long` matrix has both,
    rolls back to a savepoint as well, and leaves no pair out. What is `beside` the short one is what it leaves out of
    maintenance.
    """
    short = ends_beside if beside else ends_raced
    for at, start in enumerate(STARTS):
        for row, first in enumerate(RULES):
            for column, second in enumerate(RULES):
                flushed = (at + row + column) % 2 == 0
                for end in ENDS if long else short(start, first, second):
                    for also in (flushed, not flushed) if long else (flushed,):
                        yield Cell(start, first, second, end, also)
