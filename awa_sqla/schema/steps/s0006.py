"""Step 6: leaders, periodic schedules, ageing, retention, counts of finished jobs, the audit log.

Frozen text: once released, a step never changes.
"""

from awa_sqla.schema.steps.step import Index, Step, exclusive

UP = (
    "ALTER TABLE {schema}.jobs_hot ADD COLUMN aged SMALLINT DEFAULT 0 NOT NULL",
    """\
ALTER TABLE {schema}.queue_meta
    ADD COLUMN declared_aging_seconds DOUBLE PRECISION,
    ADD COLUMN declared_keep_completed_seconds DOUBLE PRECISION,
    ADD COLUMN declared_keep_failed_seconds DOUBLE PRECISION,
    ADD COLUMN declared_keep_dead_seconds DOUBLE PRECISION,
    ADD COLUMN override_aging_seconds DOUBLE PRECISION,
    ADD COLUMN override_keep_completed_seconds DOUBLE PRECISION,
    ADD COLUMN override_keep_failed_seconds DOUBLE PRECISION,
    ADD COLUMN override_keep_dead_seconds DOUBLE PRECISION,
    ADD CONSTRAINT ck_queue_meta_aging CHECK (declared_aging_seconds > 0 AND override_aging_seconds > 0),
    ADD CONSTRAINT ck_queue_meta_keep CHECK (declared_keep_completed_seconds >= 0 AND declared_keep_failed_seconds >= 0
        AND declared_keep_dead_seconds >= 0 AND override_keep_completed_seconds >= 0
        AND override_keep_failed_seconds >= 0 AND override_keep_dead_seconds >= 0)""",
    """\
ALTER TABLE {schema}.runtime_instances
    ADD COLUMN stale_after_seconds DOUBLE PRECISION,
    ADD COLUMN lanes JSONB DEFAULT '{}' NOT NULL""",
    """\
CREATE TABLE {schema}.leaders (
    name TEXT NOT NULL,
    holder TEXT NOT NULL,
    term BIGINT DEFAULT 1 NOT NULL,
    acquired_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (name)
)""",
    """\
CREATE TABLE {schema}.cron_jobs (
    name TEXT NOT NULL,
    cron_expr TEXT NOT NULL,
    timezone TEXT DEFAULT 'UTC' NOT NULL,
    kind TEXT,
    queue TEXT,
    args JSONB,
    args_version SMALLINT DEFAULT 1 NOT NULL,
    priority SMALLINT,
    max_attempts SMALLINT,
    deadline_seconds DOUBLE PRECISION,
    tags TEXT[] DEFAULT '{}' NOT NULL,
    metadata JSONB DEFAULT '{}' NOT NULL,
    uniqueness JSONB,
    missed_fire_policy TEXT DEFAULT 'coalesce' NOT NULL,
    most_missed INTEGER DEFAULT 1000 NOT NULL,
    last_enqueued_at TIMESTAMP WITH TIME ZONE,
    last_job_id BIGINT,
    last_error TEXT,
    failed_at TIMESTAMP WITH TIME ZONE,
    counts_from TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    paused_at TIMESTAMP WITH TIME ZONE,
    paused_by TEXT,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    last_seen TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    PRIMARY KEY (name),
    CONSTRAINT ck_cron_jobs_name CHECK (length(name) BETWEEN 1 AND 200),
    CONSTRAINT ck_cron_jobs_policy CHECK (missed_fire_policy IN ('coalesce', 'catch_up', 'skip')),
    CONSTRAINT ck_cron_jobs_most_missed CHECK (most_missed >= 1),
    CONSTRAINT ck_cron_jobs_job CHECK (args IS NULL OR (kind IS NOT NULL AND queue IS NOT NULL)),
    CONSTRAINT ck_cron_jobs_metadata CHECK (jsonb_typeof(metadata) = 'object'),
    CONSTRAINT ck_cron_jobs_earliest CHECK (least(last_enqueued_at, failed_at, counts_from, paused_at, created_at,
        updated_at, last_seen) >= '1970-01-01 00:00:00+00'),
    CONSTRAINT ck_cron_jobs_latest CHECK (greatest(last_enqueued_at, failed_at, counts_from, paused_at, created_at,
        updated_at, last_seen) <= '9000-01-01 00:00:00+00')
)""",
    """\
CREATE TABLE {schema}.job_counts (
    queue TEXT NOT NULL,
    state TEXT NOT NULL,
    jobs BIGINT NOT NULL,
    counted_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    PRIMARY KEY (queue, state)
)""",
    """\
CREATE TABLE {schema}.audit_log (
    id BIGINT GENERATED ALWAYS AS IDENTITY NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    actor TEXT,
    source TEXT NOT NULL,
    verb TEXT NOT NULL,
    target TEXT NOT NULL,
    count BIGINT DEFAULT 1 NOT NULL,
    reason TEXT,
    PRIMARY KEY (id)
)""",
    "CREATE INDEX ix_audit_log_at ON {schema}.audit_log (at)",
)

DOWN = (
    # What waiting has raised goes back: nothing would remember it.
    "UPDATE {schema}.jobs_hot SET priority = least(priority + aged, 4) WHERE state = 'available' AND aged > 0",
    "DROP TABLE {schema}.audit_log",
    "DROP TABLE {schema}.job_counts",
    "DROP TABLE {schema}.cron_jobs",
    "DROP TABLE {schema}.leaders",
    "ALTER TABLE {schema}.runtime_instances DROP COLUMN lanes, DROP COLUMN stale_after_seconds",
    """\
ALTER TABLE {schema}.queue_meta
    DROP CONSTRAINT ck_queue_meta_keep,
    DROP CONSTRAINT ck_queue_meta_aging,
    DROP COLUMN declared_aging_seconds,
    DROP COLUMN declared_keep_completed_seconds,
    DROP COLUMN declared_keep_failed_seconds,
    DROP COLUMN declared_keep_dead_seconds,
    DROP COLUMN override_aging_seconds,
    DROP COLUMN override_keep_completed_seconds,
    DROP COLUMN override_keep_failed_seconds,
    DROP COLUMN override_keep_dead_seconds""",
    "DROP INDEX IF EXISTS {schema}.ix_dlq_entries_queue",
    "DROP INDEX IF EXISTS {schema}.ix_jobs_hot_aged",
    "DROP INDEX IF EXISTS {schema}.ix_jobs_hot_finished",
    "ALTER TABLE {schema}.jobs_hot DROP COLUMN aged",
)

_LOCKS = exclusive("jobs_hot", "queue_meta", "runtime_instances")

STEP = Step(
    UP,
    DOWN,
    locks=_LOCKS,
    down_locks=_LOCKS | exclusive("dlq_entries", "leaders", "cron_jobs", "job_counts", "audit_log"),
    after=(
        Index(
            "jobs_hot",
            "ix_jobs_hot_finished",
            "(state, queue, finalized_at) WHERE state IN ('completed', 'failed', 'cancelled')",
        ),
        Index("jobs_hot", "ix_jobs_hot_aged", "(queue, priority, aged, run_at) WHERE state = 'available' AND aged > 0"),
        Index("dlq_entries", "ix_dlq_entries_queue", "(queue, dlq_at)"),
    ),
)
