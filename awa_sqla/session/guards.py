"""Belts: job rows change through verbs, and every other way of writing them is refused loudly.

A change that bypasses the verbs would bypass the fence of the lease and lose the follow-ups. What these
belts see: assignments to loaded rows (so also `session.merge`), `session.delete`, and UPDATE, DELETE and
INSERT statements sent through a session, ORM or Core. What they cannot see: `bulk_*` methods and statements
sent on the connection behind the session's back.
"""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import Alias, Connection, Table, event, inspect
from sqlalchemy.orm import Mapper, ORMExecuteState, Session, class_mapper, object_session

from awa_sqla.errors import UnmanagedWriteError
from awa_sqla.models.job import JOB_TABLES, DeadLetter, Job, JobRecord, ScheduledJob
from awa_sqla.models.records import UniqueClaim
from awa_sqla.session.hints import explain_refusals
from awa_sqla.session.target import refuse_autocommit

#: Execution option of the statements that may write job rows.
MANAGED = "awa_managed"

#: What nobody adds to: the view, which PostgreSQL would refuse with an error that ends the transaction, and the claims.
_DERIVED = (JobRecord, UniqueClaim)
_CLASSES = (*JOB_TABLES, *_DERIVED)
_TABLES = {cls.__table__ for cls in _CLASSES}

_VERBS = {
    "state": "complete(), fail(), retry_after(), snooze() or cancel()",
    "progress": "set_progress()",
    "result": "complete(session, job, result=...)",
    "errors": "fail()",
    "run_lease": "claim()",
    "attempt": "claim()",
}


def _deny(cls: type[Any], attribute: str) -> None:
    verb = _VERBS.get(attribute, "a verb of awa_sqla")

    def on_set(target: Any, value: object, old: object, initiator: object) -> None:  # noqa: ARG001
        if inspect(target).has_identity:
            raise UnmanagedWriteError(
                cls.__tablename__, verb, f"{cls.__name__}.{attribute} is read-only once the row is stored"
            )

    event.listen(getattr(cls, attribute), "set", on_set)


def _deny_flush(mapper: Mapper[Any], connection: Connection, target: Any) -> None:  # noqa: ARG001
    raise UnmanagedWriteError(target.__tablename__, "a verb of awa_sqla", "a flush would write this row")


def _deny_change(mapper: Mapper[Any], connection: Connection, target: Any) -> None:
    """`flag_dirty`, which the verbs use, comes by here too, and changes nothing."""
    session = object_session(target)
    if session is None or session.is_modified(target):
        _deny_flush(mapper, connection, target)


def _before_insert(mapper: Mapper[Any], connection: Connection, target: Any) -> None:  # noqa: ARG001
    """For rows that come without a verb, or from a `before_flush` listener after ours."""
    explain_refusals(connection.engine)
    refuse_autocommit(connection)


for _cls in _CLASSES:
    for _attribute in class_mapper(_cls).column_attrs:
        _deny(_cls, _attribute.key)
    event.listen(_cls, "before_delete", _deny_flush)
    event.listen(_cls, "before_update", _deny_change)
    event.listen(_cls, "before_insert", _deny_flush if _cls in _DERIVED else _before_insert)


def refuse_writes(session: Session) -> None:
    """In `before_flush`: no row of ours is deleted or updated by the unit of work itself."""
    for row in session.new:
        if isinstance(row, _DERIVED):
            raise UnmanagedWriteError(row.__tablename__, "enqueue()", f"session.add({row!r})")
    for row in session.deleted:
        if isinstance(row, _CLASSES):
            raise UnmanagedWriteError(row.__tablename__, "cancel()", f"session.delete({row!r})")
    for row in session.dirty:
        if isinstance(row, _CLASSES) and session.is_modified(row):
            raise UnmanagedWriteError(row.__tablename__, "a verb of awa_sqla", f"{row!r} was changed in place")


def refuse_statements(state: ORMExecuteState) -> None:
    """In `do_orm_execute`: only our own statements write our job tables."""
    if state.is_select or state.execution_options.get(MANAGED):
        return
    table: Any = getattr(state.statement, "table", None)
    while isinstance(table, Alias):
        table = cast("Any", table).element
    if isinstance(table, Table) and table in _TABLES:
        verb = "enqueue()" if state.is_insert else "a verb of awa_sqla"
        raise UnmanagedWriteError(table.name, verb)


def holds_ours(session: Session) -> bool:
    """Whether the session holds unflushed rows of ours."""
    return any(isinstance(row, Job | ScheduledJob | DeadLetter) for row in session.new)
