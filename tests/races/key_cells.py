"""The races for a unique key that are run: which operations meet in which starting situation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tests.races.cells import ENDS
from tests.races.keys import MASKS, ROADS, VERBS, Verdict, Wait, World, judge, start
from tests.races.matrix import RULES

#: What a job that is on its last attempt does otherwise than any other running job.
LAST = ("fail", "retry_after", "rescue_stale")
#: What claims the key in a savepoint of its own: PostgreSQL lets nobody go on before the whole transaction has ended.
NESTED = ("follow_up_raise", "rescue_stale", "promote")
STATES = ("available", "running", "scheduled", "retryable")
#: A dead letter may hold its key for ever.
LAST_STATES = {"live": ("last",), "pending": ("last",), "available": (), "all": ("last-kept",)}


@dataclass(frozen=True)
class Situation:
    """How a race begins."""

    mask: str
    holder: str | None
    """The state of the job that the verbs are about; None: there is none, and nobody holds the key."""
    twin: bool = False
    """Whether a twin was enqueued while that job did not hold the key."""

    def __str__(self) -> str:
        return f"{self.mask}-{self.holder or 'nobody'}{'-twin' * self.twin}"

    @property
    def world(self) -> World:
        """The jobs of the reference."""
        return start(self.mask, self.holder, twin=self.twin)

    @property
    def verbs(self) -> list[str]:
        """The verbs that find something to do."""
        job = self.world.jobs.get("holder")
        found = [name for name in VERBS if job is not None and RULES[name].takes(job)]
        if self.holder in ("last", "last-kept"):
            return [name for name in found if name in LAST]
        return [*found, "cancel_twin"] if self.twin else found

    def comes_in(self, verb: str) -> bool:
        """Whether the verb makes the job claim the key."""
        if verb not in self.verbs or verb == "cancel_twin":
            return False
        job = self.world.jobs["holder"]
        return self.world.comes_in(job, RULES[verb].does(job))


def _situations() -> Iterator[Situation]:
    for mask in MASKS:
        yield Situation(mask, None)
        for state in STATES + LAST_STATES[mask]:
            alone = Situation(mask, state)
            yield alone
            if any(map(alone.comes_in, alone.verbs)):
                yield Situation(mask, state, twin=True)


SITUATIONS = {str(situation): situation for situation in _situations()}


@dataclass(frozen=True)
class KeyCell:
    """One race for a key."""

    situation: Situation
    first: str
    second: str
    end: str
    flushed: bool

    def __str__(self) -> str:
        sent = "" if self.flushed else " unflushed"
        return f"{self.situation}: {self.first} ends by {self.end}{sent}, {self.second} races"

    @property
    def commits(self) -> bool:
        """Whether what the first has done stays."""
        return self.end == "commit"

    @property
    def verdict(self) -> Verdict:
        """What must come of it."""
        return judge(self.situation.world, self.first, self.second, commits=self.commits)


def key_cells(situation: Situation, *, long: bool = False) -> Iterator[KeyCell]:
    """Every ordered pair that may meet at the key, committed and rolled back.

    What is left out of all but the `long` matrix is what comes to the same. Two verbs meet at the key only when one of
    them claims it; where a twin has it already, every third pair. Two roads are both duplicates, whichever they are,
    while a stored job holds the key: one pair each. A road against a verb that claims nothing is a duplicate at once,
    or not held up at all: every third pair, another third with each mask. Savepoints are rolled back to where nobody
    holds the key.
    """
    names = [*ROADS, *situation.verbs]
    for row, column in product(range(len(names)), repeat=2):
        first, second = names[row], names[column]
        if not long and not _meet(situation, row, column, first, second):
            continue
        flushed = (row + column) % 2 == 0
        three = (long or str(situation) == "live-nobody") and first not in NESTED
        for end in ENDS if three else ENDS[:2]:
            for also in (flushed, not flushed) if long else (flushed,):
                cell = KeyCell(situation, first, second, end, also)
                # A sweep's patience lasts a quarter of a second: one end each.
                if long or cell.verdict.wait is not Wait.BRIEFLY or cell.commits is (row % 2 == 0):
                    yield cell


def _meet(situation: Situation, row: int, column: int, first: str, second: str) -> bool:
    verbs = [name for name in (first, second) if name not in ROADS]
    claims = any(map(situation.comes_in, verbs))
    match len(verbs):
        case 0:
            ring = column == (row + 1) % len(ROADS)
            return ring or (situation.holder is None and (situation.mask == "live" or ROADS[first].goes_again))
        case 1:
            is_free = situation.world.holder is None
            return (claims and is_free) or (row + column + list(MASKS).index(situation.mask)) % 3 == 0
        case _:
            return claims and (not situation.twin or "cancel_twin" in verbs or (row + column) % 3 == 0)
