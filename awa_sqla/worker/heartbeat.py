"""Heartbeats: a thread with a connection of its own, so that no handler can starve them.

Each beat refreshes the rows of all attempts in flight, in the order of their ids and passing over locked rows
(whose holder is alive); asks which leases are lost; and refreshes the process's own row and its specs in the
catalogue.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

from sqlalchemy import BigInteger, Engine, Executable, and_, bindparam, column, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.orm import Session

from awa_sqla.models.base import JobState
from awa_sqla.models.job import Attempt, Job
from awa_sqla.models.records import Queue, RuntimeInstance
from awa_sqla.session import catalogue
from awa_sqla.session.guards import MANAGED
from awa_sqla.session.specs import Spec
from awa_sqla.session.statements import NOW, among, owned
from awa_sqla.worker.config import STALE_AFTER, QueueConfig

log = logging.getLogger("awa_sqla.worker")

CHUNK = 500
#: How many unknown kinds are counted.
KINDS = 100
#: Seconds between looks for lost leases while no notification would tell of them.
LOOK = 2.0
#: Seconds until a beat that failed is tried again; so many more each time, up to the interval.
AGAIN = 1.0
#: Seconds that the last beat may take.
LAST = 5.0

_flight = (
    func.unnest(bindparam("ids", type_=ARRAY(BigInteger)), bindparam("leases", type_=ARRAY(BigInteger)))
    .table_valued(column("id", BigInteger), column("run_lease", BigInteger), name="flight")
    .render_derived()
)
_own = and_(Job.id == _flight.c.id, Job.run_lease == _flight.c.run_lease)
_mine = (
    select(Job.id)
    .join(_flight, _own)
    .where(owned)
    .order_by(Job.id)
    .with_for_update(of=Job, key_share=True, skip_locked=True)
    .cte("mine")
)
BEAT = (
    update(Job)
    .where(Job.id == _mine.c.id)
    .values(heartbeat_at=NOW)
    .execution_options(synchronize_session=False, **{MANAGED: True})
)
# Completed and failed under our lease is our own doing, perhaps not acknowledged yet.
LOST = (
    select(_flight.c.id, _flight.c.run_lease)
    .outerjoin(
        Job,
        and_(
            _own,
            or_(owned, among(Job.state, (JobState.COMPLETED, JobState.FAILED))),
        ),
    )
    .where(Job.id.is_(None))
)


class Identity:
    """What this process says of itself: its row in `runtime_instances`, and in the catalogue the specs that it has."""

    def __init__(
        self,
        worker_id: str,
        version: str,
        queues: Sequence[str],
        kinds: Sequence[str],
        specs: Sequence[Spec],
        *,
        role: str = "worker",
    ) -> None:
        self.worker_id = worker_id
        #: Kinds that came without a handler for them, with how many; of very many kinds, the first.
        self.unknown_kinds: dict[str, int] = {}
        self.stopping = False
        #: How many attempts it runs at a time at the most, how many now, and whether notifications reach it.
        self.concurrency, self.running = 0, 0
        self.listening: Callable[[], bool] = bool
        #: After how long a silence its attempts are another's, and how the lanes of maintenance fare here.
        self.stale_after = STALE_AFTER
        self.lanes: Callable[[], dict[str, Any]] = dict
        self._specs = [(spec.kind, spec.outcome, spec.name) for spec in specs]
        self._fixed: dict[str, Any] = {
            "id": worker_id,
            "role": role,
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "version": version,
            "queues": list(queues),
            "kinds": list(kinds),
        }

    def write(self, session: Session) -> None:
        """Insert or refresh it all."""
        stopping = NOW if self.stopping else None
        seen = {
            "unknown_kinds": self.unknown_kinds,
            "concurrency": self.concurrency,
            "running": self.running,
            "listening": self.listening(),
            "stopping_at": stopping,
            "stale_after_seconds": self.stale_after.total_seconds(),
            "lanes": self.lanes(),
        }
        session.execute(
            insert(RuntimeInstance)
            .values(**self._fixed, **seen)
            .on_conflict_do_update(index_elements=[RuntimeInstance.id], set_={**seen, "last_seen": NOW})
        )
        catalogue.publish(session, self._specs)

    def unknown(self, kind: str) -> bool:
        """A job of a kind that has no handler here; whether it is the first one that is noted."""
        count = self.unknown_kinds.get(kind, 0)
        if count or len(self.unknown_kinds) < KINDS:
            self.unknown_kinds[kind] = count + 1
        return self.unknown_kinds.get(kind) == 1

    def forget(self, session: Session) -> None:
        """The process has ended in good order: its row goes."""
        session.execute(delete(RuntimeInstance).where(RuntimeInstance.id == self.worker_id))


def _or_never(duration: timedelta | None) -> float:
    return math.inf if duration is None else duration.total_seconds()


def declare_queues(session: Session, configs: dict[str, QueueConfig]) -> None:
    """Write the declared settings of the queues this worker serves.

    What is written already is not touched: a process that stands still in its start keeps no other from starting.
    """
    rows = [
        {
            "queue": name,
            "declared_concurrency": config.concurrency,
            "declared_deadline_seconds": config.deadline.total_seconds() if config.deadline else None,
            "declared_poll_seconds": config.poll_interval.total_seconds(),
            "declared_dead_letters": config.dead_letters,
            "declared_rate_per_second": config.rate_limit and config.rate_limit.per_second,
            "declared_rate_burst": config.rate_limit and config.rate_limit.burst,
            "declared_aging_seconds": _or_never(config.priority_aging),
            "declared_keep_completed_seconds": _or_never(config.retention.completed),
            "declared_keep_failed_seconds": _or_never(config.retention.failed),
            "declared_keep_dead_seconds": _or_never(config.retention.dead),
        }
        for name, config in sorted(configs.items())
    ]
    columns = [getattr(Queue, name) for name in rows[0]]
    written = {tuple(row) for row in session.execute(select(*columns).where(Queue.queue.in_(configs)))}
    changed = [row for row in rows if tuple(row.values()) not in written]
    if changed:
        statement = insert(Queue).values(changed)
        declared = {name: statement.excluded[name] for name in rows[0] if name != "queue"}
        session.execute(statement.on_conflict_do_update(index_elements=[Queue.queue], set_=declared))


class Beating(Protocol):
    """What a heart keeps alive. Asked from its thread."""

    def attempts(self) -> list[Attempt]: ...

    def lost(self, attempts: list[Attempt]) -> None: ...


class Heart:
    """The thread."""

    def __init__(self, engine: Engine, identity: Identity, interval: timedelta, flight: Beating) -> None:
        self._engine = engine
        self._identity = identity
        self._interval = interval.total_seconds()
        self._flight = flight
        self._stopping = False
        #: When it last reached the database, of `monotonic()`.
        self.last_beat = 0.0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="awa_sqla heartbeat", daemon=True)

    def start(self) -> None:
        """Start beating."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and take this process out of the list of those that live. Blocks for the beat in progress, if short."""
        self._stopping = True
        self._wake.set()
        self._thread.join(LAST)
        if self._thread.is_alive():
            return
        try:
            with Session(self._engine) as session, session.begin():
                self._identity.forget(session)
        except Exception as exc:  # noqa: BLE001 - others see that it is not heard of any more
            log.warning("this process stays listed among those that live: %s", str(exc).partition("\n")[0])

    @property
    def dead(self) -> bool:
        """Whether its thread has ended although nobody has stopped it."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stopping

    def soon(self) -> None:
        """Beat now: cancellations may have gone unheard."""
        self._wake.set()

    def _run(self) -> None:
        due, failures = monotonic() + self._interval, 0
        while not self._stopping:
            left = max(due - monotonic(), 0)
            if self._wake.wait(left if self._identity.listening() else min(left, LOOK)) or monotonic() >= due:
                self._wake.clear()
                failures = 0 if self._surely(self.beat) else failures + 1
                due = monotonic() + (min(AGAIN * failures, self._interval) if failures else self._interval)
            else:
                self._surely(self.look)

    def _surely(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as exc:  # noqa: BLE001 - the next beat may find the database again
            log.warning("heartbeat failed: %s", str(exc).partition("\n")[0])
            return False
        return True

    def beat(self) -> None:
        """One beat: a transaction for each 500 attempts, and one for the process itself."""
        attempts = self._each_chunk(BEAT, LOST)
        self._identity.running = attempts
        with Session(self._engine) as session, session.begin():
            self._identity.write(session)
        self.last_beat = monotonic()

    def look(self) -> None:
        """Ask only which leases are lost: a query for each 500 attempts."""
        self._each_chunk(LOST)

    def _each_chunk(self, *statements: Executable) -> int:
        """Send the statements, the last of which finds lost leases, for all attempts; how many those are."""
        attempts = sorted(self._flight.attempts())
        for start in range(0, len(attempts), CHUNK):
            chunk = attempts[start : start + CHUNK]
            parameters = {"ids": [a.id for a in chunk], "leases": [a.run_lease for a in chunk]}
            with Session(self._engine) as session, session.begin():
                results = [session.execute(statement, parameters) for statement in statements]
                lost = [Attempt(*row) for row in results[-1]]
            if lost:
                self._flight.lost(lost)
        return len(attempts)
