"""Which errors of the database pass by themselves, so that trying again may help."""

from __future__ import annotations

import sys
from typing import Any

from sqlalchemy import exc as sa_exc

from awa_sqla.sqlstates import READ_ONLY, sqlstate

#: SQLSTATE classes of what passes: connection, serialization and deadlock, resources, locks, an operator's or the
#: system's interruption; and a server that is read-only for now.
_PASSING = ("08", "40", "53", "55", "57", "58", READ_ONLY)


def passing(error: BaseException) -> bool:
    """Whether SQLAlchemy reports the connection, the pool or the server as the cause, not the statement."""
    if isinstance(error, sa_exc.TimeoutError):
        return True
    if not isinstance(error, sa_exc.DBAPIError):
        # Out of a new connection asyncpg's own errors come as they are: a server that is starting up, or a connection
        # that is gone again before it is set up.
        code = getattr(error, "sqlstate", None)
        return code.startswith(_PASSING) if isinstance(code, str) else _of_asyncpg(error)
    code = sqlstate(error)
    if code is not None:
        return code.startswith(_PASSING)
    # Internal, and no error of the server: asyncpg is confused by a connection that is terminated while it is set up.
    found = sa_exc.OperationalError | sa_exc.InterfaceError | sa_exc.InternalError
    return error.connection_invalidated or isinstance(error, found)


def _of_asyncpg(error: BaseException) -> bool:
    driver: Any = sys.modules.get("asyncpg")  # which need not be there
    return driver is not None and isinstance(error, driver.InterfaceError | driver.InternalClientError)


def transient(error: BaseException) -> bool:
    """`passing`, or a failure of the network itself: for our own transactions, where nothing else raises OSError."""
    return passing(error) or isinstance(error, OSError)
