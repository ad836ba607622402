"""A database with its roles, for the tests of a module."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.databases import DBNAME, Server
from tests.schema.roles.least import SCHEMAS, Place


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
