"""The demo: real processes on a small tree, and its self-check, which must turn red for every kind of damage."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Engine, NullPool, create_engine, inspect, select, text
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import JobState, Outcome
from awa_sqla.demo import Plan, content, run
from awa_sqla.demo.approver import approve
from awa_sqla.demo.check import CHECKS, check_all, shown
from awa_sqla.demo.content import NotAFileError, frequent_words, measure
from awa_sqla.demo.database import migrate
from awa_sqla.demo.jobs import awa
from awa_sqla.demo.models import APP_SCHEMA, JOBS_SCHEMA, Directory, engine_on, path_from_text, path_to_text
from awa_sqla.demo.records import Records
from awa_sqla.demo.seed import listings
from awa_sqla.schema import LATEST, installed_version
from tests.databases import DBNAME, Server, libpq_url
from tests.processes import hear_interrupts

PATIENCE = 30.0


# ------------------------------------------------------------------------------------------------------- fixtures
@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one of everything: 13 files in 5 directories, of which 4 cannot be read."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("empty", "nested/deep", "many"):
        (root / folder).mkdir(parents=True)
    (root / "empty.txt").touch()
    (root / "hello.txt").write_text("Hello, hello world\nit is Straße, STRASSE\n")
    (root / "binary").write_bytes(bytes(range(256)))
    (root / "latin1.txt").write_bytes(b"caf\xe9\n")
    (root / "nested/deep/er.py").write_text("print('no newline at the end')")
    (root / "many" / "new\nline \x1b[31m[red]\\x41.txt").write_text("odd\n")
    Path(os.fsdecode(os.fsencode(root) + b"/many/\xff\xfe")).write_text("not utf-8\n")
    (root / "many/linked").symlink_to("../hello.txt")
    (root / "nested/circle").symlink_to("..")
    (root / "many/two.txt").write_text("two words\n" * 100)
    (root / "broken").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(root)  # the name of a socket must be short
        try:
            listener.bind("socket")
        finally:
            os.chdir(here)
    return root


@dataclass(frozen=True)
class Finished:
    """A demo that has run and kept its schemas."""

    engine: Engine
    status: int
    result: dict[str, Any]
    stderr: str


@pytest.fixture(scope="session")
def finished(postgres_server: Server, tree: Path) -> Iterator[Finished]:
    """The tree, catalogued with --json and --keep."""
    dbname = f"{DBNAME}{os.environ.get('PYTEST_XDIST_WORKER', '')}_demo"
    janitor = postgres_server.janitor(dbname, template_dbname="template0")
    janitor.drop()
    with janitor:
        url = postgres_server.url(dbname)
        done = demo(url, str(tree), "--json", "--keep")
        engine = engine_on(url, poolclass=NullPool)
        yield Finished(engine, done.returncode, json.loads(done.stdout), done.stderr)


def command_line(url: URL, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "awa_sqla", "-d", url.render_as_string(hide_password=False), "demo", *arguments]


def demo(url: URL, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, in a process of its own: it attaches its follow-ups for good."""
    return subprocess.run(command_line(url, *arguments), check=False, capture_output=True, text=True)


def found_in(engine: Engine, damage: str | None = None) -> dict[str, bool]:
    """Which checks agree, after `damage` was done to the database and before it is undone."""
    with engine.connect() as connection, connection.begin() as transaction:
        if damage is not None:
            assert connection.execute(text(damage)).rowcount == 1
        checks = check_all(Records.read(Session(connection)))
        transaction.rollback()
    return {check.name: check.ok for check in checks}


# ------------------------------------------------------------------------------------------------------- the run
def test_a_tree_with_one_of_everything_is_catalogued(finished: Finished) -> None:
    assert finished.status == 0, finished.stderr
    assert [check for check in finished.result["checks"] if not check["ok"]] == []
    assert finished.result["ok"]
    assert finished.result["files"] == 13
    assert finished.result["dead_letters"] == finished.result["follow_ups"]["exhausted"] == 4
    # Two are no files at all, which another attempt would not change; two are tried three times.
    assert finished.result["retries"] == finished.result["follow_ups"]["retried"] == 4
    # Of the nine that can be read, two are binary.
    assert finished.result["follow_ups"]["completed"] == 7
    assert finished.result["jobs"]["failed"] == 4
    # Each of the five directories waits for its approval, and is counted as waiting.
    assert finished.result["follow_ups"]["waiting_for_callback"] == 5
    assert finished.result["jobs"]["completed"] == 13 + 7 + 4 + 4 + 5 + 5 - 4


