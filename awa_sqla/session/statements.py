"""Every guarded statement, built once from the table of transitions.

States in WHERE are literals, so that the partial indexes match whatever the plan cache does; ids, leases and
times are binds. In WHERE the clock is `statement_timestamp()`, which an index can use; in SET it is
`clock_timestamp()`. Nothing uses the start of the caller's transaction, which may be minutes ago.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Double,
    Executable,
    Integer,
    Interval,
    Text,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    type_coerce,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.types import NULLTYPE

from awa_sqla.models.base import JobState, run_lease_seq
from awa_sqla.models.job import SHARED, Job, JobRecord, ScheduledJob
from awa_sqla.models.records import Queue
from awa_sqla.models.wakeups import SWITCH
from awa_sqla.session.guards import MANAGED
from awa_sqla.session.history import appended
from awa_sqla.session.table import TRANSITIONS, Transition

#: "fetch" and populate_existing are what keeps the identity map right; "auto" and "evaluate" lie to it.
OPTIONS: dict[str, Any] = {"synchronize_session": "fetch", "populate_existing": True, MANAGED: True}

NOW = func.clock_timestamp()
AS_OF = func.statement_timestamp()


def among(state: Any, states: tuple[JobState, ...]) -> ColumnElement[bool]:
    """`state` is one of `states`, as literals."""
    if len(states) == 1:
        one: ColumnElement[bool] = state == bindparam(None, states[0], literal_execute=True)
        return one
    several: ColumnElement[bool] = state.in_(bindparam(None, states, expanding=True, literal_execute=True))
    return several


SECOND = literal_column("interval '1 second'", Interval)


def by_key(key: Any, chosen: CTE) -> ColumnElement[bool]:
    """`key` is one of those in a CTE of one column, looked up one by one whatever the planner thinks.

    A join would do, but a generic plan takes LIMIT for a tenth of the table, and then hashes all of it.
    """
    found: ColumnElement[bool] = key == func.any(func.array(select(*chosen.c).scalar_subquery()))
    return found


def seconds(name: str) -> Any:
    """An interval from a bind of seconds."""
    return cast(bindparam(name), Double) * SECOND


def held(transition: Transition) -> ColumnElement[bool]:
    """The fence of an attempt: this id, in a state the transition starts from, under this lease.

    A job whose handler waits for a callback is as much its attempt's as a running one.
    """
    return and_(
        Job.id == bindparam("held_id", type_=BigInteger),
        or_(among(Job.state, transition.sources), Job.attended_at.is_not(None)),
        Job.run_lease == bindparam("held_lease", type_=BigInteger),
    )


def stays(old: JobState, new: JobState) -> ColumnElement[bool]:
    """Of a job that is in `old`: it is not unique in `new`, or already was; else it has to claim its key first."""
    both: ColumnElement[Any] = literal_column(str(old.bit | new.bit))
    return func.coalesce(Job.unique_states.op("&")(both), 0) != literal_column(str(new.bit))


def stays_held(new: JobState) -> ColumnElement[bool]:
    """The same of an attempt's job, which runs, or waits while its handler attends the callback."""
    return and_(stays(JobState.RUNNING, new), or_(Job.attended_at.is_(None), stays(JobState.WAITING_EXTERNAL, new)))


#: A job that is some attempt's own: it runs, or its handler attends the callback that it waits for.
owned = or_(among(Job.state, (JobState.RUNNING,)), Job.attended_at.is_not(None))


def effects(transition: Transition) -> dict[str, Any]:
    """The SET of a transition that stays in its table."""
    values: dict[str, Any] = {"state": literal_column(f"'{transition.target.value}'")}
    values.update(dict.fromkeys(transition.clears, null()))
    if transition.finalizes:
        values["finalized_at"] = NOW
    return values


def shared(cls: type[Job | ScheduledJob]) -> list[InstrumentedAttribute[Any]]:
    """The columns that a moved row takes along."""
    return [getattr(cls, key) for key in SHARED]


# ------------------------------------------------------------------ claim

_queue = bindparam("in_queue", type_=Text)

