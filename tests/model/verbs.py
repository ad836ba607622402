"""Rules: the verbs that enqueue, claim and end attempts."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from sqlalchemy import inspect

from awa_sqla import (
    Attempt,
    Completion,
    InvalidJob,
    JobNotFound,
    Outcome,
    cancel,
    claim,
    complete,
    complete_many,
    enqueue,
    fail,
    retry_after,
    set_progress,
    snooze,
)
from awa_sqla.session.verbs import cancel_attempt, put_back
from tests.model.application import HOUR, PLAIN, QUEUES, TASK, Plain, Task, key_of
from tests.model.machine import Handle, Machine, Sitting, picks, sessions, step
from tests.model.rows import Row

TERMINAL = ("completed", "failed", "cancelled")
lives = st.sampled_from([True, True, True, False])
results = st.sampled_from([None, {"n": 1}, [1, "two"], "text", 0])
delays = st.sampled_from([HOUR, timedelta(0)])
some_queues = st.permutations(QUEUES) | st.lists(st.sampled_from(QUEUES), min_size=1, max_size=2)
jobs = st.tuples(
    st.sampled_from([False, False, True]),
    st.sampled_from(["now", "now", "now", "now", "past", "delay", "future"]),
    st.sampled_from(QUEUES[:3]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([False] * 7 + [True]),
)
given_attempts = precondition(lambda self: self.is_running)


def when_due(when: str) -> dict[str, Any]:
    """The options of a job that is due then."""
    now = datetime.now(UTC)
    return {
        "now": {},
        "delay": {"delay": HOUR},
        "past": {"run_at": now - HOUR},
        "future": {"run_at": now + HOUR},
    }[when]


class Verbs(Machine):
    """Everything that an application does to its jobs."""

    @property
    def is_running(self) -> bool:
        """Whether an attempt holds for one of the sessions."""
        return any(self.handle(one, 0, live=True) for one in self.sittings)

    @initialize(expire=st.booleans(), autoflush=st.booleans(), jobs=st.lists(jobs, min_size=2, max_size=5))
    def begin(self, expire: bool, autoflush: bool, jobs: list[tuple[Any, ...]]) -> None:
        """Three sessions, and some jobs."""
        self.open_sessions(expire=expire, autoflush=autoflush)
        self._enqueue(self.sittings[0], jobs)
        self.commit_now(self.sittings[0])

    @rule(s=sessions, jobs=st.lists(jobs, min_size=1, max_size=3), commits=st.booleans())
    @step
    def enqueue(self, s: int, jobs: list[tuple[Any, ...]], commits: bool) -> None:
        self._enqueue(self.sittings[s], jobs)
        if commits:
            self.commit_now(self.sittings[s])

    def _enqueue(self, sitting: Sitting, jobs: list[tuple[Any, ...]]) -> None:
        for plain, when, queue, priority, most, poison in jobs:
            n = next(self.numbers)
            args = Plain(n=str(n)) if plain else Task(n=n, poison=poison)
            options = {"queue": queue, "priority": priority, "max_attempts": most}
            job = enqueue(sitting.session, args, **options, **when_due(when))  # type: ignore[call-overload]
            key = key_of(PLAIN if plain else TASK, args.model_dump())
            row = Row(key, queue, priority, most, poison and not plain)
            later = {"state": "scheduled", "store": "scheduled", "due": when == "past"} if when != "now" else {}
            sitting.transaction.put(replace(row, **later))  # type: ignore[arg-type]
            sitting.hold(key, job)

    @precondition(lambda self: any(row.state == "available" for row in self.reference.free()))
    @rule(s=sessions, queues=some_queues, limit=st.integers(1, 4), commits=st.booleans())
    @step
    def claim(self, s: int, queues: list[str], limit: int, commits: bool) -> object:
        sitting = self.sittings[s]
        mine = sitting.transaction
        asked = queues[0] if len(queues) == 1 else queues
        jobs = self.attempted(sitting, claim, sitting.session, asked, limit=limit, worker_id=f"session {s}")
        free = [r for r in mine.rows() if r.state == "available" and not self.reference.elsewhere(mine, r.key)]
        left = limit
        for queue in dict.fromkeys(queues):
            got = [key_of(job.kind, job.args, job.meta) for job in jobs if job.queue == queue]
            may = {row.key: row for row in free if row.queue == queue}
            must = [row for row in may.values() if row.certain]
            assert set(got) <= set(may), f"{set(got) - set(may)} could not be claimed"
            assert min(left, len(must)) <= len(got) <= left, f"claimed {got} of {must}, {left} wanted"
            passed = [row.priority for row in must if row.key not in got]
            assert not got or not passed or max(may[key].priority for key in got) <= min(passed)
            left -= len(got)
        assert left == limit - len(jobs)
        earlier = self.reference.last_lease
        for job in sorted(jobs, key=lambda job: job.run_lease):
            self.reference.issued(job.run_lease)
        for job in jobs:
            row = mine.view(key_of(job.kind, job.args, job.meta))
            assert row is not None
            assert row.lease <= earlier
            mine.started(row.claimed(job.id, job.run_lease))
            assert Attempt.of(job) == (job.id, job.run_lease)
            assert (job.attempt, job.state) == (row.attempt + 1, "running")
            self.remember(Handle(row.key, Attempt.of(job), job))
            sitting.hold(row.key, job)
        self.counts["jobs claimed"] += len(jobs)
        if commits:
            self.commit_now(sitting)
        return bool(jobs)

    claim_again = claim  # twice as likely

    def _end(self, s: int, pick: int, live: bool, by_object: bool) -> tuple[Sitting, Handle, Any] | None:
        """A session and an attempt to end in it: session `s` if there is one for it, else the next one."""
        for wanted in (live, False):
            for sitting in (*self.sittings[s:], *self.sittings[:s]):
                if (handle := self.handle(sitting, pick, live=wanted)) is None:
                    continue
                # A session that claims a job again has one object for both attempts: it stands for the later one.
                same = handle.job is not None and Attempt.of(handle.job) == handle.attempt
                return sitting, handle, handle.job if by_object and same else handle.attempt
        return None

    @given_attempts
    @rule(s=sessions, pick=picks, live=lives, by_object=st.booleans(), result=results)
    @step
    def complete(self, s: int, pick: int, live: bool, by_object: bool, result: Any) -> object:
        if (found := self._end(s, pick, live, by_object)) is None:
            return False
        sitting, handle, job = found
        if (done := self.transition(sitting, handle, complete, job, result=result)) is None:
            return "complete"
        before, made = done
        sitting.transaction.stage(before.completed(result), Outcome.COMPLETED)
        assert (made.state, made.result, made in sitting.session) == ("completed", result, True)
        return True

    @given_attempts
    @rule(
        s=sessions,
        pick=picks,
        live=lives,
        by_object=st.booleans(),
        terminal=st.sampled_from([False, False, True]),
        error=st.sampled_from(["no", ValueError("bad")]),
    )
    @step
    def fail(self, s: int, pick: int, live: bool, by_object: bool, terminal: bool, error: Any) -> object:
        if (found := self._end(s, pick, live, by_object)) is None:
            return False
        self._failed(found, lambda row: row.failed(str(error), terminal=terminal), fail, error, terminal=terminal)
        return True

    @given_attempts
    @rule(s=sessions, pick=picks, live=lives, by_object=st.booleans(), delay=delays)
    @step
    def retry_after(self, s: int, pick: int, live: bool, by_object: bool, delay: timedelta) -> object:
        if (found := self._end(s, pick, live, by_object)) is None:
            return False
        self._failed(found, lambda row: row.failed("later", due=not delay), retry_after, delay, error="later")
        return True

    def _failed(self, found: tuple[Sitting, Handle, Any], change: Any, act: Any, *args: Any, **kwargs: Any) -> None:
        sitting, handle, job = found
        done = self.transition(sitting, handle, act, job, *args, becomes=change, **kwargs)
        if done is not None:
            before, made = done
            after = change(before)
            outcome = Outcome.RETRIED if after.state == "retryable" else Outcome.EXHAUSTED
            sitting.transaction.stage(after, outcome)
            assert (made.id, made.state, made.attempt) == (after.id, after.state, after.attempt)
            sitting.hold(after.key, made)

    @given_attempts
    @rule(s=sessions, pick=picks, live=lives, by_object=st.booleans(), delay=delays, counts=st.booleans())
    @step
    def snooze(self, s: int, pick: int, live: bool, by_object: bool, delay: timedelta, counts: bool) -> object:
        if (found := self._end(s, pick, live, by_object)) is None:
            return False
        sitting, handle, job = found
        act = snooze if counts else put_back
        becomes = lambda row: row.put_back(due=not delay, counts=counts)  # noqa: E731
        if (done := self.transition(sitting, handle, act, job, delay, becomes=becomes)) is not None:
            before, made = done
            after = becomes(before)
            sitting.transaction.stage(after)
            assert (made.id, made.attempt, made.snoozes) == (after.id, after.attempt, after.snoozes)
            sitting.hold(after.key, made)
        return True

    @given_attempts
    @rule(
        s=sessions,
        pick=picks,
        live=lives,
        by_object=st.booleans(),
        percent=st.sampled_from([None, 40, 99.5]),
        message=st.sampled_from([None, "half"]),
        metadata=st.sampled_from([{}, {"page": 1}, {"page": 2, "of": 9}]),
    )
    @step
    def set_progress(
        self, s: int, pick: int, live: bool, by_object: bool, percent: Any, message: Any, metadata: Any
    ) -> object:
        if (found := self._end(s, pick, live, by_object)) is None:
            return False
        sitting, handle, job = found
        told = {"message": message, "metadata": metadata}
        if (done := self.transition(sitting, handle, set_progress, job, percent, **told)) is not None:
            after = done[0].progressed(percent, message, metadata)
            sitting.transaction.put(after)
            assert done[1].progress == after.progress
        return True

    @given_attempts
    @rule(s=sessions, pick=picks, live=lives, by_object=st.booleans())
    @step
    def cancel_own_attempt(self, s: int, pick: int, live: bool, by_object: bool) -> object:
        if (found := self._end(s, pick, live, by_object)) is None:
            return False
        sitting, handle, job = found
        if (done := self.transition(sitting, handle, cancel_attempt, job, "gave up")) is not None:
            sitting.transaction.stage(done[0].cancelled("gave up"), Outcome.CANCELLED)
        return True

    @given_attempts
    @rule(s=sessions, picked=st.lists(st.tuples(picks, lives, results), min_size=1, max_size=4))
    @step
    def complete_many(self, s: int, picked: list[tuple[int, bool, Any]]) -> object:
        sitting = self.sittings[s]
        self.flush_waiting(sitting)
        batch: dict[int, tuple[Handle, Any]] = {}
        for pick, live, result in picked:
            handle = self.handle(sitting, pick, live=live)
            if handle is not None:
                batch.setdefault(handle.attempt.id, (handle, result))
        items = [Completion(handle.attempt, result) for handle, result in batch.values()]
        mine = sitting.transaction
        fits = [id_ for id_, (handle, _) in batch.items() if self.fits(mine.view(handle.key), handle)]
        done = self.attempted(sitting, complete_many, sitting.session, items)
        assert (done.completed, done.stale) == (fits, [id_ for id_ in batch if id_ not in fits])
        for id_ in sorted(fits):
            handle, result = batch[id_]
            row = mine.view(handle.key)
            assert row is not None
            mine.stage(row.completed(result), Outcome.COMPLETED)
        self.counts["stale attempts refused"] += len(done.stale)
        return bool(batch)

    @precondition(lambda self: sum(row.state not in TERMINAL for row in self.reference.committed.values()) > 2)
    @rule(s=sessions, pick=picks, by_object=st.booleans())
    @step
    def cancel(self, s: int, pick: int, by_object: bool) -> object:
        sitting = self.sittings[s]
        mine = sitting.transaction
        if by_object:
            may = [(key, job) for key, job in sitting.objects if not self.reference.elsewhere(mine, key)]
        else:
            may = [(row.key, row.id) for row in mine.rows() if row.id and not self.reference.elsewhere(mine, row.key)]
        if not may:
            return False
        key, job = may[-1 - pick % len(may)]
        if by_object and job not in sitting.session:
            self.flush_waiting(sitting)
        try:
            made = self.attempted(sitting, cancel, sitting.session, job, reason="enough")
            row = mine.view(key)
        except (JobNotFound, InvalidJob) as exc:
            row = mine.view(key)
            # The object may be of a move that was rolled back, or taken out of the session before the flush; and a
            # follow-up whose savepoint was rolled back is stored again, with another id.
            moved = by_object and inspect(job).transient
            gone = row is None or moved or (by_object and row.parent and inspect(job).identity != (row.id,))
            assert gone, f"{exc!r} although it is {row}"
            return True
        assert row is not None
        if row.state in TERMINAL:
            assert made is None
        else:
            assert made is not None
            assert row.id in (None, made.id)
            mine.stage(replace(row, id=made.id).cancelled("enough"), Outcome.CANCELLED)
            sitting.hold(key, made)
        return True
