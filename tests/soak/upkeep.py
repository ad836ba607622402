"""What is there to maintain besides jobs: schedules that fire each second, jobs that are deleted soon, and what is
noted of it by triggers, since nobody could tell afterwards.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta

from sqlalchemy import Connection, text

from awa_sqla.maintenance import lanes, leadership
from awa_sqla.worker import upkeep
from tests.soak.app import AGEING, BRIEF, KEPT, Plan, awa, write

#: How long a lease lasts here.
LEASE = timedelta(seconds=2)


class Tick(Plan):
    """The job of a schedule; transactional."""

    schedule: str


awa.task(Tick, transactional=True)(write)


def _built(tick: datetime) -> Tick:
    """What this process makes of a tick."""
    assert tick.microsecond == 0
    return Tick(schedule="built")


#: Each fires each second; the first two catch up whatever was missed.
EACH_SECOND = "* * * * * *"
awa.periodic("stored", EACH_SECOND, Tick(schedule="stored"), missed_fires="catch_up")
awa.periodic("built", EACH_SECOND, _built, missed_fires="catch_up")
awa.periodic("coalescing", EACH_SECOND, Tick(schedule="coalescing"))

_TRIGGERS = f"""
CREATE TABLE soak_pruned (job jsonb NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE FUNCTION soak_prune() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO soak_pruned (job) SELECT to_jsonb(OLD) || '{{"stored_in": "pruned"}}'; RETURN NULL; END $$;
CREATE TRIGGER soak_prune AFTER DELETE ON awa.jobs_hot FOR EACH ROW
    WHEN (OLD.state IN ('completed', 'failed', 'cancelled')) EXECUTE FUNCTION soak_prune();
CREATE TABLE soak_rises (job_id bigint NOT NULL, aged int NOT NULL, priority int NOT NULL, waited float NOT NULL);
CREATE FUNCTION soak_rise() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO soak_rises VALUES (NEW.id, NEW.aged, NEW.priority + NEW.aged,
        extract(epoch FROM clock_timestamp() - NEW.run_at) / {AGEING.total_seconds()});
    RETURN NULL; END $$;
CREATE TRIGGER soak_rise AFTER UPDATE OF aged ON awa.jobs_hot FOR EACH ROW
    WHEN (NEW.aged > OLD.aged) EXECUTE FUNCTION soak_rise()
"""

#: A job cannot be changed once it has ended, but when it is deleted: its row as it was then is as good as any.
ALL_JOBS = """
SELECT * FROM awa.jobs
UNION ALL SELECT (jsonb_populate_record(NULL::awa.jobs, job)).* FROM soak_pruned
"""

#: What is wrong -> a query for it; as in `audit`.
CHECKS: dict[str, str] = {
    "ticks that fired twice": """
        SELECT min(id) AS id, schedule, tick, count(*) FROM soak_ticks GROUP BY schedule, tick HAVING count(*) > 1""",
    "ticks that did not fire": """
        SELECT s.schedule, tick FROM (
            SELECT schedule, generate_series(min(tick), max(tick), interval '1 second') AS tick
            FROM soak_ticks WHERE schedule IN ('stored', 'built') GROUP BY schedule
        ) s WHERE NOT EXISTS (SELECT FROM soak_ticks t WHERE t.schedule = s.schedule AND t.tick = s.tick)""",
    "ticks that fired too early": """
        SELECT t.id, t.schedule, t.tick FROM soak_ticks t JOIN soak_jobs j USING (id) WHERE t.tick > j.created_at""",
    "schedules that do not know what has fired": """
        SELECT name AS schedule, last_enqueued_at, last_error FROM awa.cron_jobs c WHERE last_error IS NOT NULL
            OR last_enqueued_at IS DISTINCT FROM (SELECT max(tick) FROM soak_ticks WHERE schedule = c.name)""",
    "jobs deleted too early, or of queues that keep them": f"""
        SELECT (job->>'id')::bigint AS id, job->>'queue' AS queue, at - (job->>'finalized_at')::timestamptz AS after
        FROM soak_pruned WHERE job->>'queue' <> '{BRIEF}'
            OR at - (job->>'finalized_at')::timestamptz < interval '{KEPT.total_seconds()} seconds'""",
    "jobs that have not their own priority again": """
        SELECT id, queue, state, priority, metadata->>'priority' AS own FROM soak_jobs
        WHERE metadata ? 'priority' AND priority <> (metadata->>'priority')::int
        UNION ALL SELECT id, queue, state, priority, aged::text FROM awa.jobs_hot WHERE aged <> 0""",
    "levels that were not waited for": """
        SELECT job_id AS id, aged, priority, waited FROM soak_rises WHERE aged > floor(waited) OR aged >= priority""",
    "rescued more often than it was tried": """
        SELECT j.id, j.attempt, j.max_attempts, count(*) FROM soak_jobs j JOIN soak_entries e ON e.id = j.id
        WHERE e.type = 'rescue' GROUP BY 1, 2, 3
        HAVING count(*) > j.attempt OR j.attempt > j.max_attempts OR count(*) > count(DISTINCT e.attempt)""",
    "leases that outlive their holder": "SELECT name, holder FROM awa.leaders WHERE expires_at > clock_timestamp()",
}

PREPARE = """
CREATE TEMP TABLE soak_ticks AS
    SELECT id, metadata->>'cron_name' AS schedule, (metadata->>'cron_fire_time')::timestamptz AS tick
    FROM soak_jobs WHERE metadata ? 'cron_name'
"""

#: How much of everything there was.
COUNTS: dict[str, str] = {
    "ticks": "SELECT count(*) FROM soak_ticks",
    "deleted": "SELECT count(*) FROM soak_pruned",
    "rises": "SELECT count(*) FROM soak_rises",
    "changes of the leader": "SELECT COALESCE(sum(term), 0)::int AS count FROM awa.leaders",
    "callbacks in vain": "SELECT count(*) FROM soak_entries WHERE type = 'rescue' AND error = 'callback timed out'",
    "deadlines missed": "SELECT count(*) FROM soak_entries WHERE error = 'hard deadline exceeded'",
}

#: No schedule fires any more, so that an end can be reached.
END_OF_TIME = "UPDATE awa.cron_jobs SET paused_at = clock_timestamp()"


def set_up(connection: Connection) -> None:
    """The triggers, on tables that are there."""
    connection.exec_driver_sql(_TRIGGERS)


def hurry(*, forced: bool) -> None:
    """Let this process maintain more often than it would, and, if `forced`, lead whoever else does."""
    leadership.LEASE = leadership.SHORTEST = LEASE.total_seconds()
    lanes.AGEING = lanes.RETENTION = lanes.COUNTS = 1.0
    if forced:  # by a lease of its own
        upkeep.NAME = f"{upkeep.NAME} by {os.getpid()}"


#: Who leads by right.
LEADER = text("SELECT holder FROM awa.leaders WHERE name = 'maintenance' AND expires_at > clock_timestamp()")
