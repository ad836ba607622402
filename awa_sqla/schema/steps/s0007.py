"""Step 7: times and deadlines that every driver can read, in every table; one row of others would stop a whole lane.

Frozen text: once released, a step never changes. Old rows are looked at when the checks are there: a time in the past
that says later becomes now, one to come the end of the years that can be read.
"""

from awa_sqla.schema.steps.step import Step, Validation, exclusive

EARLIEST, LATEST = "'1970-01-01 00:00:00+00'", "'9000-01-01 00:00:00+00'"
LONGEST = "31536000000"

_JOB = ("created_at", "attempted_at", "heartbeat_at", "finalized_at", "attended_at")
_TO_COME = {"deadline_at", "callback_timeout_at", "paused_until", "next_attempt_at", "expires_at"}

#: The columns with a time, and those with a deadline in seconds, by table.
TIMES = {
    "jobs_hot": (*_JOB, "deadline_at", "callback_timeout_at"),
    "scheduled_jobs": (*_JOB, "deadline_at", "callback_timeout_at"),
    "dlq_entries": (*_JOB, "deadline_at", "callback_timeout_at", "dlq_at"),
    "queue_meta": ("paused_at", "paused_until"),
    "follow_up_specs": ("created_at", "last_seen"),
    "follow_up_obligations": ("next_attempt_at", "created_at"),
    "runtime_instances": ("started_at", "last_seen", "stopping_at"),
    "callback_receipts": ("created_at",),
    "leaders": ("acquired_at", "expires_at"),
    "job_counts": ("counted_at",),
    "audit_log": ("at",),
}
DEADLINES = dict.fromkeys(("jobs_hot", "scheduled_jobs", "dlq_entries", "cron_jobs"), ("deadline_seconds",)) | {
    "queue_meta": ("declared_deadline_seconds", "override_deadline_seconds")
}
TABLES = (*TIMES, "cron_jobs")


def _times(columns: tuple[str, ...]) -> str:
    if len(columns) == 1:
        return f"{columns[0]} BETWEEN {EARLIEST} AND {LATEST}"
    every = ", ".join(columns)
    return f"least({every}) >= {EARLIEST} AND greatest({every}) <= {LATEST}"


def _deadlines(columns: tuple[str, ...]) -> str:
    return " AND ".join(f"{column} > 0 AND {column} <= {LONGEST}" for column in columns)


def checks(table: str) -> dict[str, str]:
    """The new checks of a table, by name."""
    found: dict[str, str] = {}
    if table in TIMES:
        found[f"ck_{table}_times"] = _times(TIMES[table])
    if table in DEADLINES:
        found[f"ck_{table}_deadlines"] = _deadlines(DEADLINES[table])
    return found


def _add(table: str) -> str:
    added = ",\n    ".join(f"ADD CONSTRAINT {name} CHECK ({check}) NOT VALID" for name, check in checks(table).items())
    return f"ALTER TABLE {{schema}}.{table}\n    {added}"


def _drop(table: str) -> str:
    return f"ALTER TABLE {{schema}}.{table} {', '.join(f'DROP CONSTRAINT {name}' for name in checks(table))}"


def _repair(table: str) -> str:
    values: list[str] = []
    for column in TIMES.get(table, ()):
        last = LATEST if column in _TO_COME else "clock_timestamp()"
        values.append(
            f"{column} = CASE WHEN {column} < {EARLIEST} THEN {EARLIEST} WHEN {column} > {LATEST} THEN {last} "
            f"ELSE {column} END"
        )
    values += [
        f"{column} = CASE WHEN {column} > 0 THEN least({column}, {LONGEST}) END" for column in DEADLINES.get(table, ())
    ]
    broken = " OR ".join(f"NOT ({check})" for check in checks(table).values())
    changed = ",\n    ".join(values)
    return f"UPDATE {{schema}}.{table} SET\n    {changed}\nWHERE {broken}"


STEP = Step(
    up=tuple(_add(table) for table in TABLES),
    down=tuple(_drop(table) for table in TABLES),
    locks=exclusive(*TABLES),
    down_locks=exclusive(*TABLES),
    after=tuple(Validation(table, tuple(checks(table)), _repair(table)) for table in TABLES),
)
