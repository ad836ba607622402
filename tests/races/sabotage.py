"""Guards that can be taken out of the process under test: a matrix that stays green without them proves nothing.

`lease`, `claim`, `rescue`, `callback` and `attendance` edit the SQL on its way to the database, `ledger`, `obligation`,
`unique` and `order` replace one function each, and `triggers` switches triggers off in the sessions of the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event, inspect
from sqlalchemy.orm import Session

from awa_sqla.models.base import jobs_id_seq
from awa_sqla.models.records import Obligation
from awa_sqla.session import bulk, drain, ledger, unique
from awa_sqla.session.unique import Holder

Edit = Callable[[str], str]

#: `run_lease = <bind>`, whatever the driver's binds look like; the bind stays, its value does not matter any more.
_FENCE = re.compile(r"awa\.jobs_hot\.run_lease = (%\(held_lease\)s(?:::BIGINT)?|\$\d+::BIGINT)")
_JOINED_FENCE = re.compile(r"awa\.jobs_hot\.run_lease = \w+\.run_lease")
_CALLED = re.compile(r"awa\.jobs_hot\.callback_id = (%\(callback\)s(?:::UUID)?|\$\d+::UUID)")
_ATTENDED = "OR awa.jobs_hot.attended_at IS NOT NULL"
_CLAIM_LOCK = "FOR NO KEY UPDATE SKIP LOCKED"
_RESCUE_LOCK = " FOR NO KEY UPDATE OF jobs_hot SKIP LOCKED"
_STILL_AVAILABLE = re.compile(r"\(?awa\.jobs_hot\.state \|\| ''\)? = 'available'")


def _without_lease(statement: str) -> str:
    return _JOINED_FENCE.sub("true", _FENCE.sub(r"\1 IS NOT NULL", statement))


def _without_claim(statement: str) -> str:
    if not _STILL_AVAILABLE.search(statement):
        return statement
    return _STILL_AVAILABLE.sub("true", statement).replace(_CLAIM_LOCK, "")


def _without_rescue(statement: str) -> str:
    """What is late is not locked, and so not asked about again."""
    return statement.replace(_RESCUE_LOCK, "") if statement.startswith("SELECT") else statement


def _without_callback(statement: str) -> str:
    return _CALLED.sub(r"\1 IS NOT NULL", statement)


def _without_attendance(statement: str) -> str:
    return statement.replace(_ATTENDED, "OR true") if "'payload', " in statement else statement


@contextmanager
def edited(edit: Edit) -> Iterator[None]:
    """Every statement is edited on its way to the database."""

    def on_execute(conn: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> tuple[str, Any]:
        return edit(statement), parameters

    event.listen(Engine, "before_cursor_execute", on_execute, retval=True)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", on_execute)


@contextmanager
def _replaced(module: Any, name: str, function: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def _stage_nothing(session: Any, entry: ledger.Staged) -> None:
    """The row of a move is added, and the transition itself forgotten."""
    session.add_all(row for row in entry.rows if inspect(row).transient)


_follow_ups = drain._follow_ups


def _owe_nothing(session: Any, entry: ledger.Staged) -> list[object]:
    return [row for row in _follow_ups(session, entry) if not isinstance(row, Obligation)]


GUARDS = {
    "lease": lambda: edited(_without_lease),
    "claim": lambda: edited(_without_claim),
    "ledger": lambda: _replaced(ledger, "stage", _stage_nothing),
    "obligation": lambda: _replaced(drain, "_follow_ups", _owe_nothing),
}

#: Those of maintenance: what a sweep has seen is looked at again under its lock.
SWEEP_GUARDS = {"rescue": lambda: edited(_without_rescue)}

#: Those of callbacks: which one it is, and whether a handler waits for it.
CALLBACK_GUARDS = {
    "callback": lambda: edited(_without_callback),
    "attendance": lambda: edited(_without_attendance),
}


def _claim_no_key(session: Session, wanted: Mapping[bytes, int | None]) -> dict[bytes, Holder]:
    """Every key is taken for granted, and what the table of claims says is not asked."""
    return {key: Holder(job_id or session.scalar(jobs_id_seq) or 0, fresh=True) for key, job_id in wanted.items()}


_claim_keys = unique.claim_keys


def _claim_as_they_come(session: Session, wanted: Mapping[bytes, int | None]) -> dict[bytes, Holder]:
    """One key after the other."""
    return {key: _claim_keys(session, {key: job_id})[key] for key, job_id in wanted.items()}


@contextmanager
def _claiming(function: Any) -> Iterator[None]:
    with _replaced(unique, "claim_keys", function), _replaced(bulk, "claim_keys", function):
        yield


@contextmanager
def _without_triggers() -> Iterator[None]:
    def on_begin(connection: Any) -> None:
        connection.exec_driver_sql("SET LOCAL session_replication_role = replica")

    event.listen(Engine, "begin", on_begin)
    try:
        yield
    finally:
        event.remove(Engine, "begin", on_begin)


#: Those of unique keys.
KEY_GUARDS = {
    "unique": lambda: _claiming(_claim_no_key),
    "order": lambda: _claiming(_claim_as_they_come),
    "triggers": _without_triggers,
}
