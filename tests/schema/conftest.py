"""Connections for tests that change the schema."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine


@pytest.fixture
def empty_engine(empty_db_url: URL) -> Iterator[Engine]:
    """An engine on an empty database; each connection is a new one."""
    engine = create_engine(empty_db_url, poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
def connection(empty_engine: Engine) -> Iterator[Connection]:
    """A connection to an empty database; what the test does not commit is rolled back."""
    with empty_engine.connect() as connection:
        yield connection
