"""Late-bound arguments: `enqueue(session, lambda: Receipt(order_id=order.id))`.

The callable is called once, after a flush and before its transaction ends: by then database-made ids are there, and
an error still leaves the transaction usable. It belongs to the transaction, or the savepoint, that was innermost when
it was enqueued, and is forgotten with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from pydantic import ValidationError
from sqlalchemy.orm import Session, SessionTransaction

from awa_sqla import limits
from awa_sqla.args import JobArgs
from awa_sqla.errors import InvalidJob
from awa_sqla.models.job import Job, ScheduledJob
from awa_sqla.requests import EnqueueRequest, Options
from awa_sqla.session import ledger, rows
from awa_sqla.session.lineage import Parent
from awa_sqla.stored import misfit


@dataclass(slots=True, eq=False)
class Late:
    """A job whose arguments are still to come. `error` is what its callable raised."""

    options: Options
    function: Callable[[], JobArgs]
    parent: Parent | None
    job: Job | ScheduledJob = field(init=False)
    begun: bool = False
    bound: bool = False
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.job = rows.empty(self.options)

    def bind(self) -> Job | ScheduledJob:
        """Call the callable and fill the job. Raises what it raises, and `InvalidJob` for what it returns."""
        self.begun = True  # a savepoint that the callable releases must not call it again
        try:
            rows.fill(self.job, EnqueueRequest.of(_args(self.function), self.options), self.parent)
        except Exception as exc:
            self.error = exc
            raise
        except BaseException:
            self.begun = False
            raise
        self.bound = True
        return self.job


_bound: WeakSet[SessionTransaction] = WeakSet()

#: Kept on the transaction itself: a callable may refer to its own session, and would keep a weak table's key alive.
_PENDING = "_awa_sqla_late"


def wait(session: Session, late: Late) -> bool:
    """Keep a job for the end of the innermost transaction. False when that has come already: bind it now."""
    transaction = ledger.boundary(session) or session.begin()
    if transaction in _bound and ledger.is_ending(transaction):
        return False
    vars(transaction).setdefault(_PENDING, []).append(late)
    return True


def bind_all(session: Session) -> None:
    """In `before_commit`: add the jobs of every transaction that ends here, the outermost first.

    One that has failed before fails again, until it is rolled back; one that was added before, and went with a
    savepoint that was rolled back since, is added again.
    """
    ending = ledger.ending(session)
    while True:
        session.flush()  # first of all: a listener may enqueue in it
        waiting = [late for late in _of(ending) if not late.begun or late.error is not None]
        if not waiting:
            break
        for late in waiting:
            if late.error is not None:
                raise late.error
            session.add(late.bind())
    session.add_all(
        job for job in ledger.missing(session, [late.job for late in _of(ending) if late.bound]) if job not in session
    )
    _bound.update(ending)


def _of(transactions: list[SessionTransaction]) -> list[Late]:
    return [late for transaction in transactions for late in vars(transaction).get(_PENDING, ())]


def _args(function: Callable[[], JobArgs]) -> JobArgs:
    try:
        made: Any = function()
    except ValidationError as exc:
        raise misfit(exc, "does not validate") from exc
    if not isinstance(made, JobArgs):
        if inspect.iscoroutine(made):
            made.close()  # nobody will await it
        hint = "; use a plain function" if inspect.iscoroutine(made) else ""
        raise InvalidJob("args", f"the callable returned a {limits.type_name(made)}, not a JobArgs instance{hint}")
    return made
