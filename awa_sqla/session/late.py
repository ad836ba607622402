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
from weakref import WeakKeyDictionary, WeakSet

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
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.job = rows.empty(self.options)

    def bind(self) -> Job | ScheduledJob:
        """Call the callable and fill the job. Raises what it raises, and `InvalidJob` for what it returns."""
        try:
            return rows.fill(self.job, EnqueueRequest.of(_args(self.function), self.options), self.parent)
        except Exception as exc:
            self.error = exc
            raise


_pending: WeakKeyDictionary[SessionTransaction, list[Late]] = WeakKeyDictionary()
_bound: WeakSet[SessionTransaction] = WeakSet()


def wait(session: Session, late: Late) -> bool:
    """Keep a job for the end of the innermost transaction. False when that has come already: bind it now."""
    transaction = ledger.boundary(session) or session.begin()
    if transaction in _bound and ledger.is_ending(transaction):
        return False
    _pending.setdefault(transaction, []).append(late)
    return True


def bind_all(session: Session) -> None:
    """In `before_commit`: add the jobs of every transaction that ends here, the outermost first.

    One that has failed before fails again, until it is rolled back.
    """
    ending = ledger.ending(session)
    while any(_pending.get(transaction) for transaction in ending):
        session.flush()
        for transaction in ending:
            waiting = _pending.get(transaction, [])
            while waiting:
                if waiting[0].error is not None:
                    raise waiting[0].error
                job = waiting[0].bind()
                del waiting[0]
                session.add(job)
    _bound.update(ending)


def _args(function: Callable[[], JobArgs]) -> JobArgs:
    try:
        made: Any = function()
    except ValidationError as exc:
        raise misfit(exc, "does not validate") from exc
    if not isinstance(made, JobArgs):
        if inspect.iscoroutine(made):
            made.close()  # nobody will await it
        raise InvalidJob("args", f"the callable returned a {limits.type_name(made)}, not a JobArgs instance")
    return made
