"""The statements of `awa_sqla.schema.grants`, and the command that prints them; what they do is in `test_roles`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import URL, Engine, NullPool, create_engine
from sqlalchemy.exc import DBAPIError

from awa_sqla import ConfigurationError
from awa_sqla.cli import cli
from awa_sqla.cli.grants import refused
from awa_sqla.models import metadata
from awa_sqla.schema import LATEST, create_all, objects
from awa_sqla.schema.grants import FUNCTIONS, OWNED_FUNCTIONS, RELATIONS, ROLES, SEQUENCES, grants, missing

WITH_PRIVILEGES = [role for role in ROLES if role != "owner"]


def test_all_that_is_ours_is_known() -> None:
    assert set(RELATIONS) == {table.name for table in metadata.tables.values()} | {"jobs"}
    assert set(SEQUENCES) == {sequence.name for sequence in metadata._sequences.values()}
    made = re.findall(r"^CREATE FUNCTION \S+\.(\w+)\(", "\n".join(objects.statements()), re.MULTILINE)
    assert sorted(made) == sorted(function.partition("(")[0] for function in OWNED_FUNCTIONS)


@pytest.mark.parametrize("role", WITH_PRIVILEGES)
def test_a_role_names_only_what_there_is(role: str) -> None:
    found = ROLES[role]
    assert set(found.relations) <= set(RELATIONS)
    assert set(found.sequences) <= set(SEQUENCES)
    assert set(found.functions) <= set(FUNCTIONS)
    columns = {table.name: {column.name for column in table.columns} for table in metadata.tables.values()}
    for relation, privileges in found.relations.items():
        for privilege in privileges:
            kind, _, named = privilege.rstrip(")").partition(" (")
            assert kind in ("SELECT", "INSERT", "UPDATE", "DELETE")
            assert not named or set(named.split(", ")) <= columns[relation]


def test_the_statements_of_a_role() -> None:
    assert list(grants("producer", "web"))[:3] == [
        'GRANT USAGE ON SCHEMA "awa" TO "web"',
        (
            "GRANT SELECT, INSERT, UPDATE (state, finalized_at, errors, priority, aged, heartbeat_at, deadline_at, "
            "attended_at, callback_answer, callback_id, callback_timeout_at, callback_filter, callback_on_complete, "
            'callback_on_fail, callback_transform) ON TABLE "awa".jobs_hot TO "web"'
        ),
        'GRANT SELECT, INSERT, DELETE ON TABLE "awa".scheduled_jobs TO "web"',
    ]
    assert 'GRANT USAGE ON SEQUENCE "My-jobs".run_lease_seq TO "run"' in list(grants("worker", "run", schema="My-jobs"))


@pytest.mark.parametrize("schema", ["awa", "My-jobs"])
@pytest.mark.parametrize("role", ROLES)
def test_every_statement_names_the_schema_and_the_role_in_quotes(role: str, schema: str) -> None:
    for statement in grants(role, 'o"brien', schema=schema):
        assert f'"{schema}"' in statement
        assert re.search('(TO|AUTHORIZATION) "o""brien"', statement)


@pytest.mark.parametrize(
    ("role", "hint"),
    [
        ("viewr", "did you mean 'viewer'?"),
        ("Worker", "did you mean 'worker'?"),
        ("admin", "they are owner, producer, worker, maintenance, callback, viewer"),
        ("", "they are owner"),
    ],
)
def test_an_unknown_role_is_an_error_before_anything_is_read(role: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(hint)):
        grants(role, "x")


@pytest.mark.parametrize("to", ["", "public", "none", "a\nb", "a\0b", "x" * 64, "é" * 32])
@pytest.mark.parametrize("role", ["owner", "viewer"])
def test_what_no_role_can_be_called_is_refused(role: str, to: str) -> None:
    """`GRANT ... TO "public"` grants to everybody, in spite of the quotes."""
    with pytest.raises(ConfigurationError, match="is no name of a database role"):
        grants(role, to)


@pytest.mark.parametrize("role", ["owner", "viewer"])
def test_a_schema_that_is_no_plain_identifier_is_refused(role: str) -> None:
    with pytest.raises(ConfigurationError, match="is no plain identifier"):
        grants(role, "x", schema='a"; DROP TABLE b; --')


# ------------------------------------------------------------------------------------------------ the command line
def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["grants", *arguments], env={"AWA_DATABASE_URL": "postgresql://nowhere.invalid/x"})


#: Roles are the server's, which other processes of a run may share.
NAME = "o'brien -- \"x" + os.environ.get("PYTEST_XDIST_WORKER", "")
QUOTED = '"' + NAME.replace('"', '""') + '"'


@pytest.fixture
def installed(empty_engine: Engine) -> Iterator[Engine]:
    """A database with our tables, and a role without privileges whose name is no identifier."""
    with empty_engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {QUOTED} LOGIN PASSWORD 'p'")
        create_all(connection)
        connection.exec_driver_sql("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA awa FROM PUBLIC")
    yield empty_engine
    with empty_engine.begin() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {QUOTED} CASCADE")
        connection.exec_driver_sql(f"DROP ROLE {QUOTED}")


def _as_nobody(engine: Engine) -> URL:
    return engine.url.set(username=NAME, password="p")


@pytest.mark.parametrize("role", ROLES)
def test_what_is_printed_can_be_run_as_it_is(role: str, installed: Engine) -> None:
    shown = run("--role", role, "--to", NAME)
    assert (shown.exit_code, shown.stderr) == (0, "")
    comment, *statements = [line for line in shown.stdout.splitlines() if not line.startswith("SET client_min_")]
    assert comment == f"-- {role}, for version {LATEST} of the schema. {ROLES[role].may}"
    assert [statement.removesuffix(";") for statement in statements] == list(grants(role, NAME))
    with installed.begin() as connection:
        for _ in range(2):
            connection.exec_driver_sql(shown.stdout)
    with create_engine(_as_nobody(installed), poolclass=NullPool).connect() as connection:
        assert missing(connection, role) == []
        connection.exec_driver_sql("SELECT FROM awa.jobs")


def test_another_schema_can_be_named() -> None:
    assert 'ON TABLE "jobs-2".leaders TO "ops";' in run("--role=maintenance", "--to=ops", "--schema=jobs-2").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--role=viewr", "--to=x"], "'viewr' is not one of 'owner', 'producer', 'worker'"),
        (["--role=viewer"], "Missing option '--to'"),
        (["--to=x"], "Missing option '--role'"),
        (["--role=viewer", "--to=public"], "'public' is no name of a database role"),
        (["--role=viewer", "--to=x", "--schema=pg_x"], "schema 'pg_x' is PostgreSQL's own"),
    ],
)
def test_what_cannot_be_printed_is_a_usage_error(arguments: list[str], said: str) -> None:
    shown = run(*arguments)
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert shown.stdout == ""


# ----------------------------------------------------------------------------------------------- what is missing
@pytest.mark.parametrize("role", WITH_PRIVILEGES)
def test_missing_says_what_is_left_to_grant(role: str, installed: Engine) -> None:
    statements = list(grants(role, NAME))
    engine = create_engine(_as_nobody(installed), poolclass=NullPool)

    def left(*granted: str) -> list[str]:
        with installed.begin() as admin:
            for statement in granted:
                admin.exec_driver_sql(statement)
        with engine.connect() as connection:
            return missing(connection, role)

    assert left() == statements[:1]
    assert left(statements[0]) == statements[1:]
    assert left(*statements[2:]) == statements[1:2]
    assert left(statements[1]) == []


def test_missing_sees_one_column(installed: Engine) -> None:
    with installed.begin() as admin:
        for statement in grants("producer", NAME):
            admin.exec_driver_sql(statement)
        admin.exec_driver_sql(f"REVOKE UPDATE (errors) ON awa.jobs_hot FROM {QUOTED}")
    with create_engine(_as_nobody(installed), poolclass=NullPool).connect() as connection:
        (statement,) = missing(connection, "producer")
    assert "UPDATE (state, finalized_at, errors" in statement


def _error(url: URL, statement: str) -> BaseException:
    with create_engine(url, poolclass=NullPool).connect() as connection, pytest.raises(DBAPIError) as caught:
        connection.exec_driver_sql(statement)
    return caught.value


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_refusal_is_told_with_the_grants_that_are_missing(installed: Engine, driver: str) -> None:
    with installed.begin() as admin:
        for statement in grants("worker", NAME):
            if "leaders" not in statement and "runtime_instances" not in statement:
                admin.exec_driver_sql(statement)
    url = _as_nobody(installed).set(drivername=f"postgresql+{driver}")
    error = _error(url, "SELECT * FROM awa.runtime_instances")
    assert refused(error, "worker", url.render_as_string(hide_password=False)) == (
        "the database refused: permission denied for table runtime_instances. Its user lacks:\n"
        f'  GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE "awa".runtime_instances TO {QUOTED};\n'
        "`awa-sqla grants --role worker --to NAME` prints all that a database role needs for this"
    )
    assert refused(_error(url, "SELECT 1/0"), "worker", "postgresql://nowhere.invalid/x") is None
    assert refused(error, "worker", "postgresql://u@127.0.0.1:1/x") == (
        "the database refused: permission denied for table runtime_instances. "
        "`awa-sqla grants --role worker --to NAME` prints all that a database role needs for this"
    )
