"""Where the guard does not run, where nobody should notice it, and how it tells our tables from others."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata, produce_migrations
from alembic.migration import MigrationContext
from alembic.operations.ops import CreateTableOp
from alembic.runtime.plugins import Plugin, _all_plugins
from alembic.util import PriorityDispatchResult
from sqlalchemy import Column, Connection, ForeignKey, Integer, MetaData, Table, create_engine, event, text
from sqlalchemy.orm import Mapped, mapped_column

import awa_sqla.alembic
from awa_sqla import ConfigurationError
from awa_sqla.alembic import filters
from awa_sqla.models import AwaBase
from awa_sqla.models.base import ViewBase
from awa_sqla.schema import create_all, statements
from awa_sqla.schema.ownership import NAMES, installed, marked
from awa_sqla.schema.steps import STEPS
from tests.schema import guarded
from tests.schema.guarded import PLUGINS, app_metadata, proposals, stored

#: Each takes its own database, project or processes; run by `.ci/run` beside the quick suite.
pytestmark = pytest.mark.beside

SITUATIONS = guarded.situations()

#: Alembic's own comparisons, one by one: no wildcard that the guard is found by.
SINGLY = ["alembic.autogenerate.schemas", "alembic.autogenerate.tables", "alembic.autogenerate.constraints"]


@pytest.fixture
def with_ours(connection: Connection) -> Connection:
    create_all(connection)
    return connection


# ------------------------------------------------------------------------------------------------- without the guard
@pytest.mark.parametrize("plugins", [SINGLY, ["alembic.autogenerate.*", "~alembic.autogenerate.awa_sqla"]], ids=str)
@pytest.mark.parametrize("row", SITUATIONS.UNGUARDED, ids="; ".join)
def test_what_the_filters_do_alone(with_ours: Connection, row: Any, plugins: list[str]) -> None:
    chosen = filters("nowhere" if row.filters == "those of another schema" else "awa")
    options: dict[str, Any] = {"include_schemas": row.include_schemas == "on", "autogenerate_plugins": plugins}
    if row.filters != "none":
        options |= {"include_name": chosen.include_name} if row.filters != "`include_object`" else {}
        options |= {"include_object": chosen.include_object} if row.filters != "`include_name`" else {}
    if row.path:
        with_ours.execute(text(f"SET LOCAL search_path = {row.path}"))
    found = {name.rpartition(".")[2] for kind, name, *_ in proposals(with_ours, MetaData(), options)}
    assert (found >= {"jobs_hot", "audit_log"}) == (row.proposed == SITUATIONS.LOST)
    assert row.proposed == SITUATIONS.LOST or not found


def test_our_plugin_brings_the_guard_where_single_plugins_are_named(with_ours: Connection) -> None:
    options: dict[str, Any] = {"include_schemas": True, "autogenerate_plugins": [*SINGLY, "awa_sqla.alembic"]}
    assert proposals(with_ours, MetaData(), options) == []


# ------------------------------------------------------------------------------------------------- nobody notices it
@contextmanager
def counted(connection: Connection) -> Iterator[list[str]]:
    """The statements that are run meanwhile."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    event.listen(connection.engine, "before_cursor_execute", note)
    yield seen
    event.remove(connection.engine, "before_cursor_execute", note)


@pytest.mark.parametrize(("name", "more"), [("newcomers", 0), ("audit_log", 1)])
def test_a_statement_is_run_only_where_a_name_is_like_one_of_ours(connection: Connection, name: str, more: int) -> None:
    metadata = app_metadata()
    stored(connection, metadata, {"customers", "orders"})
    Table(name, metadata, Column("id", Integer, primary_key=True))
    expected = ("add_table", name)
    with counted(connection) as without:
        options = {"autogenerate_plugins": ["alembic.autogenerate.*", "~alembic.autogenerate.awa_sqla"]}
        assert proposals(connection, metadata, options) == [expected]
    with counted(connection) as with_guard:
        assert proposals(connection, metadata, {}) == [expected]
    assert len(without) > 1
    assert len(with_guard) == len(without) + more


