"""Which errors pass by themselves."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from sqlalchemy.exc import InternalError

from awa_sqla.session.trouble import passing, transient


def test_a_connection_that_ends_before_it_is_set_up_passes(db_url_str: str) -> None:
    """SQLAlchemy sets up new connections of asyncpg, and what that raises comes as it is."""

    async def ended_early() -> None:
        connection = await asyncpg.connect(db_url_str.replace("+psycopg", ""))
        await connection.close()
        await connection.set_type_codec("json", encoder=str, decoder=str, schema="pg_catalog")

    with pytest.raises(asyncpg.InterfaceError) as caught:
        asyncio.run(ended_early())
    assert passing(caught.value)


CONFUSED = asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress")


@pytest.mark.parametrize("error", [CONFUSED, InternalError("BEGIN", None, CONFUSED)])
def test_a_connection_that_is_terminated_while_it_is_set_up_passes(error: Exception) -> None:
    """As asyncpg puts it, and as SQLAlchemy does."""
    assert passing(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        RuntimeError("connection is closed"),
        asyncpg.UndefinedTableError(),
        InternalError("x", None, asyncpg.DataCorruptedError()),
    ],
)
def test_other_errors_do_not(error: Exception) -> None:
    assert not passing(error)
    assert not transient(error)
