"""The machine: three sessions on connections of their own, one database, and the reference beside them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from awa_sqla import Attempt, FollowUpError, FollowUps, Hooks, StaleJobError
from tests.model.application import DEAD, Cause, Key, Told, hooks, register
from tests.model.checks import compare
from tests.model.reference import Reference, Row, Transaction
from tests.worlds import Database, World

SESSIONS = 3
P = ParamSpec("P")
T = TypeVar("T")

#: Which of several candidates a step takes; small numbers come first when a failure is made smaller.
picks = st.integers(0, 30)
sessions = st.integers(0, SESSIONS - 1)


VETOED = "vetoed"


class VetoError(Exception):
    """A flush was refused because a spec raises: the step has not happened."""


@dataclass
class Handle:
    """An attempt that somebody was given, perhaps long ago, and the object that came with it."""

    key: Key
    attempt: Attempt
    job: Any = None


@dataclass
class Sitting:
    """One session: its transaction in the reference, its open savepoints, the objects that its user holds."""

    session: Session
    transaction: Transaction
    savepoints: list[SessionTransaction] = field(default_factory=list[SessionTransaction])
    objects: list[tuple[Key, Any]] = field(default_factory=list[tuple[Key, Any]])

    def hold(self, key: Key, row: Any) -> None:
        """Remember an object, and let the oldest go."""
        self.objects = [*self.objects, (key, row)][-12:]


def step(function: Callable[Concatenate[Any, P], object]) -> Callable[Concatenate[Any, P], None]:
    """A rule: count it (as the text that it returns, if any), know whether it went well, and let a veto be its end."""

    @wraps(function)
    def counted(self: Machine, *args: P.args, **kwargs: P.kwargs) -> None:
        self.sound = False
        try:
            done = function(self, *args, **kwargs)
        except VetoError:
            done = VETOED
        nothing = "nothing to do" if done is False else None
        self.counts[nothing or (done if isinstance(done, str) else function.__name__)] += 1
        self.counts["steps"] += 1
        self.sound = True

    return counted


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


class Machine(RuleBasedStateMachine):
    """What the rules stand on."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.rig, self.world, self.database, self.counts = rig, rig.world, rig.database, rig.counts
        self.counts["examples"] += 1
        self.sound = True
        self.told: list[Told] = []
        self.failed_once: set[Cause] = set()
        self.numbers = itertools.count(1)
        self.handles: list[Handle] = []
        self.reference = Reference(True, True, False, True)  # the last is for maintenance
        self.sittings: list[Sitting] = []
        rig.machine = self
        rig.clear()

    def open_sessions(self, *, expire: bool, autoflush: bool) -> None:
        """One with SQLAlchemy's defaults, one with other options, one without specs."""
        options = {"expire_on_commit": expire, "autoflush": autoflush}
        made = (
            self.rig.session(local=True),
            self.rig.session(local=True, **options),
            self.rig.session(local=False),
        )
        self.sittings = [Sitting(*pair) for pair in zip(made, self.reference.transactions, strict=False)]

    def fails_once(self, cause: Cause) -> bool:
        """Whether a dispatched spec of a poisoned job raises: the first time."""
        first = cause not in self.failed_once
        self.failed_once.add(cause)
        return first

    # ------------------------------------------------------------------------------------------ for the rules
    def attempted(self, sitting: Sitting, act: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Do something that may flush. Raises `VetoError` when a spec raised, which only a veto explains."""
        try:
            return act(*args, **kwargs)
        except FollowUpError as exc:
            assert sitting.transaction.vetoed, f"{exc!r} without a spec that raises"
            assert isinstance(exc.__cause__, ValueError)
            raise VetoError from exc

    def transition(
        self, sitting: Sitting, handle: Handle, act: Callable[..., T], job: Any, *args: Any, **kwargs: Any
    ) -> tuple[Row, T] | None:
        """Call a verb of an attempt. Returns the job before it and what the verb returned; None when it was stale.

        Which of the two is what the reference says it must be.
        """
        before = sitting.transaction.view(handle.key)
        try:
            made = self.attempted(sitting, act, sitting.session, job, *args, **kwargs)
        except StaleJobError as exc:
            assert not self.fits(before, handle), f"{exc} although it is {before}"
            assert (exc.state, exc.found_lease) in self._as_it_stands(before, handle), f"{exc} although it is {before}"
            self.counts["stale attempts refused"] += 1
            return None
        assert before is not None
        assert self.fits(before, handle), f"{act.__name__} of {handle.attempt} went through although it is {before}"
        return before, made

    @staticmethod
    def _as_it_stands(row: Row | None, handle: Handle) -> list[tuple[str | None, int | None]]:
        """What a `StaleJobError` may say of a job: its state and lease, or that it has left the table."""
        gone: tuple[None, None] = (None, None)
        if row is None or row.store != "hot":
            return [gone]
        if row.parent is None or row.id == handle.attempt.id:
            return [(row.state, row.lease)]
        # A follow-up whose row was rolled back: it is stored again, and then with another id.
        return [gone] if row.id is not None else [gone, (row.state, row.lease)]

    @staticmethod
    def fits(row: Row | None, handle: Handle) -> bool:
        """Whether a job runs under this attempt."""
        return row is not None and row.state == "running" and (row.id, row.lease) == handle.attempt

    def handle(self, sitting: Sitting, pick: int, *, live: bool) -> Handle | None:
        """An attempt that holds for a session, or one that does not; none whose job another session holds.

        Of those that do not, the first are the overtaken ones, whose job runs on under another lease.
        """
        mine, found = sitting.transaction, (list[Handle](), list[Handle](), list[Handle]())
        for handle in self.handles:
            row = mine.view(handle.key)
            if self.fits(row, handle):
                if not self.reference.elsewhere(mine, handle.key):
                    found[0].append(handle)
            else:
                found[1 if row is not None and row.state == "running" else 2].append(handle)
        may = found[0] if live else found[1] or found[2]
        return may[-1 - pick % len(may)] if may else None

    def remember(self, handle: Handle) -> None:
        """Keep an attempt, and let the oldest go."""
        self.handles = [*self.handles, handle][-16:]

    def commit_now(self, sitting: Sitting) -> None:
        """Commit a session, which a spec that raises must prevent."""
        vetoed = sitting.transaction.vetoed
        try:
            self.attempted(sitting, sitting.session.commit)
        finally:
            if vetoed:
                self.check()
        assert not vetoed, "a commit went through although a spec raises"
        sitting.transaction.commit()
        sitting.savepoints.clear()
        self.counts["commits"] += 1
        self.check()

    def check(self) -> None:
        """What is committed is what the reference says."""
        self.counts["checks"] += 1
        compare(self.reference, self.database, self.told)

    # -------------------------------------------------------------------------------------------- at the end
    def teardown(self) -> None:
        """Roll back what is open, pay what is owed, and count for the last time."""
        try:
            for sitting in self.sittings:
                sitting.session.close()
                sitting.transaction.roll_back()
            if self.sound:
                self.settle()
        finally:
            self.rig.machine = None

    def settle(self) -> None:
        """Overridden: dispatch every obligation."""
        self.check()


def waits_for_nobody(connection: Any) -> None:
    """A statement that waits for a lock is a failure, and soon."""
    connection.exec_driver_sql("SET LOCAL lock_timeout = '1s'")


def impatient(engine: Any) -> None:
    """Set the lock timeout in every transaction of an engine."""
    event.listen(engine, "begin", waits_for_nobody)
