"""Step 1: jobs, scheduled jobs, dead letters, the view over them, queues, follow-ups, processes.

Frozen text: once released, a step never changes. `{schema}` is the quoted schema, `{schema_literal}` the
same as an SQL string, `{channel}` the name of its wake-up channel.
"""

from awa_sqla.schema.steps.step import Step, exclusive

UP = (
    # The schema itself, unless a DBA has made it.
    """\
DO $body$ BEGIN
    IF to_regnamespace({schema_literal}) IS NULL THEN
        CREATE SCHEMA {schema};
    END IF;
END $body$""",
    "CREATE SEQUENCE {schema}.jobs_id_seq",
    "CREATE SEQUENCE {schema}.run_lease_seq",
    """\
CREATE TABLE {schema}.schema_version (
    version INTEGER NOT NULL,
    applied_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    PRIMARY KEY (version)
)""",
    """\
CREATE TABLE {schema}.jobs_hot (
    id BIGINT DEFAULT nextval('{schema}.jobs_id_seq') NOT NULL,
    parent_id BIGINT,
    root_id BIGINT,
    run_lease BIGINT DEFAULT 0 NOT NULL,
    run_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    attempted_at TIMESTAMP WITH TIME ZONE,
    heartbeat_at TIMESTAMP WITH TIME ZONE,
    deadline_at TIMESTAMP WITH TIME ZONE,
    finalized_at TIMESTAMP WITH TIME ZONE,
    callback_timeout_at TIMESTAMP WITH TIME ZONE,
    deadline_seconds DOUBLE PRECISION,
    snoozes INTEGER DEFAULT 0 NOT NULL,
    priority SMALLINT DEFAULT 2 NOT NULL,
    attempt SMALLINT DEFAULT 0 NOT NULL,
    max_attempts SMALLINT DEFAULT 25 NOT NULL,
    unique_states SMALLINT,
    callback_id UUID,
    state TEXT DEFAULT 'available' NOT NULL,
    kind TEXT NOT NULL,
    queue TEXT DEFAULT 'default' NOT NULL,
    worker_id TEXT,
    parent_outcome TEXT,
    unique_key BYTEA,
    args JSONB DEFAULT '{}' NOT NULL,
    metadata JSONB DEFAULT '{}' NOT NULL,
    progress JSONB,
    result JSONB,
    tags TEXT[] DEFAULT '{}' NOT NULL,
    errors JSONB[] DEFAULT '{}' NOT NULL,
    callback_filter TEXT,
    callback_on_complete TEXT,
    callback_on_fail TEXT,
    callback_transform TEXT,
    PRIMARY KEY (id),
    CONSTRAINT ck_jobs_hot_state CHECK (
        state IN ('available', 'running', 'waiting_external', 'completed', 'failed', 'cancelled')
    ),
    CONSTRAINT ck_jobs_hot_kind CHECK (length(kind) BETWEEN 1 AND 200),
    CONSTRAINT ck_jobs_hot_queue CHECK (length(queue) BETWEEN 1 AND 200),
    CONSTRAINT ck_jobs_hot_priority CHECK (priority BETWEEN 1 AND 4),
    CONSTRAINT ck_jobs_hot_attempt CHECK (attempt >= 0),
    CONSTRAINT ck_jobs_hot_max_attempts CHECK (max_attempts BETWEEN 1 AND 1000),
    CONSTRAINT ck_jobs_hot_tags CHECK (cardinality(tags) <= 20),
    CONSTRAINT ck_jobs_hot_run_at CHECK (run_at BETWEEN '1970-01-01 00:00:00+00' AND '9000-01-01 00:00:00+00')
)""",
    """\
CREATE INDEX ix_jobs_hot_claim ON {schema}.jobs_hot (queue, priority, run_at, id)
WHERE state = 'available'""",
    "CREATE INDEX ix_jobs_hot_parent_id ON {schema}.jobs_hot (parent_id) WHERE parent_id IS NOT NULL",
    "CREATE INDEX ix_jobs_hot_root_id ON {schema}.jobs_hot (root_id) WHERE root_id IS NOT NULL",
    "CREATE INDEX ix_jobs_hot_running ON {schema}.jobs_hot (id) WHERE state = 'running'",
    """\
CREATE TABLE {schema}.scheduled_jobs (
    run_at TIMESTAMP WITH TIME ZONE NOT NULL,
    state TEXT DEFAULT 'scheduled' NOT NULL,
    id BIGINT DEFAULT nextval('{schema}.jobs_id_seq') NOT NULL,
    parent_id BIGINT,
    root_id BIGINT,
    run_lease BIGINT DEFAULT 0 NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    attempted_at TIMESTAMP WITH TIME ZONE,
    heartbeat_at TIMESTAMP WITH TIME ZONE,
    deadline_at TIMESTAMP WITH TIME ZONE,
    finalized_at TIMESTAMP WITH TIME ZONE,
    callback_timeout_at TIMESTAMP WITH TIME ZONE,
    deadline_seconds DOUBLE PRECISION,
    snoozes INTEGER DEFAULT 0 NOT NULL,
    priority SMALLINT DEFAULT 2 NOT NULL,
    attempt SMALLINT DEFAULT 0 NOT NULL,
    max_attempts SMALLINT DEFAULT 25 NOT NULL,
    unique_states SMALLINT,
    callback_id UUID,
    kind TEXT NOT NULL,
    queue TEXT DEFAULT 'default' NOT NULL,
    worker_id TEXT,
    parent_outcome TEXT,
    unique_key BYTEA,
    args JSONB DEFAULT '{}' NOT NULL,
    metadata JSONB DEFAULT '{}' NOT NULL,
    progress JSONB,
    result JSONB,
    tags TEXT[] DEFAULT '{}' NOT NULL,
    errors JSONB[] DEFAULT '{}' NOT NULL,
    callback_filter TEXT,
    callback_on_complete TEXT,
    callback_on_fail TEXT,
    callback_transform TEXT,
    PRIMARY KEY (id),
    CONSTRAINT ck_scheduled_jobs_state CHECK (state IN ('scheduled', 'retryable')),
    CONSTRAINT ck_scheduled_jobs_kind CHECK (length(kind) BETWEEN 1 AND 200),
    CONSTRAINT ck_scheduled_jobs_queue CHECK (length(queue) BETWEEN 1 AND 200),
    CONSTRAINT ck_scheduled_jobs_priority CHECK (priority BETWEEN 1 AND 4),
    CONSTRAINT ck_scheduled_jobs_attempt CHECK (attempt >= 0),
    CONSTRAINT ck_scheduled_jobs_max_attempts CHECK (max_attempts BETWEEN 1 AND 1000),
    CONSTRAINT ck_scheduled_jobs_tags CHECK (cardinality(tags) <= 20),
    CONSTRAINT ck_scheduled_jobs_run_at CHECK (run_at BETWEEN '1970-01-01 00:00:00+00' AND '9000-01-01 00:00:00+00')
)""",
    "CREATE INDEX ix_scheduled_jobs_due ON {schema}.scheduled_jobs (run_at, id)",
    """\
CREATE INDEX ix_scheduled_jobs_parent_id ON {schema}.scheduled_jobs (parent_id)
WHERE parent_id IS NOT NULL""",
    """\
CREATE INDEX ix_scheduled_jobs_root_id ON {schema}.scheduled_jobs (root_id)
WHERE root_id IS NOT NULL""",
    """\
CREATE TABLE {schema}.dlq_entries (
    id BIGINT NOT NULL,
    state TEXT DEFAULT 'failed' NOT NULL,
    original_run_lease BIGINT NOT NULL,
    dlq_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    dlq_reason TEXT NOT NULL,
    parent_id BIGINT,
    root_id BIGINT,
    run_lease BIGINT DEFAULT 0 NOT NULL,
    run_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    attempted_at TIMESTAMP WITH TIME ZONE,
    heartbeat_at TIMESTAMP WITH TIME ZONE,
    deadline_at TIMESTAMP WITH TIME ZONE,
    finalized_at TIMESTAMP WITH TIME ZONE,
    callback_timeout_at TIMESTAMP WITH TIME ZONE,
    deadline_seconds DOUBLE PRECISION,
    snoozes INTEGER DEFAULT 0 NOT NULL,
    priority SMALLINT DEFAULT 2 NOT NULL,
    attempt SMALLINT DEFAULT 0 NOT NULL,
    max_attempts SMALLINT DEFAULT 25 NOT NULL,
    unique_states SMALLINT,
    callback_id UUID,
    kind TEXT NOT NULL,
    queue TEXT DEFAULT 'default' NOT NULL,
    worker_id TEXT,
    parent_outcome TEXT,
    unique_key BYTEA,
    args JSONB DEFAULT '{}' NOT NULL,
    metadata JSONB DEFAULT '{}' NOT NULL,
    progress JSONB,
    result JSONB,
    tags TEXT[] DEFAULT '{}' NOT NULL,
    errors JSONB[] DEFAULT '{}' NOT NULL,
    callback_filter TEXT,
    callback_on_complete TEXT,
    callback_on_fail TEXT,
    callback_transform TEXT,
    PRIMARY KEY (id),
    CONSTRAINT ck_dlq_entries_state CHECK (state IN ('failed')),
    CONSTRAINT ck_dlq_entries_kind CHECK (length(kind) BETWEEN 1 AND 200),
    CONSTRAINT ck_dlq_entries_queue CHECK (length(queue) BETWEEN 1 AND 200),
    CONSTRAINT ck_dlq_entries_priority CHECK (priority BETWEEN 1 AND 4),
    CONSTRAINT ck_dlq_entries_attempt CHECK (attempt >= 0),
    CONSTRAINT ck_dlq_entries_max_attempts CHECK (max_attempts BETWEEN 1 AND 1000),
    CONSTRAINT ck_dlq_entries_tags CHECK (cardinality(tags) <= 20),
    CONSTRAINT ck_dlq_entries_run_at CHECK (run_at BETWEEN '1970-01-01 00:00:00+00' AND '9000-01-01 00:00:00+00')
)""",
    """\
CREATE INDEX ix_dlq_entries_parent_id ON {schema}.dlq_entries (parent_id)
WHERE parent_id IS NOT NULL""",
    "CREATE INDEX ix_dlq_entries_root_id ON {schema}.dlq_entries (root_id) WHERE root_id IS NOT NULL",
    """\
CREATE TABLE {schema}.queue_meta (
    queue TEXT NOT NULL,
    declared_concurrency INTEGER,
    declared_deadline_seconds DOUBLE PRECISION,
    declared_poll_seconds DOUBLE PRECISION,
    declared_dead_letters BOOLEAN,
    override_concurrency INTEGER,
    override_deadline_seconds DOUBLE PRECISION,
    override_poll_seconds DOUBLE PRECISION,
    override_dead_letters BOOLEAN,
    paused_at TIMESTAMP WITH TIME ZONE,
    paused_by TEXT,
    pause_reason TEXT,
    paused_until TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (queue),
    CONSTRAINT ck_queue_meta_queue CHECK (length(queue) BETWEEN 1 AND 200),
    CONSTRAINT ck_queue_meta_paused CHECK (paused_until IS NULL OR paused_at IS NOT NULL)
)""",
    """\
CREATE TABLE {schema}.follow_up_specs (
    kind TEXT NOT NULL,
    outcome TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    last_seen TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    PRIMARY KEY (kind, outcome, name)
)""",
    """\
CREATE TABLE {schema}.follow_up_obligations (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    job_id BIGINT NOT NULL,
    kind TEXT NOT NULL,
    outcome TEXT NOT NULL,
    spec TEXT NOT NULL,
    snapshot JSONB NOT NULL,
    context JSONB DEFAULT '{}' NOT NULL,
    attempts INTEGER DEFAULT 0 NOT NULL,
    next_attempt_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp(),
    last_error TEXT,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    PRIMARY KEY (id)
)""",
    """\
CREATE INDEX ix_follow_up_obligations_due ON {schema}.follow_up_obligations (next_attempt_at, id)
WHERE next_attempt_at IS NOT NULL""",
    """\
CREATE TABLE {schema}.runtime_instances (
    id TEXT NOT NULL,
    role TEXT NOT NULL,
    hostname TEXT NOT NULL,
    pid INTEGER NOT NULL,
    version TEXT NOT NULL,
    queues TEXT[] DEFAULT '{}' NOT NULL,
    kinds TEXT[] DEFAULT '{}' NOT NULL,
    unknown_kinds JSONB DEFAULT '{}' NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    last_seen TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
    stopping_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (id)
)""",
    """\
CREATE VIEW {schema}.jobs AS
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority, attempt,
    max_attempts, unique_states, callback_id, state, kind, queue, worker_id, parent_outcome,
    unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'hot'::text AS stored_in FROM
    {schema}.jobs_hot
UNION ALL
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority, attempt,
    max_attempts, unique_states, callback_id, state, kind, queue, worker_id, parent_outcome,
    unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'scheduled'::text AS stored_in FROM
    {schema}.scheduled_jobs
UNION ALL
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority, attempt,
    max_attempts, unique_states, callback_id, state, kind, queue, worker_id, parent_outcome,
    unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'dead'::text AS stored_in FROM
    {schema}.dlq_entries""",
    """\
CREATE FUNCTION {schema}.wake_workers() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF pg_catalog.current_setting('awa.notify', true) IS DISTINCT FROM 'off' THEN
        PERFORM pg_catalog.pg_notify('{channel}', pg_catalog.left(pg_catalog.encode(
            pg_catalog.sha256(pg_catalog.convert_to(q.queue, 'UTF8')), 'hex'), 16))
        FROM (SELECT DISTINCT queue FROM inserted WHERE state = 'available') AS q;
    END IF;
    RETURN NULL;
END
$body$""",
    """\
CREATE TRIGGER jobs_hot_wake_workers AFTER INSERT ON {schema}.jobs_hot
REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION {schema}.wake_workers()""",
)

