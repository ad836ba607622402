"""Every layout of an Alembic project: made by `alembic init`, one line changed, there and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, inspect, text

from awa_sqla.schema import LATEST, installed_version
from tests.databases import DBNAME, Server
from tests.schema.catalog import names
from tests.schema.projects import MODELS, NAMED, Project, executed

pytestmark = [pytest.mark.slow, pytest.mark.beside]


def beside(value: object) -> Any:
    """A parameter that is tried beside the quick suite."""
    return pytest.param(value, marks=pytest.mark.beside)


LINE = f"    op.awa_migrate(from_=0, to={LATEST}"
MIRROR = f"    op.awa_migrate(from_={LATEST}, to=0"


def version(engine: Engine, schema: str = "awa") -> int:
    with engine.connect() as connection:
        return installed_version(connection, schema)


def left(engine: Engine) -> set[str]:
    """What is in the database, besides Alembic's own table."""
    with engine.connect() as connection:
        return {name for name in names(connection) if "alembic_version" not in name}


def there_and_back(project: Project, engine: Engine, section: str = "alembic") -> None:
    """Write the revision, install, find nothing more to do, take all away, install again."""
    written = project.revise("one", section)
    assert LINE in written
    assert MIRROR in written
    assert "create_table('orders'" in written
    for _ in range(2):
        project.run("upgrade", "head", section=section)
        assert version(engine) == LATEST
        assert project.diffs(section) == []
        project.run("downgrade", "base", section=section)
        assert left(engine) == {"schema public"}


# --------------------------------------------------------------------------------------------------- one database
@pytest.mark.parametrize("driver", ["psycopg", beside("psycopg2")])
def test_the_generic_layout(tmp_path: Path, empty_db_url: URL, empty_engine: Engine, driver: str) -> None:
    there_and_back(Project(tmp_path).configure(NAMED).at(empty_db_url, driver), empty_engine)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_the_async_layout(tmp_path: Path, empty_db_url: URL, empty_engine: Engine, driver: str) -> None:
    there_and_back(Project(tmp_path, "async").configure(NAMED).at(empty_db_url, driver), empty_engine)


@pytest.mark.parametrize(
    "options",
    [
        "transaction_per_migration=True",
        beside("compare_type=True, compare_server_default=True, render_as_batch=True"),
        beside("include_schemas=True, compare_type=True, compare_server_default=True"),
    ],
)
def test_the_options_that_others_set(tmp_path: Path, empty_db_url: URL, empty_engine: Engine, options: str) -> None:
    there_and_back(Project(tmp_path).configure(f"{NAMED}, {options}").at(empty_db_url), empty_engine)


def test_our_metadata_in_the_list_does_what_the_plugin_does(
    tmp_path: Path, empty_db_url: URL, empty_engine: Engine
) -> None:
    project = Project(tmp_path).configure("include_schemas=True, compare_type=True, compare_server_default=True")
    project.edit(
        "target_metadata = metadata", "import awa_sqla.models\ntarget_metadata = [metadata, awa_sqla.models.metadata]"
    )
    there_and_back(project.at(empty_db_url), empty_engine)


def test_an_app_that_never_named_the_plugin_keeps_our_tables(
    tmp_path: Path, empty_db_url: URL, empty_engine: Engine
) -> None:
    project = Project(tmp_path).configure("include_schemas=True").at(empty_db_url)
    project.run("revision", rev_id="one")
    by_hand = next(project.versions.glob("one*.py"))
    by_hand.write_text(by_hand.read_text().replace("pass", f"op.awa_migrate(from_=0, to={LATEST})", 1))
    project.run("upgrade", "head")
    written = project.revise("two")
    assert "op.create_table('orders'" in written
    assert "awa" not in written
    assert "op.drop_table('orders')" in written.partition("def downgrade")[2]


