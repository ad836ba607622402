"""Fixtures that give a test its database.

The server is a throw-away one for each pytest process, root or not; or that of ``$AWA_TEST_DATABASE_URL``.
That one needs a superuser and ``max_prepared_transactions`` >= 10; databases ``awa_test*`` come and go in it.
The schema is loaded once, into a template.  A test chooses:

* `db_url`: a database that all tests of the process share, wiped with DELETE after each (about 5 ms, where
  TRUNCATE takes 100): the default.  Sequences go on counting, so do not rely on ids;
* `fresh_db_url`: a new clone of the template (about 60 ms), for tests that change the schema;
* `empty_db_url`: a new database with nothing in it, for migrations.

No rollback isolation: other connections must see the jobs, and NOTIFY happens at commit only.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psycopg
import pytest
from psycopg import sql
from pytest_postgresql import factories
from pytest_postgresql.executors import NoopExecutor
from pytest_postgresql.janitor import DatabaseJanitor
from sqlalchemy import URL, Engine, NullPool, create_engine, make_url

from awa_sqla.localpg import LocalPostgres, PostgresUnavailable
from awa_sqla.schema import create_all
from tests.app import Base

DBNAME = "awa_test"
SETTINGS = {"max_prepared_transactions": "10", "max_connections": "200"}


# ------------------------------------------------------------------------------------------------- the server
@dataclass(frozen=True)
class Server:
    """How to reach a server; the field names are those that pytest-postgresql's ``depends_on`` asks for.

    Attributes:
        local: the server itself, for tests that `restart` it; None when somebody else runs it.
    """

    host: str
    port: int
    user: str
    password: str | None = field(repr=False)
    maintenance_dbname: str = "postgres"
    template_dbname: str = "template0"
    options: str = ""
    local: LocalPostgres | None = field(default=None, repr=False)

    def url(self, dbname: str) -> URL:
        """The SQLAlchemy URL of one of its databases."""
        return URL.create("postgresql+psycopg", self.user, self.password, self.host, self.port, dbname)

    def janitor(self, dbname: str, template_dbname: str) -> DatabaseJanitor:
        """What creates and drops a database, as a context manager."""
        return DatabaseJanitor(
            user=self.user,
            host=self.host,
            port=self.port,
            password=self.password,
            dbname=dbname,
            template_dbname=template_dbname,
            maintenance_dbname=self.maintenance_dbname,
        )


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """The server of this pytest process."""
    external = os.environ.get("AWA_TEST_DATABASE_URL")
    if external:
        url = make_url(external)
        user, database = url.username or "postgres", url.database or "postgres"
        yield Server(url.host or "", url.port or 5432, user, url.password, maintenance_dbname=database)
        return
    try:
        local = LocalPostgres(settings=SETTINGS).start()
    except PostgresUnavailable as exc:
        pytest.fail(exc.message("AWA_TEST_DATABASE_URL"), pytrace=False)
    try:
        yield Server(local.host, local.port, local.user, local.password, local=local)
    finally:
        local.stop()


# ----------------------------------------------------------------------------------------------- the template
def load_schema(*, host: str, port: int, user: str, dbname: str, password: str | None, **_: object) -> None:
    """Fill the template: awa's schema, then the tables of the tests' own application."""
    url = URL.create("postgresql+psycopg", user, password, host, port, dbname)
    engine = create_engine(url, poolclass=NullPool)  # a connection left open would forbid cloning
    with engine.begin() as connection:
        create_all(connection)
        Base.metadata.create_all(connection)


# These two stand for the fixtures of the same names in pytest-postgresql: they win because a
# conftest registers this module later than that plugin; ``-p tests.databases`` would be too early.
postgresql_noproc = factories.postgresql_noproc(
    depends_on="postgres_server",
    dbname=DBNAME,
    load=[load_schema],
)
postgresql = factories.postgresql("postgresql_noproc")


# ---------------------------------------------------------------------------------------------- the databases
@pytest.fixture
def db_url(_shared_database: "SharedDatabase") -> Iterator[URL]:
    """A database with the schema and no rows but the schema's own; wiped after the test."""
    yield _shared_database.url
    _shared_database.wipe()


