"""What the MetaData cannot say: the view over the job tables and the triggers, as they are now.

The versioned steps hold their own frozen text; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import inspect

from awa_sqla.models.base import SCHEMA, JobState
from awa_sqla.models.job import JOB_TABLES, DeadLetter, Job, JobRecord, ScheduledJob
from awa_sqla.models.wakeups import SWITCH, channel


def quoted(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def statements(schema: str = SCHEMA) -> Iterator[str]:
    """Everything here, in an order in which it can be created."""
    yield view(schema)
    yield wakeup_function(schema)
    yield wakeup_trigger(schema)
    yield from claim_functions(schema)
    yield from claim_triggers(schema)


def view(schema: str = SCHEMA) -> str:
    """CREATE VIEW of `jobs`."""
    stores = ((Job, "hot"), (ScheduledJob, "scheduled"), (DeadLetter, "dead"))
    columns = [column.name for column in inspect(JobRecord).columns]
    selects = [
        f"SELECT {', '.join(columns)} FROM {quoted(schema)}.{cls.__tablename__}".replace(  # noqa: S608 - our names
            "stored_in", f"'{store}'::text AS stored_in"
        )
        for cls, store in stores
    ]
    return f"CREATE VIEW {quoted(schema)}.jobs AS\n" + "\nUNION ALL\n".join(selects)


def wakeup_function(schema: str = SCHEMA) -> str:
    """CREATE FUNCTION of the trigger: one NOTIFY for each queue that a statement gave work to."""
    return f"""\
CREATE FUNCTION {quoted(schema)}.wake_workers() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF pg_catalog.current_setting('{SWITCH}', true) IS DISTINCT FROM 'off' THEN
        PERFORM pg_catalog.pg_notify('{channel(schema)}', pg_catalog.left(pg_catalog.encode(
            pg_catalog.sha256(pg_catalog.convert_to(q.queue, 'UTF8')), 'hex'), 16))
        FROM (SELECT DISTINCT queue FROM inserted WHERE state = 'available') AS q;
    END IF;
    RETURN NULL;
END
$body$"""  # noqa: S608 - a quoted name


def wakeup_trigger(schema: str = SCHEMA) -> str:
    """CREATE TRIGGER on the table of available jobs."""
    return f"""\
CREATE TRIGGER jobs_hot_wake_workers AFTER INSERT ON {quoted(schema)}.jobs_hot
REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION {quoted(schema)}.wake_workers()"""


def claim_functions(schema: str = SCHEMA) -> Iterator[str]:
    """CREATE FUNCTION for the claims on unique keys.

    Those that look things up forbid sequential scans: a plan from when the tables were empty stays with a connection,
    and would read all of a burst for each of its rows (20,000 jobs: 67 s instead of 2).

    `take_keys`: take keys for jobs, and say who has each; one that another open transaction has taken is waited for,
    and left to the next call. `claim_keys`: the same until there is an answer for each. `in_unique_state`: whether a
    row in this state holds its key. `holds_claim`: whether a job does, wherever its row lives. `sync_claims`: after any
    change of a row, take the key or let it go; a row on its way to another table keeps it. `drop_idle_claim`: at the
    end of the transaction, a claim that was taken ahead of a job which never came.
    """
    name = quoted(schema)
    bits = "\n        ".join(f"WHEN '{state}' THEN {state.bit}" for state in JobState)
    yield f"""\
CREATE FUNCTION {name}.in_unique_state(state text, unique_states smallint) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $body$
    SELECT coalesce(unique_states & CASE state
        {bits}
    END <> 0, false)
$body$"""
    yield f"""\
CREATE FUNCTION {name}.holds_claim(job_id bigint, key bytea) RETURNS boolean
LANGUAGE sql STABLE AS $body$
    SELECT EXISTS (
        SELECT FROM {name}.jobs AS job WHERE job.id = holds_claim.job_id AND job.unique_key = holds_claim.key
        AND {name}.in_unique_state(job.state, job.unique_states)
    )
$body$"""  # noqa: S608 - a quoted name
    yield f"""\
CREATE FUNCTION {name}.take_keys(keys bytea[], ids bigint[])
RETURNS TABLE (unique_key bytea, job_id bigint, fresh boolean)
LANGUAGE plpgsql SET enable_seqscan TO off AS $body$
#variable_conflict use_column
BEGIN
    -- In the order of the keys: two that want the same ones cannot wait for each other. Keys that are visibly taken
    -- are not tried: a duplicate costs no id, and does not wait for a holder that somebody is finishing.
    RETURN QUERY WITH wanted AS MATERIALIZED (
        SELECT given.key, given.id, (
            SELECT claim.job_id FROM {name}.job_unique_claims AS claim WHERE claim.unique_key = given.key
        ) AS holder
        FROM ROWS FROM (pg_catalog.unnest(keys), pg_catalog.unnest(ids)) AS given (key, id)
    ), taken AS (
        INSERT INTO {name}.job_unique_claims (unique_key, job_id)
        SELECT wanted.key, coalesce(wanted.id, pg_catalog.nextval('{name}.jobs_id_seq'))
        FROM wanted WHERE wanted.holder IS NULL ORDER BY wanted.key
        ON CONFLICT DO NOTHING
        RETURNING unique_key, job_id
    )
    SELECT taken.unique_key, taken.job_id, true FROM taken
    UNION ALL SELECT wanted.key, wanted.holder, false FROM wanted WHERE wanted.holder IS NOT NULL;
