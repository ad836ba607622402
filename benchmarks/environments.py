"""The peers, a virtual environment for each, and the server they share."""

from __future__ import annotations

import os
import shutil
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
    """One row of the comparison: its name in tables, its adapter, its environment's packages and oldest Python."""

    title: str
    adapter: str
    environment: str
    packages: tuple[str, ...]
    oldest: tuple[int, int] = (3, 11)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return HOME / "venvs" / self.environment / "bin" / "python"


_FLOORS = ("psycopg[binary]>=3.2", "sqlalchemy>=2.0.43")
_OURS = ("--editable", f"{CHECKOUT}[asyncpg]", "uvloop")
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
    "awa_pg": Peer("awa-pg", f"{_ADAPTERS}.awa_pg:AwaPg", "awa_pg", ("awa-pg==0.6.9",)),
    "procrastinate": Peer(
        "procrastinate",
        f"{_ADAPTERS}.procrastinate:Procrastinate",
        "procrastinate",
        ("procrastinate", "psycopg[binary]>=3.2"),
    ),
    "oban": Peer(
        "oban", f"{_ADAPTERS}.oban:ObanPy", "oban", ("oban", "psycopg[binary]>=3.2", "uvloop"), oldest=(3, 12)
    ),
    "chancy": Peer("chancy", f"{_ADAPTERS}.chancy:ChancyPeer", "chancy", ("chancy", "psycopg[binary]>=3.2")),
    "riverqueue": Peer(
        "riverqueue",
        f"{_ADAPTERS}.riverqueue:Riverqueue",
        "riverqueue",
        ("riverqueue", "sqlalchemy[asyncio]>=2.0.43", "psycopg[binary]>=3.2"),
    ),
    "awa_sqla_unique": Peer("awa_sqla unique jobs", f"{_ADAPTERS}.awa_sqla:UniqueJobs", "awa_sqla", _OURS),
    "awa_sqla": Peer("awa_sqla", f"{_ADAPTERS}.awa_sqla:AwaSQLA", "awa_sqla", _OURS),
}


def prepare(names: Sequence[str]) -> dict[str, str]:
    """Make the environments that are missing or were made for other packages. Needs a package index.

    Returns the peers that cannot have theirs, each with the reason.
    """
    reasons = {
        peer.environment: _made(peer) for peer in {PEERS[name].environment: PEERS[name] for name in names}.values()
    }
    return {name: reason for name in names if (reason := reasons[PEERS[name].environment])}


def _made(peer: Peer) -> str:
    """Make one environment; why it cannot be, or nothing."""
    root = HOME / "venvs" / peer.environment
    note, wanted = root / "packages.txt", "\n".join(peer.packages)
    if note.exists() and note.read_text() == wanted:
        return ""
    python = _interpreter(peer.oldest)
    if python is None:
        return f"needs Python {peer.oldest[0]}.{peer.oldest[1]} or newer, and the PATH has none"
    print(f"making {root}", file=sys.stderr, flush=True)
    subprocess.run([python, "-m", "venv", "--clear", root], check=True)
    pip = [peer.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *peer.packages], check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    note.write_text(wanted)
    return ""


def _interpreter(oldest: tuple[int, int]) -> str | None:
    """This interpreter where it is new enough, else one of the PATH that runs."""
    if sys.version_info >= oldest:
        return sys.executable
    for minor in range(oldest[1], oldest[1] + 4):
        found = shutil.which(f"python{oldest[0]}.{minor}")
        if found and not subprocess.run([found, "-c", ""], check=False, stderr=subprocess.DEVNULL).returncode:
            return found
    return None


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
