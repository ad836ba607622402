"""Rules: jobs that are unique, many at once, or bound late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sqlalchemy import inspect

from awa_sqla import (
    EnqueueRequest,
    JobArgs,
    UniqueConflict,
    enqueue,
    enqueue_many,
    enqueue_unique,
    fail,
    retry_after,
    snooze,
)
from tests.model.application import (
    HOUR,
    KINDS,
    PENDING,
    PLAIN,
    POOL,
    QUEUES,
    READY,
    TASK,
    UNIQUE,
    Claim,
    Plain,
    Task,
    key_of,
)
from tests.model.machine import DEEPEST, Handle, LateError, Sitting, picks, sessions, step
from tests.model.maintenance import Maintenance
from tests.model.reference import Conflict, Late
from tests.model.rows import Row
from tests.model.verbs import when_due

policies = st.sampled_from(["raise", "skip", "skip"])
endings = st.sampled_from(["", "", "flush", "commit", "release"])
claims = st.tuples(st.sampled_from(UNIQUE), st.integers(0, POOL - 1))
options = st.tuples(
    st.sampled_from(["now", "now", "now", "past", "delay"]),
    st.sampled_from(QUEUES[:3]),
    st.integers(1, 4),
    st.integers(1, 3),
)
wishes = st.lists(st.tuples(claims, policies, options), min_size=1, max_size=4)
some = st.tuples(claims | st.sampled_from([TASK, PLAIN]), st.sampled_from([None, None, "raise", "skip"]), options)

#: The verbs that bring a job back, what they are given, and what the job becomes.
BACK: dict[str, tuple[Callable[..., Any], Any, Callable[[Row], Row]]] = {
    "snooze": (snooze, HOUR, lambda row: row.put_back(due=False, counts=1)),
    "fail": (fail, "no", lambda row: row.failed("no")),
    "retry_after": (retry_after, HOUR, lambda row: row.failed("")),
}


class Uniques(Maintenance):
    """Whatever may turn out to be a duplicate."""

    def _wish(self, what: Claim | str, options: Any) -> tuple[JobArgs, dict[str, Any], Row]:
        """The arguments and options of a job, and its row."""
        when, queue, priority, most = options
        n = next(self.numbers)
        given = {"queue": queue, "priority": priority, "max_attempts": most, **when_due(when)}
        if isinstance(what, tuple):
            args, given["metadata"] = KINDS[what[0]](k=what[1]), {"who": [n]}
        else:
            args = Task(n=n) if what == TASK else Plain(n=str(n))
        key = key_of(type(args).__awa__.kind, args.model_dump(), given.get("metadata"))
        later = {"state": "scheduled", "store": "scheduled", "due": when == "past"} if when != "now" else {}
        return args, given, Row(key, queue, priority, most, **later)  # type: ignore[arg-type]

    def _open(self, sitting: Sitting, what: Claim | str) -> bool:
        """Whether no other session is about to claim this key."""
        return isinstance(what, str) or not self.reference.blocked(sitting.transaction, what)

    @rule(s=sessions, wishes=wishes, then=endings)
    @step
    def enqueue_claiming(self, s: int, wishes: list[Any], then: str) -> object:
        """Unique jobs, which some flush decides about."""
        sitting = self.sittings[s]
        wishes = [wish for wish in wishes if self._open(sitting, wish[0])]
        if sitting.transaction.vetoed or not wishes:
            return False
        inner = self._nested(sitting) if then == "release" else 0
        for what, policy, options in wishes:
            args, given, row = self._wish(what, options)
            job = enqueue(sitting.session, args, **given, on_conflict=policy)
            sitting.transaction.want(row, skip=policy == "skip")
            sitting.hold(row.key, job)
        self._then(sitting, then, inner)
        return None

    def _nested(self, sitting: Sitting) -> int:
        """The number of a new savepoint, or of the innermost where there may be no other."""
        if sum(len(one.savepoints) for one in self.sittings) < DEEPEST:
            self.nest(sitting)
        return len(sitting.savepoints)

    def _then(self, sitting: Sitting, then: str, inner: int) -> None:
        if then == "flush":
            self.attempted(sitting, sitting.session.flush)
        elif then == "commit":
            self.commit_now(sitting)
        elif inner:
            self.release_now(sitting, inner)

    @rule(s=sessions, what=claims, options=options, commits=st.booleans())
    @step
    def enqueue_unique(self, s: int, what: Claim, options: Any, commits: bool) -> object:
        sitting = self.sittings[s]
        if not self._open(sitting, what):
            return False
        self._unique(sitting, what, options)
        if commits:
            self.commit_now(sitting)
        return None

    def _unique(self, sitting: Sitting, what: Claim, options: Any) -> None:
        args, given, row = self._wish(what, options)
        found = self.attempted(sitting, enqueue_unique, sitting.session, args, **given)
        holder = sitting.transaction.holder(what) if row.holds else None
        assert (found.created, found.job is None) == (holder is None, holder is not None)
        if holder is None:
            sitting.transaction.put(row.stored(found.id))
            sitting.hold(row.key, found.job)
        else:
            assert holder.id in (None, found.id)
            self.counts["duplicates found"] += 1

    @property
    def may_return(self) -> list[Row]:
        """Jobs that may come back into their unique states."""
        return [
            row
            for row in self.reference.free()
            if (row.kind == PENDING and row.state in ("running", "waiting_external"))
            or (row.kind, row.store) == (READY, "scheduled")
        ]

    @precondition(lambda self: bool(self.may_return))
    @rule(s=sessions, pick=picks, how=st.sampled_from(["", "sweep", *BACK]), commits=st.booleans())
    @step
    def overtake(self, s: int, pick: int, how: str, commits: bool) -> object:
        """The next one waits while one runs, or waits for its time; then somebody would bring that back, perhaps."""
        sitting, row = self.sittings[s], self.may_return[pick % len(self.may_return)]
        if row.claim is None or not self._open(sitting, row.claim):
            return False
        self._unique(sitting, row.claim, ("now", QUEUES[0], 1, 2))
        if commits:
            self.commit_now(sitting)
        if how in BACK:
            self._bring_back(pick, how, row)
        elif how == "sweep" and row.is_held:
            self.falls_silent(row)
            self.rescue(survives=True)
        elif how == "sweep":
            self.time_passes()
            self.promote(survives=True)
        return None

    def _overtaken(self, becomes: Callable[[Row], Row]) -> list[tuple[Sitting, Handle]]:
        """Attempts that hold, in a session that must not bring their jobs back."""
        found: list[tuple[Sitting, Handle]] = []
        for sitting in self.sittings:
            mine = sitting.transaction
            for handle in self.handles:
                row = mine.view(handle.key)
                if row and self.fits(row, handle) and self.may_end(mine, row) and mine.twin(row, becomes(row)):
                    found.append((sitting, handle))
        return found

    @precondition(lambda self: bool(self._overtaken(BACK["snooze"][-1])))
    @rule(pick=picks, how=st.sampled_from(list(BACK)))
    @step
    def bring_back(self, pick: int, how: str) -> object:
        """A person would bring back a job that has been overtaken."""
        return self._bring_back(pick, how)

    def _bring_back(self, pick: int, how: str, row: Row | None = None) -> bool:
        act, given, becomes = BACK[how]
        may = [pair for pair in self._overtaken(becomes) if row is None or pair[1].key == row.key]
        if may:
            sitting, handle = may[pick % len(may)]
            assert self.transition(sitting, handle, act, handle.attempt, given, becomes=becomes) is None
        return bool(may)

    @rule(s=sessions, wishes=st.lists(some, min_size=1, max_size=6), policy=policies, commits=st.booleans())
    @step
    def enqueue_many(self, s: int, wishes: list[Any], policy: Any, commits: bool) -> object:
        sitting = self.sittings[s]
        mine = sitting.transaction
        made: list[tuple[Row, bool]] = []
        jobs: list[Any] = []
        for what, own, options in wishes:
            if self._open(sitting, what):
                args, given, row = self._wish(what, options)
                jobs.append(EnqueueRequest(args, **given, on_conflict=own))
                made.append((row, (own or policy) == "skip"))
        if not jobs:
            return False
        try:
            ids = self.attempted(sitting, enqueue_many, sitting.session, jobs, on_conflict=policy)
        except UniqueConflict as exc:
            lost = self._duplicates(sitting, made)
            refused = sorted(
                ((row, holder) for (row, skip), holder in zip(made, lost, strict=True) if holder and not skip),
                key=lambda pair: mine.holder(pair[0].claim) is None,
            )
            assert refused, f"{exc!r} without a duplicate in {made}"
            self.refused(exc, Conflict(*refused[0]))
            mine.tried(row.claim for row, _ in made if row.holds and mine.holder(row.claim) is None)
            self.counts["conflicts in bulk"] += 1
            return None
        lost = self._duplicates(sitting, made)
        assert not any(holder and not skip for (_, skip), holder in zip(made, lost, strict=True))
        assert [id_ is None for id_ in ids] == [holder is not None for holder in lost]
        for (row, _), id_ in zip(made, ids, strict=True):
            if id_ is not None:
                mine.put(row.stored(id_))
        self.counts["jobs in bulk"] += len(made)
        self.counts["duplicates in bulk"] += sum(holder is not None for holder in lost)
        if commits:
            self.commit_now(sitting)
        return None

    @staticmethod
    def _duplicates(sitting: Sitting, made: list[tuple[Row, bool]]) -> list[Row | None]:
        """For each of a list of jobs, the one that it would be a duplicate of."""
        first: dict[Claim | None, Row] = {}
        found: list[Row | None] = []
        for row, _ in made:
            holder = sitting.transaction.holder(row.claim) or first.get(row.claim) if row.holds else None
            found.append(holder)
            if row.holds and holder is None:
                first[row.claim] = row
        return found

    @rule(
        s=sessions,
        what=claims | st.just(PLAIN),
        policy=policies,
        options=options,
        raises=st.sampled_from([False] * 5 + [True]),
        then=endings,
    )
    @step
    def enqueue_late(self, s: int, what: Any, policy: Any, options: Any, raises: bool, then: str) -> object:
        """A job whose arguments come at the end of its transaction or savepoint."""
        sitting = self.sittings[s]
        mine = sitting.transaction
        if mine.vetoed or not self._open(sitting, what):
            return False
        inner = self._nested(sitting) if then == "release" else 0
        args, given, row = self._wish(what, options)
        number = next(self.numbers)
        pending = [job for _, job in sitting.objects if inspect(job).pending]

        def bind() -> JobArgs:
            self.calls[number] += 1
            assert not any(inspect(job).pending for job in pending), "bound before the flush"
            if raises:
                raise LateError(number)
            return args

        job = enqueue(sitting.session, bind, **given, on_conflict=policy)
        assert job not in sitting.session
        mine.layers[-1].late.append(Late(row, policy == "skip", number, raises))
        sitting.hold(row.key, job)
        self._then(sitting, then, inner)
        return None

    def settle(self) -> None:
        """Count."""
        self.counts["late-bound jobs called"] += len(self.reference.called)
        self.counts["duplicates skipped"] += self.reference.duplicates
        self.counts["follow-ups that were duplicates"] += sum(self.reference.skipped.values())
        self.counts["keys held"] += sum(row.holds for row in self.reference.committed.values())
        super().settle()
