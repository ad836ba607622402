"""Each role does its work with exactly its privileges: with all of them it can, without any one of them it cannot."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy.exc import DBAPIError

from awa_sqla import claim, complete
from awa_sqla.cli import cli
from awa_sqla.models import metadata
from awa_sqla.sqlstates import INSUFFICIENT_PRIVILEGE, sqlstate
from tests.schema.roles.duties import DUTIES, EACH
from tests.schema.roles.duties.given import Duty, Plain, given, owed
from tests.schema.roles.duties.processes import runs
from tests.schema.roles.least import DRIVERS, PREFIX, SCHEMAS, Place, every_grant, in_one_schema

#: Each takes its own database, project or processes; run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside

TABLES = sorted(table.name for table in metadata.tables.values())

#: Roles whose privileges are soon gone through; the others take up to a minute.
AT_ONCE = ("viewer",)


def _named(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@in_one_schema
@pytest.mark.parametrize(("role", "duty"), [(role, duty) for role in DUTIES for duty in DUTIES[role]], ids=_named)
def test_a_role_can_do_its_work(place: Place, role: str, duty: Duty) -> None:
    with place.watched() as refused:
        duty(place, role)
    assert refused == []


@pytest.mark.parametrize("_built", SCHEMAS[1:], indirect=True)
@pytest.mark.parametrize(("role", "duty", "driver"), EACH, ids=_named)
def test_a_role_can_do_its_work_in_every_driver(place: Place, role: str, duty: Duty, driver: str) -> None:
    """And in a schema of another name."""
    with place.watched() as refused:
        duty(place, role, driver)
    assert refused == []


def _fails(place: Place, role: str) -> bool:
    """Whether one of the role's duties is refused something."""
    for duty in DUTIES[role]:
        place.wipe()
        with place.watched() as refused:
            try:
                duty(place, role)
            except BaseException:
                if not refused:
                    raise
        if refused:
            return True
    return False


@in_one_schema
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "role", [pytest.param(role, marks=() if role in AT_ONCE else pytest.mark.beside) for role in DUTIES]
)
def test_no_privilege_is_one_too_many(place: Place, role: str) -> None:
    idle = []
    for grant in every_grant(place, role):
        with grant.taken_away():
            if not _fails(place, role):
                idle.append(str(grant))
    assert not idle, "\n".join(idle)


# ---------------------------------------------------------------------------------------------- what nobody may do
def _privileges(place: Place, role: str) -> set[str]:
    """What the server says that a role has, in the words of `every_grant`."""
    kinds = "CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END || ' '"
    named = f"'{place.qualified('')}'"
    found = place.sql(
        f"SELECT privilege_type || ' ON ' || {kinds} || {named} || relname FROM pg_class, aclexplode(relacl) "
        "WHERE grantee = (:role)::regrole UNION "
        f"SELECT privilege_type || ' (' || attname || ') ON TABLE ' || {named} || relname FROM pg_class "
        "JOIN pg_attribute ON attrelid = pg_class.oid, aclexplode(attacl) WHERE grantee = (:role)::regrole UNION "
        f"SELECT privilege_type || ' ON FUNCTION ' || {named} || proname || '(' || "
        "pg_get_function_identity_arguments(pg_proc.oid) || ')' FROM pg_proc, aclexplode(proacl) "
        "WHERE grantee = (:role)::regrole UNION "
        "SELECT privilege_type || ' ON SCHEMA ' || quote_ident(nspname) FROM pg_namespace, aclexplode(nspacl) "
        "WHERE grantee = (:role)::regrole",
        role=PREFIX + role,
    )
    return {str(name) for (name,) in found}


def _plain(grant: object) -> str:
    """Of a function's arguments the types only."""
    return re.sub(r"\(\w+ (\S+), \w+ (\S+)\)", r"(\1, \2)", str(grant)).replace('SCHEMA "awa"', "SCHEMA awa")


@pytest.mark.parametrize("role", DUTIES)
def test_the_server_knows_of_no_more_than_the_data(place: Place, role: str) -> None:
    """Also not by way of PUBLIC, or of a statement that has granted too much."""
    assert {_plain(name) for name in _privileges(place, role)} == {_plain(grant) for grant in every_grant(place, role)}
    assert _privileges(place, "nobody") == set()