@pytest.mark.parametrize("plugins", [None, PLUGINS], ids=["not set", "named"])
@pytest.mark.parametrize("listed", [False, True])
def test_another_database_is_left_to_alembic(listed: bool, plugins: list[str] | None) -> None:
    options: dict[str, Any] = {} if plugins is None else {"autogenerate_plugins": plugins}
    target: Any = [app_metadata(alike=True), AwaBase.metadata] if listed else app_metadata(alike=True)
    with create_engine("sqlite://").connect() as connection, counted(connection) as seen:
        context = MigrationContext.configure(connection, opts=options)
        found = {diff[1].fullname for diff in compare_metadata(context, target) if diff[0] == "add_table"}
    assert found >= {"customers", "orders", "jobs", "audit_log"}
    assert ("awa.jobs_hot" in found) == listed
    assert not any("pg_catalog" in statement for statement in seen)


def test_another_plugin_cannot_keep_the_guard_from_running(with_ours: Connection) -> None:
    plugin = Plugin("tests.stops")
    plugin.add_autogenerate_comparator(lambda *_: PriorityDispatchResult.STOP, "autogenerate")
    try:
        options = {"include_schemas": True, "autogenerate_plugins": ["alembic.autogenerate.*", "tests.stops"]}
        assert proposals(with_ours, MetaData(), options) == []
    finally:
        plugin.remove()


def test_the_module_can_be_set_up_under_a_second_name(with_ours: Connection) -> None:
    Plugin.setup_plugin_from_module(awa_sqla.alembic, "tests.again")
    try:
        options = {"include_schemas": True, "autogenerate_plugins": ["alembic.autogenerate.*", "tests.again"]}
        assert proposals(with_ours, MetaData(), options) == []
    finally:
        _all_plugins["tests.again"].remove()  # there is no other way to find one


@pytest.mark.parametrize("first", ["awa_sqla.schema.autogenerate", "awa_sqla.schema.ownership", "alembic.util"])
def test_the_guard_is_there_whatever_is_imported_first(first: str) -> None:
    code = f"import {first}; from alembic import op; op.awa_migrate; import awa_sqla.schema.autogenerate"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# -------------------------------------------------------------------------------------------------- which are ours
def test_all_our_tables_and_views_carry_the_mark_and_so_do_copies() -> None:
    ours = [*AwaBase.metadata.tables.values(), *ViewBase.metadata.tables.values()]
    assert {table.name for table in ours if marked(table)} == NAMES >= {"jobs", "jobs_hot", "audit_log"}
    copies = guarded.ours_copied(MetaData(), "elsewhere")
    assert all(marked(table) for table in copies.tables.values())
    assert marked(CreateTableOp.from_table(next(iter(copies.tables.values()))).to_table())


def test_a_model_that_an_app_puts_on_our_base_is_the_apps(with_ours: Connection) -> None:
    class Note(AwaBase):
        __tablename__ = "note_of_the_app"
        id: Mapped[int] = mapped_column(primary_key=True)

    try:
        assert proposals(with_ours, AwaBase.metadata, {}) == [("add_table", "awa.note_of_the_app")]
    finally:
        AwaBase.metadata.remove(Note.__table__)
        AwaBase.registry._dispose_cls(Note)


def test_every_table_and_view_of_every_step_is_known() -> None:
    made = set(re.findall(r'CREATE (?:TABLE|VIEW) "awa"\.(\w+)', "\n".join(statements(0, len(STEPS)))))
    assert made == NAMES


def test_a_schema_with_some_of_the_names_is_not_one_of_ours(connection: Connection) -> None:
    connection.execute(text("CREATE TABLE jobs_hot (id int); CREATE TABLE schema_version (version int)"))
    assert installed(connection).tables == frozenset()
    assert {name for _, name in proposals(connection, MetaData(), {})} == {"jobs_hot", "schema_version"}


def test_an_older_schema_is_one_of_ours(connection: Connection) -> None:
    awa_sqla.schema.migrate(connection, 1)
    assert ("awa", "jobs") in installed(connection).tables
    assert ("awa", "audit_log") not in installed(connection).tables


def test_names_mean_what_the_translation_makes_of_them(connection: Connection) -> None:
    create_all(connection, "shop")
    assert not installed(connection).has(None, "audit_log")
    translated = connection.execution_options(schema_translate_map={None: "shop"})
    try:
        assert installed(translated).has(None, "audit_log")
        assert "audit_log" in installed(translated).in_the_way
    finally:
        connection.execution_options(schema_translate_map=None)


