"""The reference of the races for a unique key: what must come of each, in plain Python.

It knows no SQL and nothing of the package. What the verbs make of a job is said by `tests.races.matrix`; added here is
the one key that all jobs of a race share. A job holds it while it is in one of the `MASKS` states. Whoever wants it

* is a duplicate at once when a job holds it in what is committed, even if the open first transaction lets it go;
* waits for the first when that has claimed it, and then looks at what the first has left;
* takes it otherwise.

A person who brings a job back into its unique states is told of the other holder, and nothing changes; a sweep cancels
the job, but does not wait for the first: it leaves the job for its next pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tests.races.matrix import RULES, Answer, cancelled
from tests.races.starts import STARTS, Job

MASKS = {
    "live": frozenset({"scheduled", "available", "running", "retryable", "waiting_external"}),
    "pending": frozenset({"scheduled", "available", "retryable"}),
    "available": frozenset({"available"}),
    "all": frozenset(
        {"scheduled", "available", "running", "completed", "retryable", "failed", "cancelled", "waiting_external"}
    ),
}
SWEEPS = ("rescue_stale", "promote")
VERBS = (
    *("claim", "complete", "complete_many", "fail", "fail_terminal", "retry_after"),
    *("snooze", "put_back", "cancel_id", "rescue_stale", "promote"),
)


@dataclass(frozen=True)
class Road:
    """One way to enqueue a job."""

    duplicate: Answer
    is_follow_up: bool = False
    goes_again: bool = False
    """Whether the same transaction cancels the job again."""


ROADS = {
    "skip": Road(Answer.SKIPPED),
    "raise": Road(Answer.REFUSED),
    "unique": Road(Answer.SKIPPED),
    "many_skip": Road(Answer.SKIPPED),
    "many_raise": Road(Answer.REFUSED),
    "follow_up": Road(Answer.SKIPPED, is_follow_up=True),
    "follow_up_raise": Road(Answer.REFUSED, is_follow_up=True),
    "there_and_gone": Road(Answer.SKIPPED, goes_again=True),
}


class Wait(StrEnum):
    """How long the second is held up."""

    NOT = "does not wait"
    BRIEFLY = "gives up before the first has ended"
    LONG = "waits for the first"


@dataclass(frozen=True)
class World:
    """The jobs of a race by their names, and the states in which they hold the key."""

    mask: str
    jobs: Mapping[str, Job]

    @property
    def holder(self) -> str | None:
        """The job that holds the key; never more than one."""
        holders = [name for name, job in self.jobs.items() if job.state in MASKS[self.mask]]
        assert len(holders) <= 1, f"the reference gives the key to {holders}"
        return holders[0] if holders else None

    def comes_in(self, old: Job, new: Job) -> bool:
        """Whether a job claims the key by changing so."""
        return old.state not in MASKS[self.mask] and new.state in MASKS[self.mask]

    def having(self, name: str, job: Job) -> World:
        """The same with this job as it is now."""
        return replace(self, jobs={**self.jobs, name: job})


@dataclass(frozen=True)
class Said:
    """What an operation has answered, and which job it took or was a duplicate of."""

    answer: Answer
    of: str | None = None


@dataclass(frozen=True)
class Done:
    """What an operation has done in its open transaction."""

    world: World
    said: Said
    rows: frozenset[str] = frozenset()
    """The jobs that it has locked."""
    claimed: bool = False
    """Whether it has claimed the key, even if it let it go again."""


# -------------------------------------------------------------------------------------------------- one operation
@dataclass
class Sight:
    """What an operation sees: what is committed, until it has waited for the open transaction to end."""

    world: World
    other: Done | None = None
    after: World | None = None
    wait: Wait = field(default=Wait.NOT)

    def lock(self, name: str, *, waits: bool) -> bool:
        """Lock a row; False when it is passed over."""
        if self.other is not None and name in self.other.rows:
            if not waits:
                return False
            self._wait()
        return True

    def is_free(self, *, waits: bool) -> bool:
        """Whether nobody holds the key; raises when that cannot be known yet and must not be waited for."""
        if self.world.holder is None and self.other is not None and self.other.claimed:
            if not waits:
                self.wait = Wait.BRIEFLY
                raise BlockingIOError
            self._wait()
        return self.world.holder is None

    def _wait(self) -> None:
        assert self.after is not None
        self.wait, self.world, self.other = Wait.LONG, self.after, None


def act(name: str, who: str, sight: Sight) -> Done:
    """What an operation does; `who` ("first", "second") is the name of a job that it enqueues."""
    if name in ROADS:
        return _enqueue(ROADS[name], who, sight)
    if name == "cancel_twin":
        return _verb("cancel_id", "twin", sight)
    return _verb(name, "holder", sight)


def _enqueue(road: Road, who: str, sight: Sight) -> Done:
    if not sight.is_free(waits=True):
        return Done(sight.world, Said(road.duplicate, sight.world.holder))
    job = cancelled(Job("available"), "enough") if road.goes_again else Job("available")
    return Done(sight.world.having(who, job), Said(Answer.WON, who), frozenset({who}), claimed=True)


def _verb(name: str, me: str, sight: Sight) -> Done:
    rule = RULES[name]
    nothing = Said(rule.otherwise)
    if not rule.takes(sight.world.jobs[me]):
        return Done(sight.world, nothing)
    claimed, rows = False, frozenset({me})
    if not sight.lock(me, waits=rule.waits) or not rule.takes(sight.world.jobs[me]):
        return Done(sight.world, nothing)
    job = sight.world.jobs[me]
    new = rule.does(job)
    if sight.world.comes_in(job, new):
        try:
            claimed = sight.is_free(waits=name not in SWEEPS)
        except BlockingIOError:
            return Done(sight.world, nothing, rows)
        if not claimed and name in SWEEPS:
            gone = cancelled(job, f"duplicate of job {{{sight.world.holder}}}", owed=True)
            said = Said(Answer.WON) if name == "rescue_stale" else nothing
            return Done(sight.world.having(me, gone), said, rows)
        if not claimed:
            return Done(sight.world, Said(Answer.REFUSED, sight.world.holder), rows)
    return Done(sight.world.having(me, new), Said(Answer.WON), rows, claimed)


# ---------------------------------------------------------------------------------------------------- the verdict
@dataclass(frozen=True)
class Verdict:
    """What must come of a race."""

    first: Said
    second: Said
    first_sees: str | None
    """Who holds the key, in the first's own transaction."""
    second_sees: str | None
    wait: Wait
    end: World


def judge(start: World, first: str, second: str, *, commits: bool) -> Verdict:
    """What must come of two operations, the first of which commits or rolls back when the second has done what it can.

    The first's changes and the second's are of different jobs, or the second has waited: they add up.
    """
    one = act(first, "first", Sight(start))
    left = one.world if commits else start
    sight = Sight(start, one, left)
    two = act(second, "second", sight)
    changed = {name: job for name, job in two.world.jobs.items() if job != sight.world.jobs.get(name)}
    end = replace(left, jobs={**left.jobs, **changed})
    return Verdict(one.said, two.said, one.world.holder, two.world.holder, sight.wait, end)


def start(mask: str, holder: str | None, *, twin: bool = False) -> World:
    """A starting situation: nobody, or a job in some state, perhaps with a twin that was enqueued meanwhile."""
    jobs = {} if holder is None else {"holder": STARTS[holder]}
    return World(mask, jobs | ({"twin": Job("available")} if twin else {}))
