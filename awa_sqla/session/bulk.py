"""`enqueue_many()`: any number of jobs in the caller's transaction, by COPY on the session's own connection.

All jobs are added, or none. Few are checked before anything is sent; many are checked on their way, inside a savepoint,
so that this process and the server work at the same time, and a generator's jobs are not all in memory. Ids are drawn
first, so that they can be returned in the order of the input; unique keys are claimed by one statement, in the order of
the keys; the rows go out as one COPY for each table and chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, islice
from typing import Any, NamedTuple

from sqlalchemy import DateTime, Executable, Integer, bindparam, case, func, literal_column, null, select
from sqlalchemy.orm import Session

from awa_sqla import limits
from awa_sqla.args import JobArgs, concrete
from awa_sqla.errors import InvalidJob, UniqueConflict
from awa_sqla.models.base import JobState, jobs_id_seq
from awa_sqla.models.job import Job, ScheduledJob
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session import ledger, lineage
from awa_sqla.session.copying import copy_rows, field, savepoint
from awa_sqla.session.lineage import Parent
from awa_sqla.session.steps import entered
from awa_sqla.session.target import SyncSession, jobs_connection
from awa_sqla.session.unique import claim_keys, give_back
from awa_sqla.stored import dump_text
from awa_sqla.unique import OnConflict, Unique
from awa_sqla.unique import on_conflict as checked_policy

#: From here on, checking and sending at the same time is worth a savepoint; and how many jobs are sent at once.
MANY, CHUNK = 1_000, 20_000

SomeJob = JobArgs | EnqueueRequest


def enqueue_many(
    session: SyncSession, jobs: Iterable[SomeJob], /, *, on_conflict: OnConflict = "raise"
) -> list[int | None]:
    """Add many jobs at once: like `enqueue()` for each, at the speed of COPY.

    `jobs` are `JobArgs`, or `EnqueueRequest`s with options of their own; defaults, checks, unique keys, lineage and
    wake-ups are those of `enqueue()`. `on_conflict` holds for the requests that do not say: "raise" adds no job at all
    when one of them is a duplicate, of a stored job or of an earlier one in the list; "skip" leaves duplicates out.

    Returns the ids in the order of `jobs`, None for duplicates. Flushes the session first; sends one statement, one
    more where jobs are unique, and a COPY for each table, in the caller's transaction; for each 20,000 jobs the same
    again, and from 1,000 on a savepoint around all of it. There are no Job objects: use `session.get(Job, id)`. Needs
    psycopg, asyncpg or psycopg2.

    Raises `InvalidJob` with the position, "jobs[3].args.to" for instance, and `UniqueConflict`: no job of the list was
    added, and the transaction stays usable. `existing_id` is None when the twin is in the list itself. What iterates
    may read through the session, not write. Raises `UnsupportedSession`, `ConfigurationError`. (DESIGN 7)
    """
    target = entered(session, "enqueue_many")
    preparation = _Preparation(checked_policy(on_conflict), lineage.running())
    rest = _several(jobs)
    ids: list[int | None] = []
    if not isinstance(jobs, list | tuple):
        target.flush()  # what the iterable reads is there, and what it writes is its own
    with ledger.sending(target):
        chunk = list(islice(rest, CHUNK))
    if not chunk:
        return ids
    target.flush()
    with ledger.sending(target), savepoint(jobs_connection(target)) if len(chunk) >= MANY else nullcontext():
        while chunk:
            if len(chunk) < MANY or any(map(_is_unique, chunk)):
                # All keys by one statement: two that want the same ones cannot wait for each other.
                return ids + _send_checked(target, list(preparation.all(chain(chunk, rest))))
            ids += _send_unchecked(target, chunk, preparation)
            chunk = list(islice(rest, CHUNK))
    return ids


def _several(jobs: object) -> Iterator[SomeJob]:
    if not isinstance(jobs, Iterable) or isinstance(jobs, str | bytes | JobArgs):
        raise InvalidJob("jobs", f"must be several JobArgs or EnqueueRequests, not {limits.type_name(jobs)}")
    return iter(jobs)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _is_unique(job: object) -> bool:
    if isinstance(job, EnqueueRequest):
        return job.uniqueness is not None
    return isinstance(job, JobArgs) and type(job).__awa__.unique is not None


def _send_unchecked(session: Session, jobs: Sequence[SomeJob], preparation: _Preparation) -> Sequence[int]:
    """Check and send at the same time: the server stores some rows while the next are made."""
    ids, clock = _draw(session, len(jobs))
    later: list[str] = []

    def lines() -> Iterator[str]:
        for job_id, (plan, text) in zip(ids, preparation.texts(jobs), strict=True):
            if plan.due is None:
                yield plan.line(job_id, text)
            else:
                later.append(plan.line(job_id, text, clock=clock))

    connection = jobs_connection(session)
    copy_rows(connection, Job.__tablename__, _COLUMNS, lines())
    if later:
        copy_rows(connection, ScheduledJob.__tablename__, _LATER, later)
    return ids


def _send_checked(session: Session, jobs: Sequence[_Checked]) -> list[int | None]:
    """Claim the unique keys, and send what is no duplicate."""
    ids, clock = _draw(session, len(jobs))
    left_out = _claim(session, jobs, ids)
    kept = [(job_id, one) for n, (job_id, one) in enumerate(zip(ids, jobs, strict=True)) if n not in left_out]
    connection = jobs_connection(session)
    for table, columns, later in ((Job.__tablename__, _COLUMNS, False), (ScheduledJob.__tablename__, _LATER, True)):
        lines = [
            one.plan.line(job_id, one.text, one.key, clock)
            for job_id, one in kept
            if (one.plan.due is None) is not later
        ]
        if lines:
            copy_rows(connection, table, columns, lines)
    return [None if n in left_out else job_id for n, job_id in enumerate(ids)]


# ------------------------------------------------------------------------------------------------------- the rows
_SETTINGS = (
    "kind",
    "queue",
    "priority",
    "max_attempts",
    "deadline_seconds",
    "tags",
    "metadata",
    "args_version",
    "parent_id",
    "root_id",
    "parent_outcome",
    "unique_states",
)
_COLUMNS = ("id", *_SETTINGS, "unique_key", "args")
_LATER = (*_COLUMNS, "run_at")
_DEFAULTS: dict[str, Any] = {"tags": [], "metadata": {}, "args_version": 1}


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the rows of one class, or of one request, have in common."""

    kind: str
    queue: str
    settings: str
    due: datetime | timedelta | None
    unique: Unique | None
    policy: OnConflict

    @property
    def claims(self) -> bool:
        """Whether the first state is a unique one."""
        start = JobState.AVAILABLE if self.due is None else JobState.SCHEDULED
        return self.unique is not None and bool(self.unique.mask & start.bit)

    def key(self, text: str) -> bytes | None:
        """The unique key of a job with these arguments."""
        if self.unique is None:
            return None
        return self.unique.key(self.kind, self.queue, json.loads(text) if self.unique.by_args else {})

    def line(self, job_id: int, text: str, key: bytes | None = None, clock: datetime | None = None) -> str:
        """The row as COPY takes it."""
        stored = r"\N" if key is None else rf"\\x{key.hex()}"
        start = f"{job_id}\t{self.settings}\t{stored}\t" + text.replace("\\", "\\\\")
        if self.due is None or clock is None:
            return start + "\n"
        moment = clock + self.due if isinstance(self.due, timedelta) else self.due
        return f"{start}\t{moment.isoformat()}\n"


