"""The command line, as a user meets it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.orm import Session

from awa_sqla.cli import cli
from awa_sqla.cli.finding import Settings
from awa_sqla.cli.root import Duration
from awa_sqla.models import FollowUpSpec
from awa_sqla.schema import LATEST, create_all, installed_version

APP = """
from awa_sqla import Awa, JobArgs

class Work(JobArgs):
    pass

first = Awa()

def make():
    return Awa()

class Holder:
    inner = first

number = 5
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("AWA_APP", "AWA_DATABASE_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "one_app.py").write_text(APP)
    yield tmp_path
    for name in ("one_app", "two_apps", "broken_app"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("reference", ["one_app:first", "one_app", "one_app:make", "one_app:Holder.inner"])
def test_an_app_is_found_by_its_reference(here, reference):
    assert type(Settings(reference, None).load_app()).__name__ == "Awa"


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("nosuch:awa", "no module 'nosuch'"),
        ("one_app:nosuch", "has no 'nosuch'"),
        ("one_app:number", "is of type int, not an Awa"),
        ("two_apps", "has 2 apps"),
        (None, "no app"),
    ],
)
def test_what_is_not_found_is_said_with_status_3(here, reference, says):
    (here / "two_apps.py").write_text(APP + "second = Awa()\n")
    arguments = ["worker"] if reference is None else ["worker", "--app", reference]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 3
    assert says in result.stderr


def test_an_import_error_inside_the_module_is_shown_untouched(here):
    (here / "broken_app.py").write_text("import no_such_dependency\n")
    result = CliRunner().invoke(cli, ["worker", "-A", "broken_app:awa"])
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "no_such_dependency"


def test_the_app_may_stand_in_pyproject_or_the_environment(here, monkeypatch):
    (here / "pyproject.toml").write_text('[tool.awa-sqla]\napp = "one_app:first"\n')
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")
    monkeypatch.syspath_prepend(str(here))
    app = Settings(None, None).load_app()
    monkeypatch.setenv("AWA_APP", "one_app:make")
    assert Settings(None, None).load_app() is not app


