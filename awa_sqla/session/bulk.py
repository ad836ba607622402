"""`enqueue_many()`: any number of jobs in the caller's transaction, by COPY on the session's own connection.

All jobs are added, or none: few are checked before anything is sent, many are checked on their way, inside a
savepoint, so that this process and the server work at the same time. Ids are drawn first, so that they can be returned
in the order of the input; unique keys are claimed by one statement, in the order of the keys; the rows go out as one
COPY for each table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, cast

from sqlalchemy import DateTime, Executable, Integer, bindparam, case, func, literal_column, null, select
from sqlalchemy.orm import Session

from awa_sqla import limits
from awa_sqla.args import JobArgs, concrete
from awa_sqla.errors import InvalidJob, UniqueConflict
from awa_sqla.models.base import JobState, jobs_id_seq
from awa_sqla.models.job import Job, ScheduledJob
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session import lineage
from awa_sqla.session.copying import copy_rows, field, savepoint
from awa_sqla.session.lineage import Parent
from awa_sqla.session.steps import entered
from awa_sqla.session.target import SyncSession, jobs_connection
from awa_sqla.session.unique import Holder, claim_keys, give_back
from awa_sqla.stored import dump_text
from awa_sqla.unique import OnConflict, Unique
from awa_sqla.unique import on_conflict as checked_policy

#: From here on, checking and sending at the same time is worth a savepoint.
STREAMED = 1000


def enqueue_many(
    session: SyncSession, jobs: Iterable[JobArgs | EnqueueRequest], /, *, on_conflict: OnConflict = "raise"
) -> list[int | None]:
    """Add many jobs at once: like `enqueue()` for each, at the speed of COPY.

    `jobs` are `JobArgs`, or `EnqueueRequest`s with options of their own; defaults, checks, unique keys, lineage and
    wake-ups are those of `enqueue()`. `on_conflict` holds for the requests that do not say: "raise" adds no job at all
    when one of them is a duplicate, of a stored job or of an earlier one in the list; "skip" leaves duplicates out.

    Returns the ids in the order of `jobs`, None for duplicates. Flushes the session first; sends one statement, one
    more where jobs are unique, and a COPY for each table, in the caller's transaction; 1000 jobs and more also a
    savepoint of its own. There are no Job objects: use `session.get(Job, id)`. Needs psycopg, asyncpg or psycopg2.

    Raises `InvalidJob` with the position, "jobs[3].args.to" for instance (nothing was added), `UniqueConflict` (no job
    of the list was added, the transaction stays usable), `UnsupportedSession`, `ConfigurationError`. (DESIGN 7)
    """
    target = entered(session, "enqueue_many")
    preparation = _Preparation(checked_policy(on_conflict), lineage.running())
    given = _listed(jobs)
    if not given:
        return []
    if len(given) >= STREAMED and not any(map(_is_unique, given)):
        return _stream(target, given, preparation)
    prepared = list(preparation.all(given))
    target.flush()
    ids, clock = _draw(target, len(prepared))
    left_out = _claim(target, prepared, ids)
    kept = [(one, job_id) for n, (job_id, one) in enumerate(zip(ids, prepared, strict=True)) if n not in left_out]
    connection = jobs_connection(target)
    for table, columns, scheduled in ((Job.__tablename__, _COLUMNS, False), (ScheduledJob.__tablename__, _LATER, True)):
        if lines := [one.line(job_id, clock) for one, job_id in kept if one.is_scheduled is scheduled]:
            copy_rows(connection, table, columns, lines)
    return [None if n in left_out else job_id for n, job_id in enumerate(ids)]


def _listed(jobs: object) -> list[JobArgs | EnqueueRequest]:
    if not isinstance(jobs, Iterable) or isinstance(jobs, str | bytes | JobArgs):
        raise InvalidJob("jobs", f"must be several JobArgs or EnqueueRequests, not {limits.type_name(jobs)}")
    return list(jobs)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _stream(session: Session, given: Sequence[JobArgs | EnqueueRequest], preparation: _Preparation) -> list[int | None]:
    """Check and send at the same time: the server stores one chunk while the next is made. All of it, or nothing."""
    session.flush()
    ids, clock = _draw(session, len(given))
    later: list[str] = []

    def lines() -> Iterator[str]:
        for job_id, one in zip(ids, preparation.all(given), strict=True):
            if one.is_scheduled:
                later.append(one.line(job_id, clock))
            else:
                yield one.line(job_id, clock)

    connection = jobs_connection(session)
    with savepoint(connection):
        copy_rows(connection, Job.__tablename__, _COLUMNS, lines())
        if later:
            copy_rows(connection, ScheduledJob.__tablename__, _LATER, later)
    return list(ids)


def _is_unique(job: object) -> bool:
    if isinstance(job, EnqueueRequest):
        return job.uniqueness is not None
    return isinstance(job, JobArgs) and type(job).__awa__.unique is not None


# ------------------------------------------------------------------------------------------------------- the rows
class _Prepared(NamedTuple):
    """A job on its way: the text of most of its columns, and what the database has to be asked about."""

    settings: str
    args: str
    due: datetime | timedelta | None
    key: bytes | None
    claims: bool
    policy: OnConflict
    kind: str

    @property
    def is_scheduled(self) -> bool:
        return self.due is not None

    def line(self, job_id: int, clock: datetime) -> str:
        """The row as COPY takes it."""
        key = r"\N" if self.key is None else rf"\\x{self.key.hex()}"
        start = f"{job_id}\t{self.settings}\t{key}\t" + self.args.replace("\\", "\\\\")
        if self.due is None:
            return start + "\n"
        moment = clock + self.due if isinstance(self.due, timedelta) else self.due
        return f"{start}\t{moment.isoformat()}\n"


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


class _Preparation:
    """Turns what the caller gave into rows; jobs without options of their own share the text of their class."""

    def __init__(self, policy: OnConflict, parent: Parent | None) -> None:
        self._policy: OnConflict = policy
        self._parent: dict[str, Any] = {} if parent is None else parent.columns()
        self._of_class: dict[type[JobArgs], Callable[[str], _Prepared]] = {}

    def all(self, jobs: Iterable[JobArgs | EnqueueRequest]) -> Iterator[_Prepared]:
        """Every job, or `InvalidJob` with the position of the first that is wrong."""
        position = 0
        try:
            for position, job in enumerate(jobs):  # noqa: B007 - for the error
                yield self._one(job)
        except InvalidJob as exc:
            raise InvalidJob(f"jobs[{position}].{exc.field}", exc.reason) from exc

    def _one(self, job: object) -> _Prepared:
        if isinstance(job, JobArgs):
            make = self._of_class.get(type(job))
            if make is None:
                concrete(type(job))
                make = self._of_class[type(job)] = self._maker(EnqueueRequest(job))
            return make(dump_text(job))
        if not isinstance(job, EnqueueRequest):
            raise InvalidJob("args", f"must be a JobArgs or an EnqueueRequest, not {limits.type_name(job)}")
        return self._maker(job)(dump_text(job.args))

    def _maker(self, request: EnqueueRequest) -> Callable[[str], _Prepared]:
        """What makes the row of a request out of the text of its arguments."""
        values = _DEFAULTS | self._parent | request.settings()
        values["metadata"] = values.pop("meta", {})
        unique = request.uniqueness
        values["unique_states"] = None if unique is None else unique.mask
        start = JobState.SCHEDULED if request.scheduled else JobState.AVAILABLE
        claims = unique is not None and bool(unique.mask & start.bit)
        settings = "\t".join(field(values.get(name)) for name in _SETTINGS)
        due = request.run_at if request.run_at is not None else request.delay
        kind, queue = values["kind"], values["queue"]
        policy = self._policy if request.on_conflict is None else request.on_conflict
        return lambda text: _Prepared(settings, text, due, _key(unique, kind, queue, text), claims, policy, kind)


def _key(unique: Unique | None, kind: str, queue: str, text: str) -> bytes | None:
    return None if unique is None else unique.key(kind, queue, json.loads(text) if unique.by_args else {})


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


def _claim(session: Session, prepared: Sequence[_Prepared], ids: Sequence[int]) -> frozenset[int]:
    """Claim the unique keys, and return the positions of duplicates, which are to be left out."""
    first: dict[bytes, int] = {}
    for position, one in enumerate(prepared):
        if one.claims and one.key is not None:
            first.setdefault(one.key, position)
    if not first:
        return frozenset()
    holders = claim_keys(session, {key: ids[position] for key, position in first.items()})
    duplicates = [
        position
        for position, one in enumerate(prepared)
        if one.claims and one.key is not None and not (first[one.key] == position and holders[one.key].fresh)
    ]
    refused = [position for position in duplicates if prepared[position].policy == "raise"]
    if refused:
        give_back(session, holders)
        # Of a stored job first: the id of one in the list itself is given back too.
        refused.sort(key=lambda position: holders[cast("bytes", prepared[position].key)].fresh)
        one = prepared[refused[0]]
        holder: Holder = holders[cast("bytes", one.key)]
        raise UniqueConflict(holder.job_id, cast("bytes", one.key), one.kind)
    return frozenset(duplicates)
