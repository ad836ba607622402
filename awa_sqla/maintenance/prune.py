"""Retention: finished jobs, dead letters and records go when their time is over.

Each function deletes one bounded batch and says how many rows that were; a caller goes on while batches are full. How
long a queue keeps what has ended is read from `queue_meta` in the same statement: override > declared > default, zero
until the next pass, infinity for ever. What somebody holds is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import CTE, ColumnElement, Executable, Select, case, delete, select, tuple_
from sqlalchemy.orm import Session

from awa_sqla import defaults
from awa_sqla.maintenance.groups import MOST, Attribute, ago, fairly, groups, in_force, plain
from awa_sqla.models.base import AwaBase, JobState
from awa_sqla.models.job import DeadLetter, Job
from awa_sqla.models.records import CallbackReceipt, FollowUpSpec, Queue, RuntimeInstance
from awa_sqla.models.upkeep import AuditEntry, Leader
from awa_sqla.session.guards import MANAGED
from awa_sqla.session.statements import AS_OF, SECOND, among, by_key
from awa_sqla.session.table import TERMINAL

#: How long records are kept: what operators did, processes that have ended without a word, answers to callbacks,
#: specs that no process has any more, leases that nobody renews.
AUDIT_LOG = timedelta(days=90)
PROCESSES = timedelta(days=1)
RECEIPTS = timedelta(hours=24)
SPECS = timedelta(days=30)
LEASES = timedelta(days=1)

_OPTIONS: dict[str, Any] = {"synchronize_session": False, MANAGED: True}
_FINISHED = tuple(state for state in JobState if state in TERMINAL)


class Pruned(NamedTuple):
    """How many records of each table one pass has deleted."""

    audit_log: int
    runtime_instances: int
    callback_receipts: int
    follow_up_specs: int
    leaders: int


def _keeping(
    model: type[Job | DeadLetter],
    keys: Sequence[Attribute],
    at: Attribute,
    keep: Callable[[CTE], ColumnElement[float]],
    *states: ColumnElement[bool],
) -> Executable:
    """DELETE of rows whose `at` is longer ago than their group is kept, oldest first."""
    found = groups("found", keys, at, *states)
    kept = select(*found.c, keep(found).label("seconds")).outerjoin(Queue, Queue.queue == found.c.queue).cte("kept")
    until = ago(kept.c.seconds)
    due = (
        select(*(kept.c[column.name] for column in found.c), until.label("until"))
        .where(kept.c[at.key] <= until)
        .order_by(kept.c[at.key])
        .cte("due")
        .prefix_with("MATERIALIZED")
    )

    def rows(of: CTE, most: ColumnElement[int], others: Sequence[ColumnElement[bool]]) -> Select[Any]:
        # From the first row that there is: entries of rows that are gone come before it, in any number.
        span = at.between(of.c[at.key], of.c.until)
        return (
            select(model.id)
            .where(*states, *(key == of.c[key.key] for key in keys), span, *others)
            .order_by(at)
            .limit(most)
            .with_for_update(skip_locked=True)
            .correlate(of)
        )

    chosen = fairly(due, model.id, rows)
    return delete(model).where(by_key(model.id, chosen), *states).returning(model.queue).execution_options(**_OPTIONS)


_completed, _failed, _dead = (
    in_force("keep_completed", defaults.KEEP_COMPLETED),
    in_force("keep_failed", defaults.KEEP_FAILED),
    in_force("keep_dead", defaults.KEEP_DEAD),
)
_JOBS = _keeping(
    Job,
    (Job.state, Job.queue),
    Job.finalized_at,
    lambda found: case((among(found.c.state, (JobState.COMPLETED,)), _completed), else_=_failed),
    among(Job.state, _FINISHED),
)
_DEAD_LETTERS = _keeping(DeadLetter, (DeadLetter.queue,), DeadLetter.dlq_at, lambda _: _dead)


def prune_jobs(session: Session, *, limit: int = 1000) -> int:
    """Delete up to `limit` finished jobs that were kept long enough, oldest first, each queue its share; how many.

    Completed ones after 24 h, failed and cancelled ones after 72 h, unless their queue says otherwise. A unique key
    that such a job holds becomes free; its follow-ups stay. A row without `finalized_at` stays. One statement. It steps
    over what was deleted and not yet vacuumed: while an old snapshot is open, large batches cost less.
    """
    return len(session.scalars(_JOBS, {"most": limit}).all())


def prune_dead_letters(session: Session, *, limit: int = 1000) -> int:
    """Delete up to `limit` dead letters that were kept long enough (30 days, unless their queue says otherwise)."""
    return len(session.scalars(_DEAD_LETTERS, {"most": limit}).all())


def _old(at: Attribute, kept: timedelta, *keys: Attribute) -> Select[Any]:
    """The keys of records older than `kept`, oldest first, locked."""
    found: Any = select(*keys).where(at < AS_OF - plain(kept) * SECOND)
    locked: Select[Any] = found.order_by(at).with_for_update(skip_locked=True)
    return locked


def _gone(model: type[AwaBase], at: Attribute, kept: timedelta, *keys: Attribute) -> Executable:
    old = _old(at, kept, *keys).limit(MOST).cte("old").prefix_with("MATERIALIZED")
    chosen = by_key(keys[0], old) if len(keys) == 1 else tuple_(*keys).in_(select(old))
    return delete(model).where(chosen).returning(keys[0]).execution_options(**_OPTIONS)


#: Receipts that answer no more. Ingress removes a few with each new one, also where no maintenance runs.
OLD_RECEIPTS = _old(CallbackReceipt.created_at, RECEIPTS, CallbackReceipt.request)

# Those without an index are small: a row for each process of the last day, for each spec, for each name of a lease.
_RECORDS = {
    "audit_log": _gone(AuditEntry, AuditEntry.at, AUDIT_LOG, AuditEntry.id),
    "runtime_instances": _gone(RuntimeInstance, RuntimeInstance.last_seen, PROCESSES, RuntimeInstance.id),
    "callback_receipts": _gone(CallbackReceipt, CallbackReceipt.created_at, RECEIPTS, CallbackReceipt.request),
    "follow_up_specs": _gone(
        FollowUpSpec, FollowUpSpec.last_seen, SPECS, FollowUpSpec.kind, FollowUpSpec.outcome, FollowUpSpec.name
    ),
    "leaders": _gone(Leader, Leader.expires_at, LEASES, Leader.name),
}


def prune_records(session: Session, *, limit: int = 1000) -> Pruned:
    """Delete up to `limit` records of each table that are no longer needed. One statement for each table.

    Operators' deeds after 90 days, processes unheard of for a day, receipts of callbacks after 24 hours, specs that
    no process has had for 30 days, leases that ended a day ago. What a job is still owed stays, and so do schedules.
    """
    return Pruned(**{name: len(session.scalars(old, {"most": limit}).all()) for name, old in _RECORDS.items()})


def forget_dead(session: Session, *, limit: int = 1000) -> int:
    """Take up to `limit` processes out of the list that have not been heard of for a day; how many."""
    return len(session.scalars(_RECORDS["runtime_instances"], {"most": limit}).all())