@pytest.mark.parametrize("per_migration", [False, beside(True)])
def test_the_sql_of_an_upgrade_and_a_downgrade_does_what_they_do(
    tmp_path: Path, empty_db_url: URL, empty_engine: Engine, per_migration: bool
) -> None:
    project = Project(tmp_path).configure(f"{NAMED}, transaction_per_migration={per_migration}").at(empty_db_url)
    project.revise("one")
    executed(empty_db_url, "DROP TABLE IF EXISTS alembic_version")  # the look for differences may have made it
    executed(empty_db_url, project.run("upgrade", "head", sql=True))
    assert version(empty_engine) == LATEST
    assert project.diffs() == []
    executed(empty_db_url, project.run("downgrade", "one:base", sql=True))
    assert left(empty_engine) == {"schema public"}


# ---------------------------------------------------------------------------------------------------- version tables
#: What creates the schema of the version table; Alembic wants to write there before the first revision is run.
MAKES_SCHEMA = 'context.get_context().execute("CREATE SCHEMA IF NOT EXISTS awa")'


def test_a_version_table_in_our_schema_needs_the_schema_first(
    tmp_path: Path, empty_db_url: URL, empty_engine: Engine
) -> None:
    project = Project(tmp_path).configure(f'{NAMED}, include_schemas=True, version_table_schema="awa"')
    project.before_migrations(MAKES_SCHEMA)
    there_and_back_beside_versions(project.at(empty_db_url), empty_engine)


def there_and_back_beside_versions(project: Project, engine: Engine) -> None:
    assert LINE in project.revise("one")
    for _ in range(2):
        project.run("upgrade", "head")
        assert version(engine) == LATEST
        assert inspect(engine).has_table("alembic_version", "awa")
        assert project.diffs() == []
        project.run("downgrade", "base")
        assert left(engine) == {"schema public", "schema awa"}


def test_the_sql_for_a_version_table_in_our_schema(tmp_path: Path, empty_db_url: URL, empty_engine: Engine) -> None:
    project = Project(tmp_path).configure(f'{NAMED}, version_table_schema="awa"').at(empty_db_url)
    project.before_migrations(MAKES_SCHEMA)
    project.revise("one")
    executed(empty_db_url, "DROP SCHEMA IF EXISTS awa CASCADE")
    executed(empty_db_url, project.run("upgrade", "head", sql=True))
    assert version(empty_engine) == LATEST
    assert project.diffs() == []


#: The filter of an app beside another history, whose version table it must not take for one of its own.
LEAVES_OUT = """
from awa_sqla.alembic import filters

def include_name(name, type_, parents):
    return name != "alembic_version_jobs" and filters().include_name(name, type_, parents)
"""


@pytest.mark.parametrize("first", ["alembic", beside("jobs")])
@pytest.mark.parametrize("version_table", ['version_table="alembic_version_jobs"', 'version_table_schema="awa"'])
def test_two_histories_in_one_database(
    tmp_path: Path, empty_db_url: URL, empty_engine: Engine, version_table: str, first: str
) -> None:
    shop = Project(tmp_path).configure("include_schemas=True, include_name=include_name")
    shop.edit("from alembic import context\n", f"from alembic import context\n{LEAVES_OUT}")
    jobs = Project(tmp_path / "other", directory="jobs_migrations")
    jobs.edit("target_metadata = None", "from sqlalchemy import MetaData\ntarget_metadata = MetaData()")
    jobs.configure_more(f'autogenerate_plugins=["awa_sqla.alembic"], {version_table}')
    jobs.before_migrations(MAKES_SCHEMA)
    shop.at(empty_db_url).set("jobs", script_location=str(jobs.directory), path_separator="os").at(
        empty_db_url, section="jobs"
    )
    both = ["alembic", "jobs"] if first == "alembic" else ["jobs", "alembic"]
    written = {}
    for section in both:
        written[section] = shop.revise("one", section)
        shop.run("upgrade", "head", section=section)
    assert (LINE in written["jobs"], "orders" in written["jobs"]) == (True, False)
    assert ("awa" in written["alembic"].partition("def upgrade")[2], "orders" in written["alembic"]) == (False, True)
    assert [shop.diffs(section) for section in both] == [[], []]
    for section in both:
        shop.run("downgrade", "base", section=section)
    assert left(empty_engine) - {"schema awa"} == {"schema public"}


