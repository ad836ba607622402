"""The lease that says which process leads: one row, by the database's clock.

No session-level lock and no connection that must stay the same, so it works behind any pooler. A leader is fenced by
nothing but time, and need not be: every lane bears two.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    Double,
    Integer,
    Text,
    bindparam,
    case,
    cast,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from awa_sqla.models.upkeep import Leader
from awa_sqla.session.statements import AS_OF, NOW, seconds

NAME = "maintenance"
#: No lease lasts longer.
LONGEST = timedelta(minutes=2)


class Standing(NamedTuple):
    """What one look at the lease found: whether it is ours, the term, and the database's clock and age."""

    leads: bool
    term: int
    now: datetime
    #: How long the server has been up.
    up: timedelta


_started: Any = func.pg_postmaster_start_time()
# In seconds: how an interval is written is a setting, and psycopg reads but one of its styles.
_up = cast(func.extract("epoch", NOW - _started), Double)
_ours = Leader.holder == bindparam("candidate", type_=Text)
# One that ends much later than any lease lasts was taken before the database's clock went back.
_taken = Leader.expires_at.between(AS_OF, AS_OF + LONGEST)

# A standby only reads: with ON CONFLICT it would lock the row, and leave a dead version behind each time.
_LOOK = select(
    func.coalesce(func.bool_or(_ours & _taken), False),
    func.coalesce(func.bool_or(_taken), False),
    func.coalesce(func.max(Leader.term), 0),
    NOW,
    _up,
).where(Leader.name == bindparam("lease_name", type_=Text))


def _hold() -> Any:
    new: Any = insert(Leader).values(
        name=bindparam("lease_name", type_=Text),
        holder=bindparam("candidate", type_=Text),
        expires_at=NOW + seconds("lease"),
    )
    changed = Leader.holder != new.excluded.holder
    return new.on_conflict_do_update(
        index_elements=[Leader.name],
        set_={
            "holder": new.excluded.holder,
            "expires_at": NOW + seconds("lease"),
            "term": Leader.term + cast(case((changed, 1), else_=0), Integer),
            "acquired_at": case((changed | ~_taken, NOW), else_=Leader.acquired_at),
        },
        where=~changed | ~_taken,
    ).returning(cast(Leader.term, BigInteger), NOW, _up)


_HOLD = _hold()

_RELEASE = (
    update(Leader)
    .where(Leader.name == bindparam("lease_name", type_=Text), _ours)
    .values(expires_at=NOW)
    .execution_options(synchronize_session=False)
)


def look(connection: Connection, holder: str, name: str = NAME) -> tuple[Standing, bool]:
    """How the lease stands, and whether anybody has it. One statement, which only reads."""
    row: Any = connection.execute(_LOOK, {"lease_name": name, "candidate": holder}).one()
    ours, taken, term, now, up = row
    return Standing(ours, term, now, timedelta(seconds=up)), taken


def hold(connection: Connection, holder: str, lease: timedelta, name: str = NAME) -> Standing | None:
    """Take the lease or renew it, from now on for `lease`; None when another process has it. One statement."""
    parameters = {"lease_name": name, "candidate": holder, "lease": lease.total_seconds()}
    row: Any = connection.execute(_HOLD, parameters).one_or_none()
    return None if row is None else Standing(leads=True, term=row[0], now=row[1], up=timedelta(seconds=row[2]))


def release(connection: Connection, holder: str, name: str = NAME) -> None:
    """Give the lease up, if it is ours, for the next process to take at once. One statement."""
    connection.execute(_RELEASE, {"lease_name": name, "candidate": holder})
