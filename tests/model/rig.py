"""What the machines of a run stand on: session factories, registries, hooks, counts, connections that never wait."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from awa_sqla import FollowUps, Hooks
from tests.model.application import DEAD, hooks, register
from tests.worlds import Database, World

if TYPE_CHECKING:
    from tests.model.machine import Machine


class Rig:
    """What all examples of a run share: the world, its session factories, the counts."""

    def __init__(self, world: World, database: Database) -> None:
        self.world, self.database = world, database
        self.counts: Counter[str] = Counter()
        self.machine: Machine | None = None
        self.hooks: Hooks = hooks(lambda told: self.machine.told.append(told) if self.machine else None)
        self.local, self.everything = world.registry(), FollowUps()  # the dispatcher's is attached nowhere
        register(self.local, lambda cause: True)
        register(self.everything, lambda cause: self.machine is None or self.machine.fails_once(cause), everything=True)
        self._makers: dict[Any, Any] = {}
        self._publish()

    def session(self, *, local: bool, **options: Any) -> Session:
        """A session with the local specs, or with an empty registry: then whatever follows is owed."""
        key = (local, *options.items())
        if key not in self._makers:
            made = self.world.maker(self.local if local else self.world.registry(), **options)
            self.hooks.attach(made)
            self._makers[key] = made
        session = self.world.from_maker(self._makers[key])
        self.world._sessions.remove(session)  # each example closes its own
        return session

    def clear(self) -> None:
        """An empty queue for the next example."""
        for table in ("jobs_hot", "scheduled_jobs", "dlq_entries", "follow_up_obligations", "queue_meta"):
            self.database.execute(f"DELETE FROM {table}")
        self.database.keep_dead_letters(DEAD)

    def _publish(self) -> None:
        """What dispatching processes have said of themselves, a while ago."""
        for spec in self.everything.specs:
            self.database.execute(
                "INSERT INTO follow_up_specs (kind, outcome, name, created_at) "
                "VALUES (%s, %s, %s, now() - interval '1 min')",
                spec.kind,
                spec.outcome.value,
                spec.name,
            )


def waits_for_nobody(connection: Any) -> None:
    """A statement that waits for a lock is a failure, and soon."""
    connection.exec_driver_sql("SET LOCAL lock_timeout = '1s'")


def impatient(engine: Any) -> None:
    """Set the lock timeout in every transaction of an engine."""
    event.listen(engine, "begin", waits_for_nobody)
