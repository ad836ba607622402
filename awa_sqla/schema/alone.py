"""One migration at a time, for as long as it takes: a lock that does not stand in the way of what it guards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from sqlalchemy import URL, Connection, Engine, text

from awa_sqla.errors import ConfigurationError

#: Between two tries, in seconds.
_PAUSE = 0.2

#: What may end a statement or a transaction that takes its time; not every server knows each of them.
LIMITS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "transaction_timeout")

_WITHOUT = text("SELECT set_config(name, '0', true) FROM pg_settings WHERE name = ANY (:names)")

#: Who is in here: thread, database and key.
_INSIDE: set[tuple[int, URL, str]] = set()

#: Whether the transaction has got the lock of a key.
TRY = text("SELECT pg_try_advisory_xact_lock(hashtextextended(:key, 0))")


@contextmanager
def alone(engine: Engine, key: str, tell: Callable[[str], None]) -> Generator[None, None, None]:
    """Wait until nobody else is in here with this key. Raises `ConfigurationError` when it is this thread that is.

    The lock is one of a transaction: it ends with the process, and a pooler keeps it with its connection. An index that
    is built CONCURRENTLY waits for the end of every transaction that has a snapshot. So who waits for the lock asks for
    it again and again, each time in another transaction, and the one that has it is left without a snapshot.
    """
    mine = (threading.get_ident(), engine.url, key)
    if mine in _INSIDE:
        raise ConfigurationError(
            "this thread would wait for itself: it has this lock already, taken further out; take it only there"
        )
    _INSIDE.add(mine)
    try:
        # Serializable, a transaction would keep its first snapshot.
        with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            if not _has(connection, key):
                tell("waiting for another process that migrates")
                while not _has(connection, key):
                    time.sleep(_PAUSE)
            yield
    finally:
        _INSIDE.discard(mine)


def without_limits(connection: Connection) -> None:
    """Let the transaction take its time, whatever is set for its role."""
    connection.execute(_WITHOUT, {"names": list(LIMITS)})


def _has(connection: Connection, key: str) -> bool:
    """Whether the lock could be had; else the transaction has ended."""
    if connection.scalar(TRY, {"key": key}):
        without_limits(connection)
        # The statement before keeps its snapshot until another takes its place; this one needs none.
        connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        return True
    connection.rollback()
    return False
