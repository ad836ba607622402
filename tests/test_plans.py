"""The plans of the hot statements at 100,000 rows: on their indexes, with and without statistics.

Asked for as generic plans, which is what a long-lived worker's prepared statements end up with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, event, select, text

from awa_sqla.maintenance import prune, rollup
from awa_sqla.maintenance.age import _GO_BACK, _RISE
from awa_sqla.maintenance.firing import _FAILED, FIRE_BUILT, FIRE_STORED
from awa_sqla.maintenance.obligations import _due, _settled_by
from awa_sqla.maintenance.promote import _NEXT, _PROMOTE, _WAIT
from awa_sqla.maintenance.rescue import _EXPIRED, _OVERDUE, _STALE, _UNATTENDED
from awa_sqla.models.records import Obligation
from awa_sqla.session import batch_statements, callback_statements, statements
from awa_sqla.session.periodic import JOB_COLUMNS
from awa_sqla.web import receipts
from awa_sqla.worker import heartbeat, survey, waits

FILL = """
INSERT INTO awa.jobs_hot (kind, queue, args, state, run_lease, heartbeat_at, root_id, parent_id, callback_id,
callback_timeout_at, finalized_at)
SELECT 'work', 'q' || n % 50, '{"n": 1}',
       CASE WHEN n % 100 < 90 THEN 'completed' WHEN n % 100 < 98 THEN 'available'
         WHEN n % 100 = 98 THEN 'waiting_external' ELSE 'running' END,
       n, now(), n / 10, n / 5, CASE WHEN n % 100 = 98 THEN gen_random_uuid() END,
       CASE WHEN n % 100 = 98 THEN now() + n * interval '1 s' END,
       CASE WHEN n % 100 < 90 THEN now() - n * interval '1 s' END
