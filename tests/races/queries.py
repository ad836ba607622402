"""What a race asks the database beside the package: who waits for whom, and what is committed."""

from __future__ import annotations

#: Behind another session, that is; behind the autovacuum everyone may have to wait for a moment.
HELD_UP = """
SELECT EXISTS (
    SELECT FROM unnest(pg_blocking_pids(%s)) blocker JOIN pg_stat_activity ON pid = blocker
    WHERE backend_type = 'client backend'
)
"""

#: The job, and everything that belongs to it.
COMMITTED = """
    SELECT job.*, heartbeat_at < now() - interval '30 min' AS silent,
        callback_timeout_at < now() AS expired, COALESCE(deadline_at < now(), false) AS overdue,
        COALESCE((SELECT aged FROM jobs_hot WHERE id = job.id), 0) AS aged,
        (SELECT dlq_reason FROM dlq_entries WHERE id = job.id),
        ARRAY(SELECT parent_outcome FROM jobs WHERE parent_id = job.id) AS children,
        ARRAY(SELECT outcome FROM follow_up_obligations WHERE job_id = job.id) AS owed,
        ARRAY(SELECT note FROM app_order) AS orders
    FROM jobs AS job WHERE id = %s
"""