def test_json_is_one_object_with_the_documented_fields(finished: Finished) -> None:
    result = finished.result
    assert list(result) == [
        *("ok", "files", "jobs", "follow_ups", "retries", "dead_letters", "obligations", "killed", "seconds"),
        *("jobs_per_second", "checks"),
    ]
    assert set(result["jobs"]) == set(JobState)
    assert set(result["follow_ups"]) == set(Outcome)
    assert all(list(check) == ["name", "ok", "detail"] for check in result["checks"])
    assert result["obligations"] == result["killed"] == 0


def test_what_was_read_is_what_is_there(finished: Finished, tree: Path) -> None:
    with Session(finished.engine) as session:
        records = Records.read(session)
    by_path = {file.path: file for file in records.files.values()}
    hello = by_path[tree / "hello.txt"]
    assert (hello.size, hello.lines, hello.type) == (42, 2, "text")
    assert records.words[hello.id][:2] == [("hello", 2), ("strasse", 2)]
    assert (by_path[tree / "empty.txt"].size, by_path[tree / "empty.txt"].lines) == (0, 0)
    assert by_path[tree / "binary"].type == by_path[tree / "latin1.txt"].type == "binary"
    assert by_path[Path(os.fsdecode(os.fsencode(tree) + b"/many/\xff\xfe"))].status == "done"
    assert "not a regular file" in str(by_path[tree / "pipe"].error)
    assert tree / "nested/circle" not in by_path


