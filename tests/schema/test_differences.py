"""The comparison with an installed schema: it names what differs, and its statements mend exactly that."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from random import Random

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

from awa_sqla.schema import LATEST, create_all, installed_version, migrate
from awa_sqla.schema.drift import Difference, differences, mend
from tests.databases import Server
from tests.schema import catalog
from tests.schema.sabotage import SABOTAGE, THEIRS

NAMES = ("awa", "Job-Queue", "ärger", "public", "jobs_hot")
NAMED = [
    pytest.param(NAMES[number % len(NAMES)], case, id=f"{case}, {NAMES[number % len(NAMES)]}")
    for number, case in enumerate(SABOTAGE)
]

#: Some of them, each name among them; the others beside the quick suite.
MIXED = [
    pytest.param(*param.values, id=param.id, marks=() if number % 12 == 0 else pytest.mark.beside)
    for number, param in enumerate(NAMED)
]

#: Where the statements that are executed one after another are others than those of one transaction.
APART = {
    "column of an index and a check missing",
    "not null",
    "not null, and rows without",
    "type with a default and a check",
    "type under the view",
    "types under the view and in triggers",
    "type of a column that a trigger watches",
    "identity gone",
    "generated, of another type",
    "check",
    "check missing",
    "another check, not valid",
    "primary key",
    "primary key missing",
    "primary key of others",
    "predicate",
    "predicate gone",
    "index columns",
    "index order",
    "index method",
    "index missing",
    "index not valid",
    "index not unique",
    "index unique",
    "unique index of others",
    "unique index of others on an expression",
    "rests of a rebuild",
    "view with another column",
    "function with another result",
    "trigger",
}

ROWS = """
    INSERT INTO {s}.jobs_hot (kind, tags) VALUES ('send', '{{a}}'), ('it''s', '{{}}');
    INSERT INTO {s}.jobs_hot (kind, unique_key, unique_states) VALUES ('once', 'a key', 255);
    INSERT INTO {s}.scheduled_jobs (kind, run_at) VALUES ('later', now());
    INSERT INTO {s}.dlq_entries (id, kind, original_run_lease, dlq_reason)
    VALUES (nextval('{s}.jobs_id_seq'), 'dead', nextval('{s}.run_lease_seq'), 'no');
    INSERT INTO {s}.queue_meta (queue) VALUES ('mail');
    INSERT INTO {s}.follow_up_specs (kind, outcome, name) VALUES ('send', 'completed', 'tell');
    INSERT INTO {s}.follow_up_obligations (job_id, kind, outcome, spec, snapshot)
    VALUES (1, 'send', 'completed', 'tell', '{{}}');
    INSERT INTO {s}.cron_jobs (name, cron_expr) VALUES ('nightly', '0 0 * * *');
    INSERT INTO {s}.job_counts (queue, state, jobs) VALUES ('mail', 'completed', 3);
    INSERT INTO {s}.audit_log (source, verb, target) VALUES ('cli', 'pause', 'mail')"""


@contextmanager
def database(server: Server, name: str) -> Generator[Engine]:
    """An engine on a new database that goes afterwards."""
    janitor = server.janitor(name, template_dbname="template0")
    janitor.drop()
    with janitor:
        engine = create_engine(server.url(name), poolclass=NullPool)
        yield engine
        engine.dispose()


Rows = dict[str, list[dict[str, str]]]


def execute(connection: Connection, sql: str, schema: str) -> None:
    connection.exec_driver_sql(
        sql.replace("{s}", f'"{schema}"').replace("{{", "{").replace("}}", "}").replace("%", "%%")
    )


def rows(connection: Connection, schema: str) -> Rows:
    """All rows of all tables, as text and without what is NULL: a type may change, a value may not."""
    tables = connection.scalars(
        text("SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(:name) AND relkind = 'r'"),
        {"name": f'"{schema}"'},
    ).all()
    found: Rows = {}
    for table in tables:
        all_of_it = connection.execute(text(f'SELECT * FROM "{schema}"."{table}"')).mappings()
        found[table] = [{name: str(value) for name, value in row.items() if value is not None} for row in all_of_it]
    return found


def assert_kept(before: Rows, after: Rows) -> None:
    """Every value of every row is still there; columns that were mended may have come."""
    for table, expected in before.items():
        left = list(after[table])
        for row in expected:
            left.remove(next(one for one in left if row.items() <= one.items()))
        assert not left or table == "schema_version"


def assert_named(found: list[Difference], case: str) -> None:
    """Exactly what the case says, each with its problem; a name that comes twice counts once."""
    named = SABOTAGE[case].named
    assert {one.what for one in found} == set(named)
    for what, problem in named.items():
        assert any(problem in one.problem for one in found if one.what == what), [one.problem for one in found]


@pytest.fixture(scope="module")
def _installed(postgres_server: Server) -> Iterator[Engine]:
    with database(postgres_server, "awa_test_installed") as engine:
        with engine.begin() as connection:
            for schema in NAMES:
                create_all(connection, schema)
                execute(connection, ROWS, schema)
        yield engine


@pytest.fixture
def installed(_installed: Engine) -> Iterator[Connection]:
    """A connection to a database with the schema under each name, and rows; what a test does is rolled back."""
    with _installed.connect() as connection:
        yield connection
        connection.rollback()
        assert differences(connection) == [], "a test of this connection must not commit"


@pytest.mark.parametrize("version", range(LATEST + 1))
def test_a_clean_schema_of_any_version_has_no_differences(connection: Connection, version: int) -> None:
    migrate(connection, version)
    before = catalog.names(connection)
    assert differences(connection) == []
    assert catalog.names(connection) == before
    assert installed_version(connection) == version


@pytest.mark.parametrize("schema", NAMES)
def test_a_clean_schema_of_any_name_has_no_differences(installed: Connection, schema: str) -> None:
    assert differences(installed, schema) == []


@pytest.mark.parametrize(("schema", "case"), MIXED)
def test_what_differs_is_named_and_mended_in_one_transaction(installed: Connection, schema: str, case: str) -> None:
    clean = catalog.described(installed, schema)
    execute(installed, SABOTAGE[case].sql, schema)
    damaged, kept = catalog.described(installed, schema), rows(installed, schema)
    found = differences(installed, schema)
    assert_named(found, case)
    assert (case in APART) == any(one.mends != one.mends_in_transaction for one in found)
    assert catalog.described(installed, schema) == damaged, "looking has changed it"
    mend(installed, found)
    assert differences(installed, schema) == []
    assert_mended(clean, catalog.described(installed, schema), case)
    assert_kept(kept, rows(installed, schema))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.beside) for seed in range(2, 10))])
def test_many_differences_are_mended_in_their_order(installed: Connection, seed: int) -> None:
    """As many cases at once as can be done one after another, in a random order."""
    schema = NAMES[seed % len(NAMES)]
    clean = catalog.described(installed, schema)
    done: list[str] = []
    # A type that is mended rebuilds the indexes: what a REINDEX has left is valid then, and nobody's to drop.
    cases = sorted(SABOTAGE.keys() - ADDED.keys() - {"rests of a rebuild"})
    for case in Random(seed).sample(cases, 25):
        savepoint = installed.begin_nested()
        try:
            execute(installed, SABOTAGE[case].sql, schema)
        except DBAPIError:
            savepoint.rollback()
        else:
            savepoint.commit()
            done.append(case)
    assert len(done) > 10
    mend(installed, differences(installed, schema))
    assert differences(installed, schema) == []
    assert catalog.differences(clean, catalog.described(installed, schema)) == set()


def assert_mended(clean: dict[str, str], mended: dict[str, str], case: str) -> None:
    """As new, but for what the case itself has added and nobody must take away."""
    left = catalog.differences(clean, mended)
    added = {name for name in left if any(word in name for word in ADDED.get(case, ()))}
    assert left - added == set()


ADDED = {
    "column of others that must be given": ("Team's",),
    "foreign key of others": ("kinds",),
    "primary key of others": ("number",),
    "view with another column": ("relation jobs",),  # its option
}


@pytest.fixture(scope="module")
def committed(postgres_server: Server) -> Iterator[Engine]:
    """A database on which what happens is committed."""
    with database(postgres_server, "awa_test_differences") as engine:
        yield engine


@pytest.mark.beside
@pytest.mark.parametrize(("schema", "case"), [param for param in NAMED if param.values[1] in APART])
def test_it_is_mended_by_one_statement_after_another(committed: Engine, schema: str, case: str) -> None:
    with committed.begin() as connection:
        execute(connection, 'DROP SCHEMA IF EXISTS {s} CASCADE; DROP SCHEMA IF EXISTS "Shop\'s" CASCADE', schema)
        execute(connection, "CREATE SCHEMA {s}", schema)
        create_all(connection, schema)
        execute(connection, ROWS, schema)
        clean = catalog.described(connection, schema)
        execute(connection, SABOTAGE[case].sql, schema)
        kept = rows(connection, schema)
    with committed.connect() as connection:
        found = differences(connection, schema)
    assert_named(found, case)
    with committed.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        mend(connection, found)
    with committed.connect() as connection:
        assert differences(connection, schema) == []
        assert_mended(clean, catalog.described(connection, schema), case)
        assert_kept(kept, rows(connection, schema))


@pytest.mark.parametrize("case", THEIRS)
def test_what_the_application_may_add_is_no_difference(installed: Connection, case: str) -> None:
    execute(installed, THEIRS[case], "awa")
    assert differences(installed) == []
