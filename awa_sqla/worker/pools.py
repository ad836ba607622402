"""Sums of connections: what handlers may hold at once, and what the pools and the server can give.

A transactional handler holds one connection from its beginning to its commit. With more handlers than connections the
rest would wait for one with a claimed job in hand, so a worker that could get there refuses to start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sqlalchemy import AssertionPool, Engine, QueuePool, StaticPool, text
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection

from awa_sqla.errors import ConfigurationError
from awa_sqla.session.target import jobs_bind

log = logging.getLogger("awa_sqla.worker")

#: Connections of a worker besides those of its handlers: for its books, its heart, its listener.
OWN = 12
#: And for the lanes of maintenance, where it is led.
UPKEEP = 10


def most_of(factory: Any) -> int | None:
    """How many sessions of a factory can have a connection at once; None without a limit, or with an unknown pool."""
    session = factory()
    try:
        bind = jobs_bind(getattr(session, "sync_session", session))
    except UnboundExecutionError:
        return None
    pool: Any = bind.pool if isinstance(bind, Engine) else None
    if isinstance(pool, StaticPool | AssertionPool):
        return 1
    overflow: int = pool._max_overflow if isinstance(pool, QueuePool) else -1  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    return None if overflow < 0 else pool.size() + overflow


def most_served(factories: Mapping[bool, Any], concurrency: Mapping[str, int]) -> int | None:
    """How many handlers the pools behind the session factories serve; None without a limit.

    `factories` are those of transactional handlers, by whether they are async. Raises `ConfigurationError` when a pool
    gives fewer connections than the queues have slots.
    """
    limits = [most for most in map(most_of, factories.values()) if most is not None]
    total = sum(concurrency.values())
    if limits and min(limits) < total:
        numbers = " + ".join(f"{number} ({queue})" for queue, number in sorted(concurrency.items()))
        raise ConfigurationError(
            f"the queues run {numbers} = {total} handlers at a time, and each transactional one holds a connection; "
            f"the pool of their sessions gives {min(limits)} (pool_size + max_overflow). Raise pool_size, lower the "
            f"concurrency of the queues to {min(limits)} in all, or give the worker a URL instead of an engine"
        )
    return min(limits, default=None)


async def warn_of_few(connection: AsyncConnection, handlers: int, own: int) -> None:
    """Log a warning when the server itself cannot give as many connections as this worker alone may want."""
    allowed = int(
        await connection.scalar(
            text(
                "SELECT current_setting('max_connections')::int"
                " - current_setting('superuser_reserved_connections')::int"
            )
        )
    )
    if handlers + own > allowed:
        log.warning(
            "this worker may want %d connections at once (%d transactional handlers and %d of its own), and the server "
            "has %d for everybody: jobs that find none are put back and tried again. Lower the queues' concurrency",
            handlers + own,
            handlers,
            own,
            allowed,
        )
