"""The database refuses what the package refuses, for writers that go round the package."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

import psycopg.errors
import pytest
from sqlalchemy import CheckConstraint, Connection, DateTime, Engine, Insert, Table, insert, null, text
from sqlalchemy.exc import IntegrityError

from awa_sqla import DeadLetter, Job, JobState, ScheduledJob, limits
from awa_sqla.models import (
    AuditEntry,
    AwaBase,
    CallbackReceipt,
    CronSchedule,
    FollowUpSpec,
    JobCount,
    Leader,
    Obligation,
    Queue,
    RuntimeInstance,
    metadata,
)
from awa_sqla.models.job import JOB_TABLES

#: The states that a row of each table may be in.
STATES: dict[type[AwaBase], set[JobState]] = {
    Job: {
        JobState.AVAILABLE,
        JobState.RUNNING,
        JobState.WAITING_EXTERNAL,
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
    },
    ScheduledJob: {JobState.SCHEDULED, JobState.RETRYABLE},
    DeadLetter: {JobState.FAILED},
}

#: The least that a row of each table needs.
NEEDED: dict[type[AwaBase], dict[str, Any]] = {
    Job: {"kind": "k"},
    ScheduledJob: {"kind": "k", "run_at": datetime.now(UTC)},
    DeadLetter: {"kind": "k", "id": 1, "original_run_lease": 1, "dlq_reason": "manual"},
    Queue: {"queue": "q"},
    CronSchedule: {"name": "n", "cron_expr": "* * * * *"},
    FollowUpSpec: {"kind": "k", "outcome": "completed", "name": "n"},
    Obligation: {"job_id": 1, "kind": "k", "outcome": "completed", "spec": "s", "snapshot": {}},
    RuntimeInstance: {"id": "i", "role": "worker", "hostname": "h", "pid": 1, "version": "0"},
    CallbackReceipt: {"request": b"r", "callback_id": UUID(int=1), "action": "complete"},
    Leader: {"name": "n", "holder": "h", "expires_at": datetime.now(UTC)},
    JobCount: {"queue": "q", "state": "completed", "jobs": 1},
    AuditEntry: {"source": "cli", "verb": "v", "target": "t"},
}

_N = limits.NAME_LENGTH

#: (check, column, the values at its edges that are stored, those just beyond that are refused)
JOB_LIMITS: list[tuple[str, str, list[Any], list[Any]]] = [
    ("kind", "kind", ["k", "k" * _N, "ü" * _N], ["", "k" * (_N + 1)]),
    ("queue", "queue", ["q", "q" * _N, "ü" * _N], ["", "q" * (_N + 1)]),
    ("priority", "priority", list(limits.PRIORITIES), [limits.PRIORITIES[0] - 1, limits.PRIORITIES[-1] + 1]),
    ("attempt", "attempt", [0, limits.ATTEMPTS], [-1]),
    ("max_attempts", "max_attempts", [1, limits.ATTEMPTS], [0, limits.ATTEMPTS + 1]),
    ("tags", "tags", [[], ["t"] * limits.TAGS], [["t"] * (limits.TAGS + 1)]),
    (
        "run_at",
        "run_at",
        [limits.EARLIEST, limits.LATEST],
        [limits.EARLIEST - timedelta(seconds=1), limits.LATEST + timedelta(seconds=1), text("'-infinity'")],
    ),
]

_NOW = datetime.now(UTC)
_MOMENTS: list[tuple[Any, bool]] = [
    (limits.EARLIEST, True),
    (limits.LATEST, True),
    (limits.EARLIEST - timedelta(seconds=1), False),
    (limits.LATEST + timedelta(seconds=1), False),
    (text("'-infinity'"), False),
    (text("'infinity'"), False),
]

DEADLINES: dict[type[AwaBase], list[str]] = {
    **{model: ["deadline_seconds"] for model in (*JOB_TABLES, CronSchedule)},
    Queue: ["declared_deadline_seconds", "override_deadline_seconds"],
}
_LONGEST = limits.LONGEST.total_seconds()
_SECONDS: list[tuple[float, bool]] = [
    (0.001, True),
    (_LONGEST, True),
    (0, False),
    (-1, False),
    (_LONGEST * 1.001, False),
    (float("inf"), False),
    (float("nan"), False),
]

QUEUE_LIMITS: list[tuple[str, dict[str, Any], bool]] = [
    ("queue", {"queue": "q" * _N}, True),
    ("queue", {"queue": ""}, False),
    ("queue", {"queue": "q" * (_N + 1)}, False),
    ("paused", {"paused_at": _NOW, "paused_until": _NOW}, True),
    ("paused", {"paused_at": _NOW}, True),
    ("paused", {"paused_until": _NOW}, False),
    ("rates", {"declared_rate_per_second": 0.001, "declared_rate_burst": 1}, True),
    ("rates", {"declared_rate_per_second": 0}, False),
    ("rates", {"declared_rate_burst": 0}, False),
    ("rates", {"override_rate_per_second": 0.001, "override_rate_burst": 1}, True),
    ("rates", {"override_rate_per_second": 0}, False),
    ("rates", {"override_rate_burst": 0}, False),
    ("aging", {"declared_aging_seconds": 0.001, "override_aging_seconds": float("inf")}, True),
    ("aging", {"declared_aging_seconds": 0}, False),
    ("aging", {"override_aging_seconds": 0}, False),
    *(
        ("keep", {f"{by}_keep_{what}_seconds": seconds}, seconds >= 0)
        for by in ("declared", "override")
        for what in ("completed", "failed", "dead")
        for seconds in (0, float("inf"), -0.001)
    ),
]

_CRON_TIMES = [c.name for c in CronSchedule.__table__.columns if isinstance(c.type, DateTime)]

CRON_LIMITS: list[tuple[str, dict[str, Any], bool]] = [
    ("name", {"name": "ü" * _N}, True),
    ("name", {"name": ""}, False),
    ("name", {"name": "n" * (_N + 1)}, False),
    ("policy", {"missed_fire_policy": "skip"}, True),
    ("policy", {"missed_fire_policy": "catch_up"}, True),
    ("policy", {"missed_fire_policy": "often"}, False),
    ("most_missed", {"most_missed": 1}, True),
    ("most_missed", {"most_missed": 0}, False),
    ("job", {"args": {}, "kind": "k", "queue": "q"}, True),
    ("job", {"args": {}, "kind": "k"}, False),
    ("job", {"args": {}, "queue": "q"}, False),
    ("metadata", {"meta": {}}, True),
    ("metadata", {"meta": []}, False),
    ("metadata", {"meta": text("'null'")}, False),
    *(
        (check, {column: value}, stored)
        for check, edge, beyond in (("earliest", limits.EARLIEST, "-infinity"), ("latest", limits.LATEST, "infinity"))
        for column in _CRON_TIMES
        for value, stored in ((edge, True), (text(f"'{beyond}'"), False))
    ),
]


def edges() -> Iterator[tuple[type[AwaBase], str, dict[str, Any], bool]]:
    """(model, name of the check, values, whether they are stored), for every check of every table."""
    for model in JOB_TABLES:
        table = model.__tablename__
        for check, column, stored, refused in JOB_LIMITS:
            yield from ((model, f"ck_{table}_{check}", {column: value}, True) for value in stored)
            yield from ((model, f"ck_{table}_{check}", {column: value}, False) for value in refused)
        for state in JobState:
            yield model, f"ck_{table}_state", {"state": state}, state in STATES[model]
    yield from times()
    for model, columns in DEADLINES.items():
        for column in columns:
            for value, fits in _SECONDS:
                yield model, f"ck_{model.__tablename__}_deadlines", {column: value}, fits
    for check, values, stored_ in QUEUE_LIMITS:
        yield Queue, f"ck_queue_meta_{check}", values, stored_
    for check, values, stored_ in CRON_LIMITS:
        yield CronSchedule, f"ck_cron_jobs_{check}", values, stored_


def times() -> Iterator[tuple[type[AwaBase], str, dict[str, Any], bool]]:
    """The same for every column of every table that holds a time."""
    for model in NEEDED:
        if model is CronSchedule:
            continue
        for column in model.__table__.columns:
            if isinstance(column.type, DateTime) and column.name != "run_at":
                more = {"paused_at": _NOW} if column.name == "paused_until" else {}
                for value, fits in _MOMENTS:
                    yield model, f"ck_{model.__tablename__}_times", more | {column.name: value}, fits


CHECKS = {check: model for model, check, _, _ in edges()}


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


def refused(connection: Connection, statement: Insert) -> psycopg.errors.IntegrityError | None:
    """What the database says against an INSERT; what it stores is taken back."""
    savepoint = connection.begin_nested()
    try:
        connection.execute(statement)
    except IntegrityError as error:
        return cast("psycopg.errors.IntegrityError", error.orig)
    finally:
        savepoint.rollback()
    return None


@pytest.mark.parametrize("check", CHECKS)
def test_a_value_is_stored_up_to_its_limit_and_refused_beyond(connection: Connection, check: str) -> None:
    for model, of, values, stored in edges():
        if of == check:
            error = refused(connection, insert(model).values(**NEEDED[model] | values))
            assert (error and error.diag.constraint_name) == (None if stored else check), values


def test_every_check_of_every_table_is_tried_at_both_sides() -> None:
    checks = {
        constraint.name
        for table in metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, CheckConstraint)
    }
    for stored in (True, False):
        assert {check for _, check, _, side in edges() if side is stored} == checks


def unwritten(table: Table) -> list[str]:
    """The columns that an INSERT must give a value."""
    return [c.name for c in table.columns if not c.nullable and c.server_default is None and c.identity is None]


@pytest.mark.parametrize("model", JOB_TABLES)
def test_a_job_cannot_be_stored_without_what_it_needs(
    connection: Connection, model: type[Job | ScheduledJob | DeadLetter]
) -> None:
    assert set(unwritten(model.__table__)) == set(NEEDED[model])
    for left_out in NEEDED[model]:
        error = refused(connection, model.__table__.insert().values(**NEEDED[model] | {left_out: null()}))
        assert isinstance(error, psycopg.errors.NotNullViolation)
        assert error.diag.column_name == left_out