END
$body$"""  # noqa: S608
    yield f"""\
CREATE FUNCTION {name}.claim_keys(keys bytea[], ids bigint[])
RETURNS TABLE (unique_key bytea, job_id bigint, fresh boolean) LANGUAGE plpgsql AS $body$
DECLARE
    answers {name}.job_unique_claims[];
    news boolean[];
BEGIN
    LOOP
        IF pg_catalog.cardinality(keys) = 1 THEN
            RETURN QUERY SELECT taken.* FROM {name}.take_keys(keys, ids) AS taken;
            EXIT WHEN FOUND;
        ELSE
            -- There is no answer for a key that somebody else took and committed meanwhile. All are asked for again,
            -- and what was taken is given up for it: whoever waits for that would be waited for otherwise.
            BEGIN
                SELECT pg_catalog.array_agg((taken.unique_key, taken.job_id)::{name}.job_unique_claims),
                    pg_catalog.array_agg(taken.fresh) INTO answers, news
                FROM {name}.take_keys(keys, ids) AS taken;
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
$body$"""  # noqa: S608
    yield f"""\
CREATE FUNCTION {name}.sync_claims() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan TO off AS $body$
DECLARE
    held boolean := TG_OP IN ('UPDATE', 'DELETE') AND OLD.unique_key IS NOT NULL
        AND {name}.in_unique_state(OLD.state, OLD.unique_states);
    wanted boolean := TG_OP IN ('UPDATE', 'INSERT') AND NEW.unique_key IS NOT NULL
        AND {name}.in_unique_state(NEW.state, NEW.unique_states);
    holder bigint;
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        DELETE FROM {name}.job_unique_claims AS claim WHERE NOT {name}.holds_claim(claim.job_id, claim.unique_key);
        RETURN NULL;
    END IF;
    IF held AND wanted AND OLD.unique_key = NEW.unique_key AND OLD.id = NEW.id THEN
        RETURN NULL;
    END IF;
    IF held AND (TG_OP = 'UPDATE' OR NOT {name}.holds_claim(OLD.id, OLD.unique_key)) THEN
        DELETE FROM {name}.job_unique_claims AS claim
        WHERE claim.unique_key = OLD.unique_key AND claim.job_id = OLD.id;
    END IF;
    WHILE wanted LOOP
        SELECT claim.job_id INTO holder
        FROM {name}.job_unique_claims AS claim WHERE claim.unique_key = NEW.unique_key;
        EXIT WHEN holder = NEW.id;
        IF holder IS NOT NULL THEN
            RAISE unique_violation USING
                MESSAGE = 'job ' || NEW.id || ' would be a duplicate of job ' || holder,
                DETAIL = 'Kind ' || NEW.kind || ', unique key ' || pg_catalog.encode(NEW.unique_key, 'hex'),
                CONSTRAINT = 'job_unique_claims_pkey', TABLE = 'job_unique_claims', SCHEMA = TG_TABLE_SCHEMA;
        END IF;
        INSERT INTO {name}.job_unique_claims (unique_key, job_id) VALUES (NEW.unique_key, NEW.id)
        ON CONFLICT DO NOTHING;
        EXIT WHEN FOUND;
    END LOOP;
    RETURN NULL;
END
$body$"""  # noqa: S608
    yield f"""\
CREATE FUNCTION {name}.drop_idle_claim() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan TO off AS $body$
BEGIN
    -- Nearly always it is there; the view over all tables would take four times as long to say so.
    IF NOT EXISTS (
        SELECT FROM {name}.jobs_hot AS job WHERE job.id = NEW.job_id AND job.unique_key = NEW.unique_key
        AND {name}.in_unique_state(job.state, job.unique_states)
    ) AND NOT {name}.holds_claim(NEW.job_id, NEW.unique_key) THEN
        DELETE FROM {name}.job_unique_claims AS claim
        WHERE claim.unique_key = NEW.unique_key AND claim.job_id = NEW.job_id;
    END IF;
    RETURN NULL;
END
$body$"""  # noqa: S608


def claim_triggers(schema: str = SCHEMA) -> Iterator[str]:
    """CREATE TRIGGER for the claims on unique keys; rows without a key do not call them."""
    name = quoted(schema)
    for table in (cls.__tablename__ for cls in JOB_TABLES):
        for event, when in (
            ("INSERT", "NEW.unique_key IS NOT NULL"),
            (
                "UPDATE OF id, state, unique_key, unique_states",
                "OLD.unique_key IS NOT NULL OR NEW.unique_key IS NOT NULL",
            ),
            ("DELETE", "OLD.unique_key IS NOT NULL"),
        ):
            yield f"""\
CREATE TRIGGER {table}_claims_{event.split()[0].lower()} AFTER {event}
ON {name}.{table} FOR EACH ROW WHEN ({when})
EXECUTE FUNCTION {name}.sync_claims()"""
        yield f"""\
CREATE TRIGGER {table}_claims_truncate AFTER TRUNCATE ON {name}.{table}
FOR EACH STATEMENT EXECUTE FUNCTION {name}.sync_claims()"""
    # Claims that the trigger itself has made are of rows that are there.
    yield f"""\
CREATE CONSTRAINT TRIGGER job_unique_claims_idle AFTER INSERT ON {name}.job_unique_claims
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (pg_catalog.pg_trigger_depth() = 0)
EXECUTE FUNCTION {name}.drop_idle_claim()"""
