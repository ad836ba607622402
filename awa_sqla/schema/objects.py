"""What the MetaData cannot say: the view over the job tables and the wake-up trigger, as they are now.

The versioned steps hold their own frozen text; a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import inspect

from awa_sqla.models.base import SCHEMA
from awa_sqla.models.job import DeadLetter, Job, JobRecord, ScheduledJob
from awa_sqla.models.wakeups import SWITCH, channel


def quoted(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def view(schema: str = SCHEMA) -> str:
    """CREATE VIEW of `jobs`."""
    names = [c.name for c in inspect(JobRecord).columns if c.name != "stored_in"]
    stores = ((Job, "hot"), (ScheduledJob, "scheduled"), (DeadLetter, "dead"))
    selects = [
        f"SELECT {', '.join(names)}, '{store}'::text AS stored_in FROM {quoted(schema)}.{cls.__tablename__}"  # noqa: S608 - our names
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
