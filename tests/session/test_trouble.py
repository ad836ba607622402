"""Which errors pass by themselves."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

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


@pytest.mark.parametrize("error", [ValueError(), RuntimeError("connection is closed"), asyncpg.UndefinedTableError()])
def test_other_errors_do_not(error: Exception) -> None:
    assert not passing(error)
    assert not transient(error)