# These two ask about the one queue of the claim, not about each row: PostgreSQL evaluates them once.
_paused = (
    select(Queue.queue)
    .where(
        Queue.queue == _queue,
        Queue.paused_at.is_not(None),
        or_(Queue.paused_until.is_(None), Queue.paused_until > AS_OF),
    )
    .exists()
)

_queue_deadline = (
    select(func.coalesce(Queue.override_deadline_seconds, Queue.declared_deadline_seconds))
    .where(Queue.queue == _queue)
    .scalar_subquery()
)

#: What waiting has raised goes back when the job leaves the queue. Plain SQL may have set both too high.
given_priority: dict[str, Any] = {"priority": func.least(Job.priority + Job.aged, 4), "aged": 0}

# A CTE, because LIMIT in a sub-select may be evaluated again for each row, and then claims far too many;
# and the state once more in the UPDATE, because the row may have changed before the lock was had.
_ready = (
    select(Job.id)
    .where(
        among(Job.state, TRANSITIONS["claim"].sources),
        Job.queue == _queue,
        Job.run_at <= AS_OF,
        ~_paused,
    )
    .order_by(Job.priority, Job.run_at, Job.id)
    .limit(bindparam("limit", type_=Integer))
    .with_for_update(skip_locked=True, key_share=True)
    .cte("ready")
    .prefix_with("MATERIALIZED")
)

# The concatenation hides the state from the partial index of available jobs. With statistics from before a burst,
# the planner would else join through that index: 1.8 s instead of 12 ms for 500 jobs of 20,000.
_still_available = Job.state.op("||")(literal_column("''")) == literal_column(f"'{JobState.AVAILABLE.value}'")

_claim = (
    update(Job)
    .where(by_key(Job.id, _ready), _still_available)
    .values(
        **effects(TRANSITIONS["claim"]),
        attempt=Job.attempt + 1,
        run_lease=run_lease_seq.next_value(),
        attempted_at=NOW,
        heartbeat_at=NOW,
        finalized_at=null(),
        deadline_at=NOW + func.coalesce(Job.deadline_seconds, _queue_deadline) * SECOND,
        worker_id=bindparam("by_worker", type_=Text),
        **given_priority,
    )
)

CLAIM = _claim.returning(Job).execution_options(**OPTIONS)


def _cheap(key: str) -> ColumnElement[Any]:
    """A shared column as the worker reads it: JSON stays text, arrays are left as the driver gives them."""
    attribute: Any = getattr(Job, key)
    stored: Any = attribute.type
    if isinstance(stored, JSONB):
        return cast(attribute, Text).label(key)
    if hasattr(stored, "item_type"):
        of_json = isinstance(stored.item_type, JSONB)
        return (cast(func.to_jsonb(attribute), Text) if of_json else type_coerce(attribute, NULLTYPE)).label(key)
    plain: ColumnElement[Any] = attribute
    return plain


#: For a connection instead of a session: plain rows of the shared columns, JSON as text.
CLAIM_ROWS: Executable = _claim.returning(*map(_cheap, SHARED))  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]

#: The same of what a worker holds already.
RUNNING_ROWS: Executable = select(*map(_cheap, SHARED)).where(  # pyright: ignore[reportUnknownVariableType]
    among(Job.state, (JobState.RUNNING,)),
    Job.worker_id == bindparam("by_worker", type_=Text),
    Job.queue == bindparam("in_queue", type_=Text),
)

# ------------------------------------------------- transitions of an attempt

#: For a job that has claimed its unique key anew.
COMPLETE_CLAIMED = (
    update(Job)
    .where(held(TRANSITIONS["complete"]))
    .values(**effects(TRANSITIONS["complete"]), result=bindparam("given_result", type_=JSONB(none_as_null=True)))
    .returning(Job)
    .execution_options(**OPTIONS)
)

#: But jobs that are unique when completed, and not while they wait, have to claim it first.
COMPLETE = COMPLETE_CLAIMED.where(stays_held(JobState.COMPLETED))

keeps_dead_letters = func.coalesce(Queue.override_dead_letters, Queue.declared_dead_letters, False)

