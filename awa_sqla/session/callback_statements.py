"""The guarded statements of callbacks: by the attempt while it runs, by the callback's id afterwards."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Text,
    Uuid,
    and_,
    bindparam,
    func,
    literal_column,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from awa_sqla.models.base import JobState
from awa_sqla.models.job import Job
from awa_sqla.models.records import Queue
from awa_sqla.session.statements import LOCK as HELD_LOCK
from awa_sqla.session.statements import (
    NOW,
    OPTIONS,
    among,
    effects,
    held,
    keeps_dead_letters,
    owned,
    seconds,
    stays,
    wake,
)
from awa_sqla.session.table import CALLBACK_COLUMNS, TRANSITIONS, Transition

_callback = bindparam("callback", type_=Uuid)
_lease = bindparam("of_lease", type_=BigInteger)


def called(transition: Transition) -> ColumnElement[bool]:
    """The guard of a callback: its id, in a state the transition starts from, and its attempt when one is named."""
    return and_(
        Job.callback_id == _callback,
        among(Job.state, transition.sources),
        or_(_lease.is_(None), Job.run_lease == _lease),
    )


def _stays(new: JobState) -> ColumnElement[bool]:
    return stays(JobState.WAITING_EXTERNAL, new)


REGISTER = (
    update(Job)
    .where(held(TRANSITIONS["register"]))
    .values(
        callback_id=bindparam("new_callback", type_=Uuid),
        callback_timeout_at=NOW + seconds("timeout"),
        callback_filter=bindparam("callback_filter", type_=Text),
        callback_on_complete=bindparam("callback_on_complete", type_=Text),
        callback_on_fail=bindparam("callback_on_fail", type_=Text),
        callback_transform=bindparam("callback_transform", type_=Text),
        callback_answer=null(),
    )
    .returning(Job)
    .execution_options(**OPTIONS)
)

WITHDRAW = (
    update(Job)
    .where(held(TRANSITIONS["register"]), Job.callback_id.is_not(None))
    .values(**dict.fromkeys(CALLBACK_COLUMNS, null()))
    .returning(Job)
    .execution_options(**OPTIONS)
)

#: By the attempt: its handler waits for the callback, and the job stays its own.
ATTEND = (
    update(Job)
    .where(held(TRANSITIONS["attend"]), Job.callback_id == _callback, Job.attended_at.is_(None))
    .values(**effects(TRANSITIONS["attend"]), attended_at=NOW)
    .returning(Job)
    .execution_options(**OPTIONS)
)

#: The deadline stands still while a handler waits.
_running_again: dict[str, Any] = {
    "deadline_at": func.coalesce(Job.deadline_at + (NOW - Job.attended_at), Job.deadline_at),
    "attended_at": null(),
}

#: By the attempt: its handler has stopped waiting. The callback stays as it is.
_go_on = (
    update(Job)
    .where(held(TRANSITIONS["go_on"]), Job.attended_at.is_not(None))
    .values(**effects(TRANSITIONS["go_on"]) | _running_again)
)
GO_ON = _go_on.where(_stays(JobState.RUNNING)).returning(Job).execution_options(**OPTIONS)
GO_ON_CLAIMED = _go_on.returning(Job).execution_options(**OPTIONS)

#: What a waiting handler looks at, under its lease.
LOOK = select(Job.state, Job.attended_at, Job.callback_id, Job.callback_answer).where(
    Job.id == bindparam("held_id", type_=BigInteger), Job.run_lease == bindparam("held_lease", type_=BigInteger)
)

PARK = (
    update(Job)
    .where(held(TRANSITIONS["park"]), Job.callback_id == _callback)
    .values(**effects(TRANSITIONS["park"]))
    .returning(Job)
    .execution_options(**OPTIONS)
)

#: The row as it is, without a lock.
READ = select(Job).where(called(TRANSITIONS["fail_external"])).execution_options(populate_existing=True)

#: The row under its lock, and whether its queue keeps dead letters.
LOCK = (
    select(Job, keeps_dead_letters)
    .outerjoin(Queue, Queue.queue == Job.queue)
    .where(called(TRANSITIONS["fail_external"]))
    .with_for_update(of=Job, key_share=True)
    .execution_options(populate_existing=True)
)

LOCK_WAITING = LOCK.where(among(Job.state, TRANSITIONS["retry_external"].sources))
LOCK_UNCALLED = HELD_LOCK.where(Job.callback_id.is_(None))

_complete = (
    update(Job)
    .where(called(TRANSITIONS["complete_external"]))
    .values(
        **effects(TRANSITIONS["complete_external"]), result=bindparam("given_result", type_=JSONB(none_as_null=True))
    )
)
COMPLETE = _complete.where(_stays(JobState.COMPLETED)).returning(Job).execution_options(**OPTIONS)
COMPLETE_CLAIMED = _complete.returning(Job).execution_options(**OPTIONS)


def _retry(*conditions: ColumnElement[bool]) -> Any:
    # The attempt that has ended is read under the lock: RETURNING knows the new row only.
    waiting = (
        select(Job.id, Job.attempt)
        .where(called(TRANSITIONS["retry_external"]), *conditions)
        .with_for_update(key_share=True)
        .cte("waiting")
        .prefix_with("MATERIALIZED")
    )
    payload = func.left(func.encode(func.sha256(func.convert_to(Job.queue, "UTF8")), "hex"), 16)
    return (
        update(Job)
        .where(Job.id == waiting.c.id)
        .values(**effects(TRANSITIONS["retry_external"]), attempt=0, run_at=NOW, finalized_at=null())
        .returning(Job, waiting.c.attempt, wake(bindparam("channel", type_=Text), payload))
        .execution_options(**OPTIONS)
    )


_resumable = and_(called(TRANSITIONS["resume_external"]), owned)
LOCK_RESUMABLE = LOCK.where(_resumable)


def _resume(*conditions: ColumnElement[bool]) -> Any:
    answer = func.jsonb_build_object(
        literal_column("'callback'"),
        Job.callback_id,
        literal_column("'payload'"),
        bindparam("payload", type_=JSONB(none_as_null=False)),
    )
    return (
        update(Job)
        .where(_resumable, *conditions)
        .values(**effects(TRANSITIONS["resume_external"]) | _running_again, callback_answer=answer)
        .returning(Job, wake(bindparam("channel", type_=Text), func.concat("w:", Job.id)))
        .execution_options(**OPTIONS)
    )


RESUME, RESUME_CLAIMED = _resume(_stays(JobState.RUNNING)), _resume()

RETRY, RETRY_CLAIMED = _retry(_stays(JobState.AVAILABLE)), _retry()

PROLONG = (
    update(Job)
    .where(called(TRANSITIONS["prolong"]))
    .values(callback_timeout_at=NOW + seconds("timeout"))
    .returning(Job)
    .execution_options(**OPTIONS)
)
