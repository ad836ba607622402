"""What the pages say of the server's errors and no block can show, because it takes two at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import JobArgs, Unique, enqueue


class Reindex(JobArgs, unique=Unique(), kind="reindex_of_the_claims"):
    shop: int


def race(engine: Engine, one: Callable[[Session], None], two: Callable[[Session], None]) -> list[str]:
    """Two transactions in two threads; returns the SQLSTATEs of those that were lost."""
    lost: list[str] = []

    def run(work: Callable[[Session], None]) -> None:
        try:
            with sessionmaker(engine).begin() as session:
                work(session)
        except OperationalError as error:
            lost.append(getattr(error.orig, "sqlstate", ""))

    threads = [threading.Thread(target=run, args=(work,)) for work in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return lost


def test_two_flushes_in_opposite_orders_may_deadlock(engine: Engine) -> None:
    both = threading.Barrier(2, timeout=30)

    def in_order(first: int, second: int) -> Callable[[Session], None]:
        def work(session: Session) -> None:
            enqueue(session, Reindex(shop=first), on_conflict="skip")
            session.flush()
            both.wait()
            enqueue(session, Reindex(shop=second), on_conflict="skip")
            session.flush()

        return work

    assert race(engine, in_order(1, 2), in_order(2, 1)) == ["40P01"]


def test_one_flush_in_opposite_orders_does_not(engine: Engine) -> None:
    both = threading.Barrier(2, timeout=30)

    def in_order(*shops: int) -> Callable[[Session], None]:
        def work(session: Session) -> None:
            for shop in shops:
                enqueue(session, Reindex(shop=shop), on_conflict="skip")
            both.wait()
            session.flush()

        return work

    assert race(engine, in_order(1, 2, 3), in_order(3, 2, 1)) == []
