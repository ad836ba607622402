"""PostgreSQL's own words for what went wrong: the SQLSTATE, whatever the driver."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

#: A lock that was not had within lock_timeout.
LOCK_NOT_AVAILABLE = "55P03"
#: A right that the user has not been granted.
INSUFFICIENT_PRIVILEGE = "42501"
#: No such schema, table, column or function.
MISSING = ("3F000", "42P01", "42703", "42883")
#: A write on a server, or in a transaction, that only reads.
READ_ONLY = "25006"

#: How the codes begin that say that there is no connection: broken off or refused, no such user or database, no room,
#: shut down or starting.
UNREACHABLE = ("08", "28", "3D", "53", "57P")


def sqlstate(error: DBAPIError) -> str | None:
    """PostgreSQL's code for an error."""
    return driver_sqlstate(error.orig)


def driver_sqlstate(error: object) -> str | None:
    """The same of what a driver itself raised."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
