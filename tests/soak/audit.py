"""What the database says afterwards: each check is a query for offenders, of which there must be none.

`soak_outcomes` is what was committed, read from the rows of the jobs alone: an outcome for each entry in `errors`, one
more for a rescue in the last attempt, and one for a completion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import dict_row

from tests.soak import upkeep

PREPARE = f"""
CREATE TEMP TABLE soak_jobs AS {upkeep.ALL_JOBS};
CREATE INDEX ON soak_jobs (id);
CREATE INDEX ON soak_jobs (parent_id);
CREATE TEMP TABLE soak_entries AS
    SELECT j.id, e.number, (e.entry->>'attempt')::int AS attempt, e.entry->>'type' AS type, e.entry->>'error' AS error,
        e.number = cardinality(j.errors) AS last
    FROM soak_jobs j, unnest(j.errors) WITH ORDINALITY AS e (entry, number);
CREATE INDEX ON soak_entries (id);
CREATE TEMP TABLE soak_outcomes AS
    SELECT e.id, j.kind, e.attempt, CASE
        WHEN e.type = 'rescue' THEN 'rescued'
        WHEN e.type = 'cancelled' THEN 'cancelled'
        WHEN e.last AND j.state = 'failed' THEN 'exhausted'
        ELSE 'retried' END AS outcome
    FROM soak_entries e JOIN soak_jobs j USING (id)
    UNION ALL
    SELECT e.id, j.kind, e.attempt, 'exhausted' FROM soak_entries e JOIN soak_jobs j USING (id)
    WHERE e.last AND j.state = 'failed' AND e.type = 'rescue'
    UNION ALL
    SELECT id, kind, attempt, 'completed' FROM soak_jobs WHERE state = 'completed';
CREATE TEMP TABLE soak_due AS
    SELECT o.id, o.kind, o.attempt, o.outcome, s.spec FROM soak_outcomes o JOIN soak_specs s USING (kind, outcome)
    JOIN soak_jobs j USING (id) WHERE o.outcome <> 'completed' OR (j.args->>'tells')::bool;
CREATE TEMP TABLE soak_notes AS
    SELECT parent_id AS id, args->>'outcome' AS outcome, args->>'spec' AS spec, (args->>'attempt')::int AS attempt,
        count(*) AS notes, min(parent_outcome) = max(parent_outcome) AND min(parent_outcome) = args->>'outcome' AS sane
    FROM soak_jobs WHERE kind = 'note' GROUP BY 1, 2, 3, 4;
CREATE INDEX ON soak_notes (id);
CREATE TEMP TABLE soak_marks AS
    SELECT job_id AS id, mark, count(*) AS effects, max(run_lease) AS lease FROM soak_effects GROUP BY 1, 2;
