"""`python -m tests.examples.served MODULE:ATTR ENGINE-MODULE`: an example's app behind a real server that can die.

A supervisor holds the listening socket and forks the server; when that dies, it forks the next one, and requests that
come meanwhile wait in the socket. It says the port on stdout.

A request with the header `X-Die: kill UPDATE orders` ends the process with SIGKILL before the first statement that
begins so, one with `X-Die: raise UPDATE orders` raises there. Besides the statements there are COMMIT and ANSWER. What
is raised before the COMMIT comes from the database, which ends the connection: SQLAlchemy would put one that an
exception of Python's has stopped there back into its pool, in the middle of the transaction.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Engine, event

HEADER = "X-Die"


class Fate:
    """How, and before what, this process meets its end; one request at a time may have one."""

    def __init__(self) -> None:
        self.told: str | None = None

    def before(self, step: str, connection: Connection | None = None) -> None:
        how, _, what = (self.told or "").partition(" ")
        if how and step.startswith(what):
            self.told = None
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if connection is None:
                raise RuntimeError("the app has died here")
            connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")

    def watch(self, engine: Engine) -> None:
        event.listen(engine, "before_cursor_execute", lambda _, __, statement, *___: self.before(statement))
        event.listen(engine, "commit", lambda connection: self.before("COMMIT", connection))  # not sent yet


def asgi(app: Any, fate: Fate) -> Any:
    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                fate.before("ANSWER")
            await send(message)

        if scope["type"] != "http":
            return await app(scope, receive, send)
        fate.told = dict(scope["headers"]).get(HEADER.lower().encode(), b"").decode()
        return await app(scope, receive, answer)

    return wrapped


def wsgi(app: Any, fate: Fate) -> Any:
    def wrapped(environ: Any, start_response: Any) -> Any:
        def answer(*given: Any) -> Any:
            fate.before("ANSWER")
            return start_response(*given)

        fate.told = environ.get("HTTP_" + HEADER.upper().replace("-", "_"))
        return app(environ, answer)

    return wrapped


def server(app: Any, engine: Any, listening: socket.socket) -> Callable[[], Any]:
    """What the forked process is to run."""
    fate = Fate()
    fate.watch(getattr(engine, "sync_engine", engine))
    if hasattr(app, "wsgi_app"):
        from werkzeug.serving import make_server

        host, port = listening.getsockname()
        return make_server(host, port, wsgi(app, fate), threaded=True, fd=listening.fileno()).serve_forever
    import uvicorn

    config = uvicorn.Config(asgi(app, fate), log_level="warning")
    return lambda: uvicorn.Server(config).run([listening])


def end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


def main(app_name: str, engine_module: str) -> None:
    module, _, attribute = app_name.partition(":")
    app = getattr(importlib.import_module(module), attribute)
    engine = importlib.import_module(engine_module).engine
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    while True:
        child = os.fork()
        if not child:
            threading.Thread(target=end_with_parent, daemon=True).start()
            server(app, engine, listening)()
            os._exit(0)
        signal.signal(signal.SIGTERM, lambda *_, pid=child: (os.kill(pid, signal.SIGKILL), os._exit(0)))
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
