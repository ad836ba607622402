"""What an adapter offers, and the command line around it.

An adapter says how one peer installs its tables, enqueues and works. The command line does one such thing in a
process of its own and writes what it saw as JSON. All clocks are CLOCK_MONOTONIC, which the processes of a machine
share.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import json
import logging
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

Payload = dict[str, Any]
Send = Callable[[Payload], Any]
SendMany = Callable[[list[Payload]], Any]
Handler = Callable[[int], None]
Opened = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]

#: Ids of warm-up jobs start here.
WARM_UP = 100_000
#: Pause between the jobs of `produce`, in seconds.
PACE = (0.010, 0.020)


#: What a peer may leave out.
OFFERS = ("enqueue_one", "enqueue_many", "enqueue_in_session", "drain")


class UnsupportedError(Exception):
    """The peer has no such thing."""


class Adapter:
    """One peer. Each opener gives a context manager, sync or async, of the function that sends."""

    #: Distributions whose versions are reported.
    distributions: tuple[str, ...] = ()
    #: Modules that are imported before the worker's clock starts.
    preload: tuple[str, ...] = ()
    #: SQL: how many jobs have no stored completion.
    remaining = ""
    #: SQL: how many rows of jobs are there.
    kept = ""
    #: Whether coroutines run under uvloop.
    uvloop = False

    def setup(self, dsn: str) -> Awaitable[None] | None:
        """Install the peer's tables in an empty database. Raises `UnsupportedError` where that is impossible."""

    def enqueue_one(self, dsn: str) -> Opened:  # noqa: ARG002
        """Gives `send(payload)`: one committed job."""
        raise UnsupportedError("no jobs")

    def enqueue_many(self, dsn: str) -> Opened:  # noqa: ARG002
        """Gives `send(payloads)`: the peer's fastest call for many, in one transaction where it has that, connected."""
        raise UnsupportedError("no jobs")

    def enqueue_in_session(self, dsn: str) -> Opened:  # noqa: ARG002
        """Gives `send(payload)`: a row of the app and a job, in the user's own SQLAlchemy session, one commit."""
        raise UnsupportedError("no jobs")

    def drain(self, dsn: str, handler: Handler) -> Awaitable[None] | None:  # noqa: ARG002
        """Work until SIGTERM; `handler(user_id)` is what a job does."""
        raise UnsupportedError("no worker")


class Board:
    """Memory shared by a worker and its watcher: 0 jobs handled, 1 start, 2 + id when that job began, two flags."""

    IDS = 200_000 - 1
    READY = 200_001
    GO = 200_002

    def __init__(self, path: str | Path, *, create: bool = False) -> None:
        size = 8 * (self.GO + 1)
        if create:
            Path(path).write_bytes(bytes(size))
        with Path(path).open("r+b") as file:
            self.cells = memoryview(mmap.mmap(file.fileno(), size)).cast("Q")

    def handler(self) -> Handler:
        """The no-op job: it leaves the time and counts itself."""
        cells, now = self.cells, time.monotonic_ns

        def handle(user_id: int) -> None:
            cells[2 + user_id] = now()
            cells[0] += 1

        return handle

    @property
    def begun(self) -> list[int]:
        """When jobs began."""
        return [at for at in self.cells[2 : self.READY] if at]


def payload(number: int) -> Payload:
    """About 60 bytes of JSON."""
    return {"user_id": number, "email": f"user{number:06d}@example.com"}


def told_to_stop() -> list[int]:
    """For sync workers: a list that is no longer empty after SIGTERM."""
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.append(number))
    return told


def stop_event() -> asyncio.Event:
    """For async workers: set by SIGTERM."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


# ------------------------------------------------------------------ commands


def main(adapter: Adapter, arguments: list[str]) -> None:
    """Run one command and write its JSON to `--out`, or to standard output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("--dsn", default="")
    parser.add_argument("--n", type=int, default=0)
    parser.add_argument("--warm", type=int, default=20)
    parser.add_argument("--base", type=int, default=0, help="first id of enqueue_many")
    parser.add_argument("--counter", help="file of the board")
    parser.add_argument("--out")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    try:
        found = COMMANDS[given.command](adapter, given)
    except UnsupportedError as exc:
        found = {"unsupported": str(exc)}
    text = json.dumps(found)
    if given.out:
        Path(given.out).write_text(text)
    else:
        sys.stdout.write(text)