@pytest.mark.beside
def test_its_schemas_are_dropped_at_the_end(empty_db_url: URL, tmp_path: Path) -> None:
    done = demo(empty_db_url, str(tmp_path), "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "All 11 checks agree" in done.stdout
    assert schemas(empty_db_url) == set()


def schemas(url: URL) -> set[str]:
    engine = create_engine(url, poolclass=NullPool)
    return {APP_SCHEMA, JOBS_SCHEMA} & set(inspect(engine).get_schema_names())


@pytest.mark.slow
@pytest.mark.beside
def test_killing_workers_and_the_approver_in_the_middle_changes_nothing(
    empty_db_url: URL, tree: Path, tmp_path: Path
) -> None:
    for number in range(300):
        (tmp_path / f"{number}.txt").write_text(f"number {number}\n" * (number % 20))
    (tmp_path / "more").symlink_to(tree)
    (tmp_path / "broken").symlink_to("nowhere")
    done = demo(empty_db_url, str(tmp_path), "--json", "--kill")
    result = json.loads(done.stdout)
    assert done.returncode == 0, (result["checks"], done.stderr)
    assert result["killed"] >= 1
    assert result["follow_ups"]["rescued"] >= 1
    assert (result["files"], result["dead_letters"]) == (301, 1)


# ---------------------------------------------------------------------------------------------------- the checks
def test_the_checks_agree_with_an_untouched_database(finished: Finished) -> None:
    assert found_in(finished.engine) == {check(empty()).name: True for check in CHECKS}


def empty() -> Records:
    return Records({}, {}, {}, {}, [], 0)


A_TEXT = "(SELECT id FROM awa_demo_app.file WHERE path LIKE '%/hello.txt')"
ONE = "id = (SELECT min(id) FROM awa_demo.jobs_hot WHERE kind = '{}')"
COPY = (
    "INSERT INTO awa_demo.jobs_hot (kind, queue, state, args, result, parent_id, root_id, parent_outcome) "
    "SELECT kind, queue, state, args, result, parent_id, root_id, parent_outcome FROM awa_demo.jobs_hot "
    "WHERE "
)
BROKEN = "WHERE args->>'path' LIKE '%/broken'"
OTHER_ERROR = '{"error": "x", "type": "error", "attempt": 3}'
OTHER_FILE = """args = jsonb_set(args, '{file_id}', '0')"""
AGAIN = "INSERT INTO awa_demo_app.incident (file_id, what, attempt, detail) SELECT file_id, what, attempt, detail "
OWED = "INSERT INTO awa_demo.follow_up_obligations (job_id, kind, outcome, spec, snapshot) VALUES "


@pytest.mark.parametrize(
    ("damage", "red"),
    [
        (f"UPDATE awa_demo_app.file SET sha256 = repeat('0', 64) WHERE id = {A_TEXT}", {"files"}),
        (f"UPDATE awa_demo_app.file SET size = size + 1 WHERE id = {A_TEXT}", {"files", "summaries"}),
        (f"UPDATE awa_demo_app.file SET lines = lines - 1 WHERE id = {A_TEXT}", {"files", "summaries"}),
        (f"UPDATE awa_demo_app.file SET type = 'binary', lines = NULL WHERE id = {A_TEXT}", {"files", "words"}),
        (f"UPDATE awa_demo_app.file SET status = 'hashed' WHERE id = {A_TEXT}", {"files", "directories"}),
        (f"UPDATE awa_demo_app.file SET status = 'failed', error = 'x' WHERE id = {A_TEXT}", {"files", "dead letters"}),
        ("UPDATE awa_demo_app.file SET error = NULL WHERE path LIKE '%/broken'", {"files", "dead letters"}),
        ("UPDATE awa_demo_app.word SET count = 3 WHERE word = 'hello' AND file_id = " + A_TEXT, {"words"}),
        ("DELETE FROM awa_demo_app.word WHERE word = 'hello' AND file_id = " + A_TEXT, {"words"}),
        (
            "INSERT INTO awa_demo_app.word (file_id, word, count) SELECT file_id, word, count FROM awa_demo_app.word "
            "WHERE word = 'hello' AND file_id = " + A_TEXT,
            {"words", "effects"},
        ),
        ("UPDATE awa_demo_app.directory SET files_done = files_done + 1 WHERE path LIKE '%/many'", {"directories"}),
        ("UPDATE awa_demo_app.directory SET files_failed = 1 WHERE path LIKE '%/many'", {"directories"}),
        ("UPDATE awa_demo_app.directory SET summary = '{}' WHERE path LIKE '%/many'", {"summaries"}),
        ("UPDATE awa_demo_app.directory SET summary = NULL WHERE path LIKE '%/empty'", {"summaries"}),
        (f"DELETE FROM awa_demo.jobs_hot WHERE {ONE.format('summarise_directory')}", {"summaries"}),
        (COPY + ONE.format("summarise_directory"), {"summaries"}),
        ("UPDATE awa_demo_app.directory SET approval_id = NULL WHERE path LIKE '%/many'", {"summaries"}),
        ("UPDATE awa_demo_app.directory SET requests = requests + 1 WHERE path LIKE '%/many'", {"summaries"}),
        (f"DELETE FROM awa_demo.jobs_hot WHERE {ONE.format('index_words')}", {"follow-ups"}),
        (f"DELETE FROM awa_demo.jobs_hot WHERE {ONE.format('count_failure')}", {"follow-ups"}),
        (f"DELETE FROM awa_demo.jobs_hot WHERE {ONE.format('record_incident')}", {"follow-ups"}),
        (f"DELETE FROM awa_demo.jobs_hot WHERE {ONE.format('count_request')}", {"follow-ups"}),
        (COPY + ONE.format("count_request"), {"follow-ups"}),
        (COPY + ONE.format("index_words"), {"follow-ups", "effects"}),
        (COPY + ONE.format("count_failure"), {"follow-ups", "effects"}),
        (COPY + ONE.format("record_incident"), {"follow-ups"}),
        (COPY + ONE.format("hash_file"), {"effects"}),
        (f"UPDATE awa_demo.jobs_hot SET root_id = 0 WHERE {ONE.format('index_words')}", {"lineage"}),
        (f"UPDATE awa_demo.jobs_hot SET parent_id = NULL WHERE {ONE.format('index_words')}", {"lineage", "follow-ups"}),
        (
            f"UPDATE awa_demo.jobs_hot SET parent_outcome = 'exhausted' WHERE {ONE.format('index_words')}",
            {"lineage", "follow-ups"},
        ),
        (
            f"UPDATE awa_demo.jobs_hot SET {OTHER_FILE} WHERE {ONE.format('index_words')}",
            {"lineage"},
        ),
        (
            f"UPDATE awa_demo.jobs_hot SET args = '{{\"directory_id\": 0}}' WHERE {ONE.format('count_request')}",
            {"lineage"},
        ),
        (f"DELETE FROM awa_demo.dlq_entries {BROKEN}", {"dead letters", "lineage", "effects", "incidents"}),
        (f"UPDATE awa_demo.dlq_entries SET errors[3] = '{OTHER_ERROR}' {BROKEN}", {"dead letters"}),
        (f"UPDATE awa_demo.jobs_hot SET state = 'failed' WHERE {ONE.format('record_incident')}", {"dead letters"}),
        ("DELETE FROM awa_demo_app.incident WHERE id = (SELECT min(id) FROM awa_demo_app.incident)", {"incidents"}),
        (AGAIN + "FROM awa_demo_app.incident ORDER BY id LIMIT 1", {"incidents"}),
        (f"UPDATE awa_demo.jobs_hot SET state = 'available' WHERE {ONE.format('record_incident')}", {"queue"}),
        (OWED + "(1, 'hash_file', 'completed', 'x', '{}')", {"queue"}),
    ],
)
def test_damage_turns_its_checks_red(finished: Finished, damage: str, red: set[str]) -> None:
    damage = damage.replace(":", r"\:")  # no bind parameters
    off = {name for name, ok in found_in(finished.engine, damage).items() if not ok}
    assert red <= off


def test_a_file_that_changed_since_is_reported_and_no_error(finished: Finished, tree: Path) -> None:
    file, before = tree / "many/two.txt", (tree / "many/two.txt").read_text()
    try:
        file.write_text("other words\n")
        with Session(finished.engine) as session:
            checks = {check.name: check for check in check_all(Records.read(session))}
    finally:
        file.write_text(before)
    assert all(check.ok for check in checks.values())
    assert "1 changed or vanished meanwhile" in checks["files"].detail


# --------------------------------------------------------------------------------------------------- other endings
def test_what_is_no_directory_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file\x1b").touch()
    assert run(Plan(directory=tmp_path / "nothing")) == 2
    assert run(Plan(directory=tmp_path / "file\x1b")) == 2
    said = capsys.readouterr().err
    assert "not a directory" in said
    assert "\x1b" not in said


def test_no_server_and_no_way_to_start_one_ends_with_status_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWA_PG_BINDIR", "/nowhere")
    assert run(Plan(directory=tmp_path)) == 3
    assert "AWA_PG_BINDIR=/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nonsense", "sqlite://", "postgresql://nobody@127.0.0.1:1/nothing"])
