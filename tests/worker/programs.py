"""Worker processes that tests start, signal and read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.processes import hear_interrupts

ROOT = Path(__file__).parents[2]
PATIENCE = 40.0

APP = """
import asyncio, logging, os, sys, threading, time
from datetime import timedelta
from pathlib import Path
from awa_sqla import Awa, JobArgs, QueueConfig, enqueue

logging.basicConfig(level=logging.INFO)
HERE = Path(os.environ["HERE"])

class Work(JobArgs):
    text: str = ""

awa = Awa()

def mark(name):
    (HERE / name).touch()
"""

RUN = """
if __name__ == "__main__":
    sys.exit(awa.run_worker(os.environ["DATABASE_URL"], **OPTIONS))
"""


class Program:
    """A Python program with an app in a process of its own; killed at the end of `with`."""

    def __init__(self, stage: Any, here: Path, source: str, *, options: str = "{}", **settings: Any) -> None:
        self.here = here
        self.script = here / "program.py"
        self.script.write_text(APP + f"OPTIONS = {options}\n" + source)
        self._stderr = here / "stderr"
        self._settings = settings
        self._expected = False
        self._url = stage.url.render_as_string(hide_password=False)
        self.command: list[str] = [sys.executable, str(self.script)]

    def __enter__(self) -> Self:
        environment = os.environ | {"HERE": str(self.here), "DATABASE_URL": self._url, "PYTHONPATH": str(ROOT)}
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.here,
                env=environment,
                stderr=stderr,
                stdout=subprocess.PIPE,
                **{"preexec_fn": hear_interrupts} | self._settings,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate()
        if error is not None:
            error.add_note(self.stderr()[-5000:])

    def tell(self, *numbers: signal.Signals) -> None:
        """Send signals, one after the other; equal ones that meet would become one."""
        for number in numbers:
            self.process.send_signal(number)
            threading.Event().wait(0.3)

    def status(self) -> int:
        """The exit status, which comes soon."""
        self._expected = True
        return self.process.wait(PATIENCE)

    def stderr(self) -> str:
        return self._stderr.read_text("utf-8", errors="replace")

    def says(self, text: str, times: int = 1) -> None:
        """Wait until it has written so to stderr."""
        self.until(lambda: self.stderr().count(text) >= times)

    def marked(self, *names: str) -> None:
        """Wait until it has marked these."""
        self.until(lambda: all((self.here / name).exists() for name in names))

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition; the process must not end before it was asked for its status."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "it takes too long"
            ended = self.process.poll() is not None and not self._expected
            assert not ended or condition(), f"it has ended with {self.process.returncode}"
            threading.Event().wait(0.02)