def _refused(place: Place, role: str, *statements: str) -> list[str]:
    """Those of the statements that a role may not send."""
    found = []
    for statement in statements:
        with place.engine(role).connect() as connection:
            try:
                connection.exec_driver_sql(statement.replace("{awa}", f'"{place.schema}"'))
            except DBAPIError as exc:
                assert sqlstate(exc) == INSUFFICIENT_PRIVILEGE, exc
                found.append(statement)
            connection.rollback()
    return found


OWNERS = [
    *(f"TRUNCATE {{awa}}.{name}" for name in TABLES),
    "DROP TABLE {awa}.jobs_hot",
    "ALTER TABLE {awa}.jobs_hot ADD COLUMN mine text",
    "CREATE TABLE {awa}.mine ()",
    "CREATE OR REPLACE VIEW {awa}.jobs AS SELECT 1",
    "CREATE TABLE public.mine ()",
    "CREATE TEMP TABLE mine ()",
    "ALTER SEQUENCE {awa}.jobs_id_seq RESTART",
    "SELECT setval('{awa}.jobs_id_seq', 1)",
    "CREATE TRIGGER mine AFTER INSERT ON {awa}.jobs_hot EXECUTE FUNCTION {awa}.wake_workers()",
    "ALTER TABLE {awa}.jobs_hot DISABLE TRIGGER jobs_hot_claims_insert",
    "INSERT INTO {awa}.schema_version (version) VALUES (1000)",
]


@in_one_schema
@pytest.mark.parametrize("role", [*DUTIES, "both", "nobody"])
def test_what_is_the_owners_is_nobody_elses(place: Place, role: str) -> None:
    assert _refused(place, role, *OWNERS) == OWNERS


REFUSED = {
    "producer": [
        "UPDATE {awa}.jobs_hot SET result = '1'",
        "UPDATE {awa}.jobs_hot SET run_lease = 1",
        "UPDATE {awa}.jobs_hot SET args = '{}'",
        "DELETE FROM {awa}.jobs_hot",
        "UPDATE {awa}.scheduled_jobs SET run_at = now()",
        "SELECT FROM {awa}.dlq_entries",
        "SELECT FROM {awa}.cron_jobs",
        "SELECT FROM {awa}.queue_meta",
        "SELECT nextval('{awa}.run_lease_seq')",
        "UPDATE {awa}.follow_up_obligations SET attempts = 0",
        "DELETE FROM {awa}.follow_up_specs",
    ],
    "worker": [
        "UPDATE {awa}.queue_meta SET override_concurrency = 1",
        "UPDATE {awa}.queue_meta SET paused_at = now()",
        "DELETE FROM {awa}.queue_meta",
        "SELECT FROM {awa}.audit_log",
        "INSERT INTO {awa}.audit_log (source, verb, target) VALUES ('s', 'v', 't')",
        "DELETE FROM {awa}.dlq_entries",
        "DELETE FROM {awa}.cron_jobs",
        "UPDATE {awa}.leaders SET holder = 'me'",
        "SELECT FROM {awa}.callback_receipts",
    ],
    "maintenance": [
        "SELECT nextval('{awa}.run_lease_seq')",
        "INSERT INTO {awa}.audit_log (source, verb, target) VALUES ('s', 'v', 't')",
        "UPDATE {awa}.audit_log SET actor = 'me'",
        "UPDATE {awa}.queue_meta SET override_concurrency = 1",
        "UPDATE {awa}.dlq_entries SET args = '{}'",
        "UPDATE {awa}.callback_receipts SET answer = '{}'",
        "DELETE FROM {awa}.cron_jobs",
    ],
    "callback": [
        "SELECT nextval('{awa}.run_lease_seq')",
        "SELECT FROM {awa}.dlq_entries",
        "DELETE FROM {awa}.scheduled_jobs",
        "SELECT FROM {awa}.audit_log",
        "UPDATE {awa}.queue_meta SET override_concurrency = 1",
    ],
    "viewer": [
        *(f"DELETE FROM {{awa}}.{name}" for name in TABLES),
        "INSERT INTO {awa}.jobs_hot (kind) VALUES ('k')",
        "UPDATE {awa}.jobs_hot SET state = 'cancelled'",
        "SELECT FROM {awa}.jobs_hot FOR UPDATE",
        "SELECT nextval('{awa}.jobs_id_seq')",
        "SELECT {awa}.claim_keys('{}', '{}')",
    ],
    "nobody": ["SELECT FROM {awa}.jobs", "SELECT {awa}.in_unique_state('failed', 1::smallint)"],
}