def test_a_database_that_cannot_be_used_ends_with_status_3(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Plan(directory=tmp_path, database_url=url)) == 3
    assert "awa-sqla:" in capsys.readouterr().err


def test_a_second_demo_is_kept_out_of_the_database_of_a_first(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = finished.engine.url
    with psycopg.connect(libpq_url(url)) as first:
        first.execute("SELECT pg_advisory_lock(hashtextextended('awa-sqla demo', 0))")
        assert run(Plan(directory=tmp_path, database_url=url.render_as_string(hide_password=False))) == 3
    assert "another `awa-sqla demo`" in capsys.readouterr().err


def test_more_workers_than_the_server_has_room_for_are_refused(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = finished.engine.url.render_as_string(hide_password=False)
    assert run(Plan(directory=tmp_path, database_url=url, workers=16)) == 3
    assert "use --workers" in capsys.readouterr().err


@pytest.mark.beside
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_process_outlives_it(empty_db_url: URL, tree: Path, number: int, status: int) -> None:
    process = subprocess.Popen(
        command_line(empty_db_url, str(tree)), stderr=subprocess.DEVNULL, preexec_fn=hear_interrupts
    )
    try:
        children = workers_of(empty_db_url)
        process.send_signal(number)
        assert process.wait(PATIENCE) == status
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not any(map(exists, children)))
    eventually(lambda: sessions(empty_db_url) == 0)
    assert schemas(empty_db_url) == (set() if number == signal.SIGINT else {APP_SCHEMA, JOBS_SCHEMA})


def workers_of(url: URL) -> list[int]:
    """Their process ids, as soon as one has reported to the database."""
    found: list[int] = []

    def look() -> bool:
        with psycopg.connect(libpq_url(url), autocommit=True) as connection:
            try:
                rows = connection.execute("SELECT pid FROM awa_demo.runtime_instances").fetchall()
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                return False
        found[:] = [pid for (pid,) in rows]
        return bool(found)

    eventually(look)
    return found


def sessions(url: URL) -> int:
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        row = connection.execute(others).fetchone()
    return int(row[0]) if row else 0


def exists(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], check=False, capture_output=True, text=True)
    return not done.stdout.startswith("Z")


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------------ the parts
@pytest.mark.parametrize(
    "name", [b"plain", b"\xff\xfe", b"back\\slash", b"\\xff", "straße".encode(), b"new\nline\x1b", b"\xed\xb2\x80"]
)
def test_a_path_comes_back_from_text_to_the_byte(name: bytes) -> None:
    path = Path(os.fsdecode(name))
    stored = path_to_text(path)
    stored.encode()  # no lone surrogate
    assert os.fsencode(path_from_text(stored)) == name


