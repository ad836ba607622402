"""Locks that a change of the schema needs, taken without standing in everybody's way.

A statement that waits for a strong lock makes all that come after it wait too. So what is needed is locked before
anything is changed, with a short `lock_timeout` for each; when one is not to be had all are given back, and it is tried
again a little later, until a bound. Nothing has been changed by then, and the caller's transaction stays usable.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from awa_sqla.errors import SchemaLocked
from awa_sqla.schema.objects import quoted
from awa_sqla.schema.steps import MODES
from awa_sqla.sqlstates import LOCK_NOT_AVAILABLE, sqlstate

_log = logging.getLogger("awa_sqla.schema")

#: How long all together are tried for.
LOCK_WAIT = timedelta(minutes=1)

#: For all locks of one try together, in milliseconds: less than the second after which a server looks for deadlocks,
#: and would end the transaction of somebody else.
LOCK_TIMEOUT = 900

_DEADLOCK = "40P01"


def strongest(locks: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """For each relation the strongest mode that any of them asks for."""
    found: dict[str, str] = {}
    for wanted in locks:
        for name, mode in wanted.items():
            found[name] = max(mode, found.get(name, mode), key=MODES.index)
    return found


def take(connection: Connection, locks: Mapping[str, str], schema: str, lock_wait: timedelta | None = None) -> None:
    """Lock what is there of these relations, for the transaction.

    Raises `SchemaLocked` when `lock_wait`, or a minute, is over.
    """
    if not locks:
        return
    lock_wait = LOCK_WAIT if lock_wait is None else lock_wait
    name = quoted(schema)
    found = set(
        connection.scalars(
            text(
                "SELECT name FROM unnest(CAST(:names AS text[])) AS name WHERE to_regclass(:prefix || name) IS NOT NULL"
            ),
            {"names": list(locks), "prefix": f"{name}."},
        )
    )
    there = [f"LOCK TABLE {name}.{relation} IN {mode} MODE" for relation, mode in locks.items() if relation in found]
    if not there:
        return
    given = int(connection.scalar(text("SELECT setting FROM pg_settings WHERE name = 'lock_timeout'")) or 0)
    each = max(LOCK_TIMEOUT // len(there), 50)
    end = time.monotonic() + lock_wait.total_seconds()
    waits = False
    while True:
        savepoint = connection.begin_nested()
        try:
            _set_timeout(connection, min(each, given or each))
            for statement in there:
                connection.exec_driver_sql(statement)
            _set_timeout(connection, given)
        except DBAPIError as exc:
            savepoint.rollback()
            if sqlstate(exc) not in (LOCK_NOT_AVAILABLE, _DEADLOCK):
                raise
            busy = holders(connection, locks, schema)
            if time.monotonic() >= end:
                raise SchemaLocked(schema, lock_wait.total_seconds(), busy) from exc
            if not waits:
                _log.warning("schema %s: waiting for locks; held by %s", schema, "; ".join(busy) or "others")
            waits = True
            time.sleep(random.uniform(0.3, 0.9))  # noqa: S311 - others shall get through, and not in step with us
        else:
            savepoint.commit()
            return


def holders(connection: Connection, locks: Mapping[str, str], schema: str) -> tuple[str, ...]:
    """Who else has locks on these relations now, the oldest first: a line for each of at most five."""
    found = connection.execute(
        text("""
            SELECT concat_ws(', ', 'process ' || pid || ' of ' || coalesce(usename, 'nobody'),
                nullif(application_name, ''), state,
                'for ' || to_char(clock_timestamp() - min(xact_start), 'HH24:MI:SS'))
            FROM pg_locks JOIN pg_stat_activity USING (pid)
            WHERE granted AND pid <> pg_backend_pid() AND pg_locks.relation = ANY (
                SELECT to_regclass(name) FROM unnest(CAST(:names AS text[])) AS name
            )
            GROUP BY pid, usename, application_name, state ORDER BY min(xact_start) LIMIT 5
        """),
        {"names": [f"{quoted(schema)}.{relation}" for relation in locks]},
    )
    return tuple(found.scalars())


def _set_timeout(connection: Connection, milliseconds: int) -> None:
    connection.execute(text("SELECT set_config('lock_timeout', :value, true)"), {"value": f"{milliseconds}ms"})
