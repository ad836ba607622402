"""Rules: stories of a callback, several steps in a row that would seldom follow on each other by chance."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.model.application import HOUR, QUEUES
from tests.model.boundaries import Boundaries
from tests.model.callbacks import RESOLVES, Callbacks, payloads
from tests.model.machine import DEEPEST, picks, sessions, step
from tests.model.uniques import Uniques
from tests.model.verbs import jobs, lives

INSIDE = ["attend", "attend", "park", "look", "go on", "withdraw", "complete", "retry", "register"]
AROUND = ["commit", "commit", "rollback", "savepoint", "roll it back", "late", "silent", "thief", "beat"]
OUTSIDE = [*RESOLVES, "resume_external", "resume_external"]
chapters = st.tuples(
    st.one_of(st.sampled_from(INSIDE), st.sampled_from(OUTSIDE), st.sampled_from(AROUND)),
    sessions,
    picks,
    lives,
)


class Stories(Uniques, Boundaries, Callbacks):
    """All rules together."""

    @rule(
        s=sessions,
        job=jobs,
        by_object=st.booleans(),
        then=st.sampled_from(["commit", "attend", "attend", "park"]),
        tale=st.lists(chapters, min_size=1, max_size=6),
        said=payloads,
    )
    @step
    def story(self, s: int, job: Any, by_object: bool, then: str, tale: list[Any], said: Any) -> None:
        """An attempt tells somebody outside, and then whatever happens."""
        if not self.is_running:
            self.enqueue(s, jobs=[job], commits=True)
            self.claim(s, queues=list(QUEUES), limit=2, commits=True)
        self.register_callback(s, pick=0, live=True, by_object=by_object, then=then)
        for chapter in tale:
            self._next(*chapter, said)

    another_story = story  # twice as likely

    def _next(self, what: str, s: int, pick: int, live: bool, said: Any) -> None:
        if what in RESOLVES:
            self.resolve(s, pick=0, live=live, verb=what, payload=said, lease=None, commits=pick % 2 == 0)
        elif what in ("attend", "park", "look"):
            self.wait(s, pick=0, live=live, how=what)
        elif what in INSIDE:
            self._inside(what, s, live, said)
        else:
            self._around(what, s, pick)

    def _inside(self, what: str, s: int, live: bool, said: Any) -> None:
        if not self.is_running:
            return
        match what:
            case "go on":
                self.go_on(s, pick=0, live=live)
            case "withdraw":
                self.cancel_callback(s, pick=0, live=live, by_object=False)
            case "complete":
                self.complete(s, pick=0, live=live, by_object=False, result=said)
            case "retry":
                self.retry_after(s, pick=0, live=live, by_object=False, delay=HOUR)
            case _:
                self.register_callback(s, pick=0, live=live, by_object=False, then="")

    def _around(self, what: str, s: int, pick: int) -> None:
        sitting = self.sittings[s]
        free = self.reference.free()
        changed = any(one.transaction.changed for one in self.sittings)
        match what:
            case "commit" if changed:
                self.commit(pick=pick)
            case "rollback" if changed:
                self.undo(pick=pick, how="rollback")
            case "savepoint" if sum(len(one.savepoints) for one in self.sittings) < DEEPEST:
                self.begin_nested(pick=pick)
            case "roll it back" if sitting.savepoints:
                self.undo_now(sitting, len(sitting.savepoints))
            case "late" if any(row.callback for row in free):
                self.callback_is_late(pick=pick, noticed=pick % 3 > 0)
            case "silent" if any(row.is_held for row in free):
                self.worker_dies(pick=pick, noticed=pick % 3 > 0)
            case "thief" if any(row.is_held for row in free):
                self.thief(pick=pick)
            case "beat" if any(row.silent and row.is_held for row in free):
                self.beat()
            case _:
                pass
