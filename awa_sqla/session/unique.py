"""Unique keys in the unit of work: claimed before any INSERT, so that a duplicate never costs the transaction.

Before a flush, one statement claims the keys of everything new, in the order of the keys. A key that another open
transaction has claimed is waited for; one that is taken makes its job a duplicate, which is left out of the flush. The
triggers of the job tables keep the claims true afterwards, whatever moves or deletes the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    LargeBinary,
    TextClause,
    bindparam,
    column,
    delete,
    func,
    inspect,
    select,
    text,
    tuple_,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import InstanceState, Session

from awa_sqla.errors import FollowUpError, UniqueConflict
from awa_sqla.models.base import JobState
from awa_sqla.models.job import JOB_TABLES, DeadLetter, Job, ScheduledJob
from awa_sqla.models.records import UniqueClaim
from awa_sqla.schema.objects import quoted
from awa_sqla.session import ledger
from awa_sqla.session.target import jobs_connection, schema_of

Row = Job | ScheduledJob | DeadLetter


class Holder(NamedTuple):
    """The job that has a key, and whether it was claimed for it just now."""

    job_id: int
    fresh: bool


_BINDS = (bindparam("keys", type_=ARRAY(LargeBinary)), bindparam("ids", type_=ARRAY(BigInteger)))


@cache
def _claim(schema: str) -> TextClause:
    """(key, job, taken just now) of each key."""
    function = f"{quoted(schema)}.claim_keys"
    return text(f"SELECT unique_key, job_id, fresh FROM {function}(:keys, :ids)").bindparams(*_BINDS)  # noqa: S608


_wanted = (
    func.unnest(*_BINDS)
    .table_valued(column("unique_key", LargeBinary), column("job_id", BigInteger), name="wanted")
    .render_derived()
)
_GIVE_BACK = delete(UniqueClaim).where(
    tuple_(UniqueClaim.unique_key, UniqueClaim.job_id).in_(select(_wanted.c.unique_key, _wanted.c.job_id))
)


def claim_keys(session: Session, wanted: Mapping[bytes, int | None]) -> dict[bytes, Holder]:
    """Claim keys for jobs with these ids, or with new ones (None), and say who holds each now.

    Waits for other transactions that have claimed one of them and are still open. One statement, and one more where a
    job that had claimed a key was taken out of the session before its INSERT.
    """
    _take_back(session, ledger.idle_claims(session))
    claim, parameters = _claim(schema_of(session)), {"keys": list(wanted), "ids": list(wanted.values())}
    rows = jobs_connection(session).execute(claim, parameters)
    return {bytes(key): Holder(job_id, fresh) for key, job_id, fresh in rows}


def give_back(session: Session, claims: Mapping[bytes, Holder]) -> None:
    """Let go of the claims that were taken just now."""
    _take_back(session, {key: holder.job_id for key, holder in claims.items() if holder.fresh})


def _take_back(session: Session, claims: Mapping[bytes, int]) -> None:
    if claims:
        jobs_connection(session).execute(_GIVE_BACK, {"keys": list(claims), "ids": list(claims.values())})


def reenter(session: Session, job: Job | ScheduledJob, state: JobState) -> None:
    """Claim the key of a stored job that is about to come back into its unique states.

    Raises `UniqueConflict`, and nothing has changed, when another job has taken it meanwhile.
    """
    if job.unique_key is None or not comes_in(job.unique_states, job.state, state):
        return
    holder = claim_keys(session, {job.unique_key: job.id})[job.unique_key]
    if holder.job_id != job.id:
        raise UniqueConflict(holder.job_id, job.unique_key, job.kind)


def comes_in(mask: int | None, old: JobState, new: JobState) -> bool:
    """Whether this change of state leads into the unique states from outside."""
    return mask is not None and not mask & old.bit and bool(mask & new.bit)


# ------------------------------------------------------------------------------------------------- before a flush
def settle_flush(session: Session) -> None:
    """In `before_flush`: claim the keys of what is new, and leave duplicates out.

    Raises `UniqueConflict` once, when a duplicate was not to be skipped: all of those are expunged, everything else
    stays pending. A follow-up that is not to be skipped is a `FollowUpError`, and stays.
    """
    rows = [row for row in session.new if isinstance(row, JOB_TABLES) and _claims(row)]
    if any(not row.moved for row in rows):
        settle(session, sorted(rows, key=_seniority))


def settle_alone(session: Session, row: Row) -> None:
    """The same for one row that is enqueued inside a flush, before it is added. Raises `UniqueConflict`."""
    if _claims(row):
        settle(session, [row])


def settle(session: Session, rows: Sequence[Row]) -> None:
    """Claim the keys of new rows, the first of each key first; give ids to those that have one now."""
    first: dict[bytes, Row] = {}
    moving = _moving(session)
    for row in rows:
        assert row.unique_key is not None  # noqa: S101
        first.setdefault(row.unique_key, moving.get(row.unique_key, row))
    holders = claim_keys(session, {key: _id(row) for key, row in first.items()})
    duplicates: list[tuple[Row, int]] = []
    for row in rows:
        assert row.unique_key is not None  # noqa: S101
        holder = holders[row.unique_key]
        if row is first[row.unique_key] and (holder.fresh or holder.job_id == _id(row)):
            if _id(row) is None:
                row.id = holder.job_id
            row.duplicate_of = None
        else:
            duplicates.append((row, holder.job_id))
    refused = [(row, holder) for row, holder in duplicates if row.on_conflict != "skip"]
    if refused:
        give_back(session, holders)
        _refuse(session, refused)
    for row, holder_id in duplicates:
        row.duplicate_of = holder_id
        _drop(session, row)
    for key, row in first.items():
        if holders[key].fresh and not row.moved:
            ledger.claimed(session, row, key, holders[key].job_id)


def _moving(session: Session) -> dict[bytes, Row]:
    """The rows that are between two tables, and out of the session: they keep the keys that they had."""
    staged = [row for found in ledger.unsettled(session) for entry in found.staged for row in entry.rows]
    rows = [row for row in ledger.missing(session, staged) if isinstance(row, JOB_TABLES) and _claims(row)]
    return {row.unique_key: row for row in rows if row.unique_key is not None and row.moved}


def _refuse(session: Session, refused: list[tuple[Row, int]]) -> None:
    row, holder = refused[0]
    for duplicate, _ in refused:
        # A follow-up stays, and its transition with it, and so does a row that has left another table already.
        if duplicate.origin is None and not duplicate.moved:
            _drop(session, duplicate)
    conflict = UniqueConflict(holder, row.unique_key or b"", row.kind)
    if row.origin is not None:
        raise FollowUpError(*row.origin, "returned a duplicate") from conflict
    raise conflict


def _drop(session: Session, duplicate: Row) -> None:
    ledger.leave_out(session, duplicate)
    if duplicate in session:
        session.expunge(duplicate)


def _id(row: Row) -> int | None:
    state: InstanceState[Any] = inspect(row)
    return state.dict.get("id")


def _claims(row: Row) -> bool:
    """Whether a new row is to hold its key."""
    if row.unique_key is None or not row.unique_states:
        return False
    default = JobState.SCHEDULED if isinstance(row, ScheduledJob) else JobState.AVAILABLE
    return bool(row.unique_states & (row.state or default).bit)


def _seniority(row: Row) -> tuple[bool, int]:
    """Rows that move hold their keys already; then the order in which they were added."""
    state: Any = inspect(row)
    return not row.moved, state.insert_order
