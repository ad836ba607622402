"""Rules: callbacks, and the handlers that wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from awa_sqla import (
    Attempt,
    CallbackNotFound,
    CallbackToken,
    Outcome,
    StaleJobError,
    UniqueConflict,
    cancel_callback,
    complete_external,
    fail_external,
    heartbeat_callback,
    park,
    register_callback,
    resume_external,
    retry_external,
)
from awa_sqla.session.attending import Answer, attend, go_on, look
from tests.model.application import HOUR, Key
from tests.model.machine import Sitting, picks, sessions, step
from tests.model.reference import Conflict
from tests.model.rows import UNCALLED, Row
from tests.model.verbs import Verbs, given_attempts, lives

payloads = st.sampled_from([None, 0, {"paid": [5, None]}, [1]])
leases = st.sampled_from([None, None, "its own", "another"])
some_are_called = precondition(lambda self: bool(self.called))


class Called(NamedTuple):
    """A token that somebody outside was given, perhaps long ago, and the attempt that gave it."""

    key: Key
    attempt: Attempt
    token: CallbackToken

    @property
    def id(self) -> str:
        """As it is stored."""
        return str(self.token.id)


class Resolve(NamedTuple):
    """What the outside may do with a token: which jobs it takes, what it makes of them."""

    act: Callable[..., Any]
    takes: Callable[[Row], bool]
    becomes: Callable[[Row, Any], Row]
    outcomes: tuple[Outcome, ...] = ()


def _waits(row: Row) -> bool:
    return row.state == "waiting_external"


RESOLVES = {
    "complete_external": Resolve(complete_external, lambda row: True, Row.completed, (Outcome.COMPLETED,)),
    "fail_external": Resolve(
        lambda session, id_, payload, **given: fail_external(session, id_, "refused", **given),
        lambda row: True,
        lambda row, payload: row.failed("refused", terminal=True),
        (Outcome.EXHAUSTED,),
    ),
    "retry_external": Resolve(
        lambda session, id_, payload, **given: retry_external(session, id_, **given),
        _waits,
        lambda row, payload: row.retried(),
        (Outcome.RETRIED,),
    ),
    "resume_external": Resolve(resume_external, lambda row: row.is_held, Row.answered),
    "heartbeat_callback": Resolve(
        lambda session, id_, payload, **given: heartbeat_callback(session, id_, timeout=HOUR),
        _waits,
        lambda row, payload: row.registered(row.callback or ""),
    ),
}


class Callbacks(Verbs):
    """Everything about callbacks, from inside an attempt and from outside."""

    def __init__(self, rig: Any) -> None:
        super().__init__(rig)
        self.called: list[Called] = []

    # ------------------------------------------------------------------------------------ by the attempt
    @given_attempts
    @rule(
        s=sessions,
        pick=picks,
        live=lives,
        by_object=st.booleans(),
        then=st.sampled_from(["", "commit", "attend", "park"]),
    )
    @step
    def register_callback(self, s: int, pick: int, live: bool, by_object: bool, then: str) -> object:
        if (found := self._end(s, pick, live, by_object)) is None:
            return False
        sitting, handle, job = found
        if (done := self.transition(sitting, handle, register_callback, job, timeout=HOUR)) is None:
            return True
        before, token = done
        one = Called(before.key, handle.attempt, token)
        sitting.transaction.put(before.registered(one.id))
        self.called = [*self.called, one][-8:]
        if then:
            self.commit_now(sitting)
        if then in ("attend", "park") and before.may_wait:
            self._wait(sitting, one, then)
            self.commit_now(sitting)
        return True

    register_again = register_callback  # twice as likely

    @given_attempts
    @rule(s=sessions, pick=picks, live=lives, by_object=st.booleans())
    @step
    def cancel_callback(self, s: int, pick: int, live: bool, by_object: bool) -> object:
        if (found := self._end(s, pick, live, by_object)) is None:
            return False
        sitting, handle, job = found
        if (done := self.transition(sitting, handle, cancel_callback, job)) is not None:
            before, withdrawn = done
            assert withdrawn is (before.callback is not None)
            if withdrawn:
                sitting.transaction.put(before.withdrawn())
        return True

    @given_attempts
    @rule(s=sessions, pick=picks, live=lives)
    @step
    def go_on(self, s: int, pick: int, live: bool) -> object:
        if (found := self._end(s, pick, live, by_object=False)) is None:
            return False
        sitting, handle, _ = found
        before = sitting.transaction.view(handle.key)
        try:
            row = self.attempted(sitting, go_on, sitting.session, handle.attempt)
        except StaleJobError:
            assert before is None or not (self.fits(before, handle) and before.attended)
            return "nothing to give up"
        assert before is not None
        assert self.fits(before, handle)
        assert before.attended
        assert (row.id, row.state) == (before.id, "running")
        sitting.transaction.put(before.goes_on())
        return True

    def _token(self, sitting: Sitting, pick: int, *, live: bool) -> Called | None:
        """A token whose job no other session holds: one that is good if there is one, or any that is not."""
        mine = sitting.transaction
        found: dict[bool, list[Called]] = {True: [], False: []}
        for one in self.called:
            row = mine.view(one.key)
            if row is not None and self.may_end(mine, row):
                found[row.callback == one.id].append(one)
        may = found[live] or found[not live]
        return may[-1 - pick % len(may)] if may else None

    @some_are_called
    @rule(s=sessions, pick=picks, live=lives, how=st.sampled_from(["attend", "attend", "park", "look"]))
    @step
    def wait(self, s: int, pick: int, live: bool, how: str) -> object:
        sitting = self.sittings[s]
        one = self._token(sitting, pick, live=live)
        return False if one is None else self._wait(sitting, one, how)

    def _wait(self, sitting: Sitting, one: Called, how: str) -> object:
        mine = sitting.transaction
        row = mine.view(one.key)
        assert row is not None
        if how != "look" and row.callback == one.id and not row.may_wait and not (how == "attend" and row.attended):
            return False
        act: Any = {"attend": attend, "park": park, "look": look}[how]
        try:
            found = self.attempted(sitting, act, sitting.session, one.attempt, one.token)
        except StaleJobError:
            assert not self._is_its_own(row, one), f"{how} was stale although it is {row}"
            assert how != "park" or (row.id, row.lease) != one.attempt or row.state not in ("completed", "failed")
            return f"{how} was stale"
        except CallbackNotFound as exc:
            assert exc.callback_id == one.id
            assert self._is_its_own(row, one)
            assert row.callback != one.id
            assert how == "park" or row.answer is None or row.answer["callback"] != one.id
            assert how != "park" or row.callback or row.answer
            return f"{how} for another token"
        if how == "park":
            return self._parked(sitting, one, row, found)
        assert self._is_its_own(row, one)
        if row.answer is not None:
            assert isinstance(found, Answer)
            assert row.answer == {"callback": one.id, "payload": found.payload}
            return f"{how} answered"
        assert found is None
        assert row.callback == one.id
        if how == "attend" and not row.attended:
            mine.stage(row.waits(), Outcome.WAITING_FOR_CALLBACK)
            return "attend"
        return f"{how} again"

    @staticmethod
    def _is_its_own(row: Row, one: Called) -> bool:
        return row.is_held and (row.id, row.lease) == one.attempt

    def _parked(self, sitting: Sitting, one: Called, row: Row, found: Any) -> str:
        """What a park that went through has done."""
        assert (row.id, row.lease) == one.attempt
        if not row.is_held:
            assert row.state in ("completed", "failed")
            assert (found.id, found.state) == (row.id, row.state)
            return "park after the end"
        if row.callback is None:
            assert row.answer is None
            sitting.transaction.stage(row.failed(UNCALLED, terminal=True), Outcome.EXHAUSTED)
            return "park without a callback"
        assert row.callback == one.id
        sitting.transaction.stage(row.parked(), Outcome.WAITING_FOR_CALLBACK)
        assert (found.id, found.state) == (row.id, "waiting_external")
        sitting.hold(row.key, found)
        return "park"

    # ---------------------------------------------------------------------------------- from the outside
    @some_are_called
    @rule(
        s=sessions,
        pick=picks,
        live=lives,
        verb=st.sampled_from(list(RESOLVES)),
        payload=payloads,
        lease=leases,
        commits=st.booleans(),
    )
    @step
    def resolve(
        self, s: int, pick: int, live: bool, verb: str, payload: Any, lease: str | None, commits: bool
    ) -> object:
        sitting = self.sittings[s]
        if (one := self._token(sitting, pick, live=live)) is None:
            return False
        mine, how = sitting.transaction, RESOLVES[verb]
        before = mine.view(one.key)
        assert before is not None
        number = one.attempt.run_lease + (lease == "another")
        given = {"run_lease": number} if lease and verb != "heartbeat_callback" else {}
        called = before.callback == one.id and (not given or before.lease == number)
        takes = called and how.takes(before)
        after = how.becomes(before, payload) if takes else before
        try:
            made = self.attempted(sitting, how.act, sitting.session, one.token.id, payload, **given)
        except CallbackNotFound as exc:
            assert not takes, f"{verb} did not find {before}"
            assert exc.callback_id == one.id
            return f"{verb} refused"
        except UniqueConflict as exc:
            twin = mine.twin(before, after)
            assert twin is not None, f"{exc!r} without a twin of {before}"
            self.refused(exc, Conflict(before, twin))
            mine.put(before)
            return f"{verb} of a duplicate"
        assert takes, f"{verb} took {before}"
        assert mine.twin(before, after) is None, f"{before} has become a duplicate"
        mine.stage(after, *how.outcomes)
        assert (made.id, made.state, made.attempt) == (after.id, after.state, after.attempt)
        sitting.hold(after.key, made)
        if commits:
            self.commit_now(sitting)
        return verb

    resolve_again = resolve  # twice as likely
