"""What a forked child must not share with the worker it was forked from.

A handler may fork, itself or through `multiprocessing`. The child is a copy with a single thread, and what it has of
the worker is a trap: sockets in the middle of somebody else's conversation, signal handlers whose thread is gone, and
a stack that leads back into the worker. So its copies of the sockets are replaced, the worker's engines refuse to
connect, and a child that comes out of its handler ends there.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, NoReturn

from sqlalchemy import Engine, event

from awa_sqla.errors import ConfigurationError

log = logging.getLogger("awa_sqla.worker")

_hooks: dict[object, Callable[[], object]] = {}
_connections: weakref.WeakSet[Any] = weakref.WeakSet()


def in_child(hook: Callable[[], object]) -> Callable[[], None]:
    """Call `hook` in each child that is forked, until the function that is returned is called."""
    key = object()
    _hooks[key] = hook

    def forget() -> None:
        _hooks.pop(key, None)

    return forget


def hold(connection: Any) -> None:
    """A driver's connection that children must not write to."""
    _connections.add(connection)


def guard(engine: Engine) -> None:
    """Hold all connections of an engine, and let it make none in a child."""
    owner = os.getpid()

    def opened(connection: Any, _record: Any) -> None:
        hold(getattr(connection, "driver_connection", connection))

    def refuse(*_: Any) -> None:
        check(owner, "engine")

    event.listen(engine, "connect", opened)
    event.listen(engine, "do_connect", refuse)


def check(owner: int, what: str) -> None:
    """Raise `ConfigurationError` in another process than the owner."""
    if os.getpid() != owner:
        raise ConfigurationError(
            f"this {what} belongs to the worker of process {owner}, from which process {os.getpid()} was forked: make "
            "workers and engines in the process that uses them"
        )


def confined(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A `def` handler; a child that was forked in it and comes out of it ends, with the status of its `sys.exit`."""

    @wraps(handler)
    def run(context: Any) -> Any:
        process = os.getpid()
        try:
            returned = handler(context)
        except BaseException as exc:
            if os.getpid() != process:
                _leave(exc)
            raise
        if os.getpid() != process:
            _leave(None)
        return returned

    return run


def async_confined(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same for an `async def`."""

    @wraps(handler)
    async def run(context: Any) -> Any:
        process = os.getpid()
        try:
            returned = await handler(context)
        except BaseException as exc:
            if os.getpid() != process:
                _leave(exc)
            raise
        if os.getpid() != process:
            _leave(None)
        return returned

    return run


def awaited_in_child() -> NoReturn:
    """A child that was forked in the event loop's thread has come back to the loop, which is the worker's."""
    log.error("a child that was forked in an async handler has awaited something: it must end with os._exit()")
    os._exit(1)


def _leave(error: BaseException | None) -> NoReturn:
    status: Any = 0
    if isinstance(error, SystemExit):
        status = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    if not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status & 0xFF)


def _after_fork() -> None:
    """In the child. A connection that was just being made is not known, and so left to it; it has no use for it."""
    for hook in list(_hooks.values()):
        try:
            hook()
        except Exception:
            log.exception("a forked child could not leave everything behind")
    _hooks.clear()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for connection in list(_connections):
        with suppress(Exception):  # closed already
            os.dup2(nowhere, _descriptor(connection), inheritable=False)
    os.close(nowhere)


def _descriptor(connection: Any) -> int:
    """The socket, as psycopg and psycopg2 tell it; asyncpg does not."""
    if hasattr(connection, "fileno"):
        return int(connection.fileno())
    return int(connection._transport.get_extra_info("socket").fileno())  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
