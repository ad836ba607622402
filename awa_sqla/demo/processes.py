"""Processes that cannot outlive us, and how to start, freeze, kill and stop them.

Each child has a pipe from us as its stdin. The first line is the database's URL, which is thus in no process list;
after that nothing comes, and the end of the pipe means that we are gone, for whatever reason, even by SIGKILL: the
child leaves at once. Each is a process group of its own, so that Ctrl-C in a terminal reaches us alone, and so that
the kernel ends a frozen one when we are gone: it hangs up process groups that are stopped and have lost their parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Self

from sqlalchemy import URL, make_url

#: Seconds that a child may take to stop after SIGTERM.
PATIENCE = 20.0


class ProcessDiedError(Exception):
    """A child has ended that nobody had told to."""


class Process:
    """One child: `python -m awa_sqla.demo.NAME`."""

    def __init__(self, name: str, url: URL, log: IO[bytes]) -> None:
        self.name = name
        self._process = subprocess.Popen(  # noqa: S603 - our own modules
            [sys.executable, "-P", "-m", f"awa_sqla.demo.{name}"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            process_group=0,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._lifeline = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it is dead already, as `status` will tell
            self._lifeline.write(url.render_as_string(hide_password=False).encode() + b"\n")
            self._lifeline.flush()

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Its exit status, or None if it still runs after so long."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL, and wait for the end. It works on a frozen process too."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()


class Processes:
    """All children, as a context manager: none is left when it ends, and those still there then are killed."""

    def __init__(self, url: URL) -> None:
        self._url = url
        self._children: list[Process] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self.killed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children:
            child.kill()
        self._log.close()

    def start(self, name: str) -> Process:
        """Start one more."""
        child = Process(name, self._url, self._log)
        self._children.append(child)
        return child

    def named(self, name: str) -> list[Process]:
        """Those that run this module, longest-running first."""
        return [child for child in self._children if child.name == name]

    def replace(self, child: Process) -> None:
        """Kill one in the middle of what it does and start another in its place."""
        child.kill()
        self._children.remove(child)
        self.killed += 1
        self.start(child.name)

    def check(self) -> None:
        """Raise `ProcessDiedError` with the end of the log if one has ended by itself."""
        for child in self._children:
            if (status := child.status) is not None:
                raise ProcessDiedError(f"the {child.name} has ended with status {status}\n{self.log()}".strip())

    def stop(self) -> list[str]:
        """SIGTERM to all of them, and wait: what did not end as it should, one line each."""
        for child in self._children:
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        wrong: list[str] = []
        for child in self._children:
            status = child.wait(max(deadline - time.monotonic(), 0))
            if status is None:
                wrong.append(f"a {child.name} did not stop within {PATIENCE:.0f} s")
            elif status != 0:
                wrong.append(f"a {child.name} ended with status {status}")
            child.kill()
        self._children.clear()
        return wrong

    def log(self) -> str:
        """The last lines of what the children have said."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log.tell() - 4000, 0))
        return self._log.read().decode(errors="replace").strip()


def lifeline() -> URL:
    """In a child: the database's URL, and from now on the end of the parent is ours too."""
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        url = make_url(pipe.readline().decode().strip())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return url


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)
