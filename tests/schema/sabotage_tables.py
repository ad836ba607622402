"""Sabotage of tables, columns and constraints."""

from __future__ import annotations

from typing import NamedTuple


class Sabotage(NamedTuple):
    """Statements, where `{s}` is the quoted schema, and the differences that must then be named, in any order."""

    sql: str
    named: dict[str, str]  # what: a part of the problem


def _constraint(name: str, definition: str) -> str:
    table, constraint = name.split(".")
    return f"""ALTER TABLE {{s}}.{table} DROP CONSTRAINT {constraint};
        ALTER TABLE {{s}}.{table} ADD CONSTRAINT {constraint} {definition}"""


_RETYPE_VIEWED = """
    CREATE TEMP TABLE the_view AS SELECT pg_get_viewdef('{s}.jobs') AS text;
    DROP VIEW {s}.jobs;
    {change};
    DO $$ BEGIN EXECUTE 'CREATE VIEW {s}.jobs AS ' || (SELECT text FROM the_view); END $$;
    DROP TABLE the_view"""

TABLES: dict[str, Sabotage] = {
    # ---- tables
    "table missing": Sabotage("DROP TABLE {s}.cron_jobs", {"table cron_jobs": "is missing"}),
    "table with an identity missing": Sabotage("DROP TABLE {s}.audit_log", {"table audit_log": "is missing"}),
    "table under the view missing": Sabotage(
        "DROP TABLE {s}.dlq_entries CASCADE",
        {
            "table dlq_entries": "is missing",
            "view jobs": "is missing",
            **{
                f"trigger dlq_entries.dlq_entries_claims_{event}": "is missing"
                for event in ("insert", "update", "delete", "truncate")
            },
        },
    ),
    "ledger missing": Sabotage("DROP TABLE {s}.schema_version", {"table schema_version": "nobody knows the version"}),
    "unlogged": Sabotage("ALTER TABLE {s}.runtime_instances SET UNLOGGED", {"table runtime_instances": "UNLOGGED"}),
    "row level security": Sabotage(
        "ALTER TABLE {s}.jobs_hot ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
        {"table jobs_hot": "row level security"},
    ),
    "row level security, forced later": Sabotage(
        "ALTER TABLE {s}.queue_meta FORCE ROW LEVEL SECURITY", {"table queue_meta": "row level security"}
    ),
    "rule": Sabotage(
        "CREATE RULE nothing_goes AS ON DELETE TO {s}.jobs_hot DO INSTEAD NOTHING",
        {"rule jobs_hot.nothing_goes": "would change its statements"},
    ),
    # ---- columns
    "column missing": Sabotage("ALTER TABLE {s}.queue_meta DROP paused_by", {"column queue_meta.paused_by": "missing"}),
    "column with a default missing": Sabotage(
        "ALTER TABLE {s}.runtime_instances DROP lanes", {"column runtime_instances.lanes": "is missing"}
    ),
    "column without a default missing": Sabotage(
        "DELETE FROM {s}.job_counts; ALTER TABLE {s}.job_counts DROP jobs",
        {"column job_counts.jobs": "only while the table is empty"},
    ),
    "column of an index and a check missing": Sabotage(
        "ALTER TABLE {s}.jobs_hot DROP priority CASCADE",
        {
            "column jobs_hot.priority": "is missing",
            "constraint jobs_hot.ck_jobs_hot_priority": "is missing",
            "index jobs_hot.ix_jobs_hot_claim": "is missing",
            "index jobs_hot.ix_jobs_hot_aged": "is missing",
            "view jobs": "is missing",
        },
    ),
    "default": Sabotage(
        "ALTER TABLE {s}.jobs_hot ALTER priority SET DEFAULT 3", {"column jobs_hot.priority": "3 instead of 2"}
    ),
    "default gone": Sabotage(
        "ALTER TABLE {s}.jobs_hot ALTER queue DROP DEFAULT", {"column jobs_hot.queue": "has no default"}
    ),
    "default of the sequence gone": Sabotage(
        "ALTER TABLE {s}.jobs_hot ALTER id DROP DEFAULT", {"column jobs_hot.id": "should be nextval"}
    ),
    "default too many": Sabotage(
        "ALTER TABLE {s}.jobs_hot ALTER result SET DEFAULT '{{}}'", {"column jobs_hot.result": "has a default"}
    ),
    "not null": Sabotage("ALTER TABLE {s}.jobs_hot ALTER kind DROP NOT NULL", {"column jobs_hot.kind": "not NOT NULL"}),
    "not null, and rows without": Sabotage(
        """ALTER TABLE {s}.jobs_hot ALTER snoozes DROP NOT NULL; UPDATE {s}.jobs_hot SET snoozes = NULL""",
        {"column jobs_hot.snoozes": "is not NOT NULL"},
    ),
    "not null too many": Sabotage(
        "UPDATE {s}.jobs_hot SET result = '1'; ALTER TABLE {s}.jobs_hot ALTER result SET NOT NULL",
        {"column jobs_hot.result": "is NOT NULL"},
    ),
    "type": Sabotage(
        "ALTER TABLE {s}.queue_meta ALTER paused_by TYPE varchar(99)",
        {"column queue_meta.paused_by": "varying(99) instead of text"},
    ),
    "type with a default and a check": Sabotage(
        "ALTER TABLE {s}.cron_jobs ALTER missed_fire_policy TYPE varchar(99)",
        {
            "column cron_jobs.missed_fire_policy": "instead of text",
            "constraint cron_jobs.ck_cron_jobs_policy": "has another definition",
        },
    ),
    "collation": Sabotage(
        'ALTER TABLE {s}.queue_meta ALTER pause_reason TYPE text COLLATE "C"',
        {"column queue_meta.pause_reason": 'text COLLATE "C" instead of text'},
    ),
    "type under the view": Sabotage(
        _RETYPE_VIEWED.replace("{change}", "ALTER TABLE {s}.jobs_hot ALTER worker_id TYPE varchar(99)"),
        {"column jobs_hot.worker_id": "instead of text"},
    ),
    "types under the view and in triggers": Sabotage(
        "DROP TRIGGER jobs_hot_claims_insert ON {s}.jobs_hot; DROP TRIGGER jobs_hot_claims_update ON {s}.jobs_hot;"
        + _RETYPE_VIEWED.replace(
            "{change}",
            """ALTER TABLE {s}.jobs_hot DROP CONSTRAINT ck_jobs_hot_max_attempts;
            ALTER TABLE {s}.scheduled_jobs DROP CONSTRAINT ck_scheduled_jobs_max_attempts;
            ALTER TABLE {s}.dlq_entries DROP CONSTRAINT ck_dlq_entries_max_attempts;
            ALTER TABLE {s}.jobs_hot ALTER max_attempts TYPE text, ALTER unique_states TYPE integer;
            ALTER TABLE {s}.scheduled_jobs ALTER max_attempts TYPE text;
            ALTER TABLE {s}.dlq_entries ALTER max_attempts TYPE text""",
        ),
        {
            "column jobs_hot.max_attempts": "instead of smallint",
            "column scheduled_jobs.max_attempts": "instead of smallint",
            "column dlq_entries.max_attempts": "instead of smallint",
            "column jobs_hot.unique_states": "integer instead of smallint",
            "constraint jobs_hot.ck_jobs_hot_max_attempts": "missing",
            "constraint scheduled_jobs.ck_scheduled_jobs_max_attempts": "missing",
            "constraint dlq_entries.ck_dlq_entries_max_attempts": "missing",
            "trigger jobs_hot.jobs_hot_claims_insert": "missing",
            "trigger jobs_hot.jobs_hot_claims_update": "missing",
        },
    ),
    "type of a column that a trigger watches": Sabotage(
        "DROP TRIGGER dlq_entries_claims_update ON {s}.dlq_entries;"
        + _RETYPE_VIEWED.replace("{change}", "ALTER TABLE {s}.dlq_entries ALTER state TYPE varchar(20)")
        + """; CREATE TRIGGER dlq_entries_claims_update AFTER UPDATE OF id, state, unique_key, unique_states
        ON {s}.dlq_entries FOR EACH ROW WHEN (OLD.unique_key IS NOT NULL OR NEW.unique_key IS NOT NULL)
        EXECUTE FUNCTION {s}.sync_claims()""",
        {
            "column dlq_entries.state": "instead of text",
            "constraint dlq_entries.ck_dlq_entries_state": "has another definition",
        },
    ),
    "identity": Sabotage(
        "ALTER TABLE {s}.follow_up_obligations ALTER id SET GENERATED BY DEFAULT",
        {"column follow_up_obligations.id": "BY DEFAULT instead of GENERATED ALWAYS"},
    ),
    "identity gone": Sabotage(
        "ALTER TABLE {s}.audit_log ALTER id DROP IDENTITY", {"column audit_log.id": "no identity instead of"}
    ),
    "identity too many": Sabotage(
        """DELETE FROM {s}.job_counts; ALTER TABLE {s}.job_counts ALTER jobs ADD GENERATED ALWAYS AS IDENTITY""",
        {"column job_counts.jobs": "instead of no identity"},
    ),
    "generated": Sabotage(
        """ALTER TABLE {s}.queue_meta DROP paused_by;
        ALTER TABLE {s}.queue_meta ADD paused_by text GENERATED ALWAYS AS (upper(queue)) STORED""",
        {"column queue_meta.paused_by": "is generated"},
    ),
    "generated, of another type": Sabotage(
        """ALTER TABLE {s}.queue_meta DROP paused_by;
        ALTER TABLE {s}.queue_meta ADD paused_by varchar(9) GENERATED ALWAYS AS (upper(queue)) STORED""",
        {"column queue_meta.paused_by": "is generated"},
    ),
    "column of others that must be given": Sabotage(
        'DELETE FROM {s}.queue_meta; ALTER TABLE {s}.queue_meta ADD "Team\'s" text NOT NULL',
        {"column queue_meta.Team's": "no row could be added"},
    ),
    # ---- constraints
    "check": Sabotage(
        _constraint("jobs_hot.ck_jobs_hot_tags", "CHECK (cardinality(tags) <= 21)"),
        {"constraint jobs_hot.ck_jobs_hot_tags": "21) instead of"},
    ),
    "check missing": Sabotage(
        "ALTER TABLE {s}.cron_jobs DROP CONSTRAINT ck_cron_jobs_latest",
        {"constraint cron_jobs.ck_cron_jobs_latest": "is missing"},
    ),
    "check not valid": Sabotage(
        _constraint("jobs_hot.ck_jobs_hot_kind", "CHECK (length(kind) BETWEEN 1 AND 200) NOT VALID"),
        {"constraint jobs_hot.ck_jobs_hot_kind": "NOT VALID"},
    ),
    "another check, not valid": Sabotage(
        _constraint("jobs_hot.ck_jobs_hot_kind", "CHECK (length(kind) BETWEEN 1 AND 100) NOT VALID"),
        {"constraint jobs_hot.ck_jobs_hot_kind": "has another definition"},
    ),
    "check renamed": Sabotage(
        'ALTER TABLE {s}.queue_meta RENAME CONSTRAINT ck_queue_meta_keep TO "Keep it"',
        {"constraint queue_meta.ck_queue_meta_keep": "is called Keep it"},
    ),
    "primary key": Sabotage(
        _constraint("follow_up_specs.follow_up_specs_pkey", "PRIMARY KEY (name, kind, outcome)"),
        {"constraint follow_up_specs.follow_up_specs_pkey": "has another definition"},
    ),
    "primary key missing": Sabotage(
        "ALTER TABLE {s}.job_unique_claims DROP CONSTRAINT job_unique_claims_pkey",
        {"constraint job_unique_claims.job_unique_claims_pkey": "is missing"},
    ),
    "primary key renamed": Sabotage(
        'ALTER TABLE {s}.jobs_hot RENAME CONSTRAINT jobs_hot_pkey TO "PK_jobs"',
        {"constraint jobs_hot.jobs_hot_pkey": "is called PK_jobs"},
    ),
    "primary key of others": Sabotage(
        """ALTER TABLE {s}.queue_meta DROP CONSTRAINT queue_meta_pkey, ADD COLUMN number serial;
        ALTER TABLE {s}.queue_meta ADD CONSTRAINT by_number PRIMARY KEY (number)""",
        {"constraint queue_meta.queue_meta_pkey": "by_number stands in its place"},
    ),
    "check of others": Sabotage(
        "ALTER TABLE {s}.jobs_hot ADD CONSTRAINT \"No spam\" CHECK (kind <> 'spam')",
        {"constraint jobs_hot.No spam": "could refuse its rows"},
    ),
    "unique constraint of others": Sabotage(
        "ALTER TABLE {s}.jobs_hot ADD CONSTRAINT one_each UNIQUE (kind, id)", {"constraint jobs_hot.one_each": "refuse"}
    ),
    "exclusion of others": Sabotage(
        "ALTER TABLE {s}.jobs_hot ADD CONSTRAINT alone EXCLUDE USING btree (id WITH =)",
        {"constraint jobs_hot.alone": "could refuse"},
    ),
    "foreign key of others": Sabotage(
        """CREATE TABLE {s}.kinds (kind text PRIMARY KEY);
        INSERT INTO {s}.kinds SELECT DISTINCT kind FROM {s}.jobs_hot;
        ALTER TABLE {s}.jobs_hot ADD CONSTRAINT known FOREIGN KEY (kind) REFERENCES {s}.kinds""",
        {"constraint jobs_hot.known": "FOREIGN KEY"},
    ),
    "foreign key onto ours": Sabotage(
        """CREATE SCHEMA "Shop's"; CREATE TABLE "Shop's"."Order" (id int, job bigint
        CONSTRAINT "Its job" REFERENCES {s}.jobs_hot)""",
        {"""foreign key "Shop's"."Order".Its job""": "refers to jobs_hot"},
    ),
}