FROM generate_series(1, 100000) AS n;
INSERT INTO awa.scheduled_jobs (kind, queue, args, state, run_at)
SELECT 'work', 'q' || n % 50, '{}', 'scheduled', now() + n * interval '1 s' FROM generate_series(1, 100000) AS n;
INSERT INTO awa.follow_up_obligations (job_id, kind, outcome, spec, snapshot, next_attempt_at)
SELECT n, 'work', 'completed', 'spec', '{}', CASE WHEN n % 100 = 0 THEN now() END FROM generate_series(1, 100000) AS n;
INSERT INTO awa.runtime_instances (id, role, hostname, pid, version)
SELECT 'w' || n, 'worker', 'host', n, '1' FROM generate_series(1, 500) AS n;
INSERT INTO awa.dlq_entries (id, kind, queue, original_run_lease, dlq_reason, dlq_at)
SELECT nextval('awa.jobs_id_seq'), 'work', 'q' || n % 50, n, 'manual', now() - n * interval '1 s'
FROM generate_series(1, 100000) AS n;
INSERT INTO awa.audit_log (at, source, verb, target)
SELECT now() - n * interval '1 s', 'cli', 'cancel', n::text FROM generate_series(1, 100000) AS n;
INSERT INTO awa.callback_receipts (request, callback_id, action, created_at)
SELECT int8send(n), gen_random_uuid(), 'complete', now() - n * interval '1 s' FROM generate_series(1, 100000) AS n;
INSERT INTO awa.cron_jobs (name, cron_expr, kind, queue, args)
SELECT 's' || n, '0 3 * * *', 'work', 'q', '{}' FROM generate_series(1, 100000) AS n;
"""

HOT = {
    "claim": (statements.CLAIM_ROWS, {"ix_jobs_hot_claim", "jobs_hot_pkey"}),
    "complete": (statements.COMPLETE, {"jobs_hot_pkey"}),
    "complete_many": (batch_statements.COMPLETE_MANY, {"jobs_hot_pkey"}),
    "lock": (statements.LOCK, {"jobs_hot_pkey"}),
    "cancel": (statements.CANCEL, {"jobs_hot_pkey"}),
    "find": (statements.FIND, {"jobs_hot_pkey", "scheduled_jobs_pkey"}),
    "beat": (heartbeat.BEAT, {"jobs_hot_pkey"}),
    "lost": (heartbeat.LOST, {"jobs_hot_pkey"}),
    "survey": (survey.SURVEY, {"ix_jobs_hot_claim"}),
    "promote": (_PROMOTE, {"ix_scheduled_jobs_due", "scheduled_jobs_pkey"}),
    "next due": (_NEXT, {"ix_scheduled_jobs_due"}),
    "wait": (_WAIT, {"ix_scheduled_jobs_due"}),
    "rescue of stale attempts": (_STALE, {"ix_jobs_hot_running", "runtime_instances_pkey"}),
    "rescue of unattended waits": (_UNATTENDED, {"ix_jobs_hot_attended", "runtime_instances_pkey"}),
    "rescue of overdue attempts": (_OVERDUE, {"ix_jobs_hot_running", "runtime_instances_pkey"}),
    "rescue of expired callbacks": (_EXPIRED, {"ix_jobs_hot_callback_timeout", "runtime_instances_pkey"}),
    "complete_external": (callback_statements.COMPLETE, {"ix_jobs_hot_callback"}),
    "resume_external": (callback_statements.RESUME, {"ix_jobs_hot_callback"}),
    "retry_external": (callback_statements.RETRY, {"ix_jobs_hot_callback", "jobs_hot_pkey"}),
    "lock by callback": (callback_statements.LOCK, {"ix_jobs_hot_callback"}),
    "look": (callback_statements.LOOK, {"jobs_hot_pkey"}),
    "waits that are over": (waits._OVER, {"ix_jobs_hot_attended"}),
    "fire": (FIRE_STORED, {"cron_jobs_pkey"}),
    "fire what was built": (FIRE_BUILT, {"cron_jobs_pkey"}),
    "schedule that fails": (_FAILED, {"cron_jobs_pkey"}),
    "any obligation": (
        select(select(Obligation.id).where(*_settled_by([("work", "completed", "spec")])).exists()),
        {"ix_follow_up_obligations_due"},
    ),
    "prune jobs": (prune._JOBS, {"ix_jobs_hot_finished", "jobs_hot_pkey"}),
    "prune dead letters": (prune._DEAD_LETTERS, {"ix_dlq_entries_queue", "dlq_entries_pkey"}),
    "prune the audit log": (prune._RECORDS["audit_log"], {"ix_audit_log_at", "audit_log_pkey"}),
    "prune receipts": (
        prune._RECORDS["callback_receipts"],
        {"ix_callback_receipts_created", "callback_receipts_pkey"},
    ),
    "age": (_RISE, {"ix_jobs_hot_claim", "ix_jobs_hot_aged", "jobs_hot_pkey"}),
    "age no more": (_GO_BACK, {"ix_jobs_hot_aged", "jobs_hot_pkey"}),
    "count finished jobs": (rollup._COUNT, {"ix_jobs_hot_finished", "ix_dlq_entries_queue"}),
    "claim a receipt": (receipts._CLAIM, {"ix_callback_receipts_created"}),
    "obligations": (_due([("work", "completed", "spec")]), {"ix_follow_up_obligations_due"}),
}

#: Any values will do: a generic plan does not look at them.
VALUES = {
    "in_queue": "q1",
    "limit": 100,
    "by_worker": "w",
    "given_result": None,
    "ids": [1],
    "leases": [1],
    "results": [None],
    "callback": UUID(int=1),
    "of_lease": 1,
    "payload": 1,
    "held_id": 1,
    "held_lease": 1,
    "entry": {},
    "job_id": 1,
    "channel": "c",
    "queues": ["q1"],
    "most": 100,
    "stale_after": 90.0,
    "digest": b"d",
    "act": "complete",
    "of_name": "s1",
    "seen": None,
    "since": None,
    "expr": "0 3 * * *",
    "zone": "UTC",
    "tick": None,
    "mark": {},
    "error": "",
    **dict.fromkeys([f"job_{name}" for name in JOB_COLUMNS]),
}

#: Either of the two finds a running row by its id.
SAME = {"ix_jobs_hot_running": "jobs_hot_pkey"}
LARGE = {
    "jobs_hot",
    "scheduled_jobs",
    "dlq_entries",
    "follow_up_obligations",
    "audit_log",
    "callback_receipts",
    "cron_jobs",
}


@pytest.fixture(scope="module", params=["without statistics", "with statistics"])
def filled(request: pytest.FixtureRequest, postgres_server: Any, postgresql_noproc: Any) -> Iterator[Engine]:
    """100,000 rows in each of the large tables."""
    name = "awa_test_plans"
    with postgres_server.janitor(name, postgresql_noproc.template_dbname):
        engine = create_engine(postgres_server.url(name))
        with engine.begin() as connection:
            if connection.dialect.server_version_info < (16,):  # type: ignore[operator]
                pytest.skip("EXPLAIN (GENERIC_PLAN) came with PostgreSQL 16")
            for table in LARGE:
                connection.execute(text(f"ALTER TABLE awa.{table} SET (autovacuum_enabled = false)"))
            connection.exec_driver_sql(FILL.replace("%", "%%"))
        if request.param == "with statistics":
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("VACUUM ANALYZE"))
        yield engine
        engine.dispose()


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


class CapturedError(Exception):
    """Carries a statement as it would have been sent."""


def as_prepared(engine: Engine, statement: Any) -> str:
    """The statement's text with numbered parameters, as the server would prepare it."""

    def capture(connection: Any, cursor: Any, sent: str, *_: object) -> None:
        raise CapturedError(sent)

    event.listen(engine, "before_cursor_execute", capture)
    try:
        with engine.connect() as connection, pytest.raises(CapturedError) as captured:
            connection.execute(statement, VALUES)
    finally:
        event.remove(engine, "before_cursor_execute", capture)
    numbers: dict[str, str] = {}
    return re.sub(r"%\((\w+)\)s", lambda m: numbers.setdefault(m[1], f"${len(numbers) + 1}"), str(captured.value))


@pytest.mark.parametrize("name", HOT)
def test_a_hot_statement_stays_on_its_indexes(filled: Engine, name: str) -> None:
    statement, expected = HOT[name]
    prepared = as_prepared(filled, statement)
    with filled.connect() as connection:
        cursor = connection.connection.cursor()
        cursor.execute(f"EXPLAIN (GENERIC_PLAN, FORMAT JSON) {prepared}".encode())
        (plan,) = cursor.fetchone()
    found = list(nodes(plan[0]["Plan"]))
    scanned = {node["Relation Name"] for node in found if node["Node Type"] == "Seq Scan"}
    used = {SAME.get(node["Index Name"], node["Index Name"]) for node in found if "Index Name" in node}
    assert scanned & LARGE == set(), json.dumps(plan, indent=1)
    whole = {node["Index Name"] for node in found if node["Node Type"] == "Index Scan" and "Index Cond" not in node}
    assert {name for name in whole if name.endswith("_pkey")} == set(), json.dumps(plan, indent=1)
    assert {SAME.get(index, index) for index in expected} <= used, json.dumps(plan, indent=1)