# ------------------------------------------------------------------------------------------------ several databases
HAS_OURS = 'awa_schema={"engine1": "awa"}.get(name, ())'


@pytest.fixture
def second_url(postgres_server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Another database, on PostgreSQL or not."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'second.db'}"
        return
    dbname = f"{DBNAME}_second"
    janitor = postgres_server.janitor(dbname, template_dbname="template0")
    janitor.drop()
    with janitor:
        yield postgres_server.url(dbname).render_as_string(hide_password=False)


@pytest.mark.parametrize("second_url", ["sqlite", "postgresql"], indirect=True)
def test_the_layout_of_several_databases(
    tmp_path: Path, empty_db_url: URL, empty_engine: Engine, second_url: str
) -> None:
    project = Project(tmp_path, "multidb")
    project.edit("target_metadata = {}", f'{MODELS}\ntarget_metadata = {{"engine1": MetaData(), "engine2": metadata}}')
    project.edit(
        "target_metadata=target_metadata.get(name),",
        f"target_metadata=target_metadata.get(name), {NAMED}, {HAS_OURS},",
        times=2,
    )
    project.at(empty_db_url, section="engine1").set("engine2", sqlalchemy__url=second_url.replace("%", "%%"))
    written = project.revise("one")
    one, two = (written.partition(f"def upgrade_engine{n}")[2].partition("def ")[0] for n in (1, 2))
    assert (LINE in one, "orders" in one) == (True, False)
    assert ("awa_migrate" in two, "op.create_table('orders'" in two) == (False, True)
    second = create_engine(second_url, poolclass=NullPool)
    for _ in range(2):
        project.run("upgrade", "head")
        assert version(empty_engine) == LATEST
        assert inspect(second).get_table_names(schema=None) == ["alembic_version", "orders"]
        assert project.diffs() == []
        project.run("downgrade", "base")
        assert left(empty_engine) == {"schema public"}
        assert inspect(second).get_table_names(schema=None) == ["alembic_version"]


# ---------------------------------------------------------------------------------------------------- several schemas
def test_two_schemas_have_a_line_each_in_their_order(tmp_path: Path, empty_db_url: URL, empty_engine: Engine) -> None:
    project = Project(tmp_path).configure(f'{NAMED}, include_schemas=True, awa_schema=["billing", "awa"]')
    project.at(empty_db_url)
    upgrade, _, downgrade = project.revise("one").partition("def downgrade")
    first, second = f"{LINE}, schema='billing')", f"{LINE})"
    assert upgrade.index(first) < upgrade.index(second) < upgrade.index("op.create_table('orders'")
    assert downgrade.index(f"{MIRROR})") < downgrade.index(f"{MIRROR}, schema='billing')")
    project.run("upgrade", "head")
    assert (version(empty_engine), version(empty_engine, "billing")) == (LATEST, LATEST)
    assert project.diffs() == []
    with empty_engine.begin() as connection:
        take_away(connection, "billing")
    assert project.diffs() == [("awa_migrate", 0, LATEST, "billing")]
    written = project.revise("two")
    assert (first in written, second in written) == (True, False)


def take_away(connection: Connection, schema: str) -> None:
    connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))


@pytest.mark.parametrize(
    "line",
    [
        NAMED,
        MAKES_SCHEMA,
        'autogenerate_plugins=["awa_sqla.alembic"]',
        'version_table="alembic_version_jobs"',
        'version_table_schema="awa"',
        HAS_OURS,
        "target_metadata=target_metadata.get(name),",
    ],
)
def test_the_page_shows_the_lines_that_are_tried_here(line: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "alembic.md").read_text("utf-8")
    assert line in page
