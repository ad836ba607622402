"""Our tables are left alone whatever an app's options, and the app's own are not: each situation of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import URL, Column, Connection, Index, Integer, MetaData, Table, text

from awa_sqla import ConfigurationError, SchemaVersionError
from awa_sqla.alembic import filters
from awa_sqla.models import AwaBase
from awa_sqla.models.base import ViewBase
from awa_sqla.schema import LATEST, create_all, migrate
from awa_sqla.schema.ownership import NAMES
from tests.databases import Server
from tests.schema import guarded
from tests.schema.catalog import described
from tests.schema.guarded import PLUGINS, app_metadata, connected, proposals, stored

#: Each takes its own database, project or processes; run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside

SITUATIONS = guarded.situations()
#: Every two values of two options together, and every three of three.
COMBINATIONS = [*SITUATIONS.combinations(2), *SITUATIONS.combinations(3)]


@pytest.fixture(scope="module")
def databases(postgres_server: Server) -> Iterator[dict[str, URL]]:
    with guarded.databases(postgres_server) as urls:
        yield urls


class App(NamedTuple):
    """An app as one combination of the page has it: which of the values of each axis."""

    listed: int
    include_schemas: int
    filters: int
    named: int
    path: int
    ours_at: int
    version_table: int
    convention: int
    own_schema: int
    alike: int
    translated: int

    @classmethod
    def of(cls, combination: dict[str, str]) -> App:
        return cls(*(values.index(combination[axis]) for axis, values in SITUATIONS.AXES.items()))

    @property
    def ours(self) -> str:
        return guarded.SCHEMAS[self.ours_at]

    def metadata(self) -> MetaData:
        options = {"naming_convention": {"ix": "app_%(column_0_label)s", "pk": "app_%(table_name)s"}}
        return app_metadata(
            "shop" if self.own_schema else None, alike=bool(self.alike), **options if self.convention else {}
        )

    def target(self, metadata: MetaData) -> Any:
        """The app's metadata with ours, as it lists them."""
        if self.listed == 2:
            return guarded.ours_copied(metadata, self.ours)
        return [metadata, AwaBase.metadata, ViewBase.metadata] if self.listed else metadata

    def options(self) -> dict[str, Any]:
        """What Alembic would be configured with if ours were not there."""
        chosen = filters("nowhere" if self.filters == 4 else self.ours)
        given: dict[str, Any] = {
            "include_schemas": bool(self.include_schemas),
            "version_table_schema": [None, "public", self.ours][self.version_table],
        }
        if self.filters in {1, 3, 4}:
            given["include_name"] = chosen.include_name
        if self.filters in {2, 3, 4}:
            given["include_object"] = chosen.include_object
        return given

    def options_with_ours(self) -> dict[str, Any]:
        given = self.options()
        if self.named:
            given["autogenerate_plugins"] = PLUGINS
        if not (self.ours == "awa" or self.translated or (self.listed == 2)):
            given["awa_schema"] = self.ours  # else it is known from what is there
        return given

    def connected(self, url: URL) -> Any:
        path = ["", f"{self.ours}, public", f"public, {self.ours}", "''", ""][self.path]
        return connected(url, path, **{"schema_translate_map": {"awa": self.ours}} if self.translated else {})

    def enter(self, connection: Connection) -> None:
        """Make the app's tables, as far as ours leave room for them."""
        if self.path == 4:
            connection.execute(text(f"SET search_path = {self.ours}, public"))
        mine = {"customers", "orders"}
        stored(connection, self.metadata(), mine if self.ours == "public" and not self.own_schema else mine | NAMES)

    @property
    def clashes(self) -> bool:
        """Whether a table of the app would have to be made among ours."""
        among_ours = self.path in {1, 4} or self.ours == "public"
        return bool(self.alike) and not self.own_schema and among_ours and self.path != 3


def changed(metadata: MetaData) -> MetaData:
    """Models and a column come and go."""
    for key in [key for key, table in metadata.tables.items() if table.name in {"orders", "audit_log"}]:
        metadata.remove(metadata.tables[key])
    name = "leaders" if any(table.name == "jobs" for table in metadata.tables.values()) else "newcomers"
    Table(name, metadata, Column("id", Integer, primary_key=True), Column("at", Integer, index=True))
    next(table for table in metadata.sorted_tables if table.name == "customers").append_column(Column("x", Integer))
    return metadata


def combined(combination: dict[str, str]) -> str:
    return "; ".join(value.replace("`", "") for value in combination.values())


@pytest.mark.case(20)
@pytest.mark.parametrize("combination", COMBINATIONS, ids=combined)
def test_what_is_proposed_is_what_would_be_without_us(databases: dict[str, URL], combination: dict[str, str]) -> None:
    app = App.of(combination)
    with app.connected(databases[""]) as alone, app.connected(databases[app.ours]) as beside_ours:
        app.enter(alone)
        app.enter(beside_ours)
        if app.clashes:
            with pytest.raises(ConfigurationError, match="has its own of that name"):
                proposals(beside_ours, app.target(app.metadata()), app.options_with_ours())
            return
        expected = proposals(alone, app.metadata(), app.options())
        assert sorted(proposals(beside_ours, app.target(app.metadata()), app.options_with_ours())) == sorted(expected)
        expected = proposals(alone, changed(app.metadata()), app.options())
        found = proposals(beside_ours, app.target(changed(app.metadata())), app.options_with_ours())
        assert sorted(found) == sorted(expected) != []


