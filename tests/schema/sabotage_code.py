"""Sabotage of indexes, sequences, the view, functions and triggers."""

from __future__ import annotations

from tests.schema.sabotage_tables import Sabotage

CODE: dict[str, Sabotage] = {
    # ---- indexes
    "predicate": Sabotage(
        """DROP INDEX {s}.ix_jobs_hot_claim;
        CREATE INDEX ix_jobs_hot_claim ON {s}.jobs_hot (queue, priority, run_at, id) WHERE state = 'running'""",
        {"index jobs_hot.ix_jobs_hot_claim": "another predicate: state = 'running'::text instead of"},
    ),
    "predicate gone": Sabotage(
        """DROP INDEX {s}.ix_jobs_hot_claim;
        CREATE INDEX ix_jobs_hot_claim ON {s}.jobs_hot (queue, priority, run_at, id)""",
        {"index jobs_hot.ix_jobs_hot_claim": "has no predicate"},
    ),
    "index columns": Sabotage(
        """DROP INDEX {s}.ix_scheduled_jobs_due;
        CREATE INDEX ix_scheduled_jobs_due ON {s}.scheduled_jobs (id)""",
        {"index scheduled_jobs.ix_scheduled_jobs_due": "btree (id) instead of btree (run_at, id)"},
    ),
    "index order": Sabotage(
        """DROP INDEX {s}.ix_audit_log_at; CREATE INDEX ix_audit_log_at ON {s}.audit_log (at DESC)""",
        {"index audit_log.ix_audit_log_at": "at DESC"},
    ),
    "index method": Sabotage(
        """DROP INDEX {s}.ix_audit_log_at; CREATE INDEX ix_audit_log_at ON {s}.audit_log USING brin (at)""",
        {"index audit_log.ix_audit_log_at": "brin (at) instead of btree (at)"},
    ),
    "index missing": Sabotage("DROP INDEX {s}.ix_jobs_hot_claim", {"index jobs_hot.ix_jobs_hot_claim": "is missing"}),
    "index not valid": Sabotage(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{s}.ix_jobs_hot_running'::regclass",
        {"index jobs_hot.ix_jobs_hot_running": "not valid"},
    ),
    "index not unique": Sabotage(
        """DROP INDEX {s}.ix_jobs_hot_callback;
        CREATE INDEX ix_jobs_hot_callback ON {s}.jobs_hot (callback_id) WHERE callback_id IS NOT NULL""",
        {"index jobs_hot.ix_jobs_hot_callback": "is not unique"},
    ),
    "index unique": Sabotage(
        """DROP INDEX {s}.ix_audit_log_at; CREATE UNIQUE INDEX ix_audit_log_at ON {s}.audit_log (at)""",
        {"index audit_log.ix_audit_log_at": "is unique"},
    ),
    "unique index of others": Sabotage(
        'CREATE UNIQUE INDEX "One, only" ON {s}.jobs_hot (kind, id)', {"index jobs_hot.One, only": "could refuse"}
    ),
    "unique index of others on an expression": Sabotage(
        "CREATE UNIQUE INDEX one_only ON {s}.jobs_hot ((kind || id))", {"index jobs_hot.one_only": "could refuse"}
    ),
    "rests of a rebuild": Sabotage(
        """CREATE INDEX ix_jobs_hot_claim_ccnew ON {s}.jobs_hot (queue);
        UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{s}.ix_jobs_hot_claim_ccnew'::regclass""",
        {"index jobs_hot.ix_jobs_hot_claim_ccnew": "REINDEX CONCURRENTLY of ix_jobs_hot_claim"},
    ),
    # ---- sequences
    "sequence type": Sabotage("ALTER SEQUENCE {s}.jobs_id_seq AS integer", {"sequence jobs_id_seq": "AS integer"}),
    "sequence in cycles": Sabotage("ALTER SEQUENCE {s}.run_lease_seq CYCLE", {"sequence run_lease_seq": "definition"}),
    "sequence owner": Sabotage(
        "ALTER SEQUENCE {s}.jobs_id_seq OWNED BY {s}.jobs_hot.id", {"sequence jobs_id_seq": "owned by jobs_hot.id"}
    ),
    "sequence of an identity": Sabotage(
        "ALTER SEQUENCE {s}.audit_log_id_seq INCREMENT 2", {"sequence audit_log_id_seq": "INCREMENT BY 2"}
    ),
    "sequence missing": Sabotage(
        "DROP SEQUENCE {s}.jobs_id_seq CASCADE",
        {
            "sequence jobs_id_seq": "is missing",
            "column jobs_hot.id": "has no default",
            "column scheduled_jobs.id": "has no default",
        },
    ),
    "sequence of leases missing": Sabotage("DROP SEQUENCE {s}.run_lease_seq", {"sequence run_lease_seq": "missing"}),
    # ---- the view
    "view": Sabotage(
        """DO $$ BEGIN
            EXECUTE 'CREATE OR REPLACE VIEW {s}.jobs AS ' || rtrim(pg_get_viewdef('{s}.jobs'), ';') || ' LIMIT 5';
        END $$""",
        {"view jobs": "has another text"},
    ),
    "view with another column": Sabotage(
        """DROP VIEW {s}.jobs; CREATE VIEW {s}.jobs WITH (security_barrier) AS SELECT kind, id FROM {s}.jobs_hot""",
        {"view jobs": "with its grants"},
    ),
    "view missing": Sabotage("DROP VIEW {s}.jobs", {"view jobs": "is missing"}),
    # ---- functions
    "function body": Sabotage(
        """CREATE OR REPLACE FUNCTION {s}.wake_workers() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN RETURN NULL; END $$""",
        {"function wake_workers()": "has another text"},
    ),
    "function of the channel of another schema": Sabotage(
        """DO $$ BEGIN
            EXECUTE replace(pg_get_functiondef('{s}.wake_workers'::regproc), '(''awa_', '(''Awa_');
        END $$""",
        {"function wake_workers()": "has another text"},
    ),
    "function rights": Sabotage(
        "ALTER FUNCTION {s}.wake_workers() SECURITY DEFINER", {"function wake_workers()": "is SECURITY DEFINER"}
    ),
    "function settings": Sabotage(
        "ALTER FUNCTION {s}.sync_claims() RESET ALL", {"function sync_claims()": "has no settings"}
    ),
    "function volatility": Sabotage(
        "ALTER FUNCTION {s}.in_unique_state(text, smallint) VOLATILE",
        {"function in_unique_state(text, smallint)": "attributes"},
    ),
    "function missing": Sabotage(
        "DROP FUNCTION {s}.holds_claim(bigint, bytea)", {"function holds_claim(bigint, bytea)": "is missing"}
    ),
    "function with another result": Sabotage(
        """DROP FUNCTION {s}.holds_claim(bigint, bytea); CREATE FUNCTION {s}.holds_claim(a bigint, b bytea)
        RETURNS integer LANGUAGE sql AS 'SELECT 1'""",
        {"function holds_claim(bigint, bytea)": "has another text"},
    ),
    "function and its triggers missing": Sabotage(
        "DROP FUNCTION {s}.drop_idle_claim() CASCADE",
        {
            "function drop_idle_claim()": "is missing",
            "trigger job_unique_claims.job_unique_claims_idle": "is missing",
        },
    ),
    # ---- triggers
    "trigger": Sabotage(
        """DROP TRIGGER jobs_hot_wake_workers ON {s}.jobs_hot;
        CREATE TRIGGER jobs_hot_wake_workers AFTER INSERT ON {s}.jobs_hot
        FOR EACH ROW EXECUTE FUNCTION {s}.wake_workers()""",
        {"trigger jobs_hot.jobs_hot_wake_workers": "has another text"},
    ),
    "trigger missing": Sabotage(
        "DROP TRIGGER jobs_hot_claims_update ON {s}.jobs_hot", {"trigger jobs_hot.jobs_hot_claims_update": "is missing"}
    ),
    "trigger disabled": Sabotage(
        "ALTER TABLE {s}.jobs_hot DISABLE TRIGGER jobs_hot_wake_workers",
        {"trigger jobs_hot.jobs_hot_wake_workers": "is disabled"},
    ),
    "all triggers disabled": Sabotage(
        "ALTER TABLE {s}.job_unique_claims DISABLE TRIGGER USER",
        {"trigger job_unique_claims.job_unique_claims_idle": "is disabled"},
    ),
    "trigger of replicas": Sabotage(
        "ALTER TABLE {s}.jobs_hot ENABLE REPLICA TRIGGER jobs_hot_wake_workers",
        {"trigger jobs_hot.jobs_hot_wake_workers": "on a replica only"},
    ),
}
