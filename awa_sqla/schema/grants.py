"""Who may do what: roles as data, and the GRANT statements that make them true.

Each role is one kind of process, and has what that needs and no more: `producer` is the app that enqueues, `worker`
runs jobs, `maintenance` keeps the tables moving, `callback` is the ingress, `viewer` looks, and `owner` migrates. A
process that is two of them is granted both.

PostgreSQL asks for UPDATE where a row is only locked. There the UPDATE is of one column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import count

from sqlalchemy import ColumnElement, Connection, and_, func, select

from awa_sqla.errors import ConfigurationError
from awa_sqla.models import metadata
from awa_sqla.models.base import SCHEMA, ViewBase
from awa_sqla.models.records import Queue
from awa_sqla.schema import checked_schema
from awa_sqla.schema.objects import quoted

__all__ = ["FUNCTIONS", "OWNED_FUNCTIONS", "RELATIONS", "ROLES", "SEQUENCES", "Role", "grants", "missing"]

Privileges = tuple[str, ...]

#: Our tables, and the view over those of jobs.
RELATIONS = tuple(sorted(table.name for found in (metadata, ViewBase.metadata) for table in found.tables.values()))
SEQUENCES = ("jobs_id_seq", "run_lease_seq")
#: Functions that are called with the rights of the caller, out of statements and triggers.
FUNCTIONS = (
    "claim_keys(bytea[], bigint[])",
    "take_keys(bytea[], bigint[])",
    "holds_claim(bigint, bytea)",
    "in_unique_state(text, smallint)",
)
#: And those that triggers call, for which nobody needs a privilege.
OWNED_FUNCTIONS = (*FUNCTIONS, "wake_workers()", "sync_claims()", "drop_idle_claim()")


@dataclass(frozen=True, slots=True)
class Role:
    """What one kind of process may do.

    `may` says it in words. `relations` maps our tables and views to privileges, each for the whole relation ("INSERT")
    or for some columns ("UPDATE (state, errors)"). On `sequences` it has USAGE, on `functions` EXECUTE, and USAGE on
    the schema in any case.
    """

    may: str
    relations: Mapping[str, Privileges] = field(default_factory=dict[str, Privileges])
    sequences: Privileges = ()
    functions: Privileges = ()


_SELECT: Privileges = ("SELECT",)
_ADD: Privileges = ("SELECT", "INSERT")
_ALL: Privileges = ("SELECT", "INSERT", "UPDATE", "DELETE")

# What `cancel()` changes of a job: with these columns alone nobody can complete one, or give it a result.
_CANCELLED = (
    "state, finalized_at, errors, priority, aged, heartbeat_at, deadline_at, attended_at, callback_answer, "
    "callback_id, callback_timeout_at, callback_filter, callback_on_complete, callback_on_fail, callback_transform"
)
# What workers say of their queues. What operators have set over it is none of their business.
_DECLARED = ", ".join(column.name for column in Queue.__table__.columns if column.name.startswith("declared_"))

_UNIQUE: Mapping[str, Privileges] = {"jobs": _SELECT, "job_unique_claims": ("SELECT", "INSERT", "DELETE")}
_FOLLOW_UPS: Mapping[str, Privileges] = {"follow_up_specs": _SELECT, "follow_up_obligations": _ADD}

ROLES: Mapping[str, Role] = {
    "owner": Role("Owns the schema and all that is in it: installs, upgrades and grants."),
    "producer": Role(
        "Enqueues jobs in every form, cancels them, reads them and waits for their results.",
        {
            "jobs_hot": ("SELECT", "INSERT", f"UPDATE ({_CANCELLED})"),
            "scheduled_jobs": ("SELECT", "INSERT", "DELETE"),
            **_UNIQUE,
            **_FOLLOW_UPS,
        },
        ("jobs_id_seq",),
        FUNCTIONS,
    ),
    "worker": Role(
        "Runs jobs with all that handlers may do to them; a worker that may lead maintenance is granted that role too.",
        {
            "jobs_hot": _ALL,
            "scheduled_jobs": ("SELECT", "INSERT", "DELETE"),
            "dlq_entries": _ADD,
            **_UNIQUE,
            "queue_meta": ("SELECT", f"INSERT (queue, {_DECLARED})", f"UPDATE ({_DECLARED})"),
            "follow_up_specs": ("SELECT", "INSERT", "UPDATE"),
            "follow_up_obligations": _ADD,
            "runtime_instances": _ALL,
            "cron_jobs": ("SELECT", "INSERT", "UPDATE"),
            "schema_version": _SELECT,
        },
        SEQUENCES,
        FUNCTIONS,
    ),
    "maintenance": Role(
        "Promotes, rescues, settles what is owed, ages, prunes, counts and fires schedules.",
        {
            "jobs_hot": _ALL,
            "scheduled_jobs": ("SELECT", "INSERT", "UPDATE (id)", "DELETE"),
            "dlq_entries": ("SELECT", "INSERT", "UPDATE (id)", "DELETE"),
            **_UNIQUE,
            "queue_meta": _SELECT,
            "follow_up_specs": _ALL,
            "follow_up_obligations": _ALL,
            "runtime_instances": _ALL,
            "callback_receipts": ("SELECT", "UPDATE (created_at)", "DELETE"),
            "leaders": _ALL,
            "cron_jobs": ("SELECT", "INSERT", "UPDATE"),
            "job_counts": _ALL,
            "audit_log": ("SELECT", "UPDATE (id)", "DELETE"),
            "schema_version": _SELECT,
        },
        ("jobs_id_seq",),
        FUNCTIONS,
    ),
    "callback": Role(
        "Resolves callbacks, over HTTP or in the app's own transactions, and adds what follows.",
        {
            "jobs_hot": _ALL,
            "scheduled_jobs": _ADD,
            "dlq_entries": ("INSERT",),
            **_UNIQUE,
            **_FOLLOW_UPS,
            "queue_meta": _SELECT,
            "callback_receipts": _ALL,
        },
        ("jobs_id_seq",),
        FUNCTIONS,
    ),
    "viewer": Role("Reads everything and changes nothing.", dict.fromkeys(RELATIONS, _SELECT)),
}


def grants(role: str, to: str, *, schema: str = SCHEMA) -> Iterator[str]:
    """The statements that make a database role `to` one of ours, for the schema of this version. Does no I/O.

    `role` is a name of `ROLES`. They may be run any number of times: by the schema's owner once the schema is there,
    and again after each upgrade; those of `owner` before it is installed, by whoever may create it. They only add:
    REVOKE first what an earlier version has granted and should go. CONNECT on the database is not among them, because
    PostgreSQL gives that to all.

    Raises `ConfigurationError` for a role that is none, a name that no database role can have, and a schema name that
    is no plain identifier.
    """
    found = _role(role)
    checked_schema(schema)
    return _owner(_grantee(to), schema) if role == "owner" else _statements(found, _grantee(to), quoted(schema))


def _role(role: str) -> Role:
    """The role of this name. Raises `ConfigurationError`, with those that are meant perhaps."""
    found = ROLES.get(role)
    if found is None:
        close = get_close_matches(str(role), ROLES, 2)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"they are {', '.join(ROLES)}"
        raise ConfigurationError(f"there is no role {role!r}: {hint}")
    return found


def missing(connection: Connection, role: str, *, schema: str = SCHEMA) -> list[str]:
    """Those statements of a role that the connection's own user still needs; two that only read.

    Without USAGE on the schema that one alone: nothing behind it can be looked at. Of `owner`, always none. Raises
    like `grants`, and SQLAlchemy's `ProgrammingError` where the schema is not installed, or in an older version.
    """
    found = _role(role)
    checked_schema(schema)
    user = connection.scalar(select(func.current_user()))
    assert user is not None  # noqa: S101
    needed = dict(_grants(found, quoted(str(user)), quoted(schema)))
    lacking: list[str] = []
    for part in (list(needed.items())[:1], list(needed.items())[1:]):
        if part and not lacking:
            held = connection.execute(select(*(one for _, one in part))).one()
            lacking = [statement for (statement, _), has in zip(part, held, strict=True) if not has]
    return lacking


def _statements(role: Role, to: str, schema: str) -> Iterator[str]:
    return (statement for statement, _ in _grants(role, to, schema))


def _grants(role: Role, to: str, schema: str) -> Iterator[tuple[str, ColumnElement[bool]]]:
    """Each statement, and whether its privileges are held already."""
    if not role.relations:
        return
    yield f"GRANT USAGE ON SCHEMA {schema} TO {to}", func.has_schema_privilege(func.to_regnamespace(schema), "USAGE")
    for relation, privileges in role.relations.items():
        name = f"{schema}.{relation}"
        held = and_(*(one for privilege in privileges for one in _held(name, privilege)))
        yield f"GRANT {', '.join(privileges)} ON TABLE {name} TO {to}", held
    for sequence in role.sequences:
        name = f"{schema}.{sequence}"
        yield f"GRANT USAGE ON SEQUENCE {name} TO {to}", func.has_sequence_privilege(name, "USAGE")
    for function in role.functions:
        name = f"{schema}.{function}"
        yield f"GRANT EXECUTE ON FUNCTION {name} TO {to}", func.has_function_privilege(name, "EXECUTE")


def _held(relation: str, privilege: str) -> Iterator[ColumnElement[bool]]:
    kind, _, columns = privilege.rstrip(")").partition(" (")
    if not columns:
        yield func.has_table_privilege(relation, kind)
    for column in columns.split(", ") if columns else ():
        yield func.has_column_privilege(relation, column, kind)


def _owner(to: str, name: str) -> Iterator[str]:
    """The schema, and what another role has installed in it before; of `public` only the right to install there."""
    schema = quoted(name)
    if name == "public":
        yield f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {to}"
    else:
        yield f"CREATE SCHEMA IF NOT EXISTS {schema} AUTHORIZATION {to}"
        yield f"ALTER SCHEMA {schema} OWNER TO {to}"
    for relation in (*RELATIONS, *SEQUENCES):
        yield f"ALTER TABLE IF EXISTS {schema}.{relation} OWNER TO {to}"
    # ALTER FUNCTION has no IF EXISTS. The tag is one that the name does not hold.
    tag = next(tag for n in count() if (tag := f"$body{n or ''}$") not in to)
    for function in OWNED_FUNCTIONS:
        yield (
            f"DO {tag} BEGIN ALTER FUNCTION {schema}.{function} OWNER TO {to}; "
            f"EXCEPTION WHEN undefined_function THEN NULL; END {tag}"
        )


def _grantee(name: str) -> str:
    """Quoted. Quotes do not help with `public`, which is everybody, and `none`."""
    if not name or len(name.encode()) > 63 or not name.isprintable() or name in ("public", "none"):
        raise ConfigurationError(
            f"{name!r} is no name of a database role: at most 63 bytes that can be printed, and not public or none"
        )
    return quoted(name)
