"""The lanes of maintenance as `upkeep.py` and the tests look at them: rows to fill in, passes, and what each reads."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import ClientCursor, sql
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from awa_sqla import JobArgs, Outcome
from awa_sqla.maintenance import (
    age,
    any_due,
    count_finished,
    next_due,
    promote,
    prune_dead_letters,
    prune_jobs,
    prune_records,
    rescue,
)
from awa_sqla.session.specs import Spec

#: Finished jobs older than their retention, live ones at all priorities that have waited up to five intervals, and
#: everything else that some lane looks for, over 50 queues. %(n)s finished jobs, a tenth as many of each other kind.
FILL = (
    """
INSERT INTO awa.jobs_hot (kind, queue, args, state, attempt, finalized_at)
SELECT 'work', 'q' || n % 50, '{"number": 1, "text": "sixty bytes of arguments, as in the other measures"}',
    CASE WHEN n % 10 < 8 THEN 'completed' WHEN n % 10 = 8 THEN 'failed' ELSE 'cancelled' END, 1,
    now() - interval '4 days' - n * interval '10 ms'
FROM generate_series(1, %(n)s) AS n""",
    """
INSERT INTO awa.jobs_hot (kind, queue, args, priority, run_at)
SELECT 'work', 'q' || n % 50, '{"number": 1}', n % 4 + 1, now() - n % 300 * interval '1 s'
FROM generate_series(1, %(n)s / 10) AS n""",
    """
INSERT INTO awa.scheduled_jobs (kind, queue, args, state, run_at)
SELECT 'work', 'q' || n % 50, '{"number": 1}', CASE WHEN n % 3 = 0 THEN 'retryable' ELSE 'scheduled' END,
    now() + (n - %(n)s / 20) * interval '10 ms'
FROM generate_series(1, %(n)s / 10) AS n""",
    """
INSERT INTO awa.jobs_hot (kind, queue, state, attempt, run_lease, heartbeat_at, callback_id, callback_timeout_at,
    attended_at)
SELECT 'work', 'q' || n % 50, CASE WHEN n % 2 = 0 THEN 'running' ELSE 'waiting_external' END, 1, n,
    now() - CASE WHEN n % 20 < 2 THEN interval '1 hour' ELSE interval '0' END,
    CASE WHEN n % 2 = 1 THEN gen_random_uuid() END,
    CASE WHEN n % 4 = 1 THEN now() + (n - 100) * interval '1 s' END, CASE WHEN n % 4 = 3 THEN now() END
FROM generate_series(1, %(n)s / 100) AS n""",
    """
INSERT INTO awa.dlq_entries (id, kind, queue, attempt, original_run_lease, dlq_reason, dlq_at)
SELECT nextval('awa.jobs_id_seq'), 'work', 'q' || n % 50, 1, n, 'max_attempts_exhausted',
    now() - interval '30 days' - n * interval '1 s'
FROM generate_series(1, %(n)s / 10) AS n""",
    """
INSERT INTO awa.follow_up_obligations (job_id, kind, outcome, spec, snapshot, next_attempt_at)
SELECT n, 'work', 'completed', 'elsewhere', '{}', CASE WHEN n % 100 = 0 THEN now() - n * interval '1 s' END
FROM generate_series(1, %(n)s / 10) AS n""",
    """
INSERT INTO awa.audit_log (at, source, verb, target)
SELECT now() - interval '90 days' - (n - %(n)s / 20) * interval '1 s', 'cli', 'cancel', n::text
FROM generate_series(1, %(n)s / 10) AS n""",
    """
