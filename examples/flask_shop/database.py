"""The engine and the request's session; `python -m flask_shop.database` makes the tables.

One table that nobody has to keep makes `create_all` enough here. An app with a history takes Alembic, where ours are
one line in a revision: see `examples/alembic_app`.
"""

from __future__ import annotations

from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import scoped_session, sessionmaker

from awa_sqla import schema

from .models import Base
from .settings import DATABASE_URL

engine = create_engine(make_url(DATABASE_URL).set(drivername="postgresql+psycopg"))
SessionLocal = scoped_session(sessionmaker(engine, expire_on_commit=False))  # what was committed may be shown


def create_tables() -> None:
    """Ours and the queue's."""
    with engine.begin() as connection:
        schema.create_all(connection)
        Base.metadata.create_all(connection)


if __name__ == "__main__":
    create_tables()
