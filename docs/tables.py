"""Writes `docs/reference/tables.md` from the models; the phrases are here.

    python docs/tables.py > docs/reference/tables.md
    python docs/tables.py --check       # exit status 1 when the page is not up to date

A column or function without a phrase, an index without its query, and a phrase for something that is gone are errors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from sqlalchemy import CheckConstraint, Column, Identity, Index, Table, inspect
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import DefaultClause

from awa_sqla.models import AwaBase, DeadLetter, Job, JobRecord, ScheduledJob
from awa_sqla.models.job import JOB_TABLES
from awa_sqla.schema import objects

PAGE = Path(__file__).parent / "reference" / "tables.md"

INTRODUCTION = """\
# Tables

<!-- Written by docs/tables.py from the models: change those, or the phrases there. -->

Everything is in one schema, `awa` unless the app chose another name. Times are `timestamp with time zone` by the
database's clock. Ids and leases are `bigint`; they come from the sequences `jobs_id_seq` and `run_lease_seq`, which
belong to no column because several tables draw from the first, and because the second gives a number to each claim.

A job is in exactly one of `jobs_hot`, `scheduled_jobs` and `dlq_entries`, and keeps its id when it moves. **No
foreign key may point at a job**: store its id. Rows of these tables change through the verbs of the package only.