@in_one_schema
@pytest.mark.parametrize("role", REFUSED)
def test_a_role_is_refused_what_is_not_its_own(place: Place, role: str) -> None:
    assert _refused(place, role, *REFUSED[role]) == REFUSED[role]


@in_one_schema
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_producer_cannot_claim_and_cannot_complete(place: Place, driver: str) -> None:
    given(place, Plain(), Plain())
    with pytest.raises(DBAPIError, match="permission denied for table jobs_hot"):
        place.run("producer", lambda session: claim(session, "default", limit=1), driver)
    (job,) = place.run("owner", lambda session: claim(session, "default", limit=1))
    with pytest.raises(DBAPIError, match="permission denied for table jobs_hot"):
        place.run("producer", lambda session: complete(session, job), driver)


@in_one_schema
def test_a_worker_that_leads_maintenance_is_granted_both(place: Place) -> None:
    with place.watched() as refused:
        runs(place, "both", maintenance=True)
    assert refused == []
    place.wipe()
    with place.watched() as refused, suppress(AssertionError):
        runs(place, "worker", maintenance=True)
    assert "permission denied for table leaders" in refused


@in_one_schema
@pytest.mark.parametrize(
    ("role", "arguments"),
    [
        ("viewer", ["specs", "list"]),
        ("maintenance", ["maintenance", "--once"]),
        ("owner", ["migrate"]),
        ("owner", ["specs", "forget", "elsewhere"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_command_needs_one_role(place: Place, role: str, arguments: list[str]) -> None:
    owed(place, "completed")
    url = place.as_role(role).render_as_string(hide_password=False)
    with place.watched() as refused:
        shown = CliRunner().invoke(cli, ["-d", url, *arguments])
    assert (shown.exit_code, refused) == (0, []), shown.output
    nobodys = place.as_role("nobody").render_as_string(hide_password=False)
    shown = CliRunner().invoke(cli, ["-d", nobodys, *arguments])
    assert shown.exit_code == 4
    assert "the database refused: permission denied for schema awa" in shown.stderr
    assert f"`awa-sqla grants --role {role} --to NAME`" in shown.stderr


@in_one_schema
def test_a_comparison_needs_the_viewer_and_temporary_tables(place: Place) -> None:
    """Everybody may make those, unless it was revoked, as it was here."""
    url = place.as_role("viewer").render_as_string(hide_password=False)
    shown = CliRunner().invoke(cli, ["-d", url, "migrate", "--check"])
    assert shown.exit_code == 4
    assert "GRANT TEMPORARY ON DATABASE" in shown.stderr
    database = f'ON DATABASE "{place.url.database}"'
    place.sql(f"GRANT TEMPORARY {database} TO {PREFIX}viewer")
    try:
        with place.watched() as refused:
            shown = CliRunner().invoke(cli, ["-d", url, "migrate", "--check"])
    finally:
        place.sql(f"REVOKE TEMPORARY {database} FROM {PREFIX}viewer")
    assert (shown.exit_code, refused) == (0, []), shown.output


@in_one_schema
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize(
    ("role", "arguments"),
    [("worker", ["-A", "tests.schema.roles.duties.processes:app", "worker"]), ("maintenance", ["maintenance"])],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_a_process_that_lacks_a_privilege_says_which(
    place: Place, role: str, arguments: list[str], driver: str
) -> None:
    url = place.as_role(role, driver).render_as_string(hide_password=False)
    place.sql(f"REVOKE DELETE ON {{awa}}.runtime_instances FROM {PREFIX}{role}")
    try:
        shown = CliRunner().invoke(cli, ["-d", url, *arguments])
    finally:
        place.sql(f"GRANT DELETE ON {{awa}}.runtime_instances TO {PREFIX}{role}")
    assert shown.exit_code == 4, shown.output
    assert "permission denied for table runtime_instances. Its user lacks:\n  GRANT SELECT, " in shown.stderr
    assert "jobs_hot" not in shown.stderr
