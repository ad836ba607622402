"""What PostgreSQL's refusals mean when they are about our tables: a note on the error, with the next step.

An application that has upgraded the package and not its schema, or has not been granted a table, gets PostgreSQL's own
error, since by then its transaction cannot be asked anything more. The note says what it comes from.
"""

from __future__ import annotations

import re
from weakref import WeakSet

from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext

from awa_sqla.models.base import AwaBase, ViewBase
from awa_sqla.sqlstates import INSUFFICIENT_PRIVILEGE, MISSING, driver_sqlstate

_TABLES = "|".join(table.name for base in (AwaBase, ViewBase) for table in base.metadata.tables.values())
#: How our statements call a table or function of ours; the schema has any name.
_OURS = re.compile(rf'[\w"]\."?(?:{_TABLES}|claim_keys|take_keys|\w+_seq)\b')

_OLD = (
    "The schema of awa_sqla is missing or older than this version of the package: run your migrations "
    "(op.awa_migrate), or `awa-sqla migrate --check` to see its version"
)
_REFUSED = "`awa-sqla grants --role ROLE --to NAME` prints what this user must be granted for what it does"

_engines: WeakSet[Engine] = WeakSet()


def explain_refusals(engine: Engine) -> None:
    """Have this engine's errors about our tables explained, from now on."""
    if engine not in _engines:
        _engines.add(engine)
        event.listen(engine, "handle_error", _explain)


def _explain(context: ExceptionContext) -> None:
    if context.sqlalchemy_exception is not None:
        explain(context.sqlalchemy_exception, driver_sqlstate(context.original_exception), context.statement)


def explain(error: Exception, code: str | None, statement: str | None) -> None:
    """Note on an error of a statement what to do, if it is one of ours that was refused in such a way."""
    note = _OLD if code in MISSING else _REFUSED if code == INSUFFICIENT_PRIVILEGE else None
    if note is not None and _OURS.search(statement or ""):
        error.add_note(note)