INSERT INTO awa.callback_receipts (request, callback_id, action, created_at)
SELECT int8send(n), gen_random_uuid(), 'complete', now() - interval '1 day' - (n - %(n)s / 20) * interval '1 s'
FROM generate_series(1, %(n)s / 10) AS n""",
)

#: What no lane may read from end to end.
LARGE = frozenset(
    {
        "jobs_hot",
        "scheduled_jobs",
        "dlq_entries",
        "follow_up_obligations",
        "audit_log",
        "callback_receipts",
        "job_unique_claims",
    }
)

_SPEC = Spec("work", Outcome.COMPLETED, "here", JobArgs, lambda _: None)


@dataclass(frozen=True, slots=True)
class Lane:
    """One pass of one lane: at most `limit` rows, each read when it is found and when it is looked up to be changed."""

    name: str
    limit: int
    run: Callable[[Session, int], Any]
    reads: int = 2
    #: Rows that it reads whatever its limit: queues, levels, marks.
    fixed: int = 500


LANES: Sequence[Lane] = (
    Lane("promotion's look", 1, lambda session, _: next_due(session.connection())),
    Lane("promote", 4096, lambda session, limit: promote(session, limit=limit).jobs),
    Lane(
        "rescue",
        100,
        lambda session, limit: len(rescue(session, stale_after=timedelta(seconds=90), limit=limit)),
        reads=6,  # three statements
        fixed=20_000,  # every running row is looked at: as many as run at a time
    ),
    Lane("obligations' look", 1, lambda session, _: any_due(session.connection(), [_SPEC])),
    Lane("age", 1000, lambda session, limit: age(session, limit=limit)),
    Lane("prune jobs", 1000, lambda session, limit: prune_jobs(session, limit=limit)),
    Lane("prune dead letters", 1000, lambda session, limit: prune_dead_letters(session, limit=limit)),
    Lane("prune records", 1000, lambda session, limit: sum(prune_records(session, limit=limit)), reads=10),
    Lane("count finished jobs", 0, lambda session, _: count_finished(session).rows),
)


@dataclass(slots=True)
class Look:
    """What EXPLAIN ANALYZE said of a pass."""

    done: Any = None
    milliseconds: float = 0.0
    indexes: set[str] = field(default_factory=set[str])
    #: Large tables that were read from end to end.
    scanned: set[str] = field(default_factory=set[str])
    #: Rows of large tables that were read, counting each time.
    rows: int = 0
    buffers: int = 0


def fill(connection: psycopg.Connection[Any], finished: int) -> None:
    """Fill a new schema."""
    for statement in FILL:
        connection.execute(statement.replace("%(n)s", str(finished)).encode())


def timed(engine: Engine, lane: Lane, limit: int) -> tuple[Any, float, list[tuple[str, Any]]]:
    """Run a pass and take it back; what it did, the milliseconds, and the first of each statement that it sent."""
    sent: dict[str, Any] = {}

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        sent.setdefault(statement, parameters)

    event.listen(engine, "before_cursor_execute", note)
    try:
        with Session(engine) as session:
            session.connection()
            started = time.perf_counter()
            done = lane.run(session, limit)
            lasted = time.perf_counter() - started
            session.rollback()
    finally:
        event.remove(engine, "before_cursor_execute", note)
    return done, lasted * 1000, list(sent.items())


def looked_at(engine: Engine, lane: Lane, limit: int | None = None) -> Look:
    """A pass, timed, and the generic plans of its statements as they ran; nothing of it stays."""
    limit = lane.limit if limit is None else limit
    timed(engine, lane, limit)  # compiles the statements, and warms the caches as a second pass would find them
    look = Look()
    look.done, look.milliseconds, sent = timed(engine, lane, limit)
    for statement, parameters in sent:
        if re.match(r"\s*(SELECT|WITH|UPDATE|DELETE|INSERT)", statement):
            for node in _explained(engine, statement, parameters):
                _add(look, node)
    return look


def _add(look: Look, node: Mapping[str, Any]) -> None:
    if "Index Name" in node:
        look.indexes.add(node["Index Name"])
    if node.get("Parent Relationship") is None:
        look.buffers += node.get("Shared Hit Blocks", 0) + node.get("Shared Read Blocks", 0)
    if node.get("Relation Name") in LARGE and node["Node Type"].endswith("Scan"):
        dropped = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        look.rows += round((node["Actual Rows"] + dropped) * node["Actual Loops"])
        if node["Node Type"] == "Seq Scan":
            look.scanned.add(node["Relation Name"])


def _explained(engine: Engine, statement: str, parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The nodes of the generic plan, executed and rolled back."""
    names: dict[str, str] = {}
    numbered = re.sub(r"%\((\w+)\)s", lambda found: names.setdefault(found[1], f"${len(names) + 1}"), statement)
    for name, number in names.items():
        if isinstance(parameters[name], timedelta):  # which SQLAlchemy leaves to the driver to name
            numbered = re.sub(rf"\{number}\b", f"{number}::interval", numbered)
    prepare = sql.SQL("PREPARE looked_at AS ") + sql.SQL(numbered.replace("%%", "%"))  # type: ignore[arg-type]
    call = "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE looked_at"
    values = [parameters[name] for name in names]
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        cursor = ClientCursor(driver)
        cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        cursor.execute(prepare)
        cursor.execute(call + (f" ({', '.join(['%s'] * len(values))})" if values else ""), values or None)
        row = cursor.fetchone()
        cursor.execute("DEALLOCATE looked_at")
        connection.rollback()
    found = row[0] if row else []
    plan = json.loads(found) if isinstance(found, str) else found
    pending = [plan[0]["Plan"]]
    while pending:
        node = pending.pop()
        pending += node.get("Plans", ())
        yield node
