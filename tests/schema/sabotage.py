"""What can be done to an installed schema: a case for each sort of difference, and what is no difference."""

from __future__ import annotations

from tests.schema.sabotage_code import CODE
from tests.schema.sabotage_tables import TABLES, Sabotage

#: Everything that is to be seen.
SABOTAGE: dict[str, Sabotage] = {**TABLES, **CODE}

#: What the application and its DBA may do.
THEIRS: dict[str, str] = {
    "table": "CREATE TABLE {s}.orders (id int PRIMARY KEY, job_id bigint, CHECK (id > 0), UNIQUE (job_id))",
    "index": "CREATE INDEX mine ON {s}.jobs_hot (kind)",
    "nullable column": "ALTER TABLE {s}.queue_meta ADD colour text",
    "column with a default": "ALTER TABLE {s}.queue_meta ADD colour text NOT NULL DEFAULT 'red'",
    "generated column": "ALTER TABLE {s}.jobs_hot ADD who text GENERATED ALWAYS AS (args ->> 'who') STORED",
    "identity column": "ALTER TABLE {s}.jobs_hot ADD number bigint GENERATED ALWAYS AS IDENTITY",
    "foreign key on a column of its own": """CREATE TABLE {s}.tenants (id int PRIMARY KEY);
        ALTER TABLE {s}.jobs_hot ADD tenant int REFERENCES {s}.tenants""",
    "unique column of its own": "ALTER TABLE {s}.jobs_hot ADD token text UNIQUE",
    "unique index with a column of its own": """ALTER TABLE {s}.jobs_hot ADD token text;
        CREATE UNIQUE INDEX mine ON {s}.jobs_hot (kind, token)""",
    "trigger": """CREATE FUNCTION {s}.mine() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
        CREATE TRIGGER mine BEFORE UPDATE ON {s}.jobs_hot FOR EACH ROW EXECUTE FUNCTION {s}.mine()""",
    "storage parameters": """ALTER TABLE {s}.jobs_hot SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);
        ALTER INDEX {s}.ix_jobs_hot_claim SET (fillfactor = 70); ALTER INDEX {s}.jobs_hot_pkey SET (fillfactor = 70)""",
    "options of the view": "ALTER VIEW {s}.jobs SET (security_barrier = true)",
    "statistics": """ALTER TABLE {s}.jobs_hot ALTER kind SET STATISTICS 500;
        CREATE STATISTICS {s}.mine ON kind, queue FROM {s}.jobs_hot""",
    "domain": "CREATE DOMAIN {s}.colour AS text",
    "view": "CREATE VIEW {s}.mine AS SELECT id, kind FROM {s}.jobs",
    "function": "CREATE FUNCTION {s}.length(text) RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    "comments": "COMMENT ON TABLE {s}.jobs_hot IS 'do not touch'; COMMENT ON COLUMN {s}.jobs_hot.id IS 'a number'",
    "replica identity": "ALTER TABLE {s}.jobs_hot REPLICA IDENTITY FULL",
    "trigger that fires always": "ALTER TABLE {s}.jobs_hot ENABLE ALWAYS TRIGGER jobs_hot_claims_insert",
    "order of columns": """ALTER TABLE {s}.queue_meta DROP paused_by; ALTER TABLE {s}.queue_meta ADD paused_by text""",
    "cache of a sequence": "ALTER SEQUENCE {s}.jobs_id_seq CACHE 20",
    "grants": "CREATE ROLE awa_reader; GRANT SELECT ON {s}.jobs_hot TO awa_reader",
    "temporary tables with names of ours": """CREATE TEMP TABLE jobs_hot (id int PRIMARY KEY, kind serial);
        CREATE INDEX ix_jobs_hot_claim ON pg_temp.jobs_hot (kind);
        CREATE TEMP SEQUENCE jobs_id_seq; CREATE TEMP VIEW jobs AS SELECT 1 AS one;
        CREATE FUNCTION pg_temp.wake_workers() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'""",
}
