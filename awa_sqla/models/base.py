"""The declarative base, the schema name, and how a state is stored.

Our tables live on their own `MetaData`, so an app's naming conventions, type maps and table arguments
do not reach them, and its autogenerate does not see them. Another schema than `awa` is chosen with the
engine's `schema_translate_map={"awa": "other"}`; no SQL text of the package names a schema.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import CheckConstraint, Dialect, MetaData, Sequence, Table, Text, inspect
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator

from awa_sqla.states import JobState, Outcome

__all__ = [
    "SCHEMA",
    "AwaBase",
    "JobState",
    "Outcome",
    "StateText",
    "ViewBase",
    "deadlines",
    "jobs_id_seq",
    "readable",
    "run_lease_seq",
]

#: The schema our tables are declared in; what `schema_translate_map` translates.
SCHEMA = "awa"


def readable(table: str, *columns: str) -> CheckConstraint:
    """Times that every driver can read, in every time zone; one row of others would stop all that read with it."""
    first, last = "'1970-01-01 00:00:00+00'", "'9000-01-01 00:00:00+00'"
    if len(columns) == 1:
        return CheckConstraint(f"{columns[0]} BETWEEN {first} AND {last}", name=f"ck_{table}_times")
    every = ", ".join(columns)
    return CheckConstraint(f"least({every}) >= {first} AND greatest({every}) <= {last}", name=f"ck_{table}_times")


def deadlines(table: str, *columns: str) -> CheckConstraint:
    """Seconds that can be added to a time: more than none, at most a thousand years."""
    checks = (f"{column} > 0 AND {column} <= 31536000000" for column in columns)
    return CheckConstraint(" AND ".join(checks), name=f"ck_{table}_deadlines")


class StateText(TypeDecorator[JobState]):
    """`text` in the database, `JobState` in Python. A native enum cannot be altered in a transaction."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else JobState(value).value

    def process_result_value(self, value: Any, dialect: Dialect) -> JobState | None:  # noqa: ARG002
        return None if value is None else JobState(value)


class AwaBase(DeclarativeBase):
    """Base of the mapped tables."""

    metadata = MetaData(schema=SCHEMA)
    __table__: ClassVar[Table]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __repr__(self) -> str:
        """Reads what is loaded and never loads: safe after a commit, in async code and in logs."""
        state = inspect(self)
        loaded: dict[str, Any] = state.dict
        shown = [str(key) for key in state.identity or ()]
        shown += [str(loaded[name]) for name in ("kind", "queue", "state") if name in loaded]
        return f"<{' '.join([type(self).__name__, *shown])}>"


class ViewBase(AwaBase):
    """Base of the mapped views: a MetaData of their own, so that nobody tries to create them as tables.

    Under `AwaBase`, so that a session's `binds={AwaBase: engine}` holds for the views too.
    """

    __abstract__ = True

    metadata = MetaData(schema=SCHEMA)


#: Ids are never reused, also not over a move to another table.
jobs_id_seq = Sequence("jobs_id_seq", metadata=AwaBase.metadata)

#: Leases come from a sequence, so that the lease of a claim that was rolled back is never issued again.
run_lease_seq = Sequence("run_lease_seq", metadata=AwaBase.metadata)
