"""What stands between a worker and its server: a pooler, real or made of a few lines."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def pgbouncer(url: URL, directory: Path, mode: str = "transaction") -> Iterator[URL]:
    """A pgbouncer in front of the database of `url`; skips the test when there is none."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("pgbouncer is not on PATH")
    port = free_port()
    size = 8 if mode == "transaction" else 40  # by session each of our connections has one of the server's
    users = directory / "users.txt"
    users.write_text(f'"{url.username}" "{url.password or ""}"\n')
    config = directory / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n* = host={url.host} port={url.port}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = plain\n"
        f"auth_file = {users}\npool_mode = {mode}\ndefault_pool_size = {size}\nmax_client_conn = 200\n"
        f"ignore_startup_parameters = extra_float_digits\nlogfile = {directory / 'pgbouncer.log'}\n"
    )
    command = [program, str(config)]
    if os.geteuid() == 0:  # it refuses to run as root
        user = pwd.getpwnam("nobody")
        for path in (directory, *directory.iterdir()):
            os.chown(path, user.pw_uid, user.pw_gid)
        for parent in directory.parents:
            if parent != parent.parent and parent.stat().st_uid == 0 and str(parent).startswith("/tmp/"):
                parent.chmod(parent.stat().st_mode | 0o011)
        command += ["-u", "nobody"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        through = url.set(port=port)
        _until_it_answers(through, process)
        yield through
    finally:
        process.terminate()
        process.wait(10)


def _until_it_answers(url: URL, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            psycopg.connect(url.set(drivername="postgresql").render_as_string(hide_password=False)).close()
        except psycopg.OperationalError:
            assert process.poll() is None, "pgbouncer has ended"
            assert time.monotonic() < deadline, "pgbouncer does not answer"
            time.sleep(0.05)
        else:
            return


@contextmanager
def between(url: URL, *, deaf: bool = False) -> Iterator[URL]:
    """A stand-in for the server that tells a process id of its own, and with `deaf` passes no notification on."""
    loop = asyncio.new_event_loop()
    port = free_port()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(url.host, url.port)
        with suppress(asyncio.CancelledError):  # at the end, of which asyncio would make an error of this callback
            await asyncio.gather(_raw(reader, back), _messages(there, writer, deaf=deaf), return_exceptions=True)

    async def serve() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", port)
        ready.set()
        async with server:
            await server.serve_forever()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(serving)
        except asyncio.CancelledError:
            pass
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    ready = threading.Event()
    serving = loop.create_task(serve())
    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(10)
    try:
        # The answer to a request for encryption is no message.
        yield url.set(port=port).update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(10)


async def _raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def _messages(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, deaf: bool) -> None:
    """The server's answers, message by message: a type, the length, the rest."""
    try:
        while True:
            kind = await reader.readexactly(1)
            length = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack("!I", length)[0] - 4)
            if kind == b"K":
                body = struct.pack("!I", 424242) + body[4:]
            if deaf and kind == b"A":
                continue
            writer.write(kind + length + body)
            await writer.drain()
    finally:
        writer.close()
