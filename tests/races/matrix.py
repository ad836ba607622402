"""The reference of the race matrix: what must come of every race, in plain Python.

It knows no SQL and nothing of the package.  An operation is a `Rule`: which job it takes, what it makes of it, what it
answers when there is nothing for it to take, and whether it waits for a row that another transaction holds.  Two rules
and a starting job give the one `Verdict` that is right:

* the first runs on the starting job, and holds the row if it took it;
* the second looks at what is committed, which is the starting job; a held row it waits for, or passes over;
* one that has waited goes on with the job as the first has left it: changed after a commit, as before after a rollback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from tests.races.starts import CALLED, Job


class Answer(StrEnum):
    """What an operation tells its caller."""

    WON = "won"
    STALE = "StaleJobError"
    UNKNOWN = "CallbackNotFound"
    ENDED = "the job as it had ended"
    ANSWERED = "what the outside has answered"
    LISTED = "listed in .stale"
    NONE = "None"
    NOTHING = "nothing taken"
    SKIPPED = "left out as a duplicate"
    REFUSED = "UniqueConflict"


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
    unless: Callable[[Job], Answer | None] = lambda job: None
    """What it answers instead, about some of the jobs that it does not take."""

    def refuses(self, job: Job) -> Answer:
        """What it answers about a job that it does not take."""
        return self.unless(job) or self.otherwise


def _held(job: Job) -> bool:
    return job.has_worker and job.lease == 0


def _fenced(does: Callable[[Job], Job], otherwise: Answer = Answer.STALE, *, waits: bool = True) -> Rule:
    return Rule(_held, does, otherwise, waits)


def _claim(job: Job) -> Job:
    return job.becomes("running", attempt=job.attempt + 1, lease=job.lease + 1, silent=False)


def _steal(job: Job) -> Job:
    return replace(_claim(job), callback="other" if job.callback else None, answer=None)


def _complete(job: Job) -> Job:
    return job.becomes("completed", progress=None, result=1, children=(*job.children, "completed"))


def _noted(job: Job, error: str, sort: str) -> Job:
    return replace(job, errors=(*job.errors, (error, sort, job.attempt)))


def _gone(job: Job, reason: str) -> Job:
    kept = job.keeps_dead_letters
    return job.becomes("failed", store="dead" if kept else "hot", reason=reason if kept else None)


def _fail(job: Job) -> Job:
    noted = _noted(job, "no", "error")
    if job.attempt < job.max_attempts:
        return noted.becomes("retryable", store="scheduled", children=(*job.children, "retried"))
    return replace(_gone(noted, "max_attempts_exhausted"), children=(*job.children, "exhausted"))


def _fail_for_good(job: Job, reason: str = "terminal_error", error: str = "no", sort: str = "error") -> Job:
    return replace(_gone(_noted(job, error, sort), reason), children=(*job.children, "exhausted"))


def _is_lost(job: Job) -> bool:
    return job.silent and job.has_worker


def _is_overdue(job: Job) -> bool:
    return job.state == "running" and job.overdue and not _is_lost(job)


def _is_uncalled(job: Job) -> bool:
    return job.state == "waiting_external" and job.expired and not _is_lost(job)


def _rescue(takes: Callable[[Job], bool], error: str, letter: str) -> Rule:
    """What a rescue does with a job that is late in its way; what nobody attends any more is late in one way only."""

    def does(job: Job) -> Job:
        noted = _noted(job, error, "rescue")
        if job.attempt < job.max_attempts:
            return noted.becomes("retryable", store="scheduled", owed=(*job.owed, "rescued"))
        return replace(_gone(noted, letter), owed=(*job.owed, "exhausted", "rescued"))

    return Rule(takes, does, Answer.NOTHING, waits=False)


def _snooze(job: Job) -> Job:
    return job.becomes("scheduled", store="scheduled", attempt=job.attempt - 1, snoozes=job.snoozes + 1)


def _put_back(job: Job) -> Job:
    return job.becomes("scheduled", store="scheduled", attempt=job.attempt - 1)


def cancelled(job: Job, reason: str, *, owed: bool = False) -> Job:
    """A cancelled job; its follow-up has come, or is owed."""
    noted = _noted(job, f"cancelled: {reason}", "cancelled").becomes("cancelled", store="hot")
    if owed:
        return replace(noted, owed=(*job.owed, "cancelled"))
    return replace(noted, children=(*job.children, "cancelled"))


def _cancel(job: Job) -> Job:
    return cancelled(job, "enough")


def _can_park(job: Job) -> bool:
    return _held(job) and (job.callback == "known" or (job.callback is None and job.answer is None))


def _park(job: Job) -> Job:
    if job.callback is None:
        broken = "wait_for_callback_contract_violation"
        return _fail_for_good(job, broken, "wait_for_callback without a registered callback", broken)
    return job.becomes("waiting_external", children=(*job.children, "waiting_for_callback"))


def _cannot_park(job: Job) -> Answer | None:
    if _held(job):
        return Answer.UNKNOWN
    return Answer.ENDED if job.lease == 0 and job.state in ("completed", "failed") else None


def _attend(job: Job) -> Job:
    return job.becomes("waiting_external", attended=True, children=(*job.children, "waiting_for_callback"))


def _does_not_attend(job: Job) -> Answer | None:
    if not _held(job):
        return None
    if job.answer == "known":
        return Answer.ANSWERED
    return Answer.NONE if job.callback == "known" else Answer.UNKNOWN  # it waits already


def _retry_anew(job: Job) -> Job:
    return job.becomes("available", attempt=0, children=(*job.children, "retried"))


def _called(does: Callable[[Job], Job], *states: str) -> Rule:
    return Rule(lambda job: job.callback == "known" and job.state in states, does, Answer.UNKNOWN)


_ended = ("completed", "failed", "cancelled")
_by_id = Rule(lambda job: job.state not in _ended, _cancel, otherwise=Answer.NONE)

RESCUES = {
    "rescue_stale": _rescue(_is_lost, "heartbeat stale: worker presumed dead", "heartbeat_stale"),
    "rescue_overdue": _rescue(_is_overdue, "hard deadline exceeded", "deadline_exceeded"),
    "rescue_callbacks": _rescue(_is_uncalled, "callback timed out", "callback_timeout"),
}
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
    **RESCUES,
    "age": Rule(
        lambda job: job.state == "available" and not job.aged,
        lambda job: replace(job, priority=1, aged=1),
        Answer.NOTHING,
        waits=False,
    ),
    "promote": Rule(
        lambda job: job.store == "scheduled",
        lambda job: job.becomes("available", store="hot"),
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
    "thief": Rule(lambda job: job.has_worker, _steal, Answer.NOTHING),
}
CALLBACK_RULES = {
    "register": _fenced(lambda job: replace(job, callback="other", expired=False, answer=None)),
    "cancel_callback": Rule(
        lambda job: _held(job) and job.callback is not None,
        lambda job: replace(job, callback=None),
        Answer.STALE,
        unless=lambda job: Answer.NOTHING if _held(job) else None,
    ),
    "park": Rule(_can_park, _park, Answer.STALE, unless=_cannot_park),
    "complete_external": _called(_complete, *CALLED),
    "fail_external": _called(lambda job: _fail_for_good(job, "callback_failed"), *CALLED),
    "retry_external": _called(_retry_anew, "waiting_external"),
    "heartbeat_callback": _called(lambda job: replace(job, expired=False), "waiting_external"),
}
ATTENDING_RULES = {
    "attend": Rule(
        lambda job: _held(job) and job.callback == "known" and not job.attended,
        _attend,
        Answer.STALE,
        unless=_does_not_attend,
    ),
    "go_on": Rule(lambda job: _held(job) and job.attended, lambda job: job.becomes("running"), Answer.STALE),
    "resume_external": Rule(
        lambda job: job.callback == "known" and job.has_worker,
        lambda job: job.becomes("running", callback=None, answer="known"),
        Answer.UNKNOWN,
    ),
}
CALLBACK_RULES |= ATTENDING_RULES
RULES |= CALLBACK_RULES

#: The verbs of an attempt that raise when it has ended, whatever has become of the job.
FENCED = [
    name
    for name, rule in RULES.items()
    if rule.otherwise in (Answer.STALE, Answer.LISTED) and name not in ("cancel_callback", "park", "attend", "go_on")
]


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
    """Whose work is committed: "first", "second", "both" or "neither"."""


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
        first=Answer.WON if took else one.refuses(start),
        second=Answer.WON if wins else two.refuses(met),
        waits=waits,
        met=met,
        end=two.does(left) if wins else left,
        winner=works[took and commits, wins],
    )
