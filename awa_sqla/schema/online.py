"""The second way through the steps: each a short transaction, and what takes long outside of any, beside the traffic.

A step's version is written when its short part is. Whether its long part is finished is not written anywhere, but read
from the catalog: an index that is missing or not valid, a check that is not validated. So an interruption at any point
leaves nothing but work to be found by the next run. Such a part only concerns speed and old rows: the package runs
without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import TimeoutError as PoolTimeout

from awa_sqla.schema import between, change, execute, filled, known, lock_key, lock_version
from awa_sqla.schema.alone import LIMITS, TRY, alone, without_limits
from awa_sqla.schema.locks import take, timeout_of_each
from awa_sqla.schema.objects import quoted
from awa_sqla.schema.steps import STEPS, Index, Validation

#: Seconds between two lines about work that goes on.
_EVERY = 5.0

_UNLIMITED = dict.fromkeys(LIMITS, "0") | {"client_connection_check_interval": "2s"}

_SETTINGS = text("SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY (:names)")

_BUILDING = text("""
    SELECT phase, CASE WHEN blocks_total > 0 THEN 100 * blocks_done / blocks_total END
    FROM pg_stat_progress_create_index WHERE relid = to_regclass(:table)
""")


def unfinished(connection: Connection, version: int, schema: str) -> list[Index | Validation]:
    """The long work of the steps up to a version that is still to do. Reads the catalog only."""
    works = [work for step in STEPS[:version] for work in step.after]
    return [work for work in works if _is_unfinished(connection, work, schema)]


def script(from_: int, to: int, schema: str) -> Iterator[str]:
    """The SQL of the same, with comments, for a DBA to read and to run outside a transaction. Does no I/O."""
    known(from_, to, schema)
    key = lock_key(schema).replace("'", "''")
    for version in between(from_, to):
        step = STEPS[abs(version) - 1]
        locks: Mapping[str, str] = {} if from_ == 0 else step.locks if version > 0 else step.down_locks
        yield f"-- {'to' if version > 0 else 'back from'} version {abs(version)}"
        if version > 0 and from_ > 0:
            yield from filled(step.before, schema)
        yield "BEGIN"
        yield f"SELECT pg_advisory_xact_lock(hashtextextended('{key}', 0))"
        if locks:
            yield f"SET LOCAL lock_timeout = '{timeout_of_each(len(locks))}ms'"
        yield from (f"LOCK TABLE {quoted(schema)}.{relation} IN {mode} MODE" for relation, mode in locks.items())
        yield from change(version, schema)
        yield "COMMIT"
        for work in step.after if version > 0 else ():
            yield f"-- beside the traffic: {work.what}"
            yield from filled(work.beside_others(), schema)


def _is_unfinished(connection: Connection, work: Index | Validation, schema: str) -> bool:
    (condition,) = filled([work.unfinished()], schema)
    return bool(connection.exec_driver_sql(f"SELECT {condition}".replace("%", "%%")).scalar())


class Online:
    """One run of `awa_sqla.schema.migrate_online`."""

    #: What its connections are to `SET ROLE` to; else they are the user who has connected.
    role: str | None = None

    def __init__(self, engine: Engine, schema: str, lock_wait: timedelta, tell: Callable[[str], None]) -> None:
        self.engine = engine
        self.schema = schema
        self.lock_wait = lock_wait
        self.tell = tell

    def run(self, to: int, ahead: int | None = None) -> tuple[int, int]:
        """Go to version `to`, alone: up with `ahead` 1, down with -1, else the way that it is when this begins.

        Where others have gone beyond `to` meanwhile, nothing of that is taken back.
        """
        with alone(self.engine, f"awa_sqla.schema.online:{self.schema}", self.tell):
            with self._changing() as (_, before):
                found = before
            ahead = ahead or (1 if to >= before else -1)
            if ahead > 0:
                self._finish(found)
            while (to - found) * ahead > 0:
                if ahead > 0:
                    self._prepare(found)
                found = self._step(found, ahead)
                if ahead > 0:
                    self._finish(found)
            return before, found

    def _prepare(self, version: int) -> None:
        """Mend old rows for the next step, while they can still be changed."""
        if STEPS[version].before:
            with self._unlimited() as connection:
                execute(connection, filled(STEPS[version].before, self.schema))

    def _step(self, seen: int, ahead: int) -> int:
        """One step up or down, from where the schema is by now; the version then."""
        with self._changing() as (connection, found):
            if found != seen:
                return found
            up = ahead > 0
            step = STEPS[found if up else found - 1]
            self.tell(f"{'to' if up else 'back from'} version {found + 1 if up else found}")
            take(connection, step.locks if up else step.down_locks, self.schema, self.lock_wait)
            execute(connection, change(found + 1 if up else -found, self.schema))
            return found + ahead

    @contextmanager
    def _changing(self) -> Generator[tuple[Connection, int], None, None]:
        """A transaction that no other migration's is beside, and the version that it finds.

        A snapshot that is older than the wait for the others would not show what they have done.
        """
        engine = self.engine.execution_options(isolation_level="READ COMMITTED")
        with engine.begin() as connection:
            without_limits(connection)
            if self.role:
                connection.exec_driver_sql(f"SET LOCAL ROLE {quoted(self.role)}".replace("%", "%%"))
            if not connection.scalar(TRY, {"key": lock_key(self.schema)}):
                self.tell("waiting for a transaction that migrates")
            yield connection, lock_version(connection, self.schema)

    def _finish(self, version: int) -> None:
        """Do what is still to do of the long work up to a version."""
        with self._looking() as connection:
            works = unfinished(connection, version, self.schema)
        for work in works:
            self.tell(work.what)
            self._await_orphan(work)
            self._watched(work)

    def _await_orphan(self, work: Index | Validation) -> None:
        """Let a build end whose process has died, or that somebody has started by hand."""
        while isinstance(work, Index) and self._report(work):
            time.sleep(1)

    def _report(self, work: Index | Validation) -> bool:
        """Say how far an index is; whether one is being built."""
        try:
            with self._looking() as connection:
                found = connection.execute(_BUILDING, {"table": f"{quoted(self.schema)}.{work.table}"}).first()
        except PoolTimeout:  # an engine of two connections has none to look with
            return False
        if found is not None:
            share = "" if found[1] is None else f", {found[1]} %"
            self.tell(f"{work.what}: {found[0]}{share}")
        return found is not None

    def _watched(self, work: Index | Validation) -> None:
        """Do the work in a thread; report every few seconds, and have the server cancel it when we are interrupted."""
        raised: list[BaseException] = []
        # Not the thread is waited for: a join() that is interrupted takes one that runs for one that has ended.
        ended = threading.Event()

        def do(connection: Connection) -> None:
            try:
                if _is_unfinished(connection, work, self.schema):
                    execute(connection, filled(work.beside_others(), self.schema))
            except BaseException as exc:  # noqa: BLE001 - raised again by who waits
                raised.append(exc)
            finally:
                ended.set()

        with self._unlimited() as connection:
            if self.engine.dialect.is_async:  # bound to the thread of its loop
                do(connection)
            else:
                pid = connection.scalar(text("SELECT pg_backend_pid()"))
                try:
                    self._start(partial(do, connection), ended)
                    while not ended.wait(_EVERY):
                        self._report(work)
                except BaseException:
                    self._cancel(pid, ended)
                    raise
        if raised:
            raise raised[0]

    def _start(self, work: Callable[[], None], ended: threading.Event) -> None:
        try:
            threading.Thread(target=work, name="awa-sqla migrate").start()
        except RuntimeError:  # there is no thread to be had, nor to be waited for
            ended.set()
            raise

    def _cancel(self, pid: int | None, ended: threading.Event) -> None:
        """Again and again: a cancellation between two statements is one of nothing."""
        while not ended.is_set():
            with suppress(PoolTimeout), self._looking() as connection:
                connection.execute(text("SELECT pg_cancel_backend(:pid)"), {"pid": pid})
            ended.wait(1)

    @contextmanager
    def _looking(self) -> Generator[Connection, None, None]:
        """A connection whose statements are transactions of their own: an index that is built waits for none."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if self.role is None:
                yield connection
                return
            connection.exec_driver_sql(f"SET ROLE {quoted(self.role)}".replace("%", "%%"))
            try:
                yield connection
            finally:
                if not connection.invalidated:
                    connection.exec_driver_sql("RESET ROLE")

    @contextmanager
    def _unlimited(self) -> Generator[Connection, None, None]:
        """The same without the limits that a role may have on statements, until it goes back to its pool.

        A server that has lost its client stops building.
        """
        with self._looking() as connection:
            rows = connection.execute(_SETTINGS, {"names": list(_UNLIMITED)})
            before: dict[str, str] = {row.name: row.current_setting for row in rows}
            _set(connection, {name: _UNLIMITED[name] for name in before})
            try:
                yield connection
            finally:
                if not connection.invalidated:
                    _set(connection, before)


def _set(connection: Connection, settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        connection.execute(text("SELECT set_config(:name, :value, false)"), {"name": name, "value": value})
