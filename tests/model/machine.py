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
from sqlalchemy.orm import Session, SessionTransaction

from awa_sqla import Attempt, FollowUpError, StaleJobError, UniqueConflict
from tests.model.application import Cause, Key, Told
from tests.model.checks import compare
from tests.model.reference import Conflict, Late, Reference, Transaction
from tests.model.rig import Rig
from tests.model.rows import Row, may_claim

SESSIONS = 3
DEEPEST = 2  # savepoints, in all sessions
P = ParamSpec("P")
T = TypeVar("T")

#: Which of several candidates a step takes; small numbers come first when a failure is made smaller.
picks = st.integers(0, 30)
sessions = st.integers(0, SESSIONS - 1)


VETOED = "vetoed"


class VetoError(Exception):
    """A flush was refused because a spec raises: the step has not happened."""


class ConflictedError(Exception):
    """A flush was refused because of duplicates, which it has taken out: the step has not happened."""


class LateError(Exception):
    """What the callable of a late-bound job raises, so that a commit is refused."""


ENDINGS = {VetoError: VETOED, ConflictedError: "conflicts in a flush", LateError: "commits that a callable refused"}


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
    """A rule: count it (as the text that it returns, if any), know whether it went well; a refused flush is its end."""

    @wraps(function)
    def counted(self: Machine, *args: P.args, **kwargs: P.kwargs) -> None:
        self.sound = False
        try:
            done = function(self, *args, **kwargs)
        except tuple(ENDINGS) as exc:
            done = ENDINGS[type(exc)]
        nothing = "nothing to do" if done is False else None
        self.counts[nothing or (done if isinstance(done, str) else function.__name__)] += 1
        self.counts["steps"] += 1
        self.sound = True

    return counted


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
        self.calls: Counter[int] = Counter()  # of the callables of late-bound jobs
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
    def attempted(
        self, sitting: Sitting, act: Callable[..., T], *args: Any, ends: int | None = None, **kwargs: Any
    ) -> T:
        """Do something that flushes first, and perhaps `ends` savepoints from this one on (0: all there is).

        Raises `VetoError`, `ConflictedError` or `LateError` when that was refused, which the reference must explain.
        """
        mine = sitting.transaction
        refusal = None if mine.vetoed else mine.flush() if ends is None else mine.end(ends) if ends else mine.end_all()
        del sitting.savepoints[len(mine.layers) - 1 :]
        try:
            made = act(*args, **kwargs)
        except FollowUpError as exc:
            assert mine.vetoed, f"{exc!r} without a spec that raises"
            assert isinstance(exc.__cause__, ValueError)
            raise VetoError from exc
        except UniqueConflict as exc:
            if not isinstance(refusal, Conflict):
                raise
            self.refused(exc, refusal)
            raise ConflictedError from exc
        except LateError as exc:
            assert isinstance(refusal, Late), f"{exc!r} although it is {refusal}"
            assert exc.args == (refusal.number,)
            raise
        assert refusal is None, f"{act} went through in spite of {refusal}"
        return made

    @staticmethod
    def refused(exc: UniqueConflict, conflict: Conflict) -> None:
        """A conflict is about what the reference says."""
        assert exc.kind == conflict.row.kind, f"{exc!r} instead of {conflict}"
        assert conflict.holder.id in (None, exc.existing_id), f"{exc!r} instead of {conflict}"

    def flush_waiting(self, sitting: Sitting) -> None:
        """Flush before a step that would leave it open whether the next flush is one."""
        if sitting.transaction.waits():
            self.attempted(sitting, sitting.session.flush)

    def transition(
        self,
        sitting: Sitting,
        handle: Handle,
        act: Callable[..., T],
        job: Any,
        *args: Any,
        becomes: Callable[[Row], Row] = lambda row: row,
        **kwargs: Any,
    ) -> tuple[Row, T] | None:
        """Call a verb of an attempt. Returns the job before it and what the verb returned; None when it was stale, or
        when the job that it `becomes` would be a duplicate.

        Which of them is what the reference says.
        """
        before = sitting.transaction.view(handle.key)
        try:
            made = self.attempted(sitting, act, sitting.session, job, *args, **kwargs)
        except StaleJobError as exc:
            assert not self.fits(before, handle), f"{exc} although it is {before}"
            assert (exc.state, exc.found_lease) in self._as_it_stands(before, handle), f"{exc} although it is {before}"
            self.counts["stale attempts refused"] += 1
            return None
        except UniqueConflict as exc:
            twin = sitting.transaction.twin(before, becomes(before)) if before else None
            assert twin is not None, f"{exc!r} without a twin of {before}"
            assert before is not None
            self.refused(exc, Conflict(before, twin))
            sitting.transaction.put(before)
            self.counts["conflicts of a verb"] += 1
            return None
        assert before is not None
        assert sitting.transaction.twin(before, becomes(before)) is None, f"{before} has become a duplicate"
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
        """Whether a job is this attempt's."""
        return row is not None and row.is_held and (row.id, row.lease) == handle.attempt

    def handle(self, sitting: Sitting, pick: int, *, live: bool) -> Handle | None:
        """An attempt that holds for a session, or one that does not; none whose job another session holds.

        Of those that do not, the first are the overtaken ones, whose job runs on under another lease.
        """
        mine, found = sitting.transaction, (list[Handle](), list[Handle](), list[Handle]())
        for handle in self.handles:
            row = mine.view(handle.key)
            if self.fits(row, handle):
                if row is not None and self.may_end(mine, row):
                    found[0].append(handle)
            else:
                found[1 if row is not None and row.is_held else 2].append(handle)
        may = found[0] if live else found[1] or found[2]
        return may[-1 - pick % len(may)] if may else None

    def may_end(self, mine: Transaction, row: Row) -> bool:
        """Whether no other session holds a job, or a key that its end may claim."""
        held = self.reference.elsewhere(mine, row.key)
        return not held and not any(self.reference.blocked(mine, claim) for claim in may_claim(row))

    def remember(self, handle: Handle) -> None:
        """Keep an attempt, and let the oldest go."""
        self.handles = [*self.handles, handle][-16:]

    def commit_now(self, sitting: Sitting) -> None:
        """Commit a session, which a spec or a callable that raises must prevent, and a duplicate once."""
        vetoed = sitting.transaction.vetoed
        try:
            self.attempted(sitting, sitting.session.commit, ends=0)
        except tuple(ENDINGS):
            self.check()
            raise
        assert not vetoed, "a commit went through although a spec raises"
        sitting.transaction.commit()
        sitting.savepoints.clear()
        self.counts["commits"] += 1
        self.check()

    def nest(self, sitting: Sitting) -> None:
        """Open a savepoint."""
        sitting.savepoints.append(self.attempted(sitting, sitting.session.begin_nested))
        sitting.transaction.begin_nested()

    def release_now(self, sitting: Sitting, number: int) -> None:
        """Release a savepoint, counted from 1, and those inside it."""
        vetoed = sitting.transaction.vetoed
        try:
            self.attempted(sitting, sitting.savepoints[number - 1].commit, ends=number)
        except (ConflictedError, LateError):
            if number < len(sitting.savepoints):  # what it has bound would come and go with the inner one
                self.undo_now(sitting, number)
            raise
        assert not vetoed, "a savepoint was released although a spec raises"
        del sitting.savepoints[number - 1 :]
        sitting.transaction.release(number)
        self.counts["savepoints released"] += 1

    @staticmethod
    def undo_now(sitting: Sitting, number: int) -> None:
        """Roll a savepoint back, and those inside it."""
        sitting.savepoints[number - 1].rollback()
        del sitting.savepoints[number - 1 :]
        sitting.transaction.roll_back_to(number)

    def check(self) -> None:
        """What is committed is what the reference says."""
        self.counts["checks"] += 1
        assert self.calls == Counter(self.reference.called), "a callable was not called once"
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