# ------------------------------------------------------------------------------------------------- what is created
def test_a_table_that_ours_hid_is_created_before_those_that_refer_to_it(with_ours: Connection) -> None:
    metadata = MetaData()
    stored(with_ours, app_metadata(), {"customers"})
    app_metadata().tables["customers"].to_metadata(metadata)
    Table(
        "audit_log",
        metadata,
        Column("id", ForeignKey("customers.id"), primary_key=True),
        Column("at", Integer, index=True),
    )
    Table("entries", metadata, Column("id", ForeignKey("audit_log.id"), primary_key=True))
    metadata.tables["customers"].append_column(Column("last", Integer))
    with_ours.execute(text("SET LOCAL search_path = public, awa"))
    upgrade = produce_migrations(MigrationContext.configure(with_ours), metadata).upgrade_ops
    assert upgrade is not None
    ops: list[Any] = upgrade.ops
    assert [(type(op).__name__, op.table_name) for op in ops] == [
        ("CreateTableOp", "audit_log"),
        ("ModifyTableOps", "audit_log"),
        ("CreateTableOp", "entries"),
        ("ModifyTableOps", "customers"),
    ]


@pytest.mark.parametrize("leave_out", [lambda obj, name, *_: name != "audit_log", lambda obj, *_: False])
def test_what_the_app_leaves_out_is_not_created_and_does_not_clash(
    with_ours: Connection, leave_out: Callable[..., bool]
) -> None:
    metadata = MetaData()
    Table("audit_log", metadata, Column("id", Integer, primary_key=True))
    for path in ("public, awa", "awa, public"):
        with_ours.execute(text(f"SET LOCAL search_path = {path}"))
        assert proposals(with_ours, metadata, {"include_object": leave_out}) == []


def test_a_listed_table_of_ours_and_one_of_the_app_at_its_place_clash(connection: Connection) -> None:
    metadata = MetaData()
    Table("audit_log", metadata, Column("id", Integer, primary_key=True))
    copies = guarded.ours_copied(MetaData(), "public")
    with pytest.raises(ConfigurationError, match="'audit_log' where awa_sqla has its own"):
        proposals(connection, [metadata, copies], {"awa_schema": "public"})


# ------------------------------------------------------------------------------------------------------ awa_schema
@pytest.mark.parametrize("value", [7, "no such", ["awa", ""], ["awa", None], b"awa", "pg_awa", [["awa"]], "x" * 64])
def test_what_names_no_schema_is_refused(connection: Connection, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="schema"):
        proposals(connection, MetaData(), {"awa_schema": value, "autogenerate_plugins": PLUGINS})
    with pytest.raises(ConfigurationError, match="schema"):
        filters(value)


def test_a_schema_that_is_named_twice_counts_once(connection: Connection) -> None:
    options = {"awa_schema": ("jobs", "jobs"), "autogenerate_plugins": PLUGINS}
    assert len(proposals(connection, MetaData(), options)) == 1


def test_the_filters_of_several_schemas_leave_each_alone(connection: Connection) -> None:
    for schema in ("awa", "billing"):
        create_all(connection, schema)
    for which in ("include_name", "include_object"):
        options = {"include_schemas": True, "autogenerate_plugins": SINGLY}
        assert proposals(connection, MetaData(), options | {which: getattr(filters(["awa", "billing"]), which)}) == []
        assert proposals(connection, MetaData(), options | {which: getattr(filters("billing"), which)}) != []


def test_the_filter_of_objects_leaves_out_what_is_ours_in_the_target_and_nothing_new_of_the_app(
    connection: Connection,
) -> None:
    metadata = app_metadata(alike=True)
    options = {"autogenerate_plugins": SINGLY, "include_object": filters("public").include_object}
    found = {(kind, name) for kind, name, *_ in proposals(connection, [metadata, AwaBase.metadata], options)}
    assert found == {("add_table", name) for name in metadata.tables} | {
        ("add_index", "ix_customers_name"),
        ("add_index", "ix_audit_log_verb"),
    }