class _Checked(NamedTuple):
    """A job that can be stored."""

    plan: _Plan
    text: str
    key: bytes | None


class _Preparation:
    """Turns what the caller gave into rows, and knows the position of what is wrong."""

    def __init__(self, policy: OnConflict, parent: Parent | None) -> None:
        self._policy: OnConflict = policy
        self._parent: dict[str, Any] = {} if parent is None else parent.columns()
        self._plans: dict[type[JobArgs], _Plan] = {}
        self._position = -1

    def all(self, jobs: Iterable[SomeJob]) -> Iterator[_Checked]:
        """The next jobs, or `InvalidJob` with the position of the first that is wrong."""
        return (_Checked(plan, text, plan.key(text)) for plan, text in self.texts(jobs))

    def texts(self, jobs: Iterable[SomeJob]) -> Iterator[tuple[_Plan, str]]:
        """The same without unique keys."""
        plans = self._plans
        try:
            for job in jobs:
                self._position += 1
                if (plan := plans.get(type(job))) is not None:  # type: ignore[arg-type]
                    yield plan, dump_text(job)  # type: ignore[arg-type]
                else:
                    yield self._first(job)
        except InvalidJob as exc:
            raise InvalidJob(f"jobs[{self._position}].{exc.field}", exc.reason) from exc

    def _first(self, job: object) -> tuple[_Plan, str]:
        """A request with options of its own, or the first job of a class."""
        if isinstance(job, JobArgs):
            concrete(type(job))
            plan = self._plans[type(job)] = self._plan(EnqueueRequest(job))
            return plan, dump_text(job)
        if not isinstance(job, EnqueueRequest):
            raise InvalidJob("args", f"must be a JobArgs or an EnqueueRequest, not {limits.type_name(job)}")
        return self._plan(job), dump_text(job.args)

    def _plan(self, request: EnqueueRequest) -> _Plan:
        values = _DEFAULTS | self._parent | request.settings()
        values["metadata"] = values.pop("meta", {})
        unique = request.uniqueness
        values["unique_states"] = None if unique is None else unique.mask
        return _Plan(
            values["kind"],
            values["queue"],
            "\t".join(field(values.get(name)) for name in _SETTINGS),
            request.run_at if request.run_at is not None else request.delay,
            unique,
            self._policy if request.on_conflict is None else request.on_conflict,
        )


