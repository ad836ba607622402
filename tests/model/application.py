"""The application of the model: what its jobs carry, what follows on them, who is told.

Every follow-up carries the identity of its cause (job, outcome, lease, spec, part), so that one that is lost, doubled
or made for a transition that never was committed shows in its own row. Unique jobs are equal in their arguments, which
come from a small pool: they carry who they are, a number or a cause, in their metadata.
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
    JobState,
    Outcome,
    Rescued,
    Retried,
    Started,
    Unique,
    WaitingForCallback,
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


class Live(JobArgs, kind="model_live", queue="a", backoff=SLOW, unique=Unique()):
    """Unique until it is finished."""

    k: int


class Pending(
    JobArgs,
    kind="model_pending",
    queue="b",
    max_attempts=3,
    backoff=SLOW,
    unique=Unique(states={JobState.SCHEDULED, JobState.AVAILABLE, JobState.RETRYABLE}),
):
    """While one runs, the next may wait."""

    k: int


class Ready(JobArgs, kind="model_ready", queue="a", backoff=SLOW, unique=Unique(states={JobState.AVAILABLE})):
    """Any number may wait for their time, and one for a worker: promotion decides."""

    k: int


class Ever(JobArgs, kind="model_ever", queue=DEAD, backoff=SLOW, unique=Unique(states=set(JobState))):
    """One for ever."""

    k: int


KINDS: dict[str, type[JobArgs]] = {cls.__awa__.kind: cls for cls in (Task, Echo, Plain, Live, Pending, Ready, Ever)}
TASK, ECHO, PLAIN, *UNIQUE = KINDS
LIVE, PENDING, READY, EVER = UNIQUE
HOOKED = (TASK, ECHO, *UNIQUE)
POOL = 2  # the arguments of each unique kind

Key = tuple[Any, ...]
Cause = tuple[int, str, int, str]
Claim = tuple[str, int]  # the kind and the arguments of a unique job: its unique key

_MASKS = {kind: unique.mask for kind in UNIQUE if (unique := KINDS[kind].__awa__.unique)}


def key_of(kind: str, args: dict[str, Any], metadata: dict[str, Any] | None = None) -> Key:
    """The identity of a job in the model: its kind and what it carries."""
    if kind in UNIQUE:
        return (kind, args["k"], *(metadata or {})["who"])
    return (kind, args["n"]) if kind != ECHO else (kind, *(args[name] for name in Echo.model_fields))


def claim_of(key: Key) -> Claim | None:
    """What a job of this identity is the only one of."""
    return (key[0], key[1]) if key[0] in UNIQUE else None


def holds_in(kind: str, state: str) -> bool:
    """Whether a job of this kind holds its unique key in this state."""
    return kind in UNIQUE and bool(_MASKS[kind] & JobState(state).bit)


def cause_of(key: Key) -> Cause | None:
    """The (job, outcome, lease, spec) that a follow-up is due to; None for a job that was enqueued."""
    if key[0] == ECHO:
        of, outcome, lease, spec, _ = key[1:]
        return of, outcome, lease, spec
    if key[0] == PLAIN and ":" in key[1]:
        job, outcome, lease, spec, _ = key[1].split(":")
        return int(job), outcome, int(lease), spec
    if key[0] in UNIQUE and len(key) > 3:
        job, outcome, lease, spec, _ = key[2:]
        return job, outcome, lease, spec
    return None


def brought_by(key: Key) -> Claim:
    """The unique job that follows on a job: on a unique one, the same again."""
    if key[0] in UNIQUE:
        return key[0], key[1]
    return UNIQUE[key[1] % len(UNIQUE)], key[1] // len(UNIQUE) % POOL


def follow_up(key: Key, followed: Followed, cause: Cause, part: int) -> EnqueueRequest:
    """What follows on the job with this identity: the first part at once, the others later."""
    later: dict[str, Any] = {"delay": HOUR} if part else {}
    if followed.unique:
        kind, k = brought_by(key)
        return EnqueueRequest(KINDS[kind](k=k), metadata={"who": [*cause, part]}, **later)
    of, outcome, lease, spec = cause
    if key[0] == TASK:
        return EnqueueRequest(Echo(of=of, outcome=outcome, lease=lease, spec=spec, part=part), **later)
    return EnqueueRequest(Plain(n=":".join(map(str, (*cause, part)))), **later)


@dataclass(frozen=True)
class Followed:
    """One spec: how many jobs it brings, unique ones or not, and whether the model's own sessions have it."""

    name: str
    parts: int = 1
    local: bool = True
    unique: bool = False


_ONE, _PAIR, _ELSEWHERE = Followed("one"), Followed("pair", parts=2), Followed("elsewhere", local=False)
_TWINS, _AGAIN = Followed("twins", parts=2, unique=True), Followed("again", unique=True)
_ABROAD = Followed("abroad", local=False, unique=True)

SPECS: dict[tuple[str, Outcome], tuple[Followed, ...]] = {
    (TASK, Outcome.COMPLETED): (_PAIR, _ONE, _TWINS, _ELSEWHERE),
    (TASK, Outcome.RETRIED): (_ONE, _AGAIN),
    (TASK, Outcome.EXHAUSTED): (_ONE,),
    (TASK, Outcome.CANCELLED): (_ONE, _ELSEWHERE),
    (TASK, Outcome.RESCUED): (_ONE, _ELSEWHERE),
    (TASK, Outcome.WAITING_FOR_CALLBACK): (_ONE, _ELSEWHERE),
    (ECHO, Outcome.COMPLETED): (Followed("after"),),
    **{(kind, Outcome.COMPLETED): (_AGAIN, _ONE) for kind in UNIQUE},
    **{(kind, Outcome.CANCELLED): (_ONE, _ABROAD) for kind in UNIQUE},
    **{(kind, Outcome.EXHAUSTED): (_AGAIN,) for kind in UNIQUE},
    **{(kind, Outcome.RESCUED): (_ONE,) for kind in UNIQUE},
}

_REGISTERS = {
    Outcome.COMPLETED: FollowUps.on_completed,
    Outcome.RETRIED: FollowUps.on_retried,
    Outcome.EXHAUSTED: FollowUps.on_exhausted,
    Outcome.CANCELLED: FollowUps.on_cancelled,
    Outcome.RESCUED: FollowUps.on_rescued,
    Outcome.WAITING_FOR_CALLBACK: FollowUps.on_waiting_for_callback,
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
            key = key_of(kind, event.args.model_dump(), event.job.meta)
            first, *rest = (follow_up(key, followed, cause, part) for part in range(followed.parts))
            return [first, *rest] if rest else first.args if first.metadata is None else first

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
        for event in (Started, Completed, Retried, Exhausted, Cancelled, Rescued, WaitingForCallback):
            name = event.outcome.value if event is not Started else "started"
            made.on(event, KINDS[kind])(lambda e, kind=kind, name=name: told((name, kind, e.job.id, e.job.run_lease)))
    return made
