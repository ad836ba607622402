"""Batches of several keys in different orders do not wait for each other in a circle.

A third transaction holds the middle one of three keys. The first batch claims what comes before it and waits; the
second begins then, with the same keys in another order. A batch that claimed its keys as they come would hold one that
the first still needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import pytest
from sqlalchemy.orm import Session

from awa_sqla import EnqueueRequest, Unique, UniqueConflict, enqueue, enqueue_many
from tests.app import NotifyOps
from tests.races.conftest import Tally
from tests.races.race import Rival, Stage, go_on_with, opened
from tests.worlds import PATIENCE, World, in_two_worlds

#: By their keys: the order in which they must be claimed.
NUMBERS: list[int] = sorted(
    (1, 2, 3), key=lambda number: Unique().key("notify_ops", "default", {"job_id": number, "text": ""})
)
ORDERS = (NUMBERS, NUMBERS[::-1], [*NUMBERS[1:], NUMBERS[0]])


def _flush(session: Session, numbers: list[int]) -> list[int | None]:
    jobs = [enqueue(session, NotifyOps(job_id=n), unique=Unique(), on_conflict="skip") for n in numbers]
    session.flush()
    return [job.id if job.duplicate_of is None else None for job in jobs]


def _many(session: Session, numbers: list[int], policy: Any = "skip") -> list[int | None]:
    requests = [EnqueueRequest(NotifyOps(job_id=n), unique=Unique()) for n in numbers]
    return enqueue_many(session, requests, on_conflict=policy)


def _many_or_none(session: Session, numbers: list[int]) -> list[int | None]:
    try:
        return _many(session, numbers, "raise")
    except UniqueConflict:
        return [None] * len(numbers)


ROADS: dict[str, Callable[[Session, list[int]], list[int | None]]] = {
    "flush": _flush,
    "many_skip": _many,
    "many_raise": _many_or_none,
}


def _batch(road: str, numbers: list[int]) -> Callable[[Session], list[int | None]]:
    return lambda session: ROADS[road](session, numbers)


class Batches(NamedTuple):
    """Two batches, and whether the one that holds the middle key commits."""

    first: str
    first_order: list[int]
    second: str
    second_order: list[int]
    commits: bool

    @property
    def verdicts(self) -> list[list[list[bool]]]:
        """Which jobs of each batch may be added: what is left by the holder, then by the batch that comes first.

        When the holder commits, the first batch asks for all of its keys anew, and the second may be quicker.
        """
        found: list[list[list[bool]]] = []
        batches = [(self.first, self.first_order), (self.second, self.second_order)]
        for order in ([0, 1], [1, 0]) if self.commits else ([0, 1],):
            left = set(NUMBERS) - ({NUMBERS[1]} if self.commits else set())
            added: list[list[bool]] = [[], []]
            for which in order:
                road, numbers = batches[which]
                added[which] = _added(road, numbers, left)
                left -= {number for number, is_added in zip(numbers, added[which], strict=True) if is_added}
            found.append(added)
        return found


def _added(road: str, numbers: list[int], left: set[int]) -> list[bool]:
    if road == "many_raise" and not set(numbers) <= left:
        return [False] * len(numbers)
    return [number in left for number in numbers]


PAIRS = [(ORDERS[0], ORDERS[1]), (ORDERS[1], ORDERS[0]), (ORDERS[2], ORDERS[1])]


@contextmanager
def two_rivals(world: World) -> Iterator[tuple[Rival, Rival]]:
    """Two more transactions."""
    rivals = Rival(world), Rival(world)
    try:
        yield rivals
    finally:
        for rival in rivals:
            rival.close()


def _raced(maker: Any, rivals: tuple[Rival, Rival], stage: Stage, case: Batches) -> list[str]:
    stage.clear()
    session = opened(maker)
    running: list[Any] = []
    wrong: list[str] = []
    try:
        _flush(session, [NUMBERS[1]])
        batches = ((case.first, case.first_order), (case.second, case.second_order))
        for rival, (road, order) in zip(rivals, batches, strict=True):
            running.append(rival.start(_batch(road, order), flushed=True))
            if not rival.is_held_up(stage.database):
                wrong.append(f"{road} of {order} did not wait")
            rival.let_go()
        (session.commit if case.commits else session.rollback)()
        answers = [one.result(PATIENCE) for one in running]
        go_on_with(session, "after", flushed=False)
        session.commit()
    except Exception as exc:
        return [*wrong, f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"]
    finally:
        session.close()
        for one in running:
            one.exception(PATIENCE)
    added = [[job_id is not None for job_id in ids] for ids in answers]
    if added not in case.verdicts:
        wrong.append(f"they added {added}, and not one of {case.verdicts}")
    found = [row[0] for row in stage.database.rows("SELECT (args->>'job_id')::int FROM jobs ORDER BY unique_key")]
    held = stage.database.value("SELECT count(*) FROM job_unique_claims JOIN jobs ON id = job_id")
    left = [n for n in NUMBERS if n in found]
    if found != left or held != len(found) or sum(map(sum, added)) + case.commits != held:
        wrong.append(f"the jobs are {found}, {held} hold their keys")
    return wrong


@in_two_worlds
@pytest.mark.parametrize("first", ROADS)
@pytest.mark.parametrize("second", ROADS)
@pytest.mark.case(5)
def test_batches_of_keys_in_different_orders_do_not_deadlock(
    world: World, stage: Stage, tally: Tally, first: str, second: str
) -> None:
    maker = world.maker(stage.follow_ups)
    with two_rivals(world) as rivals:
        for (one, two), commits in product(PAIRS, (True, False)):
            case = Batches(first, one, second, two, commits)
            tally.add("orders", case, _raced(maker, rivals, stage, case))
    tally.check()
