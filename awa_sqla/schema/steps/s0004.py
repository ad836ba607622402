"""Step 4: waits that a handler attends, what a callback answered it, and the receipts of callback requests.

Frozen text: once released, a step never changes.
"""

from awa_sqla.schema.steps.step import Index, Step, exclusive

UP = (
    """\
ALTER TABLE {schema}.jobs_hot
    ADD COLUMN attended_at TIMESTAMP WITH TIME ZONE,
    ADD COLUMN callback_answer JSONB""",
    """\
ALTER TABLE {schema}.scheduled_jobs
    ADD COLUMN attended_at TIMESTAMP WITH TIME ZONE,
    ADD COLUMN callback_answer JSONB""",
    """\
ALTER TABLE {schema}.dlq_entries
    ADD COLUMN attended_at TIMESTAMP WITH TIME ZONE,
    ADD COLUMN callback_answer JSONB""",
    """\
CREATE OR REPLACE VIEW {schema}.jobs AS
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority,
    attempt, max_attempts, unique_states, callback_id, state, kind, queue, worker_id,
    parent_outcome, unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'hot'::text AS stored_in,
    args_version, attended_at, callback_answer FROM {schema}.jobs_hot
UNION ALL
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority,
    attempt, max_attempts, unique_states, callback_id, state, kind, queue, worker_id,
    parent_outcome, unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'scheduled'::text AS stored_in,
    args_version, attended_at, callback_answer FROM {schema}.scheduled_jobs
UNION ALL
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority,
    attempt, max_attempts, unique_states, callback_id, state, kind, queue, worker_id,
    parent_outcome, unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'dead'::text AS stored_in,
    args_version, attended_at, callback_answer FROM {schema}.dlq_entries""",
    """\
CREATE TABLE {schema}.callback_receipts (
    request BYTEA NOT NULL,
    callback_id UUID NOT NULL,
    action TEXT NOT NULL,
    answer JSONB DEFAULT '{}' NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    PRIMARY KEY (request)
)""",
    "CREATE INDEX ix_callback_receipts_callback ON {schema}.callback_receipts (callback_id)",
    "CREATE INDEX ix_callback_receipts_created ON {schema}.callback_receipts (created_at)",
)

DOWN = (
    "DROP TABLE {schema}.callback_receipts",
    "DROP INDEX IF EXISTS {schema}.ix_jobs_hot_attended",
    "DROP VIEW {schema}.jobs",
    """\
CREATE VIEW {schema}.jobs AS
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority,
    attempt, max_attempts, unique_states, callback_id, state, kind, queue, worker_id,
    parent_outcome, unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'hot'::text AS stored_in,
    args_version FROM {schema}.jobs_hot
UNION ALL
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority,
    attempt, max_attempts, unique_states, callback_id, state, kind, queue, worker_id,
    parent_outcome, unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'scheduled'::text AS stored_in,
    args_version FROM {schema}.scheduled_jobs
UNION ALL
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority,
    attempt, max_attempts, unique_states, callback_id, state, kind, queue, worker_id,
    parent_outcome, unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'dead'::text AS stored_in,
    args_version FROM {schema}.dlq_entries""",
    "ALTER TABLE {schema}.dlq_entries DROP COLUMN callback_answer, DROP COLUMN attended_at",
    "ALTER TABLE {schema}.scheduled_jobs DROP COLUMN callback_answer, DROP COLUMN attended_at",
    "ALTER TABLE {schema}.jobs_hot DROP COLUMN callback_answer, DROP COLUMN attended_at",
)

_JOBS = ("jobs", "jobs_hot", "scheduled_jobs", "dlq_entries")

STEP = Step(
    UP,
    DOWN,
    locks=exclusive(*_JOBS),
    down_locks=exclusive(*_JOBS, "callback_receipts"),
    after=(Index("jobs_hot", "ix_jobs_hot_attended", "(id) WHERE attended_at IS NOT NULL"),),
)