#: The row under its lock, and whether its queue keeps dead letters.
LOCK = (
    select(Job, keeps_dead_letters)
    .outerjoin(Queue, Queue.queue == Job.queue)
    .where(held(TRANSITIONS["retry"]))
    .with_for_update(of=Job, key_share=True)
    .execution_options(populate_existing=True)
)

#: The same row, now that it is locked: it ran, or waited for its callback.
locked = and_(
    Job.id == bindparam("held_id", type_=BigInteger),
    among(Job.state, TRANSITIONS["fail_external"].sources),
    Job.run_lease == bindparam("held_lease", type_=BigInteger),
)

EXHAUST = (
    update(Job)
    .where(locked)
    .values(**effects(TRANSITIONS["exhaust"]), errors=appended(Job))
    .returning(Job)
    .execution_options(**OPTIONS)
)

_DELETE = {"synchronize_session": "fetch", MANAGED: True}

#: For moves that leave an error entry: the row, its errors with the entry, the due time, the clock.
TAKE_WITH_ERROR = (
    delete(Job)
    .where(locked)
    .returning(*shared(Job), appended(Job), NOW + seconds("delay"), NOW)
    .execution_options(**_DELETE)
)

#: The same without an entry, and for a job that has claimed its unique key anew.
TAKE_CLAIMED = (
    delete(Job)
    .where(held(TRANSITIONS["snooze"]))
    .returning(*shared(Job), Job.errors, NOW + seconds("delay"), NOW)
    .execution_options(**_DELETE)
)

#: The same, but for jobs that are unique while scheduled and not as they are: those have to claim first.
TAKE = TAKE_CLAIMED.where(stays_held(JobState.SCHEDULED))

_old_metadata = func.coalesce(
    Job.progress.op("->", return_type=JSONB())(literal_column("'metadata'")),
    literal_column("'{}'::jsonb", JSONB),
)


def _kept(key: str, given: str, as_type: Any) -> ColumnElement[Any]:
    old = Job.progress.op("->", return_type=JSONB())(literal_column(f"'{key}'"))
    return func.coalesce(func.to_jsonb(cast(bindparam(given), as_type)), old)


SET_PROGRESS = (
    update(Job)
    .where(held(TRANSITIONS["complete"]))
    .values(
        progress=func.jsonb_build_object(
            literal_column("'percent'"),
            _kept("percent", "percent", Double),
            literal_column("'message'"),
            _kept("message", "message", Text),
            literal_column("'metadata'"),
            _old_metadata.op("||")(bindparam("given_metadata", type_=JSONB)),
        )
    )
    .returning(Job)
    .execution_options(**OPTIONS)
)

# ----------------------------------------------------------------- by id

_silent = func.coalesce(func.current_setting(SWITCH, true()), "") == "off"


def wake(channel: Any, payload: Any) -> ColumnElement[Any]:
    """NOTIFY as part of a RETURNING, unless the transaction has switched wake-ups off."""
    return case((_silent, None), else_=cast(func.pg_notify(channel, payload), Text))


CANCEL = (
    update(Job)
    .where(Job.id == bindparam("job_id", type_=BigInteger), among(Job.state, TRANSITIONS["cancel"].sources))
    .values(**effects(TRANSITIONS["cancel"]), errors=appended(Job), **given_priority)
    .returning(
        Job,
        wake(
            bindparam("channel", type_=Text),
            func.concat("c:", Job.id, ":", Job.run_lease),
        ),
    )
    .execution_options(**OPTIONS)
)

CANCEL_HELD = (
    update(Job)
    .where(held(TRANSITIONS["cancel_held"]))
    .values(**effects(TRANSITIONS["cancel_held"]), errors=appended(Job))
    .returning(Job)
    .execution_options(**OPTIONS)
)

CANCEL_DEFERRED = (
    delete(ScheduledJob)
    .where(ScheduledJob.id == bindparam("job_id", type_=BigInteger))
    .returning(*shared(ScheduledJob), appended(ScheduledJob), NOW, NOW)
    .execution_options(**_DELETE)
)

FIND = select(JobRecord.state, JobRecord.run_lease, JobRecord.stored_in).where(
    JobRecord.id == bindparam("job_id", type_=BigInteger)
)
