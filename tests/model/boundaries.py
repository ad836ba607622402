"""Rules: transactions, savepoints, the session's identity map, and connections that break."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sqlalchemy import inspect
from sqlalchemy.exc import DBAPIError, InvalidRequestError

from awa_sqla import Job, ScheduledJob
from tests.model.application import Key
from tests.model.machine import DEEPEST, ENDINGS, Machine, Sitting, picks, step

_STORES = {Job: "hot", ScheduledJob: "scheduled"}
some_are_changed = precondition(lambda self: any(sitting.transaction.changed for sitting in self.sittings))
some_may_nest = precondition(lambda self: sum(len(sitting.savepoints) for sitting in self.sittings) < DEEPEST)
some_are_nested = precondition(lambda self: bool(self.nested()))


class Boundaries(Machine):
    """Everything that happens to a session between a verb and its commit."""

    def _changed(self, pick: int) -> Sitting:
        """One of the sessions that have something to commit."""
        may = [sitting for sitting in self.sittings if sitting.transaction.changed]
        return may[pick % len(may)]

    def nested(self) -> list[Sitting]:
        """The sessions that have changed something in a savepoint."""
        return [one for one in self.sittings if any(layer.changed for layer in one.transaction.layers[1:])]

    # --------------------------------------------------------------------------------------- the root
    @some_are_changed
    @rule(pick=picks)
    @step
    def commit(self, pick: int) -> None:
        self.commit_now(self._changed(pick))

    @some_are_changed
    @rule(pick=picks, how=st.sampled_from(["rollback", "close", "crash", "crash in flush", "invalidate"]))
    @step
    def undo(self, pick: int, how: str) -> str:
        """The transaction ends without a commit: as its user wishes, or because the connection breaks."""
        sitting = self._changed(pick)
        session = sitting.session
        if how == "rollback":
            session.rollback()
        elif how == "close":
            session.close()
        else:
            connection = session.connection()
            pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            if how == "invalidate":
                session.invalidate()
            self._end_backend(pid)
            if how != "invalidate":
                self._broken(sitting, flush=how == "crash in flush")
        sitting.transaction.roll_back()
        sitting.savepoints.clear()
        assert all(times == 1 for times in self.calls.values()), self.calls
        self.reference.called = set(self.calls)  # a commit that breaks may have come so far, or not
        self.check()
        return how

    def _end_backend(self, pid: int) -> None:
        self.database.execute("SELECT pg_terminate_backend(%s)", pid)
        while self.database.value("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid):
            time.sleep(0.001)

    def _broken(self, sitting: Sitting, *, flush: bool) -> None:
        """Commit over a connection that is gone."""
        try:
            if flush:
                self.attempted(sitting, sitting.session.flush)
            self.attempted(sitting, sitting.session.commit, ends=0)
        except DBAPIError:
            self.counts["commits that a crash broke"] += 1
        except tuple(ENDINGS):
            pass
        else:
            raise AssertionError("a commit went through without a connection")
        try:
            sitting.session.rollback()
        except DBAPIError:  # in the middle of the savepoints
            sitting.session.close()

    # --------------------------------------------------------------------------------- savepoints
    @some_may_nest
    @rule(pick=picks)
    @step
    def begin_nested(self, pick: int) -> None:
        may = [sitting for sitting in self.sittings if len(sitting.savepoints) < DEEPEST]
        self.nest(may[pick % len(may)])

    @some_are_nested
    @rule(pick=picks, outer=st.booleans())
    @step
    def release(self, pick: int, outer: bool) -> None:
        sitting = self.nested()[pick % len(self.nested())]
        self.release_now(sitting, 1 if outer else len(sitting.savepoints))

    @some_are_nested
    @rule(pick=picks, outer=st.booleans())
    @step
    def rollback_to_savepoint(self, pick: int, outer: bool) -> None:
        sitting = self.nested()[pick % len(self.nested())]
        self.undo_now(sitting, 1 if outer else len(sitting.savepoints))

    # ------------------------------------------------------------------------------- identity map
    @some_are_changed
    @rule(pick=picks, how=st.sampled_from(["flush", "expire_all", "expunge_all"]))
    @step
    def disturb(self, pick: int, how: str) -> str:
        """What else may happen to a session between a verb and its commit."""
        sitting = self._changed(pick)
        if how == "flush":
            self.attempted(sitting, sitting.session.flush)
            return how
        self.flush_waiting(sitting)
        added = [(key, row) for key, row in sitting.objects if inspect(row).pending]
        getattr(sitting.session, how)()
        if how == "expunge_all":
            for key, row in added:
                self._taken_out(sitting, key, row)
        return how

    @precondition(lambda self: bool(self.present()))
    @rule(pick=picks)
    @step
    def expunge(self, pick: int) -> object:
        may = self.present()
        sitting, key, row = may[-1 - pick % len(may)]
        if not sitting.transaction.waits(key):
            self.flush_waiting(sitting)
        added = inspect(row).pending
        sitting.session.expunge(row)
        if added:
            self._taken_out(sitting, key, row)
        return None

    def present(self) -> list[tuple[Sitting, Key, Any]]:
        """The objects that are in their sessions."""
        return [(one, key, row) for one in self.sittings for key, row in one.objects if row in one.session]

    def loaded(self) -> list[tuple[Sitting, Key, Any]]:
        """Those of them that can be refreshed."""
        return [found for found in self.present() if inspect(found[2]).persistent]

    @staticmethod
    def _taken_out(sitting: Sitting, key: Any, row: Any) -> None:
        """A job that was only added is no job when its user takes it out; the row of a move comes back."""
        known = sitting.transaction.view(key)
        fresh = known is not None and known.lease == 0 and known.state != "cancelled" and known.attempt == 0
        if fresh or sitting.transaction.waits(key):
            sitting.transaction.forget(key)

    @precondition(lambda self: bool(self.loaded()))
    @rule(pick=picks)
    @step
    def refresh(self, pick: int) -> None:
        may = self.loaded()
        sitting, key, row = may[-1 - pick % len(may)]
        self.flush_waiting(sitting)
        held = row.held_attempt if isinstance(row, Job) else None
        before = sitting.transaction.view(key)
        try:
            self.attempted(sitting, sitting.session.refresh, row)
        except InvalidRequestError:
            there = before is not None and before.store == _STORES[type(row)] and before.parent is None
            assert not there, f"{row!r} could not be refreshed although it is {before}"
            return
        assert before is not None
        assert row.state == before.state
        assert not isinstance(row, Job) or row.held_attempt == held, "a refresh changed the attempt"