What the triggers do for wake-ups and for unique keys is [at the end](#functions-and-triggers).
"""

TRIGGERS = """\
## Functions and triggers

An INSERT into `jobs_hot` of jobs that are available sends one NOTIFY for each of their queues, on a channel of the
schema; `SET LOCAL awa.notify = 'off'` silences it for a transaction.

A claim in `job_unique_claims` says that a unique key is taken. The package claims a key before it inserts the row. The
triggers keep claims true from then on, also when plain SQL changes, moves or deletes a row: each claim has its row, in
one of that row's unique states. A second holder is a `unique_violation` of the constraint `job_unique_claims_pkey`.
"""

#: What each table is for.
TABLES = {
    "jobs_hot": "Jobs that are available, running or waiting for a callback, and finished ones until retention.",
    "scheduled_jobs": "Jobs that wait for their time: scheduled, snoozed, or to be tried again.",
    "dlq_entries": "Jobs that failed for good in a queue that keeps such jobs for an operator.",
    "callback_receipts": "What was answered to a callback over HTTP, for when the same request comes again.",
    "jobs": "The three job tables together, for reading. A view.",
    "job_unique_claims": "Unique keys that are taken, and by which job. Triggers keep it true; never change it.",
    "queue_meta": (
        "Settings of queues. A queue without a row has the defaults. In force is: the job's own, else override, "
        "else declared, else the default."
    ),
    "follow_up_specs": "The catalogue: which follow-ups some process can dispatch.",
    "follow_up_obligations": "Follow-ups that are still owed for a committed transition.",
    "runtime_instances": "Live processes; those that ended without a word stay listed for a day.",
    "schema_version": "One row for each installed step of the schema.",
    "leaders": "Which process does what one process should do: leases that it renews while it lives.",
    "cron_jobs": "Periodic schedules, and the jobs they make.",
    "job_counts": "How many finished jobs there are, as they were counted last.",
    "audit_log": "What operators did.",
}

#: What the columns that all job tables share mean.
SHARED = {
    "id": "the job, in whatever table; never used again",
    "parent_id": "the job whose handler or outcome enqueued this one; null on roots",
    "root_id": "the first job of the tree; null on roots",
    "run_lease": "number of the current or last attempt, from `run_lease_seq`; 0 before the first claim",
    "run_at": "not before this time",
    "created_at": "when it was enqueued",
    "attempted_at": "when the current or last attempt began",
    "heartbeat_at": "last sign of life of the running attempt",
    "deadline_at": "when the running attempt is taken from its worker",
    "finalized_at": "when it ended, or its last attempt did; null once it runs again",
    "callback_timeout_at": "until when a callback is awaited",
    "deadline_seconds": "longest run of one attempt; null for that of the queue",
    "snoozes": "how often it was put back without being charged an attempt",
    "priority": "1 is first, 4 is last",
    "attempt": "attempts begun and charged",
    "max_attempts": "attempts before it has failed for good",
    "unique_states": "states in which its unique key is held: bit n for the n-th state",
    "callback_id": "the callback it waits for",
    "state": "where it stands",
    "kind": "which args class and handler",
    "queue": "which workers take it",
    "worker_id": "who claimed it last",
    "parent_outcome": "the outcome of the parent that this is a follow-up of; null for a plain enqueue",
    "unique_key": "what at most one job may hold at a time",
    "args": "arguments",
    "args_version": "`version=` of the args class that wrote them",
    "metadata": "what the app notes beside the arguments; the attribute is `meta`",
    "progress": "`percent`, `message` and `metadata` of the attempt; kept for the next one",
    "result": "what the handler returned or the callback delivered",
    "tags": "words to find it by",
    "errors": "one entry for each failed attempt, oldest first; the middle is cut from long lists",
    "callback_filter": "CEL: which callbacks count",
    "callback_on_complete": "CEL: which callbacks complete it",
    "callback_on_fail": "CEL: which callbacks fail it",
    "callback_transform": "CEL: the result from the callback's payload",
    "attended_at": "since when its handler waits for the callback",
    "callback_answer": "the payload that a callback brought to its handler",
}

#: What the other columns mean.
COLUMNS = {
    "jobs_hot.aged": "by how many levels waiting has raised the priority, while the job is available",
    "scheduled_jobs.run_at": "when it becomes due",
    "dlq_entries.original_run_lease": "lease of the attempt that failed last",
    "dlq_entries.dlq_at": "when it came here",
    "dlq_entries.dlq_reason": "`max_attempts_exhausted`, `terminal_error`, or what the operator gave",
    "jobs.stored_in": "`hot`, `scheduled` or `dead`: the table that holds the row",
    "job_unique_claims.unique_key": "the key that is taken",
    "job_unique_claims.job_id": "the job that holds it",
    "queue_meta.queue": "name of the queue",
    "queue_meta.declared_concurrency": "by workers: jobs of one process at a time",
    "queue_meta.declared_deadline_seconds": "by workers: longest run of one attempt",
    "queue_meta.declared_poll_seconds": "by workers: longest wait between two looks",
    "queue_meta.declared_dead_letters": "by workers: whether failed jobs are kept in `dlq_entries`",
    "queue_meta.declared_rate_per_second": "by workers: jobs that one process begins in a second, on average",
    "queue_meta.declared_rate_burst": "by workers: how many of them at once",
    "queue_meta.override_concurrency": "by an operator, instead of the declared one",
    "queue_meta.override_deadline_seconds": "by an operator, instead of the declared one",
    "queue_meta.override_poll_seconds": "by an operator, instead of the declared one",
    "queue_meta.override_dead_letters": "by an operator, instead of the declared one",
    "queue_meta.override_rate_per_second": "by an operator, instead of the declared one",
    "queue_meta.override_rate_burst": "by an operator, instead of the declared one",
    "queue_meta.declared_aging_seconds": (
        "by workers: how long a job waits for each level that its priority rises; infinity for never"
    ),
    "queue_meta.declared_keep_completed_seconds": "by workers: how long completed jobs are kept; infinity for ever",
    "queue_meta.declared_keep_failed_seconds": "by workers: how long failed and cancelled jobs are kept",
    "queue_meta.declared_keep_dead_seconds": "by workers: how long dead letters are kept",
    "queue_meta.override_aging_seconds": "by an operator, instead of the declared one",
    "queue_meta.override_keep_completed_seconds": "by an operator, instead of the declared one",
    "queue_meta.override_keep_failed_seconds": "by an operator, instead of the declared one",
    "queue_meta.override_keep_dead_seconds": "by an operator, instead of the declared one",
    "queue_meta.paused_at": "since when no job of it is claimed; null when it is not paused",
    "queue_meta.paused_by": "who paused it",
    "queue_meta.pause_reason": "why",
    "queue_meta.paused_until": "when the pause ends by itself",
    "follow_up_specs.kind": "of the job",
    "follow_up_specs.outcome": "of the transition",
    "follow_up_specs.name": "of the follow-up: its identity for ever",
    "follow_up_specs.created_at": "when some process first had it; it counts from 10 seconds later",
    "follow_up_specs.last_seen": "when some process last had it; it counts for 7 days",
    "follow_up_obligations.id": "the obligation",
    "follow_up_obligations.job_id": "the job of the transition",
    "follow_up_obligations.kind": "of that job",
    "follow_up_obligations.outcome": "of the transition",
    "follow_up_obligations.spec": "name of the follow-up that is owed",
    "follow_up_obligations.snapshot": "the job as it stood then",
    "follow_up_obligations.context": "what else the event carried: error, reason, result",
    "follow_up_obligations.attempts": "how often its dispatch was tried",
    "follow_up_obligations.next_attempt_at": "when it is tried next; null once it was given up",
    "follow_up_obligations.last_error": "why the last try failed",
    "follow_up_obligations.created_at": "when the transition was made",
    "callback_receipts.request": "digest of the request: callback, action and body",
    "callback_receipts.callback_id": "the callback",
    "callback_receipts.action": "`complete`, `fail`, `heartbeat` or `resume`",
    "callback_receipts.answer": "what was answered",
    "callback_receipts.created_at": "when; it counts for 24 hours",
    "runtime_instances.id": "the process",
    "runtime_instances.role": "`worker`, `maintenance` or `ingress`",
    "runtime_instances.hostname": "where it runs",
    "runtime_instances.pid": "its process id there",
    "runtime_instances.version": "of the package",
    "runtime_instances.queues": "which it serves",
    "runtime_instances.kinds": "which it has handlers for",
    "runtime_instances.unknown_kinds": "kinds it met without a handler, with their counts",
    "runtime_instances.concurrency": "how many jobs it runs at a time at the most",
    "runtime_instances.running": "how many it was running at that sign of life",
    "runtime_instances.listening": "whether notifications reached it",
    "runtime_instances.started_at": "when it started",
    "runtime_instances.last_seen": "its last sign of life",
    "runtime_instances.stopping_at": "since when it takes no new jobs",
    "runtime_instances.stale_after_seconds": "after how long a silence its attempts are taken from it",
    "runtime_instances.lanes": "how each lane of maintenance fares there",
    "leaders.name": "what the lease is for",
    "leaders.holder": "the process that has it",
    "leaders.term": "how often it has changed hands",
    "leaders.acquired_at": "since when it has it",
    "leaders.expires_at": "until when, unless it renews it",
    "cron_jobs.name": "the schedule",
    "cron_jobs.cron_expr": "when: five fields, or six with seconds first",
    "cron_jobs.timezone": "by which local time: a name of the IANA database",
    "cron_jobs.kind": "of its jobs; null where only the app knows",
    "cron_jobs.queue": "of its jobs",
    "cron_jobs.args": "arguments of its jobs; null where the app builds them when it fires",
    "cron_jobs.args_version": "`version=` of the args class that wrote them",
    "cron_jobs.priority": "of its jobs",
    "cron_jobs.max_attempts": "of its jobs",
    "cron_jobs.deadline_seconds": "of its jobs",
    "cron_jobs.tags": "of its jobs",
    "cron_jobs.metadata": "of its jobs, beside `cron_name` and `cron_fire_time`",
    "cron_jobs.uniqueness": "of which other jobs its jobs would be duplicates; null for none",
    "cron_jobs.missed_fire_policy": "what becomes of ticks that were missed: `coalesce`, `catch_up` or `skip`",
    "cron_jobs.most_missed": "how many of them are caught up with at the most",
    "cron_jobs.last_enqueued_at": "the tick that fired last",
    "cron_jobs.last_job_id": "its job",
    "cron_jobs.last_error": "why it could not fire; null when it could",
    "cron_jobs.failed_at": "when it could not",
    "cron_jobs.counts_from": "ticks before this time do not count: when it was made, changed or resumed",
    "cron_jobs.paused_at": "since when it does not fire",
    "cron_jobs.paused_by": "who paused it",
    "cron_jobs.created_at": "when it was first declared",
    "cron_jobs.updated_at": "when it was last changed",
    "cron_jobs.last_seen": "when a process that declares it was last heard of",
    "job_counts.queue": "of the jobs",
    "job_counts.state": "`completed`, `failed` or `cancelled`, and `dead` for dead letters",
    "job_counts.jobs": "how many",
    "job_counts.counted_at": "when they were counted",
    "audit_log.id": "the entry",
    "audit_log.at": "when",
    "audit_log.actor": "who, as far as is known",
    "audit_log.source": "by which road: `python`, `cli` or `web`",
    "audit_log.verb": "what was done",
    "audit_log.target": "to what",
    "audit_log.count": "to how many",
    "audit_log.reason": "why",
    "schema_version.version": "the step",
    "schema_version.applied_at": "when it was installed",
}

#: The query that each index serves.
QUERIES = {
    "ix_jobs_hot_claim": "claim: the available jobs of one queue that are due, most urgent first",
    "ix_jobs_hot_running": "rescue: running rows whose heartbeat is stale or whose deadline has passed",
    "ix_jobs_hot_callback": "callbacks: the one job that waits for a callback",
    "ix_jobs_hot_callback_timeout": "rescue: waiting rows whose callback has not come in time",
    "ix_jobs_hot_attended": "rescue: waiting rows whose handler is gone",
    "ix_jobs_hot_finished": "retention, counts: the finished jobs of a queue, oldest first",
    "ix_jobs_hot_aged": "ageing: how far the jobs of a level have risen, and those of queues that no longer age",
    "ix_dlq_entries_queue": "retention, counts: the dead letters of a queue, oldest first",
    "ix_audit_log_at": "audit: entries by their time",
    "ix_callback_receipts_callback": "callbacks: whether one was answered already",
    "ix_callback_receipts_created": "callbacks: receipts that no longer count",
    "ix_jobs_hot_parent_id": "lineage: the children of a job",
    "ix_jobs_hot_root_id": "lineage: the whole tree of a job",
    "ix_scheduled_jobs_claiming": "promote: the due jobs that must claim their unique key to become available",
    "ix_scheduled_jobs_due": "promote: the jobs that are due, longest overdue first",
    "ix_scheduled_jobs_parent_id": "lineage: the children of a job",
    "ix_scheduled_jobs_root_id": "lineage: the whole tree of a job",
    "ix_dlq_entries_parent_id": "lineage: the children of a job",
    "ix_dlq_entries_root_id": "lineage: the whole tree of a job",
    "ix_follow_up_obligations_due": "dispatch: the obligations that are due, longest overdue first",
}

#: What each function does.
FUNCTIONS = {
    "wake_workers": "sends the NOTIFY for the queues that a statement gave work to",
    "in_unique_state": "whether a row in this state, with these `unique_states`, holds its key",
    "take_keys": "takes keys for jobs, in the order of the keys, and says who has each that is not under way",
    "claim_keys": "the same, until there is an answer for each key",
    "holds_claim": "whether a job holds a key now, in whatever table its row is",
    "sync_claims": "after a change of a row, takes its key or lets it go; a row on its way to another table keeps it",
    "drop_idle_claim": "at the end of the transaction, drops a claim whose row never came",
}

_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call, unused-ignore]


class UndescribedError(Exception):
    """Something has no phrase, or a phrase has nothing."""


def main(arguments: list[str]) -> int:
    """Print the page, or compare it with the file."""
    text = page()
    if arguments == ["--check"]:
        if PAGE.is_file() and PAGE.read_text("utf-8") == text:
            return 0
        sys.stderr.write(
            "docs/reference/tables.md is not up to date: python docs/tables.py > docs/reference/tables.md\n"
        )
        return 1
    sys.stdout.write(text)
    return 0


def page() -> str:
    """The whole page. Raises `UndescribedError` when phrases and models do not agree."""
    refuse_gaps()
    parts = [
        *(INTRODUCTION, "## Columns of every job\n", columns(shared_columns())),
        *map(section, our_tables()),
        *(TRIGGERS, functions(), triggers()),
    ]
    return "\n".join(parts)


def our_tables() -> list[Table]:
    """Every table in the order of the page, the view after the tables it shows."""
    jobs = [model.__table__ for model in JOB_TABLES]
    return [*jobs, JobRecord.__table__, *(t for t in AwaBase.metadata.tables.values() if t not in jobs)]


def shared_columns() -> list[Column[object]]:
    """The columns of the view that come from the job tables, as `jobs_hot` has them."""
    return [column for column in inspect(Job).columns if column.name in SHARED]


def own_columns(table: Table) -> list[Column[object]]:
    """The columns of a table that the shared ones do not describe already: others, and those with another default."""
    if table is JobRecord.__table__:
        return [table.columns["stored_in"]]
    if not is_job_table(table):
        return list(table.columns)
    usual = {column.name: default(column) for column in shared_columns()}
    return [column for column in table.columns if usual.get(column.name) != default(column)]


def is_job_table(table: Table) -> bool:
    """Whether a table has the shared columns."""
    return table in [model.__table__ for model in (Job, ScheduledJob, DeadLetter)]


def section(table: Table) -> str:
    """One table: what for, its own columns, its checks, its indexes."""
    parts = [f"## `{table.name}`\n", TABLES[table.name] + "\n"]
    if is_job_table(table):
        parts.append(
            "The columns of every job" + ("; these differ, or come beside them:\n" if own_columns(table) else ".\n")
        )
    elif table is JobRecord.__table__:
        parts.append("The columns of every job, and:\n")
    if own_columns(table):
        parts.append(columns(own_columns(table)))
    parts += [*checks(table), *indexes(table)]
    return "\n".join(parts)


def columns(described: Iterable[Column[object]]) -> str:
    """A Markdown table of columns."""
    rows = [
        (
            f"`{column.name}`",
            str(column.type.compile(dialect=_DIALECT)).lower(),
            "yes" if column.nullable else "",
            default(column),
            phrase(column),
        )
        for column in described
    ]
    return grid(("column", "type", "null", "default", "meaning"), rows)


def phrase(column: Column[object]) -> str:
    """What a column means."""
    own = COLUMNS.get(f"{column.table.name}.{column.name}")
    found = own or (SHARED.get(column.name) if column.table.name in ("jobs", *job_names()) else None)
    if found is None:
        raise UndescribedError(f"docs/tables.py has no phrase for the column {column.table.name}.{column.name}")
    return found


def job_names() -> list[str]:
    """The names of the job tables."""
    return [model.__tablename__ for model in JOB_TABLES]


def default(column: Column[object]) -> str:
    """The default of a column as SQL, or nothing."""
    if isinstance(column.server_default, Identity):
        return "identity"
    if isinstance(column.server_default, DefaultClause):
        return f"`{column.server_default.arg.compile(dialect=_DIALECT)}`"  # type: ignore[union-attr]
    return ""


def checks(table: Table) -> Iterator[str]:
    """The CHECKs of a table."""
    found = [c for c in table.constraints if isinstance(c, CheckConstraint)]
    if found:
        yield grid(("check", "holds"), [(f"`{c.name}`", f"`{c.sqltext}`") for c in sorted(found, key=sort_key)])


def indexes(table: Table) -> Iterator[str]:
    """The primary key and the indexes of a table."""
    key = ", ".join(column.name for column in table.primary_key)
    if table is JobRecord.__table__:
        return
    rows = [("primary key", f"`{key}`", "", "rows by their identity")]
    for index in sorted(table.indexes, key=sort_key):
        where = index.dialect_options["postgresql"]["where"]
        listed = ", ".join(str(getattr(part, "name", part)) for part in index.expressions)
        rows.append((f"`{index.name}`", f"`{listed}`", f"`{where}`" if where is not None else "", query(index)))
    yield grid(("index", "on", "where", "for the query"), rows)


def query(index: Index) -> str:
    """The query that an index serves."""
    found = QUERIES.get(str(index.name))
    if found is None:
        raise UndescribedError(f"docs/tables.py names no query for the index {index.name}")
    return found


def functions() -> str:
    """A Markdown table of the functions."""
    return grid(("function", "does"), [(f"`{name}`", FUNCTIONS[name]) for name in our_functions()])


def our_functions() -> list[str]:
    """The names of the functions that the schema has."""
    return [found[1] for sql in objects.statements() if (found := re.match(r'CREATE FUNCTION "\w+"\.(\w+)', sql))]


def triggers() -> str:
    """A Markdown table of the triggers, as their SQL has them."""
    rows: list[tuple[str, ...]] = []
    for sql in objects.statements():
        if "TRIGGER" not in sql.partition("\n")[0]:
            continue
        found = re.fullmatch(_TRIGGER, " ".join(sql.split()))
        if found is None:
            raise UndescribedError(f"docs/tables.py cannot read this trigger: {sql}")
        name, deferred = found["name"], "DEFERRED" in sql
        when = found["event"].lower() + (", at the end of the transaction" if deferred else "")
        rows.append((f"`{name}`", f"`{found['table']}`", when, found["each"].lower(), f"`{found['function']}`"))
    return grid(("trigger", "on", "after", "for each", "calls"), rows)


_TRIGGER = (
    r"CREATE (CONSTRAINT )?TRIGGER (?P<name>\w+) AFTER (?P<event>[A-Z]+)( OF [\w, ]+)? ON \"\w+\"\.(?P<table>\w+) .*?"
    r"FOR EACH (?P<each>ROW|STATEMENT) .*?EXECUTE FUNCTION \"\w+\"\.(?P<function>\w+)\(\)"
)


def sort_key(item: CheckConstraint | Index) -> str:
    """By name."""
    return str(item.name)


def grid(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def refuse_gaps() -> None:
    """Raise `UndescribedError` where models and phrases do not agree."""
    tables = our_tables()
    for table in tables:
        for column in table.columns:
            phrase(column)
        for index in table.indexes:
            query(index)
    known = {f"{table.name}.{column.name}" for table in tables for column in table.columns}
    gone = (
        TABLES.keys() ^ {table.name for table in tables},
        COLUMNS.keys() - known,
        SHARED.keys() ^ {column.name for column in JobRecord.__table__.columns if column.name != "stored_in"},
        FUNCTIONS.keys() ^ set(our_functions()),
        QUERIES.keys() - {str(index.name) for table in tables for index in table.indexes},
    )
    for names in gone:
        if names:
            raise UndescribedError(f"docs/tables.py describes what is not there, or not what is: {sorted(names)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
