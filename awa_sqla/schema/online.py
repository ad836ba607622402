"""The second way through the steps: each a short transaction, and what takes long outside of any, beside the traffic.

A step's version is written when its short part is. Whether its long part is finished is not written anywhere, but read
from the catalog: an index that is missing or not valid, a check that is not validated. So an interruption at any point
leaves nothing but work to be found by the next run. Such a part only concerns speed and old rows: the package runs
without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from sqlalchemy import Connection, Engine, text

from awa_sqla.schema import change, execute, filled, lock_version
from awa_sqla.schema.alone import alone
from awa_sqla.schema.locks import take
from awa_sqla.schema.objects import quoted
from awa_sqla.schema.steps import STEPS, Index, Validation

#: Seconds between two lines about work that goes on.
_EVERY = 5.0

_BUILDING = text("""
    SELECT phase, CASE WHEN blocks_total > 0 THEN 100 * blocks_done / blocks_total END
    FROM pg_stat_progress_create_index WHERE relid = to_regclass(:table)
""")


def unfinished(connection: Connection, version: int, schema: str) -> list[Index | Validation]:
    """The long work of the steps up to a version that is still to do. Reads the catalog only."""
    works = [work for step in STEPS[:version] for work in step.after]
    return [work for work in works if _is_unfinished(connection, work, schema)]


def _is_unfinished(connection: Connection, work: Index | Validation, schema: str) -> bool:
    (condition,) = filled([work.unfinished()], schema)
    return bool(connection.exec_driver_sql(f"SELECT {condition}".replace("%", "%%")).scalar())


class Online:
    """One run of `awa_sqla.schema.migrate_online`."""

    def __init__(self, engine: Engine, schema: str, lock_wait: timedelta, tell: Callable[[str], None]) -> None:
        self.engine = engine
        self.schema = schema
        self.lock_wait = lock_wait
        self.tell = tell

    def run(self, to: int) -> tuple[int, int]:
        """Go to version `to`, alone."""
        with alone(self.engine, f"awa_sqla.schema.online:{self.schema}", self.tell) as guard:
            before = found = self._version()
            if to >= found:
                self._finish(guard, found)
            while found != to:
                found = self._step(found, to)
                self._finish(guard, found if to > before else 0)
            return before, found

    def _version(self) -> int:
        with self.engine.begin() as connection:
            return lock_version(connection, self.schema)

    def _step(self, seen: int, to: int) -> int:
        """One step towards `to`, from where the schema is by now; the version then."""
        with self.engine.begin() as connection:
            found = lock_version(connection, self.schema)
            if found != seen:
                return found
            up = to > found
            step = STEPS[found if up else found - 1]
            self.tell(f"{'to' if up else 'back from'} version {found + 1 if up else found}")
            take(connection, step.locks if up else step.down_locks, self.schema, self.lock_wait)
            execute(connection, change(found + 1 if up else -found, self.schema))
            return found + 1 if up else found - 1

    def _finish(self, guard: Connection, version: int) -> None:
        """Do what is still to do of the long work up to a version."""
        for work in unfinished(guard, version, self.schema):
            self.tell(work.what)
            with self._autocommit() as connection:
                self._await_orphan(guard, work)
                if _is_unfinished(connection, work, self.schema):
                    _watched(guard, connection, partial(self._do, connection, work), partial(self._report, guard, work))

    def _do(self, connection: Connection, work: Index | Validation) -> None:
        execute(connection, filled(work.beside_others(), self.schema))

    def _await_orphan(self, guard: Connection, work: Index | Validation) -> None:
        """Let a build end whose process has died, or that somebody has started by hand."""
        pause = threading.Event()
        while isinstance(work, Index) and guard.execute(_BUILDING, {"table": self._table(work)}).first():
            self._report(guard, work)
            pause.wait(1)

    def _report(self, guard: Connection, work: Index | Validation) -> None:
        found = guard.execute(_BUILDING, {"table": self._table(work)}).first()
        if found is not None:
            share = "" if found[1] is None else f", {found[1]} %"
            self.tell(f"{work.what}: {found[0]}{share}")

    def _table(self, work: Index | Validation) -> str:
        return f"{quoted(self.schema)}.{work.table}"

    @contextmanager
    def _autocommit(self) -> Iterator[Connection]:
        """A connection outside of transactions, without the limits that a role may have on statements.

        Its settings go with it: it does not return to a pool. A server that has lost its client stops building.
        """
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.detach()
            for name, value in (
                ("statement_timeout", "0"),
                ("lock_timeout", "0"),
                ("client_connection_check_interval", "2s"),
            ):
                connection.execute(text("SELECT set_config(:name, :value, false)"), {"name": name, "value": value})
            yield connection


def _watched(guard: Connection, connection: Connection, work: Callable[[], None], report: Callable[[], None]) -> None:
    """Do the work in a thread; report every few seconds, and have the server cancel it when we are interrupted."""
    pid = connection.scalar(text("SELECT pg_backend_pid()"))
    raised: list[BaseException] = []

    def do() -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - raised again by who waits
            raised.append(exc)

    thread = threading.Thread(target=do, name="awa-sqla migrate")
    thread.start()
    try:
        while thread.join(_EVERY) or thread.is_alive():
            report()
    except BaseException:
        guard.execute(text("SELECT pg_cancel_backend(:pid)"), {"pid": pid})
        thread.join()
        raise
    if raised:
        raise raised[0]
