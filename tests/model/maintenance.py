"""Rules: maintenance, other processes, and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sqlalchemy.orm import Session

from awa_sqla import Attempt, Outcome
from awa_sqla.maintenance import Dispatched, dispatch_obligation, promote, rescue
from awa_sqla.worker.heartbeat import BEAT
from tests.model.application import DEAD, Cause, brought_by, poisoned
from tests.model.machine import Handle, Machine, picks, step
from tests.model.rows import EXPIRED, RESCUED, Row

STALE_AFTER = timedelta(minutes=1)
some_run = precondition(lambda self: any(row.is_held for row in self.reference.free()))
_LATE = """
SELECT id FROM jobs_hot WHERE state = 'waiting_external' AND callback_timeout_at < now()
ORDER BY callback_timeout_at, id
"""
#: Nothing is left of an earlier attempt's callback.
_ANEW = """
UPDATE jobs_hot SET state = 'running', attended_at = NULL, callback_id = NULL, callback_timeout_at = NULL,
callback_answer = NULL WHERE id = %s
"""
survives = st.sampled_from([True, True, True, False])


class Maintenance(Machine):
    """What keeps the tables moving, and what breaks in between."""

    @property
    def mine(self) -> Any:
        """The transaction of maintenance."""
        return self.reference.transactions[-1]

    def _pass(self, survives: bool, act: Callable[[Session], None]) -> None:
        """One pass in a session of its own, which commits or dies before it does."""
        session = self.rig.session(local=True)
        try:
            act(session)
            if survives:
                session.commit()
                self.mine.commit()
            else:
                self.mine.roll_back()
        finally:
            session.close()
        self.check()

    @precondition(lambda self: any(row.store == "scheduled" and row.due for row in self.reference.free()))
    @rule(survives=survives)
    @step
    def promote(self, survives: bool) -> None:
        due = {row.id: row for row in self.reference.free() if row.store == "scheduled" and row.due}
        order = [row.id for row in self.database.rows("SELECT id FROM scheduled_jobs ORDER BY run_at, id")]

        def act(session: Session) -> None:
            done = promote(session)
            moved = [row for id_ in order if (row := due.get(id_)) and self._returns(row, row.promoted())]
            assert (done.jobs, done.queues) == (len(moved), {row.queue for row in moved})

        self._pass(survives, act)

    def _returns(self, row: Row, after: Row, *outcomes: Outcome) -> bool:
        """A job moves, unless its unique key is held: then it is cancelled; or about to be: then it stays."""
        twin = self.mine.twin(row, after)
        if twin is None and row.comes_in(after) and self.reference.locked(self.mine, row.claim):
            self.counts["jobs that a sweep left"] += 1
            return False
        if twin is not None:
            self.counts["duplicates that a sweep cancelled"] += 1
            self.mine.stage(row.cancelled(f"duplicate of job {twin.id}"), Outcome.CANCELLED, defer=True)
            return False
        self.mine.stage(after, *outcomes, defer=True)
        return True

    @precondition(lambda self: any(row.is_lost for row in self.reference.free()))
    @rule(survives=survives)
    @step
    def rescue(self, survives: bool) -> None:
        late = [row.id for row in self.database.rows(_LATE)]
        lost = sorted((row for row in self.reference.free() if row.is_lost), key=lambda row: self._turn(row, late))

        def act(session: Session) -> None:
            ended = rescue(session, stale_after=STALE_AFTER)
            assert ended == [(row.id, row.lease) for row in lost if self._rescued(row)]

        self._pass(survives, act)

    @staticmethod
    def _turn(row: Row, late: list[int]) -> tuple[int, int]:
        """Whose worker is gone comes first: handlers that wait, then what runs; then callbacks, the latest last."""
        assert row.id is not None
        if row.silent and row.is_held:
            return 0 if row.attended else 1, row.id
        return 2, late.index(row.id)

    def _rescued(self, row: Row) -> bool:
        """Whether an attempt ends: with its job tried again, failed, or cancelled as a duplicate."""
        self.counts["waits rescued"] += row.state == "waiting_external"
        after = row.failed(RESCUED if row.silent and row.is_held else EXPIRED)
        spent = () if after.state == "retryable" else (Outcome.EXHAUSTED,)
        self._returns(row, after, Outcome.RESCUED, *spent)
        return self.mine.view(row.key) is not row

    @precondition(lambda self: bool(self.reference.owed))
    @rule(survives=survives)
    @step
    def dispatch(self, survives: bool) -> object:
        due = [owed for owed in self.reference.owed.values() if not owed.waits and owed.spec.unique]
        if any(self.reference.locked(self.mine, brought_by(owed.happened.key)) for owed in due):
            return False  # it would wait
        self._dispatch(survives)
        return None

    def _dispatch(self, survives: bool) -> bool:
        """One obligation, if one is due."""
        known = {
            row.id: (row.job_id, row.outcome, row.lease, row.spec)
            for row in self.database.rows(
                "SELECT *, (snapshot ->> 'run_lease')::bigint AS lease FROM follow_up_obligations"
            )
        }
        done: list[Dispatched] = []

        def act(session: Session) -> None:
            one = dispatch_obligation(session, self.rig.everything.specs)
            done.extend([one] if one else [])
            if one is None:
                assert all(owed.waits for owed in self.reference.owed.values()), "an obligation was passed over"
            else:
                self._paid(known[one.obligation_id], one, survives)

        self._failed_before = set(self.failed_once)
        self._pass(survives, act)
        return bool(done)

    def _paid(self, cause: Cause, done: Dispatched, survives: bool) -> None:
        owed = self.reference.owed[cause]
        raises = poisoned(owed.happened.kind, owed.happened.poison, owed.spec.name)
        assert (done.error is not None) == (raises and cause not in self._failed_before), (cause, done)
        if not survives:
            return
        if done.error is not None:
            assert "poisoned" in done.error
            owed.tries, owed.waits = owed.tries + 1, True
            self.counts["dispatches that failed"] += 1
            return
        del self.reference.owed[cause]
        self.mine.follow(owed.happened, owed.spec)
        assert self.mine.flush() is None

    # ------------------------------------------------------------------------------- time and others
    @precondition(lambda self: any(row.store == "scheduled" and not row.due for row in self.reference.free()))
    @rule()
    @step
    def time_passes(self) -> None:
        """Everything that waits for its time is due, but for rows that a transaction holds."""
        self.database.execute(
            "UPDATE scheduled_jobs SET run_at = now() - interval '1 s' "
            "WHERE id IN (SELECT id FROM scheduled_jobs FOR UPDATE SKIP LOCKED)"
        )
        self.database.execute("UPDATE follow_up_obligations SET next_attempt_at = now() - interval '1 s'")
        for row in self.reference.free():
            if row.store == "scheduled":
                self._replace(row, due=True)
        for owed in self.reference.owed.values():
            owed.waits = False

    def _replace(self, row: Row, **values: Any) -> None:
        self.reference.committed[row.key] = replace(row, **values)

    def _running(self, pick: int) -> Row:
        may = [row for row in self.reference.free() if row.is_held]
        return may[pick % len(may)]

    @some_run
    @rule(pick=picks, noticed=st.booleans())
    @step
    def worker_dies(self, pick: int, noticed: bool) -> None:
        """An attempt whose worker has not beaten for an hour."""
        self.falls_silent(self._running(pick))
        if noticed:
            self.rescue(survives=True)

    def falls_silent(self, row: Row) -> None:
        """Nobody is left to end this attempt."""
        self.database.execute("UPDATE jobs_hot SET heartbeat_at = now() - interval '1 h' WHERE id = %s", row.id)
        self._replace(row, silent=True)

    @precondition(lambda self: any(row.callback for row in self.reference.free()))
    @rule(pick=picks, noticed=st.booleans())
    @step
    def callback_is_late(self, pick: int, noticed: bool) -> None:
        """A callback that should have come by now; it matters where the job waits."""
        may = [row for row in self.reference.free() if row.callback]
        row = may[pick % len(may)]
        late = "UPDATE jobs_hot SET callback_timeout_at = clock_timestamp() - interval '1 s' WHERE id = %s"
        self.database.execute(late, row.id)
        self._replace(row, expired=True)
        if noticed:
            self.rescue(survives=True)

    @precondition(lambda self: any(row.silent and row.is_held for row in self.reference.free()))
    @rule()
    @step
    def beat(self) -> None:
        """The workers of all attempts are heard of after all."""
        rows = {row.id: row for row in self.reference.free() if row.id and row.lease}

        def act(session: Session) -> None:
            session.execute(BEAT, {"ids": list(rows), "leases": [row.lease for row in rows.values()]})

        for row in rows.values():
            self._replace(row, silent=False)
        self._pass(True, act)

    @some_run
    @rule(pick=picks)
    @step
    def thief(self, pick: int) -> None:
        """The same job runs under another lease, as after a rescue and the next claim."""
        row = self._running(pick)
        assert row.id is not None
        self.database.move_on(row.id)
        self.database.execute(_ANEW, row.id)
        lease = self.reference.issued(self.database.job(row.id).run_lease)
        self.reference.committed[row.key] = replace(row.claimed(row.id, lease), silent=row.silent)
        self.remember(Handle(row.key, Attempt(row.id, lease)))
        self.check()

    def settle(self) -> None:
        """Pay everything that is owed: then nothing is left but follow-ups, once each."""
        while self.reference.owed:
            self.time_passes()
            assert self._dispatch(survives=True)
        self.check()
        arrived = [row for row in self.reference.committed.values() if row.store == "dead"]
        assert all(row.queue == DEAD for row in arrived)
        self.counts["dead letters"] += len(arrived)
        self.counts["jobs"] += len(self.reference.committed)
        self.counts["outcomes"] += len(self.reference.outcomes)
        self.counts["follow-ups"] += sum(row.parent is not None for row in self.reference.committed.values())