# -------------------------------------------------------------------------------------------- names like ours
def model(row: Any) -> Table:
    """The app's table of one row of the page."""
    columns = [Column("id", Integer, primary_key=True), Column("at", Integer), Index("ix_of_the_app", "at")]
    named = {} if row.schema == row.home else {"schema": row.schema}
    return Table(row.name, MetaData(schema=row.home), *columns, **named)


def named_ops(connection: Connection, metadata: MetaData, row: Any) -> list[Any]:
    """The operations on the table of a row; on no other table of ours is there one."""
    context = MigrationContext.configure(connection, opts={"include_schemas": row.include_schemas})
    upgrade = produce_migrations(context, metadata).upgrade_ops
    assert upgrade is not None
    ops: list[Any] = upgrade.ops
    assert {op.table_name for op in ops} & NAMES <= {row.name}
    return [op for op in ops if op.table_name == row.name]


@pytest.mark.case(20)
@pytest.mark.parametrize("row", SITUATIONS.ALIKE, ids=lambda row: f"{row.says}; {row.ours}; {row.path}; {row.name}")
def test_what_is_proposed_for_a_name_of_ours(databases: dict[str, URL], row: Any) -> None:
    table = model(row)
    with connected(databases[row.ours if row.ours in databases else ""], row.path) as connection:
        if row.ours not in databases:
            create_all(connection, row.ours)
        for schema in row.there:
            table.to_metadata(MetaData(), schema=schema).create(connection)
        metadata = table.metadata if row.model else MetaData()
        if row.proposed == SITUATIONS.CLASH:
            with pytest.raises(ConfigurationError, match=f"{table.fullname!r} where awa_sqla has its own"):
                named_ops(connection, metadata, row)
            return
        ops = named_ops(connection, metadata, row)
        first = {"CreateTableOp": SITUATIONS.CREATED, "DropTableOp": SITUATIONS.DROPPED}
        kinds = [type(op).__name__ for op in ops]
        assert {first[kind] for kind in kinds if kind != "ModifyTableOps"} == {row.proposed} - {SITUATIONS.NOTHING}
        assert bool(ops) == (row.proposed != SITUATIONS.NOTHING)
        if row.path != "''":
            ours = described(connection, row.ours)
            for op in ops:
                invoke(connection, op)
            assert named_ops(connection, metadata, row) == []
            assert row.name not in NAMES or described(connection, row.ours) == ours


def invoke(connection: Connection, op: Any) -> None:
    """Do what a revision with this operation would do."""
    operations = Operations(MigrationContext.configure(connection))
    for each in getattr(op, "ops", [op]):
        operations.invoke(each)


# ------------------------------------------------------------------------------------------ when the operation is due
def configured(row: Any) -> tuple[Any, dict[str, Any]]:
    """The target metadata and the options of a row of the page."""
    target: Any = app_metadata()
    if row.metadata == SITUATIONS.LISTED:
        target = [target, AwaBase.metadata, ViewBase.metadata]
    if row.metadata == SITUATIONS.COPIED:
        target = guarded.ours_copied(target, "awa")
    options: dict[str, Any] = {"include_schemas": True}
    if row.awa_schema is not None:
        options["awa_schema"] = row.awa_schema
    if row.plugins == SITUATIONS.NAMED:
        options["autogenerate_plugins"] = PLUGINS
    return target, options


def wanted(row: Any) -> list[str]:
    """The schemas that a row is about."""
    return (
        ["awa"] if row.awa_schema is None else [row.awa_schema] if isinstance(row.awa_schema, str) else row.awa_schema
    )


@pytest.mark.parametrize("row", SITUATIONS.DUE, ids=lambda row: f"{row.metadata}; {row.plugins}; {row.awa_schema}")
def test_when_the_operation_is_proposed(databases: dict[str, URL], row: Any) -> None:
    target, options = configured(row)
    with connected(databases[""]) as connection:
        stored(connection, app_metadata(), {"customers", "orders"})

        def proposed(expected: str) -> None:
            found = [diff for diff in proposals(connection, target, options) if "alembic_version" not in diff[1]]
            line = re.fullmatch(r"`op.awa_migrate\(from_=(\d), to=LATEST\)`", expected)
            named = [() if schema == "awa" else (schema,) for schema in wanted(row)]
            assert found == ([("awa_migrate", line[1], str(LATEST), *name) for name in named] if line else [])

        proposed(row.nothing_there)
        for schema in wanted(row) or ["awa"]:
            migrate(connection, 1, schema)
        proposed(row.older)
        for schema in wanted(row) or ["awa"]:
            migrate(connection, LATEST, schema)
        proposed(row.latest)
        for schema in wanted(row) or ["awa"]:
            connection.execute(text(f"INSERT INTO {schema}.schema_version (version) VALUES ({LATEST + 1})"))
        if row.newer == SITUATIONS.REFUSED:
            with pytest.raises(SchemaVersionError, match="upgrade awa-sqla"):
                proposals(connection, target, options)
        else:
            proposed(row.newer)
