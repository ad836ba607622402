"""Receipts: the same request again is answered as the first time, for 24 hours.

A receipt is claimed before anything else happens in the transaction, and holds its answer when that commits. A second
request of the same digest waits for the first one's end: it finds the receipt, or claims it when the first has rolled
back. Each new receipt removes a few that are out of date, so that none is left behind and nobody has to clean up.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import blake3
from sqlalchemy import bindparam, delete, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from awa_sqla.errors import ConfigurationError
from awa_sqla.maintenance.prune import OLD_RECEIPTS, RECEIPTS
from awa_sqla.models.records import CallbackReceipt
from awa_sqla.session.statements import by_key
from awa_sqla.session.target import jobs_bind
from awa_sqla.signing import request_message

#: How many old ones a new one removes: more than one, so that their number falls.
SWEPT = 10
#: Actions after which a callback is used up.
RESOLVING = ("complete", "fail", "resume")

_table = CallbackReceipt.__table__
_column = _table.c
_EMPTY = text("'{}'")
_out_of_date = _column.created_at < func.clock_timestamp() - RECEIPTS
#: A receipt without an answer is one that app code has committed behind our back, in the middle of a request.
_void = or_(_out_of_date, _column.answer == _EMPTY)

_old = OLD_RECEIPTS.where(_column.request != bindparam("digest")).limit(SWEPT).cte("old")
# Looked up one by one: a join would hash all receipts.
_gone = delete(_table).where(by_key(_column.request, _old)).returning(_column.request).cte("gone")
_CLAIM = (
    insert(_table)
    .values(request=bindparam("digest"), callback_id=bindparam("callback"), action=bindparam("act"))
    .on_conflict_do_nothing()
    .returning(_column.request)
    .add_cte(_gone)
)
_FIND = select(_column.answer, _void).where(_column.request == bindparam("digest"))
_TAKE_OVER = (
    update(_table)
    .where(_column.request == bindparam("digest"), _void)
    .values(created_at=func.clock_timestamp(), answer=_EMPTY)
    .returning(_column.request)
)
_KEEP = (
    update(_table)
    .where(_column.request == bindparam("digest"))
    .values(answer=bindparam("given", type_=_column.answer.type))
    .returning(_column.request)
)
_RESOLVED = (
    select(_column.request)
    .limit(1)
    .where(_column.callback_id == bindparam("callback"), _column.action.in_(RESOLVING), ~_void)
)


def digest_of(callback_id: UUID, action: str, body: bytes, signed_at: int | None) -> bytes | None:
    """What makes two requests the same one; None for a request that is never the same.

    Not the time of the signature: a sender signs anew when it tries again. But a heartbeat with the same body is a new
    one whenever it is signed anew; without a signature there is no telling.
    """
    message = request_message(callback_id, action, body)
    if action == "heartbeat":
        if signed_at is None:
            return None
        message = f"{signed_at}\n".encode() + message
    return blake3.blake3(message).digest()


def claim(session: Session, digest: bytes, callback_id: UUID, action: str) -> dict[str, Any] | None:
    """The answer of the same request, when it has been here; else None, and the receipt is this transaction's."""
    mine = {"digest": digest, "callback": callback_id, "act": action}
    while True:
        if _one(session, _CLAIM, **mine) is not None:
            return None
        found = _one(session, _FIND, digest=digest)
        if found is None:
            continue  # swept or rolled back since
        answer, void = found
        if not void:
            return dict(answer)
        if _one(session, _TAKE_OVER, digest=digest) is not None:
            return None


def find(session: Session, digest: bytes) -> dict[str, Any] | None:
    """The answer of the same request, when it has been here."""
    found = _one(session, _FIND, digest=digest)
    return None if found is None or found[1] else dict(found[0])


def keep(session: Session, digest: bytes, answer: dict[str, Any]) -> None:
    """Write the answer on the receipt. Raises `ConfigurationError` when somebody has rolled the receipt back."""
    if _one(session, _KEEP, digest=digest, given=answer) is None:
        raise ConfigurationError("the receipt of the request is gone from its own transaction")


def resolved(session: Session, callback_id: UUID) -> bool:
    """Whether some request has resolved this callback, in the last 24 hours."""
    return _one(session, _RESOLVED, callback=callback_id) is not None


def _one(session: Session, statement: Any, **parameters: Any) -> Any:
    return session.execute(statement, parameters, bind_arguments={"bind": jobs_bind(session)}).one_or_none()
