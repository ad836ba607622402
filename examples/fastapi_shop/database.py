"""The engine and the sessions; `python -m fastapi_shop.database` makes the tables.

One table that nobody has to keep makes `create_all` enough here. An app with a history takes Alembic, where ours are
one line in a revision: see `examples/alembic_app`.
"""

from __future__ import annotations

from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from awa_sqla import schema

from .models import Base
from .settings import DATABASE_URL

url = make_url(DATABASE_URL)
engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
SessionLocal = async_sessionmaker(engine, expire_on_commit=False)


def create_tables() -> None:
    """Ours and the queue's."""
    with create_engine(url.set(drivername="postgresql+psycopg")).begin() as connection:
        schema.create_all(connection)
        Base.metadata.create_all(connection)


if __name__ == "__main__":
    create_tables()