CREATE INDEX ON soak_marks (id);
ANALYZE
"""

_FINAL = "('completed', 'failed', 'cancelled')"
_TRANSACTIONAL = "('write', 'write_async', 'leaf', 'note', 'tick')"
_PLANNED = "('write', 'write_async', 'call', 'call_async', 'walk', 'walk_async')"

#: What is wrong -> a query for it.
CHECKS: dict[str, str] = {
    "lost": """
        SELECT a.job_id AS id FROM soak_asked a LEFT JOIN soak_jobs j ON j.id = a.job_id WHERE j.id IS NULL""",
    "stuck": f"SELECT id FROM soak_jobs WHERE state NOT IN {_FINAL}",
    "never enqueued": """
        SELECT j.id FROM soak_jobs j LEFT JOIN soak_asked a ON a.job_id = j.id
        WHERE (j.parent_id IS NULL AND a.job_id IS NULL AND j.kind <> 'tick') OR (j.args->>'ghost')::bool""",
    "in two tables": "SELECT id FROM soak_jobs GROUP BY id HAVING count(*) > 1",
    "doubled effects": "SELECT id, mark, effects FROM soak_marks WHERE effects > 1",
    "effects of attempts that failed": "SELECT id FROM soak_marks WHERE mark = 'void'",
    "effects without their outcome": """
        SELECT m.id, m.mark, j.state FROM soak_marks m LEFT JOIN soak_jobs j USING (id)
        WHERE (m.mark = 'done' AND j.state IS DISTINCT FROM 'completed')
            OR (m.mark = 'cancel' AND j.state IS DISTINCT FROM 'cancelled')
            OR (m.mark LIKE 'again %' AND NOT EXISTS (
                SELECT FROM soak_entries e WHERE e.id = m.id AND e.error LIKE 'planned ' || m.mark || ' lease %'))""",
    "outcomes without their effect": f"""
        SELECT j.id, j.state FROM soak_jobs j LEFT JOIN soak_withdrawn w ON w.job_id = j.id
        WHERE j.kind IN {_TRANSACTIONAL} AND (
            (j.state = 'completed' AND NOT EXISTS (SELECT FROM soak_marks m WHERE m.id = j.id AND m.mark = 'done'))
            OR (j.state = 'cancelled' AND w.job_id IS NULL
                AND NOT EXISTS (SELECT FROM soak_marks m WHERE m.id = j.id AND m.mark = 'cancel'))
            OR (SELECT count(*) FROM soak_entries e WHERE e.id = j.id AND e.error LIKE 'planned again%')
                <> (SELECT count(*) FROM soak_marks m WHERE m.id = j.id AND m.mark LIKE 'again %'))""",
    "effects of a stale attempt": """
        SELECT m.id, m.mark, m.lease, j.run_lease FROM soak_marks m JOIN soak_jobs j USING (id)
        WHERE m.mark IN ('done', 'cancel') AND m.lease <> j.run_lease""",
    "outcomes of a stale attempt": f"""
        SELECT id, run_lease, result FROM soak_jobs
        WHERE state = 'completed' AND kind IN {_PLANNED} AND (result->>'lease')::bigint <> run_lease
        UNION ALL
        SELECT e.id, t.run_lease, to_jsonb(e.error) FROM soak_entries e
        JOIN soak_tries t ON t.job_id = e.id AND t.run_lease = substring(e.error FROM 'lease (\\d+)$')::bigint
        WHERE e.error LIKE 'planned %' AND t.attempt <> e.attempt""",
    "outcomes without a try": """
        SELECT j.id, j.run_lease FROM soak_jobs j WHERE j.state = 'completed' AND (
            (j.kind IN ('call', 'call_async', 'tally') AND NOT EXISTS (
                SELECT FROM soak_tries t WHERE t.job_id = j.id AND t.run_lease = j.run_lease))
            OR (j.kind IN ('walk', 'walk_async') AND NOT EXISTS (
                SELECT FROM soak_steps t WHERE t.job_id = j.id AND t.run_lease = j.run_lease)))""",
    "children of handlers missing or doubled": """
        SELECT COALESCE(m.id, l.id) AS id, m.mark, m.effects, l.leaves
        FROM (SELECT m.* FROM soak_marks m JOIN soak_jobs j USING (id) WHERE (j.args->>'child')::bool) m
        FULL JOIN (
            SELECT parent_id AS id, args->>'mark' AS mark, count(*) AS leaves,
                bool_and(parent_outcome IS NULL AND root_id = parent_id) AS sane
            FROM soak_jobs WHERE kind = 'leaf' GROUP BY 1, 2
        ) l ON l.id = m.id AND l.mark = m.mark
        WHERE l.leaves IS DISTINCT FROM m.effects OR NOT l.sane""",
    "follow-ups missing": """
        SELECT d.* FROM soak_due d LEFT JOIN soak_notes n USING (id, outcome, spec, attempt) WHERE n.id IS NULL""",
    "follow-ups doubled": "SELECT * FROM soak_notes WHERE notes > 1",
    "follow-ups of nothing": """
        SELECT n.* FROM soak_notes n LEFT JOIN soak_due d USING (id, outcome, spec, attempt)
        WHERE d.id IS NULL OR NOT n.sane""",
    "follow-ups still owed": "SELECT job_id AS id, outcome, spec, attempts, last_error FROM awa.follow_up_obligations",
    "buckets without a tally": """
        SELECT DISTINCT j.args->>'bucket' AS bucket FROM soak_jobs j
        WHERE j.state = 'completed' AND j.kind IN ('write', 'call_async') AND NOT EXISTS (
            SELECT FROM soak_jobs t WHERE t.kind = 'tally' AND t.args->>'bucket' = j.args->>'bucket')""",
    "attempts that do not add up": """
        SELECT j.id, j.state, j.attempt, cardinality(j.errors) AS errors
        FROM soak_jobs j LEFT JOIN soak_withdrawn w ON w.job_id = j.id
        WHERE j.attempt - cardinality(j.errors) <> (j.state = 'completed')::int
            AND NOT (w.job_id IS NOT NULL AND j.attempt - cardinality(j.errors) = -1)""",
    "attempts out of order": """
        SELECT e.id, e.number, e.attempt FROM soak_entries e LEFT JOIN soak_withdrawn w ON w.job_id = e.id
        WHERE e.attempt <> e.number AND NOT (w.job_id IS NOT NULL AND e.last AND e.attempt = e.number - 1)""",
    "plans not carried out": f"""
        SELECT j.id, j.kind, j.state, j.args, j.snoozes FROM soak_jobs j LEFT JOIN soak_withdrawn w ON w.job_id = j.id,
            LATERAL (SELECT count(*) FILTER (WHERE error LIKE 'planned error%') AS raises,
                count(*) FILTER (WHERE error LIKE 'planned again%') AS agains,
                count(*) FILTER (WHERE error LIKE 'planned end%') AS ends,
                count(DISTINCT split_part(error, ' lease ', 1)) FILTER (WHERE error LIKE 'planned %') AS several
                FROM soak_entries e WHERE e.id = j.id) p
        WHERE j.kind IN {_PLANNED} AND w.job_id IS NULL AND j.queue <> 'doomed' AND (
            (p.raises, p.agains, j.snoozes, p.several)
                <> ((j.args->>'raises')::int, (j.args->>'agains')::int, (j.args->>'snoozes')::int,
                    p.raises + p.agains + p.ends)
            OR p.ends <> (j.args->>'end' = 'fatal')::int
            OR j.state <> CASE j.args->>'end' WHEN 'done' THEN 'completed' WHEN 'fatal' THEN 'failed'
                ELSE 'cancelled' END)""",
    "snoozes without their effect": """
        SELECT j.id, j.snoozes FROM soak_jobs j WHERE j.kind IN ('write', 'write_async')
            AND j.snoozes <> (SELECT count(*) FROM soak_marks m WHERE m.id = j.id AND m.mark LIKE 'snooze %')""",
    "withdrawn, and not cancelled": """
        SELECT w.job_id AS id, w.by, j.state FROM soak_withdrawn w LEFT JOIN soak_jobs j ON j.id = w.job_id
        WHERE j.state IS DISTINCT FROM 'cancelled'""",
    "callbacks answered twice": """
        SELECT min(job_id) AS id, callback_id FROM soak_answers GROUP BY callback_id HAVING count(*) > 1""",
    "answers that did not come true": """
        SELECT a.job_id AS id, a.how, a.run_lease, j.state FROM soak_answers a LEFT JOIN soak_jobs j ON j.id = a.job_id
        WHERE a.how <> 'resume' AND (j.run_lease <> a.run_lease
            OR j.state IS DISTINCT FROM CASE a.how WHEN 'complete' THEN 'completed' ELSE 'failed' END
            OR (a.how = 'complete' AND j.result->>'answer' IS DISTINCT FROM a.callback_id::text))""",
    "waits that ended without an answer": """
        SELECT j.id, j.kind, j.run_lease, j.result FROM soak_jobs j
        WHERE j.kind IN ('park', 'attend') AND j.state = 'completed' AND NOT EXISTS (
            SELECT FROM soak_answers a WHERE a.job_id = j.id AND a.run_lease = j.run_lease
                AND a.how = CASE WHEN j.result ? 'lease' THEN 'resume' ELSE 'complete' END
                AND a.callback_id::text = j.result->>'answer')""",
    "dead letters missing": """
        SELECT id, queue, state, stored_in FROM soak_jobs
        WHERE (queue = 'doomed' AND state = 'failed') <> (stored_in = 'dead')""",
    "jobs that should not have failed": """
        SELECT id, kind, errors[cardinality(errors)] AS error FROM soak_jobs WHERE state = 'failed'
            AND queue <> 'doomed' AND COALESCE(args->>'end', '') <> 'fatal'
            AND NOT EXISTS (SELECT FROM soak_answers a WHERE a.job_id = soak_jobs.id AND a.how = 'fail')""",
    "leases handed out twice": """
        SELECT run_lease, array_agg(DISTINCT job_id) AS id FROM (
            SELECT run_lease, job_id, pid FROM soak_effects UNION ALL SELECT run_lease, job_id, pid FROM soak_tries
            UNION ALL SELECT run_lease, job_id, pid FROM soak_steps UNION ALL
            SELECT run_lease, id, NULL FROM soak_jobs WHERE run_lease > 0
        ) seen GROUP BY run_lease HAVING count(DISTINCT job_id) > 1 OR count(DISTINCT pid) > 1""",
    "checkpoints lost": """
        SELECT b.job_id AS id, b.run_lease, b.step AS begun, max(r.step) AS reached
        FROM soak_steps b JOIN soak_steps r ON r.job_id = b.job_id AND r.run_lease < b.run_lease AND r.mark = 'reached'
        WHERE b.mark = 'begin' GROUP BY b.id, 1, 2, 3 HAVING b.step < max(r.step)""",
    "checkpoints out of nowhere": """
        SELECT b.job_id AS id, b.run_lease, b.step AS begun FROM soak_steps b WHERE b.mark = 'begin' AND b.step > 1 + (
            SELECT COALESCE(max(r.step), 0) FROM soak_steps r
            WHERE r.job_id = b.job_id AND r.run_lease < b.run_lease)""",
    "walks with steps left out": """
        SELECT j.id FROM soak_jobs j WHERE j.kind IN ('walk', 'walk_async') AND j.state = 'completed' AND
            (SELECT max(step) FROM soak_steps s WHERE s.job_id = j.id) < (j.args->>'steps')::int""",
    "claims without their row": """
        SELECT c.job_id AS id FROM awa.job_unique_claims c LEFT JOIN awa.jobs j ON j.id = c.job_id
        WHERE j.unique_key IS DISTINCT FROM c.unique_key OR j.state IN ('completed', 'failed', 'cancelled')""",
    "too many errors to tell": "SELECT id FROM soak_jobs WHERE cardinality(errors) >= 50",
}

#: What must hold at any moment, in one look.
ALWAYS: dict[str, str] = {
    "in two tables": "SELECT id FROM awa.jobs GROUP BY id HAVING count(*) > 1",
    "unique claims that are not true": """
        SELECT COALESCE(c.job_id, j.id) AS id FROM awa.job_unique_claims c FULL JOIN (
            SELECT id, unique_key FROM awa.jobs WHERE unique_key IS NOT NULL
                AND state NOT IN ('completed', 'failed', 'cancelled')
        ) j ON j.id = c.job_id AND j.unique_key = c.unique_key WHERE j.id IS NULL OR c.job_id IS NULL""",
    "transitions without their follow-up": """
        SELECT j.id, s.spec FROM awa.jobs j JOIN soak_specs s ON s.kind = j.kind AND s.outcome = 'completed'
        WHERE j.state = 'completed' AND (j.args->>'tells')::bool
            AND NOT EXISTS (SELECT FROM awa.jobs n WHERE n.parent_id = j.id AND n.args->>'spec' = s.spec)
            AND NOT EXISTS (
                SELECT FROM awa.follow_up_obligations o
                WHERE o.job_id = j.id AND o.spec = s.spec AND o.outcome = 'completed')""",
}

#: Seconds that a transaction may stand still: longer than any handler takes, and any process is frozen.
STANDING = 15
ALWAYS["transactions left open"] = f"""
    SELECT a.pid, a.client_port, now() - a.xact_start AS open, left(a.query, 300) AS last,
        array(SELECT b.pid FROM pg_stat_activity b WHERE a.pid = ANY (pg_blocking_pids(b.pid))) AS blocked
    FROM pg_stat_activity a WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
        AND a.state LIKE 'idle in transaction%' AND a.state_change < now() - interval '{STANDING} seconds'"""

#: How much of everything there was.
COUNTS: dict[str, str] = {
    "jobs": "SELECT count(*) FROM soak_jobs",
    "asked": "SELECT count(*) FROM soak_asked",
    "handled": f"SELECT count(*) FROM soak_jobs WHERE state IN {_FINAL}",
    "effects": "SELECT count(*) FROM soak_effects",
    "follow-ups": "SELECT count(*) FROM soak_jobs WHERE kind = 'note'",
    "rescues": "SELECT count(*) FROM soak_outcomes WHERE outcome = 'rescued'",
    "retries": "SELECT count(*) FROM soak_outcomes WHERE outcome = 'retried'",
    "dead letters": "SELECT count(*) FROM awa.dlq_entries",
}


@dataclass
class Findings:
    """Offenders by check, and the counts."""

    offenders: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def found(self, check: str) -> int:
        return len(self.offenders.get(check, ()))

    @property
    def clean(self) -> bool:
        return not any(self.offenders.values())


def look_now(connection: psycopg.Connection[Any]) -> Findings:
    """What must hold at any moment."""
    with connection.cursor(row_factory=dict_row) as cursor:
        return Findings({check: cursor.execute(query).fetchall() for check, query in ALWAYS.items()})


def audit(connection: psycopg.Connection[Any]) -> Findings:
    """What must hold when all is done."""
    findings = Findings()
    with connection.cursor(row_factory=dict_row) as cursor:
        for statement in (*PREPARE.split(";\n"), upkeep.PREPARE):
            cursor.execute(statement)
        for check, query in (CHECKS | upkeep.CHECKS).items():
            findings.offenders[check] = cursor.execute(query).fetchall()
        for what, query in (COUNTS | upkeep.COUNTS).items():
            row = cursor.execute(query).fetchone()
            findings.counts[what] = 0 if row is None else row["count"]
    return findings


def story(connection: psycopg.Connection[Any], job_id: int) -> str:
    """All there is to know of one job: its row, what its handlers left, its children and what is owed."""
    queries = {
        "job": f"SELECT * FROM ({upkeep.ALL_JOBS}) AS jobs WHERE id = %s",
        "effects": "SELECT * FROM soak_effects WHERE job_id = %s ORDER BY id",
        "tries": "SELECT * FROM soak_tries WHERE job_id = %s ORDER BY id",
        "steps": "SELECT * FROM soak_steps WHERE job_id = %s ORDER BY id",
        "answers": "SELECT * FROM soak_answers WHERE job_id = %s ORDER BY id",
        "children": "SELECT id, kind, state, parent_outcome, args FROM awa.jobs WHERE parent_id = %s ORDER BY id",
        "owed": "SELECT * FROM awa.follow_up_obligations WHERE job_id = %s",
    }
    lines: list[str] = []
    with connection.cursor(row_factory=dict_row) as cursor:
        for what, query in queries.items():
            lines += [f"      {what}: {_short(row)}" for row in cursor.execute(query, (job_id,)).fetchall()]
    return "\n".join(lines)


def _short(row: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, list):
            return "[" + ", ".join(text(one) for one in value) + "]"
        if isinstance(value, dict):
            value = {key: one for key, one in value.items() if key != "traceback" and one not in (0, False)}
        return str(value)[:300]

    return " ".join(f"{key}={text(value)}" for key, value in row.items() if value not in (None, [], {}))