@pytest.fixture
def db_url_str(db_url: URL) -> str:
    """`db_url` as text with its password, for processes that a test starts."""
    return db_url.render_as_string(hide_password=False)


@pytest.fixture
def fresh_db_url(
    postgres_server: Server,
    postgresql: psycopg.Connection[tuple[object, ...]],
) -> Iterator[URL]:
    """A database with the schema that no other test sees, dropped after the test."""
    url = postgres_server.url(postgresql.info.dbname)
    yield url
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        end_the_rest(connection)  # a prepared transaction would forbid the drop


@pytest.fixture
def empty_db_url(postgres_server: Server) -> Iterator[URL]:
    """A database with nothing in it, dropped after the test."""
    dbname = f"{DBNAME}{os.environ.get('PYTEST_XDIST_WORKER', '')}_empty"
    janitor = postgres_server.janitor(dbname, template_dbname="template0")
    janitor.drop()
    with janitor:
        yield postgres_server.url(dbname)


@pytest.fixture
def engine(db_url: URL) -> Iterator[Engine]:
    """A synchronous engine (psycopg) on `db_url`, disposed after the test."""
    engine = create_engine(db_url)
    yield engine
    engine.dispose()


def libpq_url(url: URL) -> str:
    """The same address with its password, as libpq, psycopg, asyncpg and psql read it."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


# ---------------------------------------------------------------------------------------------------- wiping
@pytest.fixture(scope="session")
def _shared_database(postgres_server: Server, postgresql_noproc: NoopExecutor) -> Iterator["SharedDatabase"]:
    dbname = f"{postgresql_noproc.dbname}_shared"
    janitor = postgres_server.janitor(dbname, postgresql_noproc.template_dbname)
    janitor.drop()
    with janitor:
        shared = SharedDatabase(postgres_server.url(dbname))
        yield shared
        shared.close()


class SharedDatabase:
    """A clone of the template that can be brought back to the template's state."""

    def __init__(self, url: URL) -> None:
        self.url = url
        self._connection = self._connect()
        # Tables with rows, such as the schema's version, are the schema's own and stay as they are.
        empty = [table for table in self._tables() if not self._has_rows(table)]
        self._statement = sql.SQL("; ").join(sql.SQL("DELETE FROM {}").format(table) for table in empty)

    def wipe(self) -> None:
        """End what the test has left behind, and delete its rows, in every schema."""
        try:
            end_the_rest(self._connection)
        except psycopg.OperationalError:
            if not self._connection.closed:
                raise
            self._connection = self._connect()  # the test has restarted the server
            end_the_rest(self._connection)
        self._connection.execute(self._statement)

    def close(self) -> None:
        self._connection.close()

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        connection = psycopg.connect(libpq_url(self.url), autocommit=True)
        connection.execute("SET session_replication_role = replica")  # no triggers, no foreign keys
        connection.execute("SET lock_timeout = '5s'")
        return connection

    def _tables(self) -> list[sql.Identifier]:
        found = self._connection.execute(
            "SELECT nspname, relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE relkind IN ('r', 'p') AND NOT relispartition "
            "AND nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%'"
        )
        return [sql.Identifier(str(schema), str(name)) for schema, name in found]

    def _has_rows(self, table: sql.Identifier) -> bool:
        rows = self._connection.execute(sql.SQL("SELECT FROM {} LIMIT 1").format(table))
        return rows.rowcount > 0


_OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)


def end_the_rest(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """End all other connections to this database and roll back its prepared transactions.

    They would hold locks, or write into the next test.  Raises TimeoutError when one has not gone after 10 s.
    """
    deadline = time.monotonic() + 10
    # pg_terminate_backend can wait by itself, but in steps of 100 ms.
    while connection.execute(_OTHERS).rowcount:
        if time.monotonic() > deadline:
            raise TimeoutError("a connection that the test has left open does not end")
        time.sleep(0.002)
    prepared = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
    for (gid,) in prepared.fetchall():
        connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
