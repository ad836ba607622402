"""Connections for tests that change the schema."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine

from tests.databases import DBNAME, Server
from tests.schema.catalog import names


@pytest.fixture
def empty_engine(empty_db_url: URL) -> Iterator[Engine]:
    """An engine on an empty database; each connection is a new one."""
    engine = create_engine(empty_db_url, poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def _never_committed(postgres_server: Server) -> Iterator[Engine]:
    dbname = f"{DBNAME}{os.environ.get('PYTEST_XDIST_WORKER', '')}_never_committed"
    janitor = postgres_server.janitor(dbname, template_dbname="template0")
    janitor.drop()
    with janitor:
        engine = create_engine(postgres_server.url(dbname), poolclass=NullPool)
        yield engine
        engine.dispose()


@pytest.fixture
def connection(request: pytest.FixtureRequest, _never_committed: Engine) -> Iterator[Connection]:
    """A connection to an empty database.

    It is that of `empty_db_url` when the test asks for it. Else tests share one (which saves 100 ms for each), all is
    rolled back, and a test that commits fails.
    """
    if "empty_db_url" in request.fixturenames:
        with request.getfixturevalue("empty_engine").connect() as connection:
            yield connection
        return
    with _never_committed.connect() as connection:
        yield connection
        connection.rollback()
        assert names(connection) == {"schema public"}, "a test of this connection must not commit"
