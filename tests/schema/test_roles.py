"""Each role does its work with exactly its privileges: with all of them it can, without any one of them it cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy.exc import DBAPIError

from awa_sqla import claim, complete
from awa_sqla.cli import cli
from awa_sqla.models import metadata
from awa_sqla.schema import LATEST, create_all, installed_version, migrate, migrate_online
from awa_sqla.schema.grants import ROLES, grants
from awa_sqla.sqlstates import sqlstate
from tests.databases import DBNAME, Server
from tests.schema.duties import DUTIES, EACH
from tests.schema.duties.given import Duty, Plain, given, owed
from tests.schema.duties.processes import runs
from tests.schema.least import DENIED, DRIVERS, Place, every_grant

SCHEMAS = ("awa", "Other-one")
TABLES = sorted(table.name for table in metadata.tables.values())

#: For what the schema's name has no part in.
in_one_schema = pytest.mark.parametrize("_built", SCHEMAS[:1], indirect=True)


#: Roles whose privileges are soon gone through; the others take up to a minute.
AT_ONCE = ("producer", "viewer")


@pytest.fixture(scope="module", params=SCHEMAS)
def _built(postgres_server: Server, request: pytest.FixtureRequest) -> Iterator[Place]:
    dbname = f"{DBNAME}{os.environ.get('PYTEST_XDIST_WORKER', '')}_least"
    janitor = postgres_server.janitor(dbname, template_dbname="template0")
    janitor.drop()
    with janitor:
        place = Place(postgres_server.url(dbname), request.param)
        yield place
        place.close()


@pytest.fixture
def place(_built: Place, an_old_server: None) -> Place:
    """The database with its roles, and no rows."""
    _built.wipe()
    return _built


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
        role=f"least_{role}",
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
                assert sqlstate(exc) == DENIED, exc
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
        ("viewer", ["migrate", "--check"]),
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
    assert CliRunner().invoke(cli, ["-d", nobodys, *arguments]).exit_code != 0


# ------------------------------------------------------------------------------------------------------- the owner
def test_the_owner_goes_down_and_up_and_grants_again(place: Place) -> None:
    """All of it as a role that owns the schema and is allowed nothing else."""
    with place.watched() as refused, place.engine("owner").begin() as connection:
        assert migrate(connection, 0, place.schema) == (LATEST, 0)
        assert installed_version(connection, place.schema) == 0
        migrate(connection, LATEST, place.schema)
        for role in DUTIES:
            place.grant(connection, role, f"least_{role}")
            place.grant(connection, role, f"least_{role}")
        connection.rollback()
    assert refused == []


@in_one_schema
def test_the_owner_installs_and_upgrades_online(place: Place) -> None:
    """In a schema that was made for it, with what runs beside the traffic; the schema stays when our tables go."""
    place.sql(";".join(grants("owner", "least_owner", schema="online")))
    try:
        for version in (3, LATEST, 0):
            with place.watched() as refused:
                migrate_online(place.engine("owner"), version, "online")
            assert refused == []
            with place.admin.connect() as connection:
                assert installed_version(connection, "online") == version
        assert place.sql("SELECT FROM pg_namespace WHERE nspname = 'online'") != []
    finally:
        place.sql("DROP SCHEMA online CASCADE")


@in_one_schema
def test_what_somebody_else_has_installed_becomes_the_owners(place: Place) -> None:
    """A database that has lived with one role for everything: afterwards the owner can upgrade it."""
    with place.admin.connect() as connection:
        connection.exec_driver_sql("CREATE SCHEMA inherited")
        create_all(connection, "inherited")
        for _ in range(2):
            for statement in grants("owner", "least_owner", schema="inherited"):
                connection.exec_driver_sql(statement)
        others = connection.exec_driver_sql(
            "SELECT relname FROM pg_class WHERE relnamespace = 'inherited'::regnamespace "
            "AND relowner <> 'least_owner'::regrole UNION ALL SELECT proname FROM pg_proc "
            "WHERE pronamespace = 'inherited'::regnamespace AND proowner <> 'least_owner'::regrole"
        ).all()
        assert others == []
        connection.exec_driver_sql("SET LOCAL ROLE least_owner")
        assert migrate(connection, 0, "inherited") == (LATEST, 0)
        connection.rollback()


@in_one_schema
def test_in_the_schema_public_the_owner_may_install_and_owns_nothing_else(place: Place) -> None:
    with place.admin.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE public.yours ()")
        for statement in grants("owner", "least_owner", schema="public"):
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql("SET LOCAL ROLE least_owner")
        create_all(connection, "public")
        with pytest.raises(DBAPIError, match="must be owner of table yours"):
            connection.exec_driver_sql("DROP TABLE public.yours")
        connection.rollback()


# --------------------------------------------------------------------------------------------------------- hygiene
def test_a_name_of_any_kind_is_the_name_of_a_role_and_nothing_more(place: Place) -> None:
    name = """it's "$body$; DROP TABLE jobs; --"""
    quoted = '"' + name.replace('"', '""') + '"'
    with place.admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {quoted}")
        for role in ROLES:
            for statement in grants(role, name, schema=place.schema):
                connection.exec_driver_sql(statement)
        owner = connection.exec_driver_sql(
            "SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = %s", (place.schema,)
        )
        assert owner.scalar() == quoted
        connection.rollback()