def finished(adapter: Adapter, work: Awaitable[Any] | None) -> Any:
    """Run what an adapter returned to its end, in the event loop it asks for."""
    if work is None:
        return None

    async def awaited() -> Any:
        return await work

    if adapter.uvloop:
        return importlib.import_module("uvloop").run(awaited())
    return asyncio.run(awaited())


def timed(
    adapter: Adapter,
    opened: Opened,
    items: Iterable[Any],
    *,
    warm: Iterable[Any] = (),
    pace: tuple[float, float] | None = None,
) -> list[tuple[int, int]]:
    """Send each item; when each began and ended, in nanoseconds."""
    spans: list[tuple[int, int]] = []
    now = time.monotonic_ns
    if isinstance(opened, AbstractContextManager):
        with opened as send:
            for item in warm:
                send(item)
            for item in items:
                if pace:
                    time.sleep(random.uniform(*pace))
                start = now()
                send(item)
                spans.append((start, now()))
        return spans

    async def run() -> None:
        async with opened as send:
            for item in warm:
                await send(item)
            for item in items:
                if pace:
                    await asyncio.sleep(random.uniform(*pace))
                start = now()
                await send(item)
                spans.append((start, now()))

    finished(adapter, run())
    return spans


def _setup(adapter: Adapter, given: argparse.Namespace) -> dict[str, Any]:
    finished(adapter, adapter.setup(given.dsn))
    return {}


def _enqueue(adapter: Adapter, given: argparse.Namespace) -> dict[str, Any]:
    paced = given.command == "produce"
    opener = adapter.enqueue_one if paced else getattr(adapter, given.command)
    spans = timed(
        adapter,
        opener(given.dsn),
        map(payload, range(given.n)),
        warm=map(payload, range(WARM_UP, WARM_UP + given.warm)),
        pace=PACE if paced else None,
    )
    return {
        "total_s": (spans[-1][1] - spans[0][0]) / 1e9,
        "lat_ms": [(end - start) / 1e6 for start, end in spans],
        "commit_ns": [end for _, end in spans] if paced else [],
    }


def _enqueue_many(adapter: Adapter, given: argparse.Namespace) -> dict[str, Any]:
    items = [payload(number) for number in range(given.base, given.base + given.n)]
    ((start, end),) = timed(adapter, adapter.enqueue_many(given.dsn), [items])
    return {"total_s": (end - start) / 1e9, "peak_mb": peak_mb()}


def _work(adapter: Adapter, given: argparse.Namespace) -> dict[str, Any]:
    board = Board(given.counter)
    for module in adapter.preload:
        importlib.import_module(module)
    board.cells[Board.READY] = 1
    while not board.cells[Board.GO]:
        time.sleep(0.001)
    board.cells[1] = time.monotonic_ns()
    finished(adapter, adapter.drain(given.dsn, board.handler()))
    return {}


def _about(adapter: Adapter, given: argparse.Namespace) -> dict[str, Any]:  # noqa: ARG001 - as all commands
    own = type(adapter)
    return {
        "offers": [name for name in OFFERS if getattr(own, name) is not getattr(Adapter, name)],
        "remaining_sql": adapter.remaining,
        "kept_sql": adapter.kept,
        "uvloop": adapter.uvloop,
        "versions": {name: importlib.metadata.version(name) for name in adapter.distributions},
        "python": sys.version.split()[0],
    }


COMMANDS: dict[str, Callable[[Adapter, argparse.Namespace], dict[str, Any]]] = {
    "setup": _setup,
    "enqueue_one": _enqueue,
    "enqueue_in_session": _enqueue,
    "produce": _enqueue,
    "enqueue_many": _enqueue_many,
    "drain": _work,
    "latency": _work,
    "meta": _about,
}


def peak_mb(pid: int | str = "self") -> float:
    """The largest resident set a process had, in MB; 0 where there is no /proc."""
    status = Path(f"/proc/{pid}/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def setting(name: str, default: int) -> int:
    """A number that a sweep may change through the environment."""
    return int(os.environ.get(name, default))
