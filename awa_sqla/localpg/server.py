"""`LocalPostgres`: a private server with a life of its own, from initdb to the last deleted file.

The server listens on TCP, not on a Unix socket: no one URL of a socket means the same to libpq, asyncpg,
SQLAlchemy and the drivers of other languages, ``postgresql://user:password@127.0.0.1:port/dbname`` does.  TCP
is open to every user of the machine, hence the random password.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, NoReturn, Self
from urllib.parse import quote

from awa_sqla.localpg.binaries import Binaries, OsUser, PostgresUnavailable, find_binaries
from awa_sqla.localpg.guard import LOG_NAME, Guard

if sys.platform != "win32":  # where `start` says that it does not work
    import pwd

HOST = "127.0.0.1"

#: A crash of the machine may lose everything with these; a crash of the server loses nothing.  So
#: synchronous_commit stays on: off cost 718 of 8000 commits in one, and gained less than 10 us per commit.
FAST_SETTINGS: Mapping[str, str] = {
    "fsync": "off",
    "full_page_writes": "off",
    # A login that Ctrl-C cut short keeps DROP DATABASE waiting this long (default 60 s).
    "authentication_timeout": "10s",
}

_PORT_TRIES = 5
_DATA = "data"


class LocalPostgres:
    """A throw-away server: ``with LocalPostgres() as server:``, or `start` and `stop`.

    Args:
        settings: server settings by name, such as ``{"max_connections": "17"}``, on top of `FAST_SETTINGS`.
        user: name of the superuser.
        timeout: seconds that `start` and `restart` may take.

    Attributes:
        host, port, user, password: how to reach it; `port` is 0 before `start`.
        binaries: the programs in use; None before `start`.
        pid: process id of the server (the postmaster); 0 before `start`.

    Making one does no I/O.  A process forked from ours may use the server, but only we stop it.
    """

    def __init__(
        self, *, settings: Mapping[str, str] | None = None, user: str = "postgres", timeout: float = 60.0
    ) -> None:
        self.host = HOST
        self.port = 0
        self.user = user
        self.password = secrets.token_hex(16)  # no character that a URL would quote
        self.settings = {**FAST_SETTINGS, **(settings or {})}
        self.timeout = timeout
        self.binaries: Binaries | None = None
        self.pid = 0
        self._guard: Guard | None = None
        self._owner = 0

    # -- life
    def start(self) -> Self:
        """Make a new cluster and wait until it takes connections (about 0.5 s); no-op when it runs already.

        Raises:
            PostgresUnavailable: no PostgreSQL is to be found, or it does not start; the message says why.
        """
        if self._guard is not None:
            return self
        if sys.platform == "win32":
            reason = "A throw-away server works on Linux and macOS only."
            raise PostgresUnavailable(reason, needs_another=True)
        binaries = find_binaries()
        user = _unprivileged_user()
        self._owner = os.getpid()
        ids = (user.uid, user.gid) if user else (None, None)
        try:
            self._guard = guard = Guard(_parent_directory(user), _clean_environment(), *ids)
            if user and not binaries.runnable_by(user):
                binaries = binaries.copied_into(guard.directory / "copy")
            self.binaries = binaries
            self._make_cluster(guard, binaries, user)
            for _ in range(_PORT_TRIES):
                if self._launch(guard, binaries, _free_port()):
                    return self
            raise PostgresUnavailable(f"Others took {_PORT_TRIES} free ports in a row:\n{self.log()}")
        except OSError as exc:
            reason = f"PostgreSQL could not be started: {exc}\n{self.log()}"
            if user and isinstance(exc, PermissionError):
                reason = (
                    f"PostgreSQL refuses to run as root, and this root may not act as another user ({exc}). "
                    "Run as an ordinary user, or bring your own server."
                )
            self.stop()
            raise PostgresUnavailable(reason, needs_another=True) from exc
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and delete its directory.  Does nothing the second time, or in a forked process."""
        guard, self._guard = self._guard, None
        if guard is not None and os.getpid() == self._owner:
            guard.stop()

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server and start it again, on the same port with the same data.

        ``fast`` ends all connections and writes a checkpoint; ``immediate`` is a crash, with recovery at the
        start.  A server that has died by itself is just started.

        Raises:
            PostgresUnavailable: it is not running, does not stop within `timeout`, or does not start again.
        """
        if self._guard is None or self.binaries is None:
            raise PostgresUnavailable("The server has not been started.")
        self._guard.signal(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
        if self._guard.wait(self.timeout) is None:
            raise PostgresUnavailable(f"PostgreSQL did not stop within {self.timeout:.0f} s:\n{self.log()}")
        if not self._launch(self._guard, self.binaries, self.port):
            raise PostgresUnavailable(f"Port {self.port} was taken by another process during the restart.")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    # -- how to reach it
    @property
    def directory(self) -> Path | None:
        """The private directory, which goes away with the server; None while there is no server."""
        return self._guard.directory if self._guard else None

    def url(self, dbname: str = "postgres") -> str:
        """A URL for libpq, psycopg, asyncpg and the tools of other languages.  No I/O."""
        return f"postgresql://{self._address(dbname)}"

    def sqlalchemy_url(self, dbname: str = "postgres", driver: str = "psycopg") -> str:
        """A URL for SQLAlchemy, driver always named: its default differs between 2.0 and 2.1.  No I/O."""
        return f"postgresql+{driver}://{self._address(dbname)}"

    def log(self) -> str:
        """The end of what initdb and the server have said, at most 4000 characters.  Reads a file."""
        return self._log_from(0)[-4000:]

    # -- how it is done
    def _address(self, dbname: str) -> str:
        return f"{quote(self.user, safe='')}:{self.password}@{self.host}:{self.port}/{quote(dbname, safe='')}"

    def _make_cluster(self, guard: Guard, binaries: Binaries, user: OsUser | None) -> None:
        password_file = guard.directory / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(self.password)
        if user:
            os.chown(password_file, user.uid, user.gid)
        options = ["-D", str(guard.directory / _DATA), "-U", self.user, "-E", "UTF8", "--locale=C"]
        options += ["-A", "scram-sha-256", f"--pwfile={password_file}", "--no-sync", "--no-instructions"]
        if binaries.version >= (17, 0):  # upper('é') works, whatever locales the machine has
            options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        if binaries.version >= (16, 0):  # the default, 4096 rounds, adds 4 ms to each connection
            options += ["-c", "scram_iterations=1"]
        guard.run([binaries.program("initdb"), *options])
        status = guard.wait(self.timeout)
        password_file.unlink()
        if status != 0:
            self._refuse("initdb", binaries, self.log(), status)

    def _launch(self, guard: Guard, binaries: Binaries, port: int) -> bool:
        """Start the server and wait until it is ready: True, or False when somebody else has the port."""
        settings = {
            "listen_addresses": HOST,
            "port": str(port),
            "unix_socket_directories": "",
            "timezone": "UTC",
            **self.settings,
        }
        options = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        log_size = len(self._log_from(0))
        pid = guard.run([binaries.program("postgres"), "-D", str(guard.directory / _DATA), *options])
        deadline = time.monotonic() + self.timeout
        status = None
        while status is None and time.monotonic() < deadline:
            if _is_ready(guard.directory / _DATA / "postmaster.pid", pid):
                self.pid, self.port = pid, port
                return True
            status = guard.wait(0.01)
        said = self._log_from(log_size)
        if status is None or "Address already in use" not in said:
            self._refuse("PostgreSQL", binaries, said, status)
        return False

    def _refuse(self, what: str, binaries: Binaries, said: str, status: int | None) -> NoReturn:
        late = f"was not ready within {self.timeout:.0f} s"
        ending = late if status is None else f"ended with status {status}"
        if "could not look up effective user ID" in said:
            said += "PostgreSQL needs a name for its user: add this uid to /etc/passwd, or bring a server."
        raise PostgresUnavailable(f"{what} from {binaries.source} {ending}:\n{said}")

    def _log_from(self, position: int) -> str:
        with contextlib.suppress(OSError):
            if self.directory is not None:
                return (self.directory / LOG_NAME).read_text(errors="replace")[position:]
        return "(no server log)"


def _is_ready(pid_file: Path, pid: int) -> bool:
    """Whether the pid file says so, of this very process: one before a crash may have left its own."""
    with contextlib.suppress(OSError, IndexError):
        lines = pid_file.read_text().splitlines()
        return lines[0] == str(pid) and lines[7].strip() == "ready"
    return False


def _unprivileged_user() -> OsUser | None:
    """Whom to run the server as when we are root, which PostgreSQL refuses; None when we are not.

    initdb wants a name for its user, so an account of the machine it must be.
    """
    if os.geteuid() != 0:
        return None
    chosen = os.environ.get("AWA_PG_OSUSER")
    names = [chosen] if chosen else ["postgres", "nobody"]
    for name in names:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            if entry.pw_uid != 0:
                return OsUser(entry.pw_uid, entry.pw_gid)
    raise PostgresUnavailable(
        f"You are root, and PostgreSQL refuses to run as root; this machine has no ordinary user named "
        f"{' or '.join(names)}. Run as an ordinary user, or name one in AWA_PG_OSUSER."
    )


def _parent_directory(user: OsUser | None) -> Path:
    """A directory for temporary files that the server's user can pass through."""
    for place in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = Path(place).resolve()
        if path.is_dir() and (user is None or all(p.stat().st_mode & 0o001 for p in (path, *path.parents))):
            return path
    reason = "You are root, and PostgreSQL's user can enter no temporary directory: set TMPDIR."
    raise PostgresUnavailable(reason)


def _clean_environment() -> dict[str, str]:
    """Ours without what would steer PostgreSQL.

    LC_ALL=C: one message we read, in English; with others macOS starts a thread, which the server refuses.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**env, "LC_ALL": "C"}


def _free_port() -> int:
    """A port that is free now; somebody may still be faster than our server."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