DOWN = (
    "DROP VIEW {schema}.jobs",
    "DROP TRIGGER jobs_hot_wake_workers ON {schema}.jobs_hot",
    "DROP FUNCTION {schema}.wake_workers()",
    "DROP TABLE {schema}.runtime_instances",
    "DROP TABLE {schema}.follow_up_obligations",
    "DROP TABLE {schema}.follow_up_specs",
    "DROP TABLE {schema}.queue_meta",
    "DROP TABLE {schema}.dlq_entries",
    "DROP TABLE {schema}.scheduled_jobs",
    "DROP TABLE {schema}.jobs_hot",
    "DROP TABLE {schema}.schema_version",
    "DROP SEQUENCE {schema}.jobs_id_seq",
    "DROP SEQUENCE {schema}.run_lease_seq",
    # The schema too, unless something is in it, somebody else owns it, or we could not make it again.
    """\
DO $body$ BEGIN
    IF {schema_literal} <> '"public"' AND NOT EXISTS (
        SELECT FROM pg_depend WHERE refclassid = 'pg_namespace'::regclass
        AND refobjid = to_regnamespace({schema_literal}) AND deptype = 'n'
    ) AND EXISTS (
        SELECT FROM pg_namespace WHERE oid = to_regnamespace({schema_literal})
        AND nspowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)
    ) AND has_database_privilege(current_database(), 'CREATE')
    THEN
        DROP SCHEMA {schema};
    END IF;
END $body$""",
)

STEP = Step(
    UP,
    DOWN,
    locks={},
    down_locks=exclusive(
        "jobs",
        "jobs_hot",
        "scheduled_jobs",
        "dlq_entries",
        "queue_meta",
        "follow_up_specs",
        "follow_up_obligations",
        "runtime_instances",
    ),
)