def test_which_database_is_a_matter_of_order(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgresql://third")
    assert Settings(None, None).database() == "postgresql://third"
    assert Settings(None, None).given_database() is None
    monkeypatch.setenv("AWA_DATABASE_URL", "postgresql://second")
    assert Settings(None, None).database() == "postgresql://second"
    assert Settings(None, "postgresql://first").database() == "postgresql://first"


def test_no_database_is_status_3(here):
    result = CliRunner().invoke(cli, ["migrate"])
    assert result.exit_code == 3
    assert "AWA_DATABASE_URL" in result.stderr


def test_migrate_installs_checks_and_takes_away(empty_db_url):
    url = empty_db_url.render_as_string(hide_password=False)
    run = CliRunner().invoke
    assert run(cli, ["-d", url, "migrate", "--check"]).exit_code == 4
    assert run(cli, ["-d", url, "migrate"]).stdout == f"schema awa: 0 -> version {LATEST}\n"
    assert run(cli, ["migrate", "-d", url]).stdout == f"schema awa: already at version {LATEST}\n"
    assert run(cli, ["-d", url, "migrate", "--check"]).exit_code == 0
    assert run(cli, ["-d", url, "migrate", "--to", "0"]).exit_code == 2
    assert run(cli, ["-d", url.replace("+psycopg", "+asyncpg"), "migrate", "--to", "0", "--yes"]).exit_code == 0
    engine = create_engine(empty_db_url)
    with engine.connect() as connection:
        assert installed_version(connection) == 0
    engine.dispose()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "6"], "--from is for --sql"),
        (["--check", "--sql"], "--check changes nothing"),
        (["--check", "--to", "6"], "--check changes nothing"),
        (["--check", "--yes"], "--check changes nothing"),
        (["--to", "-1", "--yes"], "no schema version -1"),
        (["--to", "-1"], "no schema version -1"),
        (["--sql", "--from", "99"], "no schema version 99"),
        (["--lock-wait", f"{10**15}d"], "longer than any wait"),
    ],
)
def test_options_of_migrate_that_make_no_sense_are_usage_errors(empty_db_url, arguments, said):
    url = empty_db_url.render_as_string(hide_password=False)
    result = CliRunner().invoke(cli, ["-d", url, "migrate", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    engine = create_engine(empty_db_url)
    with engine.connect() as connection:
        assert installed_version(connection) == 0
    engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_what_the_database_refuses_is_not_called_unreachable(empty_db_url, driver):
    url = empty_db_url.set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
    assert CliRunner().invoke(cli, ["-d", url, "migrate", "--to", "5"]).exit_code == 0
    engine = create_engine(empty_db_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE awa.leaders (mine text)")  # step 6 cannot make its own
    engine.dispose()
    result = CliRunner().invoke(cli, ["-d", url, "migrate"])
    assert result.exit_code == 4
    assert 'the database refused: relation "leaders" already exists' in result.stderr
    missing = empty_db_url.set(database="awa_test_nowhere").render_as_string(hide_password=False)
    result = CliRunner().invoke(cli, ["-d", missing, "migrate"])
    assert (result.exit_code, "cannot be reached" in result.stderr) == (6, True)


def test_migrate_prints_the_sql_it_would_run():
    result = CliRunner().invoke(cli, ["migrate", "--sql", "--schema", "jobs"])
    assert result.exit_code == 0
    assert 'CREATE TABLE "jobs".jobs_hot' in result.output


@pytest.mark.parametrize("url", ["nonsense", "mysql://u:secret@h/d", "postgresql+pg8000://u:secret@h/d"])
def test_what_is_no_url_of_ours_is_a_usage_error(url):
    result = CliRunner().invoke(cli, ["-d", url, "migrate"])
    assert (result.exit_code, "secret" in result.output) == (2, False)


@pytest.mark.parametrize(("arguments", "status"), [(["migrate", "--to", "99"], 2), (["migrate", "--schema", "a;b"], 2)])
def test_bad_versions_and_names_are_usage_errors(db_url, arguments, status):
    url = db_url.render_as_string(hide_password=False)
    assert CliRunner().invoke(cli, ["-d", url, *arguments]).exit_code == status


def test_an_unreachable_database_is_status_6(here):
    url = "postgresql://nobody:secret@127.0.0.1:1/none"
    for arguments in (["migrate"], ["worker", "-A", "one_app:first", "-Q", "email"]):
        (here / "one_app.py").write_text(
            APP.replace("Awa()", "Awa(queues={'email': __import__('awa_sqla').QueueConfig()})")
        )
        result = subprocess.run(
            [sys.executable, "-m", "awa_sqla", "-d", url, *arguments], capture_output=True, text=True, check=False
        )
        assert result.returncode == 6, result.stderr
        assert "secret" not in result.stderr + result.stdout


def test_a_worker_on_an_old_schema_is_status_4(here, empty_db_url):
    (here / "one_app.py").write_text(
        APP.replace("Awa()", "Awa(queues={'email': __import__('awa_sqla').QueueConfig()})")
    )
    url = empty_db_url.render_as_string(hide_password=False)
    result = subprocess.run(
        [sys.executable, "-m", "awa_sqla", "-d", url, "worker", "-A", "one_app:first"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 4
    assert "awa-sqla migrate" in result.stderr


@pytest.mark.parametrize(
    ("text", "means"),
    [("30s", 30), ("500ms", 0.5), ("5m", 300), ("2h", 7200), ("1.5d", 129600)],
)
def test_durations_are_written_with_their_unit(text, means):
    assert Duration().convert(text, None, None) == timedelta(seconds=means)


def test_a_duration_without_a_unit_is_a_usage_error():
    result = CliRunner().invoke(cli, ["worker", "--grace", "30"])
    assert result.exit_code == 2
    assert "write for instance 30s" in result.stderr


def test_help_names_every_verb():
    result = CliRunner().invoke(cli, ["--help"])
    for verb in ("demo", "migrate", "worker"):
        assert f"\n  {verb} " in result.output


def test_help_needs_neither_rich_nor_a_worker():
    program = (
        "import sys; from click.testing import CliRunner; from awa_sqla.cli import cli; "
        "CliRunner().invoke(cli, ['--help']); print('rich' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_forgotten_spec_is_owed_nothing_more(db_url_str, engine):
    with Session(engine) as session, session.begin():
        for name in ("app:old", "app:new\x1b[2J"):
            session.add(FollowUpSpec(kind="work", outcome="completed", name=name))
    run = CliRunner().invoke
    listed = run(cli, ["specs", "list", "-d", db_url_str]).output
    assert [line.split("\t")[:3] for line in listed.splitlines()] == [
        ["work", "completed", "app:new\\x1b[2J"],
        ["work", "completed", "app:old"],
    ]
    assert run(cli, ["specs", "forget", "app:old", "-d", db_url_str]).output == "forgotten: app:old\n"
    missing = run(cli, ["specs", "forget", "app:old", "-d", db_url_str])
    assert (missing.exit_code, "specs list" in missing.stderr) == (5, True)


def test_reload_without_what_watches_files_says_what_to_install(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    result = CliRunner().invoke(cli, ["worker", "-A", "one_app:first", "--reload"])
    assert (result.exit_code, "awa-sqla[reload]" in result.stderr) == (2, True)


def test_uvloop_is_insisted_on_avoided_or_left_open(here, monkeypatch, db_url):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.setenv("DATABASE_URL", db_url.render_as_string(hide_password=False))
    for flags, says in ((["--uvloop"], "awa-sqla[uvloop]"), (["--no-uvloop"], "no queue"), ([], "no queue")):
        result = CliRunner().invoke(cli, ["worker", "-A", "one_app:make", *flags])
        assert (result.exit_code, says in result.stderr) == (2, True)


def test_health_that_cannot_be_served_is_a_usage_error_and_else_it_answers(here, db_url):
    (here / "serving.py").write_text(APP + "\nfirst.task(Work)(lambda ctx: None)\n")
    url = db_url.render_as_string(hide_password=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "awa_sqla", "-d", url, "worker", "-A", "serving:first", "--health"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        refused = subprocess.run(
            [*command, address], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (refused.returncode, "health=" in refused.stderr) == (2, True)
    with subprocess.Popen([*command, "127.0.0.1:0"], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = next(line for line in process.stderr if "health checks at" in line)
            with urllib.request.urlopen(said.split()[-3], timeout=20) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
            process.communicate(timeout=40)
    assert process.returncode == 0


def test_a_schema_that_is_not_whole_is_status_4_and_says_how_to_look(fresh_db_url):
    with create_engine(fresh_db_url, poolclass=NullPool).begin() as connection:
        connection.execute(text("DROP TABLE awa.leaders"))
    url = fresh_db_url.render_as_string(hide_password=False)
    result = CliRunner().invoke(cli, ["-d", url, "maintenance", "--once"])
    assert result.exit_code == 4
    assert 'relation "awa.leaders" does not exist' in result.stderr
    assert "`awa-sqla migrate --check`" in result.stderr


def test_check_prints_a_script_that_mends(fresh_db_url):
    url = fresh_db_url.render_as_string(hide_password=False)
    with create_engine(fresh_db_url, poolclass=NullPool).begin() as connection:
        connection.execute(text("DROP INDEX awa.ix_jobs_hot_claim"))
    result = CliRunner().invoke(cli, ["-d", url, "migrate", "--check"])
    assert result.exit_code == 4
    assert "-- index jobs_hot.ix_jobs_hot_claim is missing\n" in result.stdout
    lines = [line for line in result.stdout.splitlines() if not line.startswith("--")]
    engine = create_engine(fresh_db_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in "\n".join(lines).split(";\n"):
            connection.exec_driver_sql(statement)
    assert CliRunner().invoke(cli, ["-d", url, "migrate", "--check"]).exit_code == 0


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_maintenance_serves_another_schema(empty_db_url, driver):
    with create_engine(empty_db_url, poolclass=NullPool).begin() as connection:
        create_all(connection, "billing")
    url = empty_db_url.set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
    result = CliRunner().invoke(cli, ["-d", url, "maintenance", "--once", "--schema", "billing"])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(cli, ["-d", url, "maintenance", "--once"]).exit_code == 4
    assert CliRunner().invoke(cli, ["-d", url, "maintenance", "--once", "--schema", "a b"]).exit_code == 2
