"""The application of the model: what its jobs carry, what follows on them, who is told.

Every follow-up carries the identity of its cause (job, outcome, lease, spec, part), so that one that is lost, doubled
or made for a transition that never was committed shows in its own row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from awa_sqla import (
    Backoff,
    Cancelled,
    Completed,
    EnqueueRequest,
    Exhausted,
    FollowUps,
    Hooks,
    JobArgs,
    Outcome,
    Rescued,
    Retried,
    Started,
)

HOUR = timedelta(hours=1)
DEAD = "dead"  # the queue that keeps dead letters
QUEUES = ("a", "b", DEAD, "echo")

#: Nothing becomes due by itself while an example runs.
SLOW = Backoff(base=HOUR, factor=1, jitter=0.25)


class Task(JobArgs, kind="model_task", queue="a", backoff=SLOW):
    """A job that everything follows on. The spec `one` of a poisoned one raises."""

    n: int
    poison: bool = False


class Echo(JobArgs, kind="model_echo", queue="echo", max_attempts=2, backoff=SLOW):
    """What follows on a `Task`."""

    of: int
    outcome: str
    lease: int
    spec: str
    part: int = 0


class Plain(JobArgs, kind="model_plain", queue="b", backoff=SLOW):
    """A job on which nothing follows, and of which nobody is told; also what follows on an `Echo`."""

    n: str


KINDS: dict[str, type[JobArgs]] = {cls.__awa__.kind: cls for cls in (Task, Echo, Plain)}
TASK, ECHO, PLAIN = KINDS
HOOKED = (TASK, ECHO)

Key = tuple[Any, ...]
Cause = tuple[int, str, int, str]


def key_of(kind: str, args: dict[str, Any]) -> Key:
    """The identity of a job in the model: its kind and what it carries."""
    return (kind, args["n"]) if kind != ECHO else (kind, *(args[name] for name in Echo.model_fields))


def cause_of(key: Key) -> Cause | None:
    """The (job, outcome, lease, spec) that a follow-up is due to; None for a job that was enqueued."""
    if key[0] == ECHO:
        of, outcome, lease, spec, _ = key[1:]
        return of, outcome, lease, spec
    if key[0] == PLAIN and ":" in key[1]:
        job, outcome, lease, spec, _ = key[1].split(":")
        return int(job), outcome, int(lease), spec
    return None


def follow_up(kind: str, cause: Cause, part: int) -> JobArgs:
    """What follows on a job of `kind`."""
    of, outcome, lease, spec = cause
    if kind == TASK:
        return Echo(of=of, outcome=outcome, lease=lease, spec=spec, part=part)
    return Plain(n=":".join(map(str, (*cause, part))))


@dataclass(frozen=True)
class Followed:
    """One spec: how many jobs it brings, and whether the model's own sessions have it or only others do."""

    name: str
    parts: int = 1
    local: bool = True


_ONE, _PAIR, _ELSEWHERE = Followed("one"), Followed("pair", parts=2), Followed("elsewhere", local=False)

SPECS: dict[tuple[str, Outcome], tuple[Followed, ...]] = {
    (TASK, Outcome.COMPLETED): (_PAIR, _ONE, _ELSEWHERE),
    (TASK, Outcome.RETRIED): (_ONE,),
    (TASK, Outcome.EXHAUSTED): (_ONE,),
    (TASK, Outcome.CANCELLED): (_ONE, _ELSEWHERE),
    (TASK, Outcome.RESCUED): (_ONE, _ELSEWHERE),
    (ECHO, Outcome.COMPLETED): (Followed("after"),),
}

_REGISTERS = {
    Outcome.COMPLETED: FollowUps.on_completed,
    Outcome.RETRIED: FollowUps.on_retried,
    Outcome.EXHAUSTED: FollowUps.on_exhausted,
    Outcome.CANCELLED: FollowUps.on_cancelled,
    Outcome.RESCUED: FollowUps.on_rescued,
}


def poisoned(kind: str, poison: bool, spec: str) -> bool:
    """Whether a spec raises where it is called."""
    return kind == TASK and poison and spec == _ONE.name


def register(registry: FollowUps, raises: Callable[[Cause], bool], *, everything: bool = False) -> None:
    """Fill a registry with the local specs, or with `everything` that a dispatcher knows.

    `raises` is asked before the spec of a poisoned job raises.
    """

    def spec(kind: str, followed: Followed) -> Callable[[Any], Any]:
        def called(event: Any) -> Any:
            cause = (event.job.id, event.outcome.value, event.job.run_lease, followed.name)
            if poisoned(kind, getattr(event.args, "poison", False), followed.name) and raises(cause):
                raise ValueError("poisoned")
            first, *rest = (follow_up(kind, cause, part) for part in range(followed.parts))
            return [first, *(EnqueueRequest(args, delay=HOUR) for args in rest)] if rest else first

        return called

    for (kind, outcome), specs in SPECS.items():
        for followed in specs:
            if followed.local or everything:
                _REGISTERS[outcome](registry, KINDS[kind], name=followed.name)(spec(kind, followed))


Told = tuple[str, str, int, int]


def hooks(told: Callable[[Told], object]) -> Hooks:
    """Hooks that note (event, kind, job, lease) of everything they are told of."""
    made = Hooks()
    for kind in HOOKED:
        for event in (Started, Completed, Retried, Exhausted, Cancelled, Rescued):
            made.on(event, KINDS[kind])(
                lambda e, kind=kind: told((type(e).__name__.lower(), kind, e.job.id, e.job.run_lease))
            )
    return made
