"""Evaluation in a process that can be killed: it is asked over a pipe, and has two seconds to answer.

A process that has answered is kept for the next question. Threads that ask at the same time have one each, up to four;
to start one takes a thousand times as long as to ask it, so the others wait for their turn.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from awa_sqla.errors import ConfigurationError

#: Seconds that an evaluation may take, and those for which a new process may start.
PATIENCE = 2.0
START = 20.0
#: Processes at a time.
MOST = 4

_CHILD = Path(__file__).with_name("child.py")


class UnansweredError(Exception):
    """The process was killed because it took too long, or ended by itself: out of memory, too deep a nest."""


class Evaluator:
    """Asks, and keeps the processes for the next questions."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        self._living: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(MOST)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def ask(self, question: dict[str, Any]) -> Any:
        """The answer of the process. Blocks. Raises `UnansweredError`, `ConfigurationError` without the extra."""
        with self._turns:
            child = self._kept() or self._started()
            try:
                answer = _asked(child, question, PATIENCE)
            except BaseException:
                self._end(child)
                raise
            with self._lock:
                self._idle.append(child)
            return answer

    def _kept(self) -> subprocess.Popen[bytes] | None:
        """A process that waits for a question, if there is one."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
        if child is not None and child.poll() is not None:
            self._end(child)  # somebody has killed it meanwhile
            return None
        return child

    def close(self) -> None:
        """End the processes that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            self._end(child)

    def _forget(self) -> None:
        """After a fork: the processes are the parent's, and so is whoever holds the lock, or talks to one of them."""
        self._lock, self._turns = threading.Lock(), threading.Semaphore(MOST)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for child in self._living:
            child.returncode = 0  # not ours to wait for
            for pipe in (child.stdin, child.stdout):
                # To close it would send what is buffered, or wait for the thread that was sending.
                if pipe is not None and not pipe.closed:
                    os.dup2(nowhere, pipe.fileno(), inheritable=False)
        os.close(nowhere)
        for child in self._idle:
            _close_pipes(child)
        self._idle, self._living = [], set()

    def _started(self) -> subprocess.Popen[bytes]:
        child = _spawned()
        self._living.add(child)
        try:
            _asked(child, {"check": "true"}, START)
        except BaseException as exc:
            self._end(child)
            if isinstance(exc, UnansweredError):
                raise ConfigurationError(f"{sys.executable} cannot start the process that evaluates policies") from exc
            raise
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        child.kill()
        _close_pipes(child)
        child.wait()
        self._living.discard(child)


def _spawned() -> subprocess.Popen[bytes]:
    found = importlib.util.find_spec("cel")
    if found is None or found.origin is None:
        raise ConfigurationError("callback policies need the package common-expression-language: install awa-sqla[cel]")
    packages = str(Path(found.origin).parent.parent)
    return subprocess.Popen(  # noqa: S603 - our own file
        [sys.executable, "-I", str(_CHILD), packages],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _asked(child: subprocess.Popen[bytes], question: dict[str, Any], seconds: float) -> Any:
    assert child.stdin is not None  # noqa: S101
    assert child.stdout is not None  # noqa: S101
    timer = threading.Timer(seconds, child.kill)
    timer.daemon = True
    timer.start()
    try:
        child.stdin.write(json.dumps(question).encode() + b"\n")
        child.stdin.flush()
        line = child.stdout.readline()
    except OSError:
        line = b""
    finally:
        timer.cancel()
    if not line.endswith(b"\n"):
        raise UnansweredError
    return json.loads(line)


def _close_pipes(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not sent is lost with it
                pipe.close()


EVALUATOR = Evaluator()
