"""Locks that a change of the schema needs, taken without standing in everybody's way.

A statement that waits for a strong lock makes all that come after it wait too. So what is needed is locked before
anything is changed, with a short `lock_timeout` for each; when one is not to be had all are given back, and it is tried
again a little later, until a bound. Autovacuum would never give way to such tries, and is waited for in a mode that
stands in nobody's way. Nothing has been changed by then, and the caller's transaction stays usable.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
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

#: For all locks of one try together, in milliseconds: well below the second after which a server looks for deadlocks,
#: and would end the transaction of somebody else.
LOCK_TIMEOUT = 600

_DEADLOCK = "40P01"

#: In milliseconds.
_TIMEOUTS = text("SELECT name, setting FROM pg_settings WHERE name IN ('lock_timeout', 'deadlock_timeout')")

#: Which of our tables autovacuum has: a process without a user.
_VACUUMED = text("""
    SELECT name FROM unnest(CAST(:names AS text[])) AS name WHERE EXISTS (
        SELECT FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE granted AND mode = 'ShareUpdateExclusiveLock' AND usesysid IS NULL
        AND relation = to_regclass(:prefix || name)
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    )
""")


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
    there = {relation: mode for relation, mode in locks.items() if relation in found}
    if not there:
        return
    end = time.monotonic() + lock_wait.total_seconds()
    vacuumed: Sequence[str] = ()
    waits = False
    while True:
        savepoint = connection.begin_nested()
        try:
            _lock(connection, there, vacuumed, name)
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
            vacuumed = connection.scalars(_VACUUMED, {"names": list(there), "prefix": f"{name}."}).all()
            time.sleep(random.uniform(0.3, 0.9))  # noqa: S311 - others shall get through, and not in step with us
        else:
            savepoint.commit()
            return


def _lock(connection: Connection, locks: Mapping[str, str], vacuumed: Iterable[str], schema: str) -> None:
    """One try. Raises `DBAPIError`.

    Autovacuum gives way to who has waited for a deadlock_timeout: for its tables first, in a mode that lets others read
    and write.
    """
    settings = {name: int(value) for name, value in connection.execute(_TIMEOUTS)}
    given = settings["lock_timeout"]
    for relation in vacuumed:
        _set_timeout(connection, settings["deadlock_timeout"] + 500)
        connection.exec_driver_sql(f"LOCK TABLE {schema}.{relation} IN SHARE UPDATE EXCLUSIVE MODE")
    end = time.monotonic() + min(LOCK_TIMEOUT, 0.6 * settings["deadlock_timeout"]) / 1000
    for relation, mode in locks.items():  # who has the first soon has the others: nobody gets to them past it
        left = max(int(1000 * (end - time.monotonic())), 1)
        _set_timeout(connection, min(left, given or left))
        connection.exec_driver_sql(f"LOCK TABLE {schema}.{relation} IN {mode} MODE")
    _set_timeout(connection, given)


def timeout_of_each(locks: int) -> int:
    """The `lock_timeout` of each of several locks in a script, in milliseconds."""
    return max(LOCK_TIMEOUT // locks, 50)


def holders(connection: Connection, locks: Mapping[str, str], schema: str) -> tuple[str, ...]:
    """Who else has locks on these relations now, the oldest first: a line for each of at most five."""
    found = connection.execute(
        text("""
            WITH held AS (
                SELECT DISTINCT pid, virtualtransaction FROM pg_locks
                WHERE granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                AND relation = ANY (SELECT to_regclass(name) FROM unnest(CAST(:names AS text[])) AS name)
            ), holders AS (
                SELECT 'process ' || pid || coalesce(' of ' || usename, '') AS who, concat_ws(', ', coalesce(
                    nullif(application_name, ''), CASE WHEN usesysid IS NULL THEN 'autovacuum' END
                ), state) AS about, xact_start AS since
                FROM held JOIN pg_stat_activity USING (pid) WHERE pid <> pg_backend_pid()
                UNION ALL  -- no process has it any more; what it has is a lock on its number
                SELECT 'prepared transaction ' || gid || ' of ' || owner, NULL, prepared
                FROM held JOIN pg_locks AS own USING (virtualtransaction)
                JOIN pg_prepared_xacts ON transaction = own.transactionid
                WHERE held.pid IS NULL AND own.pid IS NULL
            )
            SELECT concat_ws(', ', who, nullif(about, ''), 'for ' || to_char(clock_timestamp() - since, 'HH24:MI:SS'))
            FROM holders ORDER BY since LIMIT 5
        """),
        {"names": [f"{quoted(schema)}.{relation}" for relation in locks]},
    )
    return tuple(found.scalars())


def _set_timeout(connection: Connection, milliseconds: int) -> None:
    connection.execute(text("SELECT set_config('lock_timeout', :value, true)"), {"value": f"{milliseconds}ms"})
