"""Entries of a job's `errors`: one shape on every road, written by the database's clock, bounded.

`{"error", "type", "attempt", "at"}`, plus `traceback`, `terminal` or `retry_after` where they apply. The
first 5 and the last 45 entries are kept; the entry after the gap counts what was `dropped`. Tracebacks hold
frames without locals, and database errors are stored without their parameters: args may hold secrets.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy
from sqlalchemy import ARRAY, ColumnElement, Integer, bindparam, case, cast, func, literal_column
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError, StatementError

from awa_sqla import limits
from awa_sqla.errors import FollowUpError, InvalidJob
from awa_sqla.models.job import Job, ScheduledJob

#: Frames below these folders are ours and SQLAlchemy's, not the app's.
_MACHINERY = (str(Path(__file__).parents[1]), str(Path(sqlalchemy.__file__).parent))


def describe(error: object) -> dict[str, Any]:
    """The parts of an entry that come from the error itself: `error`, `type` and maybe `traceback`."""
    if isinstance(error, str):
        return {"error": limits.cleaned(error), "type": "error"}
    if not isinstance(error, BaseException):
        raise InvalidJob("error", f"must be text or an exception, not {type(error).__name__}")
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    parts = {"error": limits.cleaned(_text(error)), "type": name}
    origin = error.__cause__ if isinstance(error, FollowUpError) and error.__cause__ else error
    if origin is not error:
        parts["error"] = limits.cleaned(f"{parts['error']} ({type(origin).__name__}: {_text(origin)})")
    if frames := _frames(origin.__traceback__):
        parts["traceback"] = limits.cleaned(frames, limits.TRACEBACK_CHARACTERS)
    return parts


def _text(error: BaseException) -> str:
    if isinstance(error, DBAPIError):
        diagnosis = getattr(error.orig, "diag", None)  # psycopg; its DETAIL line holds values
        primary = getattr(diagnosis, "message_primary", None) or str(error.orig).partition("\n")[0]
        return f"{type(error.orig).__name__}: {primary}\n[SQL: {error.statement}]"
    if isinstance(error, StatementError):
        return f"{error.args[0]}\n[SQL: {error.statement}]"
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001 - a broken __str__ must not lose the failure
        return f"{type(error).__name__} (its text could not be made)"


def _frames(start: TracebackType | None) -> str:
    frames = traceback.extract_tb(start)
    theirs = [frame for frame in frames if not frame.filename.startswith(_MACHINERY)]
    return "".join(traceback.StackSummary.from_list(theirs or frames).format())


def rfc3339() -> ColumnElement[str]:
    """The database's clock as RFC 3339 text in UTC."""
    utc = func.timezone(literal_column("'UTC'"), func.clock_timestamp())
    return func.to_char(utc, literal_column("""'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'"""))


def appended(cls: type[Job | ScheduledJob]) -> ColumnElement[Any]:
    """The SQL of `errors` with one more entry, within the bounds.

    The bind `entry` holds what `describe` returned and any extras; attempt and time are added here.
    """
    errors: Any = cls.errors
    stamp = func.jsonb_build_object(literal_column("'attempt'"), cls.attempt, literal_column("'at'"), rfc3339())
    new = bindparam("entry", type_=JSONB).op("||", return_type=JSONB())(stamp)
    head, tail = limits.ERRORS_HEAD, limits.ERRORS_TAIL
    gap = head + 1  # the entry that is dropped when there is no room; SQL counts from 1
    dropped = func.coalesce(cast(errors[gap].op("->>")(literal_column("'dropped'")), Integer), 0) + 1
    marked = errors[gap + 1].op("||")(func.jsonb_build_object(literal_column("'dropped'"), dropped))
    shifted = func.array_cat(
        func.array_append(errors[1:head], marked, type_=ARRAY(JSONB)), errors[gap + 2 : head + tail]
    )
    return case(
        (func.cardinality(errors) < head + tail, func.array_append(errors, new)),
        else_=func.array_append(shifted, new),
    )
