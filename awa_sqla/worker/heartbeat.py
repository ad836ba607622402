"""Heartbeats: a thread with a connection of its own, so that no handler can starve them.

Each beat refreshes the rows of all attempts in flight, in the order of their ids and passing over locked rows
(whose holder is alive); asks which leases are lost; and refreshes the process's own row and its specs in the
catalogue.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import BigInteger, Engine, and_, bindparam, column, func, or_, select, update
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from awa_sqla.errors import ConfigurationError
from awa_sqla.models.base import JobState
from awa_sqla.models.job import Attempt, Job
from awa_sqla.models.records import Queue, RuntimeInstance
from awa_sqla.session import catalogue
from awa_sqla.session.guards import MANAGED
from awa_sqla.session.specs import Spec
from awa_sqla.session.statements import NOW, among, owned
from awa_sqla.worker.config import QueueConfig

log = logging.getLogger("awa_sqla.worker")

CHUNK = 500

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
        self, worker_id: str, version: str, queues: Sequence[str], kinds: Sequence[str], specs: Sequence[Spec]
    ) -> None:
        self.worker_id = worker_id
        self.unknown_kinds: dict[str, int] = {}
        self.stopping = False
        self._specs = [(spec.kind, spec.outcome, spec.name) for spec in specs]
        self._fixed: dict[str, Any] = {
            "id": worker_id,
            "role": "worker",
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "version": version,
            "queues": list(queues),
            "kinds": list(kinds),
        }

    def write(self, session: Session) -> None:
        """Insert or refresh it all."""
        stopping = NOW if self.stopping else None
        seen = {"unknown_kinds": self.unknown_kinds, "stopping_at": stopping}
        session.execute(
            insert(RuntimeInstance)
            .values(**self._fixed, **seen)
            .on_conflict_do_update(index_elements=[RuntimeInstance.id], set_={**seen, "last_seen": NOW})
        )
        catalogue.publish(session, self._specs)


def declare_queues(session: Session, configs: dict[str, QueueConfig]) -> None:
    """Write the declared settings of the queues this worker serves."""
    rows = [
        {
            "queue": name,
            "declared_concurrency": config.concurrency,
            "declared_deadline_seconds": config.deadline.total_seconds() if config.deadline else None,
            "declared_poll_seconds": config.poll_interval.total_seconds(),
            "declared_dead_letters": config.dead_letters,
        }
        for name, config in sorted(configs.items())
    ]
    statement = insert(Queue).values(rows)
    declared = {name: statement.excluded[name] for name in rows[0] if name != "queue"}
    changed = or_(*(getattr(Queue, name).is_distinct_from(value) for name, value in declared.items()))
    session.execute(statement.on_conflict_do_update(index_elements=[Queue.queue], set_=declared, where=changed))


class Heart:
    """The thread."""

    def __init__(
        self,
        engine: Engine,
        identity: Identity,
        interval: timedelta,
        in_flight: Callable[[], list[Attempt]],
        lost: Callable[[list[Attempt]], None],
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._interval = interval.total_seconds()
        self._in_flight = in_flight
        self._lost = lost
        self._stopping = False
        #: When it last reached the database, of `time.monotonic()`.
        self.last_beat = 0.0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="awa_sqla heartbeat", daemon=True)

    def first_beat(self) -> None:
        """Beat once, here and now: a heart that cannot reach the database must be noticed before the first claim.

        Raises `ConfigurationError`.
        """
        try:
            self.beat()
        except DBAPIError as exc:
            raise ConfigurationError(
                f"heartbeats use a connection of their own, and it cannot be had: {exc.orig}. Give the worker a "
                "database URL that says everything, not an engine with connect_args or a creator"
            ) from exc

    def start(self) -> None:
        """Start beating."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and say a last time that this process is stopping. Blocks for the beat in progress."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    @property
    def dead(self) -> bool:
        """Whether its thread has ended although nobody has stopped it."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stopping

    def soon(self) -> None:
        """Beat now: cancellations may have gone unheard."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._interval)
            self._wake.clear()
            self._try_to_beat()

    def _try_to_beat(self) -> None:
        try:
            self.beat()
        except Exception as exc:  # noqa: BLE001 - the next beat may find the database again
            log.warning("heartbeat failed, next in %.1f s: %s", self._interval, str(exc).partition("\n")[0])

    def beat(self) -> None:
        """One beat: a transaction for each 500 attempts, and one for the process itself."""
        attempts = sorted(self._in_flight())
        for start in range(0, len(attempts), CHUNK):
            chunk = attempts[start : start + CHUNK]
            parameters = {"ids": [a.id for a in chunk], "leases": [a.run_lease for a in chunk]}
            with Session(self._engine) as session, session.begin():
                session.execute(BEAT, parameters)
                gone = [Attempt(*row) for row in session.execute(LOST, parameters)]
            if gone:
                self._lost(gone)
        with Session(self._engine) as session, session.begin():
            self._identity.write(session)
        self.last_beat = time.monotonic()
