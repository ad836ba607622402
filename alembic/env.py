"""Alembic's environment of this repository: the worked example of an app's own.

The database is named by `-x url=...`, `AWA_DATABASE_URL` or `DATABASE_URL`, in this order.
"""

from __future__ import annotations

import os
from logging.config import fileConfig
from typing import Any

from alembic import context, util
from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Identity,
    Integer,
    MetaData,
    NullPool,
    Table,
    Text,
    create_engine,
    make_url,
)

from awa_sqla.alembic import include_name, one_at_a_time

#: The tables of the application; ours are not among them. In an app: `from app.models import Base`.
metadata = MetaData()
Table(
    "customer_order",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("note", Text, nullable=False),
    Column("cents", Integer, nullable=False),
)

OPTIONS: dict[str, Any] = {
    "target_metadata": metadata,
    "include_schemas": True,
    "include_name": include_name,  # leaves our schema alone
    "autogenerate_plugins": ["alembic.autogenerate.*", "awa_sqla.alembic"],  # writes op.awa_migrate
}


def database_url() -> URL:
    """Where to migrate. Raises `CommandError` when nobody has said."""
    given = (
        context.get_x_argument(as_dictionary=True).get("url")
        or os.environ.get("AWA_DATABASE_URL")
        or os.environ.get("DATABASE_URL")
    )
    if not isinstance(given, str):  # none, or -x url given twice
        raise util.CommandError("which database? Say -x url=postgresql+psycopg://..., or set AWA_DATABASE_URL")
    url = make_url(given)
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgres", "postgresql") else url


def run_offline() -> None:
    """Print the SQL; no database is asked."""
    context.configure(dialect_name="postgresql", literal_binds=True, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


def run_online() -> None:
    """Migrate in one transaction, while no other process does."""
    engine = create_engine(database_url(), poolclass=NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, **OPTIONS)
        with one_at_a_time(connection), context.begin_transaction():
            context.run_migrations()


if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)

if context.is_offline_mode():
    run_offline()
else:
    run_online()
