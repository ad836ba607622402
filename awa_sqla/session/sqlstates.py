"""PostgreSQL's own words for what went wrong: the SQLSTATE, whatever the driver."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

#: A lock that was not had within lock_timeout.
LOCK_NOT_AVAILABLE = "55P03"


def sqlstate(error: DBAPIError) -> str | None:
    """PostgreSQL's code for an error."""
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
