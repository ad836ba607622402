"""Step 2: unique jobs (the claims on their keys, kept true by triggers) and the version of a job's arguments.

Frozen text: once released, a step never changes.
"""

from awa_sqla.schema.steps.step import Index, Step, exclusive

UP = (
    "ALTER TABLE {schema}.jobs_hot ADD COLUMN args_version SMALLINT DEFAULT 1 NOT NULL",
    "ALTER TABLE {schema}.scheduled_jobs ADD COLUMN args_version SMALLINT DEFAULT 1 NOT NULL",
    "ALTER TABLE {schema}.dlq_entries ADD COLUMN args_version SMALLINT DEFAULT 1 NOT NULL",
    """\
CREATE OR REPLACE VIEW {schema}.jobs AS
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
    """\
CREATE TABLE {schema}.job_unique_claims (
    unique_key BYTEA NOT NULL,
    job_id BIGINT NOT NULL,
    PRIMARY KEY (unique_key)
)""",
    """\
CREATE FUNCTION {schema}.in_unique_state(state text, unique_states smallint) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $body$
    SELECT coalesce(unique_states & CASE state
        WHEN 'scheduled' THEN 1
        WHEN 'available' THEN 2
        WHEN 'running' THEN 4
        WHEN 'completed' THEN 8
        WHEN 'retryable' THEN 16
        WHEN 'failed' THEN 32
        WHEN 'cancelled' THEN 64
        WHEN 'waiting_external' THEN 128
    END <> 0, false)
$body$""",
    """\
CREATE FUNCTION {schema}.holds_claim(job_id bigint, key bytea) RETURNS boolean
LANGUAGE sql STABLE AS $body$
    SELECT EXISTS (
        SELECT FROM {schema}.jobs AS job WHERE job.id = holds_claim.job_id AND job.unique_key = holds_claim.key
        AND {schema}.in_unique_state(job.state, job.unique_states)
    )
$body$""",
    """\
CREATE FUNCTION {schema}.take_keys(keys bytea[], ids bigint[])
RETURNS TABLE (unique_key bytea, job_id bigint, fresh boolean)
LANGUAGE plpgsql SET enable_seqscan TO off AS $body$
#variable_conflict use_column
BEGIN
    -- In the order of the keys: two that want the same ones cannot wait for each other. Keys that are visibly taken
    -- are not tried: a duplicate costs no id, and does not wait for a holder that somebody is finishing.
    RETURN QUERY WITH wanted AS MATERIALIZED (
        SELECT given.key, given.id, (
            SELECT claim.job_id FROM {schema}.job_unique_claims AS claim WHERE claim.unique_key = given.key
        ) AS holder
        FROM ROWS FROM (pg_catalog.unnest(keys), pg_catalog.unnest(ids)) AS given (key, id)
    ), taken AS (
        INSERT INTO {schema}.job_unique_claims (unique_key, job_id)
        SELECT wanted.key, coalesce(wanted.id, pg_catalog.nextval('{schema}.jobs_id_seq'))
        FROM wanted WHERE wanted.holder IS NULL ORDER BY wanted.key
        ON CONFLICT DO NOTHING
        RETURNING unique_key, job_id
    )
    SELECT taken.unique_key, taken.job_id, true FROM taken
    UNION ALL SELECT wanted.key, wanted.holder, false FROM wanted WHERE wanted.holder IS NOT NULL;
END
$body$""",
    """\
CREATE FUNCTION {schema}.claim_keys(keys bytea[], ids bigint[])
RETURNS TABLE (unique_key bytea, job_id bigint, fresh boolean) LANGUAGE plpgsql AS $body$
DECLARE
    answers {schema}.job_unique_claims[];
    news boolean[];
BEGIN
    LOOP
        IF pg_catalog.cardinality(keys) = 1 THEN
            RETURN QUERY SELECT taken.* FROM {schema}.take_keys(keys, ids) AS taken;
            EXIT WHEN FOUND;
        ELSE
            -- There is no answer for a key that somebody else took and committed meanwhile. All are asked for again,
            -- and what was taken is given up for it: whoever waits for that would be waited for otherwise.
            BEGIN
                SELECT pg_catalog.array_agg((taken.unique_key, taken.job_id)::{schema}.job_unique_claims),
                    pg_catalog.array_agg(taken.fresh) INTO answers, news
                FROM {schema}.take_keys(keys, ids) AS taken;
                IF coalesce(pg_catalog.cardinality(answers), 0) < pg_catalog.cardinality(keys) THEN
                    RAISE SQLSTATE 'AWA01';
                END IF;
                RETURN QUERY SELECT answer.unique_key, answer.job_id, answer.new
                FROM ROWS FROM (pg_catalog.unnest(answers), pg_catalog.unnest(news))
                    AS answer (unique_key, job_id, new);
                EXIT;
            EXCEPTION WHEN SQLSTATE 'AWA01' THEN
                NULL;
            END;
        END IF;
    END LOOP;
END
$body$""",
    """\
CREATE FUNCTION {schema}.sync_claims() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan TO off AS $body$
DECLARE
    held boolean := TG_OP IN ('UPDATE', 'DELETE') AND OLD.unique_key IS NOT NULL
        AND {schema}.in_unique_state(OLD.state, OLD.unique_states);
    wanted boolean := TG_OP IN ('UPDATE', 'INSERT') AND NEW.unique_key IS NOT NULL
        AND {schema}.in_unique_state(NEW.state, NEW.unique_states);
    holder bigint;
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        DELETE FROM {schema}.job_unique_claims AS claim WHERE NOT {schema}.holds_claim(claim.job_id, claim.unique_key);
        RETURN NULL;
    END IF;
    IF held AND wanted AND OLD.unique_key = NEW.unique_key AND OLD.id = NEW.id THEN
        RETURN NULL;
    END IF;
    IF held AND (TG_OP = 'UPDATE' OR NOT {schema}.holds_claim(OLD.id, OLD.unique_key)) THEN
        DELETE FROM {schema}.job_unique_claims AS claim
        WHERE claim.unique_key = OLD.unique_key AND claim.job_id = OLD.id;
    END IF;
    WHILE wanted LOOP
        SELECT claim.job_id INTO holder
        FROM {schema}.job_unique_claims AS claim WHERE claim.unique_key = NEW.unique_key;
        EXIT WHEN holder = NEW.id;
        IF holder IS NOT NULL THEN
            RAISE unique_violation USING
                MESSAGE = 'job ' || NEW.id || ' would be a duplicate of job ' || holder,
                DETAIL = 'Kind ' || NEW.kind || ', unique key ' || pg_catalog.encode(NEW.unique_key, 'hex'),
                CONSTRAINT = 'job_unique_claims_pkey', TABLE = 'job_unique_claims', SCHEMA = TG_TABLE_SCHEMA;
        END IF;
        INSERT INTO {schema}.job_unique_claims (unique_key, job_id) VALUES (NEW.unique_key, NEW.id)
        ON CONFLICT DO NOTHING;
        EXIT WHEN FOUND;
    END LOOP;
    RETURN NULL;
END
$body$""",
    """\
CREATE FUNCTION {schema}.drop_idle_claim() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan TO off AS $body$
BEGIN
    -- Nearly always it is there; the view over all tables would take four times as long to say so.
    IF NOT EXISTS (
        SELECT FROM {schema}.jobs_hot AS job WHERE job.id = NEW.job_id AND job.unique_key = NEW.unique_key
        AND {schema}.in_unique_state(job.state, job.unique_states)
    ) AND NOT {schema}.holds_claim(NEW.job_id, NEW.unique_key) THEN
        DELETE FROM {schema}.job_unique_claims AS claim
        WHERE claim.unique_key = NEW.unique_key AND claim.job_id = NEW.job_id;
    END IF;
    RETURN NULL;
END
$body$""",
    """\
INSERT INTO {schema}.job_unique_claims (unique_key, job_id)
SELECT DISTINCT ON (unique_key) unique_key, id FROM {schema}.jobs
WHERE unique_key IS NOT NULL AND {schema}.in_unique_state(state, unique_states)
ORDER BY unique_key, id""",
    """\
UPDATE {schema}.jobs_hot AS job SET unique_key = NULL, unique_states = NULL
WHERE unique_key IS NOT NULL AND NOT EXISTS (
    SELECT FROM {schema}.job_unique_claims AS claim
    WHERE claim.unique_key = job.unique_key AND claim.job_id = job.id
) AND EXISTS (SELECT FROM {schema}.job_unique_claims AS claim WHERE claim.unique_key = job.unique_key)""",
    """\
UPDATE {schema}.scheduled_jobs AS job SET unique_key = NULL, unique_states = NULL
WHERE unique_key IS NOT NULL AND NOT EXISTS (
    SELECT FROM {schema}.job_unique_claims AS claim
    WHERE claim.unique_key = job.unique_key AND claim.job_id = job.id
) AND EXISTS (SELECT FROM {schema}.job_unique_claims AS claim WHERE claim.unique_key = job.unique_key)""",
    """\
UPDATE {schema}.dlq_entries AS job SET unique_key = NULL, unique_states = NULL
WHERE unique_key IS NOT NULL AND NOT EXISTS (
    SELECT FROM {schema}.job_unique_claims AS claim
    WHERE claim.unique_key = job.unique_key AND claim.job_id = job.id
) AND EXISTS (SELECT FROM {schema}.job_unique_claims AS claim WHERE claim.unique_key = job.unique_key)""",
    """\
CREATE TRIGGER jobs_hot_claims_insert AFTER INSERT
ON {schema}.jobs_hot FOR EACH ROW WHEN (NEW.unique_key IS NOT NULL)
EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER jobs_hot_claims_update AFTER UPDATE OF id, state, unique_key, unique_states
ON {schema}.jobs_hot FOR EACH ROW WHEN (OLD.unique_key IS NOT NULL OR NEW.unique_key IS NOT NULL)
EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER jobs_hot_claims_delete AFTER DELETE
ON {schema}.jobs_hot FOR EACH ROW WHEN (OLD.unique_key IS NOT NULL)
EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER jobs_hot_claims_truncate AFTER TRUNCATE ON {schema}.jobs_hot
FOR EACH STATEMENT EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER scheduled_jobs_claims_insert AFTER INSERT
ON {schema}.scheduled_jobs FOR EACH ROW WHEN (NEW.unique_key IS NOT NULL)
EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER scheduled_jobs_claims_update AFTER UPDATE OF id, state, unique_key, unique_states
ON {schema}.scheduled_jobs FOR EACH ROW WHEN (OLD.unique_key IS NOT NULL OR NEW.unique_key IS NOT NULL)
EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER scheduled_jobs_claims_delete AFTER DELETE
ON {schema}.scheduled_jobs FOR EACH ROW WHEN (OLD.unique_key IS NOT NULL)
EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER scheduled_jobs_claims_truncate AFTER TRUNCATE ON {schema}.scheduled_jobs
FOR EACH STATEMENT EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER dlq_entries_claims_insert AFTER INSERT
ON {schema}.dlq_entries FOR EACH ROW WHEN (NEW.unique_key IS NOT NULL)
EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER dlq_entries_claims_update AFTER UPDATE OF id, state, unique_key, unique_states
ON {schema}.dlq_entries FOR EACH ROW WHEN (OLD.unique_key IS NOT NULL OR NEW.unique_key IS NOT NULL)
EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER dlq_entries_claims_delete AFTER DELETE
ON {schema}.dlq_entries FOR EACH ROW WHEN (OLD.unique_key IS NOT NULL)
EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE TRIGGER dlq_entries_claims_truncate AFTER TRUNCATE ON {schema}.dlq_entries
FOR EACH STATEMENT EXECUTE FUNCTION {schema}.sync_claims()""",
    """\
CREATE CONSTRAINT TRIGGER job_unique_claims_idle AFTER INSERT ON {schema}.job_unique_claims
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (pg_catalog.pg_trigger_depth() = 0)
EXECUTE FUNCTION {schema}.drop_idle_claim()""",
)

DOWN = (
    "DROP TRIGGER jobs_hot_claims_insert ON {schema}.jobs_hot",
    "DROP TRIGGER jobs_hot_claims_update ON {schema}.jobs_hot",
    "DROP TRIGGER jobs_hot_claims_delete ON {schema}.jobs_hot",
    "DROP TRIGGER jobs_hot_claims_truncate ON {schema}.jobs_hot",
    "DROP TRIGGER scheduled_jobs_claims_insert ON {schema}.scheduled_jobs",
    "DROP TRIGGER scheduled_jobs_claims_update ON {schema}.scheduled_jobs",
    "DROP TRIGGER scheduled_jobs_claims_delete ON {schema}.scheduled_jobs",
    "DROP TRIGGER scheduled_jobs_claims_truncate ON {schema}.scheduled_jobs",
    "DROP TRIGGER dlq_entries_claims_insert ON {schema}.dlq_entries",
    "DROP TRIGGER dlq_entries_claims_update ON {schema}.dlq_entries",
    "DROP TRIGGER dlq_entries_claims_delete ON {schema}.dlq_entries",
    "DROP TRIGGER dlq_entries_claims_truncate ON {schema}.dlq_entries",
    "DROP TRIGGER job_unique_claims_idle ON {schema}.job_unique_claims",
    "DROP FUNCTION {schema}.drop_idle_claim()",
    "DROP FUNCTION {schema}.sync_claims()",
    "DROP FUNCTION {schema}.claim_keys(bytea[], bigint[])",
    "DROP FUNCTION {schema}.take_keys(bytea[], bigint[])",
    "DROP FUNCTION {schema}.holds_claim(bigint, bytea)",
    "DROP FUNCTION {schema}.in_unique_state(text, smallint)",
    "DROP TABLE {schema}.job_unique_claims",
    "DROP INDEX IF EXISTS {schema}.ix_scheduled_jobs_claiming",
    "DROP VIEW {schema}.jobs",
    """\
CREATE VIEW {schema}.jobs AS
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority,
    attempt, max_attempts, unique_states, callback_id, state, kind, queue, worker_id,
    parent_outcome, unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'hot'::text AS stored_in FROM
    {schema}.jobs_hot
UNION ALL
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority,
    attempt, max_attempts, unique_states, callback_id, state, kind, queue, worker_id,
    parent_outcome, unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'scheduled'::text AS stored_in
    FROM {schema}.scheduled_jobs
UNION ALL
SELECT id, parent_id, root_id, run_lease, run_at, created_at, attempted_at, heartbeat_at,
    deadline_at, finalized_at, callback_timeout_at, deadline_seconds, snoozes, priority,
    attempt, max_attempts, unique_states, callback_id, state, kind, queue, worker_id,
    parent_outcome, unique_key, args, metadata, progress, result, tags, errors, callback_filter,
    callback_on_complete, callback_on_fail, callback_transform, 'dead'::text AS stored_in FROM
    {schema}.dlq_entries""",
    "ALTER TABLE {schema}.jobs_hot DROP COLUMN args_version",
    "ALTER TABLE {schema}.scheduled_jobs DROP COLUMN args_version",
    "ALTER TABLE {schema}.dlq_entries DROP COLUMN args_version",
)

_JOBS = ("jobs", "jobs_hot", "scheduled_jobs", "dlq_entries")

STEP = Step(
    UP,
    DOWN,
    locks=exclusive(*_JOBS),
    down_locks=exclusive(*_JOBS, "job_unique_claims"),
    after=(
        Index(
            "scheduled_jobs",
            "ix_scheduled_jobs_claiming",
            "(run_at, id) WHERE unique_states & 2 <> 0"
            " AND unique_states & CASE state WHEN 'scheduled' THEN 1 ELSE 16 END = 0",
        ),
    ),
)
