"""The process that is the server's parent, so that none outlives its owner.

`Guard` is the owner's end of a socket pair.  The other end is this same file, run as a script with
``python -I -S``: so it may import nothing but the standard library.  It makes the private directory and runs
one child at a time (``initdb``, then ``postgres``).  When the owner's end closes, for whatever reason, even
SIGKILL, it ends the child and deletes the directory.  It has a session of its own: Ctrl-C in a terminal
reaches the owner only.

What they say, in lines.  Owner to guard: ``run [argv as JSON]``, ``signal NUMBER`` (to the child), ``stop``.
Guard to owner: ``dir PATH`` once, ``pid NUMBER`` after run, ``exit STATUS`` when the child has ended, and
``error ERRNO TEXT`` instead of dir or pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

LOG_NAME = "server.log"


# ------------------------------------------------------------------------------------------- the owner's end
class Guard:
    """A running guard, and its private directory (mode 0700).

    Args:
        parent: where to make the directory.
        env: the environment of the guard and of all that it runs.
        uid: with `gid`, the account that owns the directory and runs the children; None for our own.
        gid: see `uid`.

    Starts a process.  Raises OSError (PermissionError, ...) when the directory cannot be made or given away.
    """

    def __init__(self, parent: Path, env: Mapping[str, str], uid: int | None = None, gid: int | None = None) -> None:
        account = [] if uid is None or gid is None else [str(uid), str(gid)]
        self._buffer = b""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(parent), *account],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=dict(env),
                start_new_session=True,
            )
        try:
            self.directory = Path(self._expect("dir"))
        except BaseException:
            self._end()
            raise

    def run(self, argv: Sequence[str]) -> int:
        """Start a child and return its process id.  The one before must have ended (see `wait`).

        Raises OSError when it cannot be started.
        """
        self._send(f"run {json.dumps(list(argv))}")
        return int(self._expect("pid"))

    def wait(self, timeout: float) -> int | None:
        """The child's exit status, or None when it still runs after `timeout` seconds."""
        line = self._receive(timeout)
        return None if line is None else int(line.removeprefix("exit "))

    def signal(self, number: int) -> None:
        """Send a signal to the child, if it still runs."""
        self._send(f"signal {number}")

    def stop(self) -> None:
        """End the child, delete the directory, wait for both."""
        self._end()
        remove(self.directory)  # the guard has done it, unless somebody killed the guard

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # the guard itself may be gone
            # Closing our end would not be enough: a process that we forked may hold it open.
            self._send("stop")
        self._socket.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, line: str) -> None:
        self._socket.settimeout(None)
        self._socket.sendall(line.encode() + b"\n")

    def _receive(self, timeout: float | None) -> str | None:
        self._socket.settimeout(timeout)
        while b"\n" not in self._buffer:
            try:
                chunk = self._socket.recv(4096)
            except TimeoutError:
                return None
            if not chunk:
                raise BrokenPipeError("the server's guard process has ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def _expect(self, wanted: str) -> str:
        word, _, rest = (self._receive(None) or "").partition(" ")
        if word == "error":
            number, _, text = rest.partition(" ")
            raise OSError(int(number), text)  # becomes PermissionError and the like by its number
        if word != wanted:
            raise OSError(f"the server's guard process said {word!r} instead of {wanted!r}")
        return rest


def remove(directory: Path) -> None:
    """Delete a directory, and try again for 2.5 s: an initdb just interrupted may still write into it."""
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------- the guard's end
class _Watch:
    """The guard's life: one loop over the socket and the signals, then the clearing up."""

    def __init__(self, directory: Path, uid: int | None, gid: int | None) -> None:
        self._directory = directory
        self._uid = uid
        self._gid = gid
        self._child: subprocess.Popen[bytes] | None = None
        self._ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # A signal wakes the loop through this pipe: the end of the child is seen at once, without polling.
        self._wakeup, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (*self._ending, signal.SIGCHLD):
            signal.signal(number, _only_wake_up)

    def until_the_end(self) -> None:
        """Obey the owner until it says stop or is gone, or until a signal tells us to end."""
        buffer = b""
        while True:
            ready, _, _ = select.select([0, self._wakeup], [], [])
            if self._wakeup in ready:
                if set(os.read(self._wakeup, 4096)) & set(self._ending):
                    return
                if self._child is not None and self._child.poll() is not None:
                    _reply(f"exit {self._child.returncode}")
                    self._child = None
            if 0 in ready:
                chunk = os.read(0, 65536)
                *lines, buffer = (buffer + chunk).split(b"\n")
                if not chunk or b"stop" in lines:
                    return
                for line in lines:
                    self._obey(*line.decode().split(" ", 1))

    def _obey(self, word: str, argument: str) -> None:
        if word == "run":
            self._run(json.loads(argument))
        elif self._child is not None:
            self._child.send_signal(int(argument))

    def _run(self, argv: list[str]) -> None:
        try:
            self._child = subprocess.Popen(
                argv,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                user=self._uid,
                group=self._gid,
                extra_groups=None if self._uid is None else [],
            )
        except OSError as exc:
            _reply_error(exc)
        else:
            _reply(f"pid {self._child.pid}")

    def clear_up(self) -> None:
        """End the child and delete the directory; no signal but SIGKILL can keep us from it."""
        for number in self._ending:
            signal.signal(number, signal.SIG_IGN)
        if self._child is not None:
            # SIGQUIT is PostgreSQL's "immediate" shutdown: there is nothing worth a checkpoint.
            for number, patience in ((signal.SIGQUIT, 10), (signal.SIGKILL, 5)):
                self._child.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(patience)
                    break
        remove(self._directory)


def _only_wake_up(_number: int, _frame: FrameType | None) -> None:
    pass


def _reply(line: str) -> None:
    os.write(0, line.encode() + b"\n")


def _reply_error(exc: OSError) -> None:
    text = f"{exc.strerror}: {exc.filename}".replace("\n", " ")
    _reply(f"error {exc.errno or 0} {text}")


def _main(parent: str, uid: int | None = None, gid: int | None = None) -> None:
    try:
        directory = Path(tempfile.mkdtemp(prefix="awa-pg-", dir=parent))
    except OSError as exc:
        return _reply_error(exc)
    watch = _Watch(directory, uid, gid)
    try:
        try:
            log = os.open(directory / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 2)  # the children inherit it, and a traceback of ours lands in it
            if uid is not None and gid is not None:
                os.chown(directory, uid, gid)
        except OSError as exc:
            return _reply_error(exc)
        _reply(f"dir {directory}")
        watch.until_the_end()
    except ConnectionError:  # the owner went away in the middle of a line
        pass
    finally:
        watch.clear_up()


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))