def test_text_from_outside_cannot_steer_a_terminal() -> None:
    assert shown("a\x1b[31m\n\u202e\udcff[bold]ä") == r"a\x1b[31m\n\u202e\udcff[bold]ä"


@pytest.mark.parametrize("block", [1, 3, 7, 1 << 20])
def test_words_do_not_depend_on_the_size_of_blocks(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "BLOCK", block)
    (tmp_path / "text").write_text("Größe größe GRÖSSE a_b " + "x" * 41 + " " + "y" * 40 + " end")
    expected = [("grösse", 3), ("a", 1), ("b", 1), ("end", 1), ("y" * 40, 1)]
    assert frequent_words(tmp_path / "text") == expected
    assert measure(tmp_path / "text").lines == 0


@pytest.mark.parametrize(
    ("data", "kind"), [(b"", "text"), (b"a\0b", "binary"), (b"\xc3", "binary"), ("é".encode(), "text")]
)
def test_text_is_utf8_without_nul(data: bytes, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "BLOCK", 1)
    (tmp_path / "file").write_bytes(data)
    assert measure(tmp_path / "file").type == kind


def test_a_pipe_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAFileError):
        measure(tmp_path / "pipe")


def test_the_default_is_pythons_own_library_without_what_was_installed() -> None:
    found = listings(None)
    assert sum(len(listing.files) for listing in found) > 1000
    assert not {"site-packages", "__pycache__"} & {part for listing in found for part in listing.path.parts[-1:]}


def test_its_migrations_lead_to_the_latest_schema_and_to_its_models(empty_db_url: URL) -> None:
    engine = engine_on(empty_db_url, poolclass=NullPool)
    migrate(engine)
    config = Config()
    config.set_main_option("script_location", "awa_sqla.demo:migrations")
    with engine.begin() as connection:
        assert installed_version(connection, JOBS_SCHEMA) == LATEST
        config.attributes["connection"] = connection
        command.check(config)
        command.downgrade(config, "base")
        assert inspect(connection).get_table_names(schema=APP_SCHEMA) == ["alembic_version"]
        assert installed_version(connection, JOBS_SCHEMA) == 0


def test_an_approval_that_comes_too_late_waits_for_the_next_request(finished: Finished) -> None:
    maker = sessionmaker(finished.engine)
    awa.attach(maker)
    with maker() as session:
        directory = session.scalars(select(Directory).limit(1)).one()
        directory.summary = None  # approved already: its token is used up
        approve(session, directory)
        assert (directory.summary, directory.approval_id) == (None, None)
        session.rollback()
    awa.detach(maker)
