"""An application whose schema is older than its package, or that lacks a grant, is told so on PostgreSQL's error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import URL, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from awa_sqla import FollowUps, Unique, claim, enqueue, enqueue_many
from awa_sqla.schema import migrate
from tests.app import Welcome

VERBS: dict[str, Callable[[Session], object]] = {
    "enqueue": lambda session: (enqueue(session, Welcome()), session.flush()),
    "unique": lambda session: (enqueue(session, Welcome(), unique=Unique()), session.flush()),
    "enqueue_many": lambda session: enqueue_many(session, [Welcome()] * 3),
    "claim": lambda session: claim(session, "default", limit=1),
}


def refusal(url: URL, verb: Callable[[Session], object], before: str = "SELECT 1") -> DBAPIError:
    """What a verb raises; the transaction begins with a statement."""
    if url.drivername.endswith("asyncpg"):

        async def run() -> None:
            async with AsyncSession(create_async_engine(url, poolclass=NullPool)) as session, session.begin():
                await session.execute(text(before))
                await session.run_sync(verb)

        with pytest.raises(DBAPIError) as caught:
            asyncio.run(run())
        return caught.value
    with Session(create_engine(url, poolclass=NullPool)) as session, FollowUps().attached(session):
        session.execute(text(before))
        with pytest.raises(DBAPIError) as caught:
            verb(session)
    return caught.value


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_on_an_old_schema_says_what_to_do(empty_db_url: URL, verb: str, version: int, driver: str) -> None:
    engine = create_engine(empty_db_url, poolclass=NullPool)
    with engine.begin() as connection:
        migrate(connection, version)
    error = refusal(empty_db_url.set(drivername=f"postgresql+{driver}"), VERBS[verb])
    (note,) = notes(error)
    assert "older than this version of the package: run your migrations (op.awa_migrate)" in note


def test_a_verb_without_a_grant_says_how_to_grant_it(db_url: URL) -> None:
    with create_engine(db_url, poolclass=NullPool).begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS awa_test_hints"))
        connection.execute(text("CREATE ROLE awa_test_hints"))
    try:
        error = refusal(db_url, VERBS["claim"], "SET LOCAL ROLE awa_test_hints")
    finally:
        with create_engine(db_url, poolclass=NullPool).begin() as connection:
            connection.execute(text("DROP ROLE awa_test_hints"))
    (note,) = notes(error)
    assert "awa-sqla grants --role" in note


@pytest.mark.parametrize("statement", ["SELECT * FROM no_such_table", "SELECT nothing FROM awa.jobs_hot"])
def test_errors_of_the_app_are_its_own(db_url: URL, statement: str) -> None:
    def work(session: Session) -> None:
        enqueue(session, Welcome())
        session.flush()
        session.execute(text(statement))

    assert len(notes(refusal(db_url, work))) == ("awa." in statement)
