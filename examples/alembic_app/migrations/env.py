"""The shop's Alembic environment. The marked lines came with awa_sqla. The database is `DATABASE_URL`."""

from __future__ import annotations

import os
from logging.config import fileConfig
from typing import Any

from alembic import context
from shop.models import Base  # type: ignore[import-not-found, unused-ignore]
from sqlalchemy import NullPool, create_engine, make_url

from awa_sqla.alembic import include_name, one_at_a_time  # <- awa_sqla

OPTIONS: dict[str, Any] = {
    "target_metadata": Base.metadata,
    "include_schemas": True,
    "include_name": include_name,  # <- awa_sqla: autogenerate leaves its schema alone
    "autogenerate_plugins": ["alembic.autogenerate.*", "awa_sqla.alembic"],  # <- awa_sqla: writes op.awa_migrate
}


def run_offline() -> None:
    """Print the SQL; no database is asked."""
    context.configure(dialect_name="postgresql", literal_binds=True, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


def run_online() -> None:
    """Migrate in one transaction, while no other process does."""
    url = make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+psycopg")
    with create_engine(url, poolclass=NullPool).connect() as connection:
        context.configure(connection=connection, **OPTIONS)
        with one_at_a_time(connection), context.begin_transaction():
            context.run_migrations()


if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)

if context.is_offline_mode():
    run_offline()
else:
    run_online()
