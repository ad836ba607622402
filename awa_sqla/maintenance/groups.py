"""Bounded work on rows that belong to many queues: which queues there are, what holds for each, and a fair choice.

Nothing here reads more rows than it chooses, but for rows that are gone and not yet vacuumed: which groups there are
is found by stepping from one to the next through an index, and each group is read from its oldest row on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Double,
    Integer,
    Select,
    all_,
    bindparam,
    case,
    func,
    literal_column,
    null,
    select,
    true,
    tuple_,
    union_all,
)
from sqlalchemy.orm import InstrumentedAttribute

from awa_sqla import limits
from awa_sqla.models.records import Queue
from awa_sqla.session.statements import AS_OF, SECOND

#: How many rows one pass may choose.
MOST = bindparam("most", type_=Integer)

#: In the text, because a generic plan takes a bound LIMIT for a tenth of all rows.
ONE = literal_column("1", Integer)

Attribute = InstrumentedAttribute[Any]
#: The rows of the groups in a CTE that meet more conditions, at most so many of each group, best first.
Rows = Callable[[CTE, ColumnElement[int], Sequence[ColumnElement[bool]]], Select[Any]]


def plain(duration: timedelta) -> ColumnElement[float]:
    """A duration that never changes, in seconds and in the text of the statement."""
    return literal_column(repr(duration.total_seconds()), Double)


def in_force(setting: str, default: timedelta) -> ColumnElement[float]:
    """A duration of the `Queue` that is outer-joined, in seconds: override > declared > default."""
    names = (f"{by}_{setting}_seconds" for by in ("override", "declared"))
    found: ColumnElement[float] = func.coalesce(*(getattr(Queue, name) for name in names), plain(default))
    return found


def ago(seconds: ColumnElement[float]) -> ColumnElement[Any]:
    """So many seconds ago; NULL for infinity and whatever else is longer than any plan.

    A CASE, because no planner may calculate its branches first: infinitely many seconds are no interval.
    """
    return case((seconds <= plain(limits.LONGEST), AS_OF - seconds * SECOND), else_=null())


def groups(name: str, keys: Sequence[Attribute], at: Attribute, *among: ColumnElement[bool]) -> CTE:
    """The groups of rows that differ in `keys`, each with its first `at`, by an index on both.

    A loose index scan: from each group straight to the next. A GROUP BY would read all rows.
    """
    columns = (*keys, at)
    found = select(*columns).where(*among).order_by(*columns).limit(ONE).cte(name, recursive=True)
    here = [found.c[key.key] for key in keys]
    beyond = keys[0] > here[0] if len(keys) == 1 else tuple_(*keys) > tuple_(*here)
    after = select(*columns).where(*among, beyond).order_by(*columns).limit(ONE).correlate(found).lateral("after")
    return found.union_all(select(*after.c).select_from(found.join(after, true())))


def fairly(due: CTE, key: Attribute, rows: Rows) -> CTE:
    """The keys of at most `MOST` rows of the groups in `due`, locked.

    Each group has the same share; what some of them leave over goes to those that have more. The choice is full
    whenever there are enough rows that nobody holds.
    """
    count = func.greatest(func.count(), ONE, type_=BigInteger)
    share = select(func.greatest(MOST // count, ONE)).select_from(due).scalar_subquery()
    one = rows(due, share, ()).lateral("one")
    first = _materialized(select(*due.c, one.c.id).select_from(due.join(one, true())).limit(MOST), "first")
    of_group: list[Any] = [first.c[column.name] for column in due.c]
    full = (
        select(*of_group, func.array_agg(first.c.id).label("taken"))
        .group_by(*of_group)
        .having(func.count() >= share)
        .cte("full_share")
    )
    # Own locks are not passed over: what the group has already is told apart by its keys.
    more = rows(full, MOST, (key != all_(full.c.taken),)).lateral("more")
    left = MOST - select(func.count()).select_from(first).scalar_subquery()
    rest = _materialized(select(more.c.id).select_from(full.join(more, true())).limit(left), "rest")
    return union_all(select(first.c.id), select(rest.c.id)).cte("chosen")


def _materialized(statement: Select[Any], name: str) -> CTE:
    return statement.cte(name).prefix_with("MATERIALIZED")
