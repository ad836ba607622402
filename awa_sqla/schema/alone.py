"""One migration at a time, for as long as it takes: a lock that does not stand in the way of what it guards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, text

#: Between two tries, in seconds.
_PAUSE = 0.2


@contextmanager
def alone(engine: Engine, key: str, tell: Callable[[str], None]) -> Iterator[Connection]:
    """Wait until nobody else is in here with this key; yields the connection that holds the lock.

    The lock is one of a transaction: it ends with the process, and a pooler keeps it with its connection. Who waits
    asks again and again instead of waiting in the database: a statement that waits is a transaction that an index
    built CONCURRENTLY would wait for, while the builder is who is waited for. For the same reason the transaction is
    READ COMMITTED, whatever the role's default: between its statements it has no snapshot.
    """
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection, connection.begin():
        connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        waits = False
        while not connection.scalar(text("SELECT pg_try_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": key}):
            if not waits:
                tell("waiting for another process that migrates")
            waits = True
            time.sleep(_PAUSE)
        yield connection
