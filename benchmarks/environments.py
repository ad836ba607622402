"""The peers, a virtual environment for each, and the server they share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from awa_sqla.localpg import LocalPostgres

CHECKOUT = Path(__file__).resolve().parents[1]
HOME = Path(os.environ.get("AWA_BENCH_HOME", CHECKOUT / "benchmarks" / ".work"))

#: What a careful installation runs with: a commit is on disk when it returns.
SETTINGS = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "shared_preload_libraries": "pg_stat_statements",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """One column of the comparison: its name in tables, its adapter, and what its environment needs."""

    title: str
    adapter: str
    environment: str
    packages: tuple[str, ...]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return HOME / "venvs" / self.environment / "bin" / "python"


_FLOORS = ("psycopg[binary]>=3.2", "sqlalchemy>=2.0.43")
_ADAPTERS = "benchmarks.adapters"

PEERS: dict[str, Peer] = {
    "raw": Peer("raw psycopg floor", f"{_ADAPTERS}.raw:Raw", "floors", _FLOORS),
    "app_only": Peer("the app's row alone", f"{_ADAPTERS}.sqlalchemy_floor:AppOnly", "floors", _FLOORS),
    "sqlalchemy": Peer("SQLAlchemy floor", f"{_ADAPTERS}.sqlalchemy_floor:SQLAlchemyFloor", "floors", _FLOORS),
    "pgqueuer": Peer(
        "pgqueuer",
        f"{_ADAPTERS}.pgqueuer:PgQueuer",
        "pgqueuer",
        ("pgqueuer[asyncpg]", "uvloop", "sqlalchemy[asyncio]>=2.0.43"),
    ),
    "awa_sqla": Peer(
        "awa_sqla", f"{_ADAPTERS}.awa_sqla:AwaSQLA", "awa_sqla", ("--editable", f"{CHECKOUT}[asyncpg]", "uvloop")
    ),
}


def prepare(names: Sequence[str]) -> None:
    """Make the environments that are missing or were made for other packages. Needs a package index."""
    for peer in {PEERS[name].environment: PEERS[name] for name in names}.values():
        root = HOME / "venvs" / peer.environment
        note, wanted = root / "packages.txt", "\n".join(peer.packages)
        if note.exists() and note.read_text() == wanted:
            continue
        print(f"making {root}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", root], check=True)
        pip = [peer.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *peer.packages], check=True)
        note.write_text(wanted)


@contextmanager
def server() -> Iterator[str]:
    """The URL of `$AWA_BENCH_DATABASE_URL`, else of a server of our own that ends with the block.

    A given server must take a superuser and preload pg_stat_statements; databases named bench_* are dropped there.
    """
    given = os.environ.get("AWA_BENCH_DATABASE_URL")
    if given:
        yield given
        return
    with LocalPostgres(settings=SETTINGS) as own:
        yield own.url()