# ----------------------------------------------------------------------------------------------- what is asked for
_count = bindparam("count", type_=Integer)
_drawn = (
    select(jobs_id_seq.next_value().label("id"))
    .select_from(func.generate_series(1, _count).alias("number"))
    .cte("drawn")
    .prefix_with("MATERIALIZED")
)
_first, _last = func.min(_drawn.c.id), func.max(_drawn.c.id)

#: Ids that nobody else has drawn in between are told by the first one: a million fit into one number.
_DRAW: Executable = select(
    _first,
    case((_last - _first + 1 == _count, null()), else_=func.array_agg(_drawn.c.id)),
    literal_column("clock_timestamp()", DateTime(timezone=True)),
)


def _draw(session: Session, count: int) -> tuple[Sequence[int], datetime]:
    first, several, clock = jobs_connection(session).execute(_DRAW, {"count": count}).one()
    return several or range(first, first + count), clock


def _claim(session: Session, jobs: Sequence[_Checked], ids: Sequence[int]) -> frozenset[int]:
    """Claim the unique keys, and return the positions of duplicates, which are to be left out."""
    claiming = [(position, one.key) for position, one in enumerate(jobs) if one.plan.claims and one.key is not None]
    first: dict[bytes, int] = {}
    for position, key in claiming:
        first.setdefault(key, position)
    if not first:
        return frozenset()
    holders = claim_keys(session, {key: ids[position] for key, position in first.items()})
    duplicates = {n: key for n, key in claiming if not (first[key] == n and holders[key].fresh)}
    refused = {n: key for n, key in duplicates.items() if jobs[n].plan.policy == "raise"}
    if refused:
        give_back(session, holders)
        # Of a stored job first; one that is in the list itself has no id, since none of the list is added.
        position, key = min(refused.items(), key=lambda each: holders[each[1]].fresh)
        holder = None if holders[key].fresh else holders[key].job_id
        where = f"jobs[{position}]" + (f" repeats jobs[{first[key]}]" if holder is None else "")
        raise UniqueConflict(holder, key, jobs[position].plan.kind, where)
    return frozenset(duplicates)
