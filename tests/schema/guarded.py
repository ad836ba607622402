"""Databases with our tables in one schema or another, and what autogenerate says of an app that lives there."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Column, Connection, ForeignKey, Integer, MetaData, NullPool, Table, create_engine, text
from sqlalchemy.engine import URL

from awa_sqla.models import AwaBase
from awa_sqla.models.base import ViewBase
from awa_sqla.schema import create_all
from tests.databases import DBNAME, Server

#: Where ours can be; the last database has the schemas, and ours in none of them.
SCHEMAS = ("awa", "other", "public", "")

#: A list that the default `alembic.autogenerate.*` is part of.
PLUGINS = ["alembic.autogenerate.*", "awa_sqla.alembic"]


def situations() -> ModuleType:
    """`docs/autogenerate.py`: what the page says, as data."""
    path = Path(__file__).parents[2] / "docs" / "autogenerate.py"
    spec = importlib.util.spec_from_file_location("situations_of_the_docs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def databases(server: Server) -> Iterator[dict[str, URL]]:
    """One for each of `SCHEMAS`: ours there, the schemas of the others and of an app empty, Alembic's own tables."""
    urls: dict[str, URL] = {}
    janitors = []
    for ours in SCHEMAS:
        dbname = f"{DBNAME}{os.environ.get('PYTEST_XDIST_WORKER', '')}_guard_{ours}"
        janitor = server.janitor(dbname, template_dbname="template0")
        janitor.drop()
        janitor.init()
        janitors.append(janitor)
        urls[ours] = server.url(dbname)
        engine = create_engine(urls[ours], poolclass=NullPool)
        with engine.begin() as connection:
            if ours:
                create_all(connection, ours)
            for schema in ("awa", "other", "shop", "public"):
                connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {schema}"))
                if schema != "shop":
                    connection.execute(text(f"CREATE TABLE {schema}.alembic_version (version_num text)"))
    yield urls
    for janitor in janitors:
        janitor.drop()


@contextmanager
def connected(url: URL, path: str = "", **options: Any) -> Iterator[Connection]:
    """A connection whose dialect has seen this search_path from the start; what is done is rolled back."""
    arguments = {"options": f"-csearch_path={path.replace(' ', '')}"} if path else {}
    engine = create_engine(url, poolclass=NullPool, connect_args=arguments, execution_options=options)
    with engine.connect() as connection:
        yield connection
        connection.rollback()
    engine.dispose()


def proposals(connection: Connection, metadata: Any, options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What autogenerate proposes, as (operation, names...)."""
    context = MigrationContext.configure(connection, opts=options)
    return [said(diff) for diff in compare_metadata(context, metadata)]


def said(diff: Any) -> tuple[Any, ...]:
    """A diff as names that can be compared."""
    if isinstance(diff, list):
        return tuple(map(said, diff))
    return tuple(getattr(part, "fullname", None) or getattr(part, "name", None) or str(part) for part in diff)


def app_metadata(schema: str | None = None, *, alike: bool = False, **options: Any) -> MetaData:
    """Two tables that refer to each other, and two with names of ours."""
    metadata = MetaData(schema=schema, **options)
    prefix = f"{schema}." if schema else ""
    Table("customers", metadata, Column("id", Integer, primary_key=True), Column("name", Integer, index=True))
    Table(
        "orders",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("customer", ForeignKey(f"{prefix}customers.id")),
    )
    if alike:
        Table("jobs", metadata, Column("id", Integer, primary_key=True))
        Table("audit_log", metadata, Column("id", Integer, primary_key=True), Column("verb", Integer, index=True))
    return metadata


def stored(connection: Connection, metadata: MetaData, names: set[str]) -> None:
    """Make the app's tables in the schema they name, or in `public`."""
    path = connection.scalar(text("SHOW search_path"))
    connection.execute(text("SET search_path = public"))
    metadata.create_all(connection, [t for t in metadata.sorted_tables if t.name in names], checkfirst=False)
    connection.execute(text("SELECT set_config('search_path', :path, false)"), {"path": path})


def ours_copied(into: MetaData, schema: str) -> MetaData:
    """Add copies of our tables and views to a metadata."""
    for base in (AwaBase, ViewBase):
        for table in base.metadata.tables.values():
            table.to_metadata(into, schema=schema)
    return into
