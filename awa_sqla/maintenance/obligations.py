"""Dispatch: call the spec that a committed transition still owes, and delete the debt, in one transaction.

Exactly one enqueue for each committed transition and spec, whatever crashes in between: the follow-ups and the
deletion of the obligation commit together. A spec that fails is tried again with backoff; after 25 tries or 7 days
the dispatch gives up and the obligation stays listed for an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, Update, case, null, select, tuple_, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from awa_sqla import limits
from awa_sqla.args import Backoff
from awa_sqla.errors import FollowUpError
from awa_sqla.models.records import Obligation
from awa_sqla.models.snapshot import JobSnapshot
from awa_sqla.session import listeners
from awa_sqla.session.history import describe
from awa_sqla.session.specs import Spec
from awa_sqla.session.statements import AS_OF, NOW
from awa_sqla.session.target import require_transaction

MAX_TRIES = 25
MAX_AGE = timedelta(days=7)
BACKOFF = Backoff(max=timedelta(hours=12))


class Dispatched(NamedTuple):
    """One obligation that was taken up, and the error if its spec failed."""

    obligation_id: int
    error: str | None


def any_due(connection: Connection, specs: Sequence[Spec]) -> bool:
    """Whether `specs` can settle an obligation that is due. One statement, which only reads; without specs none."""
    known = sorted((spec.kind, spec.outcome.value, spec.name) for spec in specs)
    return bool(known) and connection.scalar(select(select(Obligation.id).where(*_settled_by(known)).exists())) is True


def dispatch_obligation(session: Session, specs: Sequence[Spec]) -> Dispatched | None:
    """Take up the next due obligation that one of `specs` can settle; None when there is none.

    Part of the caller's transaction; call it once for each transaction, so that one debt does not wait for another.
    A failing spec costs a savepoint and leaves the transaction usable; a connection that is lost costs the spec no try,
    and its error is raised.
    """
    listeners.install(session, "dispatch_obligation")
    require_transaction(session)
    known = {(spec.kind, spec.outcome.value, spec.name): spec for spec in specs}
    owed = session.scalars(_due(sorted(known))).one_or_none() if known else None
    if owed is None:
        return None
    spec = known[owed.kind, owed.outcome, owed.spec]
    obligation_id, tries = owed.id, owed.attempts + 1
    try:
        with session.begin_nested():
            session.add_all(spec.rows(JobSnapshot.from_json(owed.snapshot), owed.context))
            session.delete(owed)
    except Exception as exc:
        if isinstance(exc, DBAPIError) and exc.connection_invalidated:
            raise  # no fault of the spec, and nothing more can be written over this connection
        # Whatever else it was, it stands on the obligation.
        cause = exc.__cause__ if isinstance(exc, FollowUpError) and exc.__cause__ is not None else exc
        error = limits.cleaned("{type}: {error}".format(**describe(cause)))
        session.execute(_failed(obligation_id, tries, error))
        return Dispatched(obligation_id, error)
    return Dispatched(obligation_id, None)


def _settled_by(known: Sequence[tuple[str, str, str]]) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    by_spec = tuple_(Obligation.kind, Obligation.outcome, Obligation.spec).in_(known)
    return Obligation.next_attempt_at <= AS_OF, by_spec


def _due(known: Sequence[tuple[str, str, str]]) -> Select[Any]:
    return (
        select(Obligation)
        .where(*_settled_by(known))
        .order_by(Obligation.next_attempt_at, Obligation.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


def _failed(obligation_id: int, tries: int, error: str) -> Update:
    too_old = Obligation.created_at < AS_OF - MAX_AGE
    again = null() if tries >= MAX_TRIES else case((too_old, null()), else_=NOW + BACKOFF.delay(tries))
    return (
        update(Obligation)
        .where(Obligation.id == obligation_id)
        .values(attempts=tries, last_error=error, next_attempt_at=again)
        .execution_options(synchronize_session=False)
    )
