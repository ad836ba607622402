"""One request, one transaction: receipt, `before`, the verb, `after`, follow-ups, answer; all of it or nothing.

`Unit` holds the steps, which are the same for every kind of session; `run` takes them in a thread with a `Session`,
`run_async` on the event loop with an `AsyncSession`. Whatever goes wrong leaves as a `Refusal`, and the transaction has
ended without a trace: the callback stays resolvable.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from awa_sqla.errors import (
    CallbackNotFound,
    CallbackRefused,
    ConfigurationError,
    FollowUpError,
    InvalidJob,
    UniqueConflict,
)
from awa_sqla.models.job import DeadLetter, Job
from awa_sqla.session import callbacks as verbs
from awa_sqla.session.target import require_transaction
from awa_sqla.session.trouble import passing
from awa_sqla.web import receipts
from awa_sqla.web.answers import Refusal, logger
from awa_sqla.web.bodies import CallbackCall

Answer = dict[str, Any]
Hook = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that may be answered: its call, and the digest under which its receipt is kept (None: none is).

    Without a call it is too old to be carried out, and only its receipt can answer it.
    """

    call: CallbackCall | None
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class Hooks:
    """The app's code around the verb."""

    before: Hook | None
    after: Hook | None


class Unit:
    """The steps of one request on one session."""

    def __init__(self, session: Session, asked: Asked) -> None:
        self._session, self._asked = session, asked
        self._transaction: SessionTransaction | None = None
        self._answer: Answer = {}
        self._at = "database"

    def open(self) -> Answer | None:
        """Begin, and claim the receipt; returns the answer of the same request when it has been here."""
        if not self._session.in_transaction():
            self._session.begin()
        self._transaction = self._session.get_transaction()
        # This connects before any code of the app runs: there, an OSError may be the app's own.
        require_transaction(self._session)
        call, digest = self._asked.call, self._asked.digest
        if call is None:
            found = receipts.find(self._session, digest) if digest is not None else None
            if found is None:
                raise Refusal("unauthorized")
            return found
        if digest is None:
            return None
        return receipts.claim(self._session, digest, call.callback_id, call.action)

    def entering(self, hook: Hook, *given: object) -> object:
        """Call the app's code; what it returns may have to be awaited."""
        self._at = "app"
        return hook(*given)

    def left(self) -> None:
        """The app's code has returned. Raises `ConfigurationError` when it has ended our transaction, or has left a
        savepoint open: whoever rolls that back later undoes the verb, and not what the sender is told.
        """
        if self._session.get_transaction() is not self._transaction:
            raise ConfigurationError(
                "before() or after() has committed or rolled back the request's transaction: leave that to the router"
            )
        if self._session.in_nested_transaction():
            raise ConfigurationError("before() or after() has left a savepoint open: end what begin_nested() began")
        self._at = "database"

    def resolve(self, call: CallbackCall) -> Job | DeadLetter:
        """The verb."""
        self._at = "verb"
        job = _carry_out(self._session, call)
        self._answer = {"id": job.id, "state": job.state.value}
        self._at = "database"
        return job

    def close(self) -> Answer:
        """Flush, which adds the follow-ups, and write the answer on the receipt; what is left is the commit.

        SQLAlchemy 2.1 would flush by itself here, 2.0 would not: a spec that fails costs no statement in either.
        """
        self._session.flush()
        if self._asked.digest is not None:
            receipts.keep(self._session, self._asked.digest, self._answer)
        return self._answer

    def explain(self, exc: BaseException) -> Refusal:
        """End the transaction, and say what the sender is told."""
        self._roll_back()
        if isinstance(exc, Refusal):
            return exc
        if isinstance(exc, FollowUpError):
            logger.error("a callback was not resolved: %s", exc, exc_info=exc)
            return Refusal("follow_up_failed")
        if self._at == "verb" and isinstance(exc, CallbackNotFound):
            return self._used_up()
        if self._at == "verb" and isinstance(exc, UniqueConflict):
            return Refusal("unique_conflict")
        if self._at == "verb" and isinstance(exc, InvalidJob):
            return Refusal("invalid_body", str(exc))
        if self._at == "app" and isinstance(exc, CallbackRefused):
            return Refusal("refused", str(exc.reason))
        if passing(exc) or (self._at != "app" and isinstance(exc, OSError)):
            logger.warning("a callback was not resolved, the database is not available: %s", type(exc).__name__)
            return Refusal("unavailable")
        logger.error("a callback was not resolved: %s", type(exc).__name__, exc_info=exc)
        return Refusal("internal")

    def _roll_back(self) -> None:
        """Said, and not left to the session's close: that one gives a connection whose COMMIT was not sent, because a
        listener of the engine raised, back to the pool as it is, and the next request would find itself inside.
        """
        try:
            self._session.rollback()
        except Exception:  # noqa: BLE001 - the connection is gone, or of no use any more
            self._session.invalidate()

    def _used_up(self) -> Refusal:
        """Nobody waits: because another request was quicker, or because nobody ever did."""
        self._at = "database"
        assert self._asked.call is not None  # noqa: S101
        try:
            if not self._session.in_transaction():
                self._session.begin()
            known = receipts.resolved(self._session, self._asked.call.callback_id)
        except Exception as exc:  # noqa: BLE001
            return self.explain(exc)
        return Refusal("already_resolved" if known else "unknown_callback")


def _carry_out(session: Session, call: CallbackCall) -> Job | DeadLetter:
    if call.action == "complete":
        return verbs.complete_external(session, call.callback_id, call.payload)
    if call.action == "resume":
        return verbs.resume_external(session, call.callback_id, call.payload)
    if call.action == "heartbeat":
        assert call.timeout is not None  # noqa: S101
        return verbs.heartbeat_callback(session, call.callback_id, timeout=call.timeout)
    assert call.error is not None  # noqa: S101
    return verbs.fail_external(session, call.callback_id, call.error)


def run(session: Session, asked: Asked, hooks: Hooks) -> Answer:
    """The whole request with a `Session`, in a thread of its own. Raises `Refusal`."""
    unit = Unit(session, asked)

    def ask(hook: Hook | None, *given: object) -> None:
        if hook is not None:
            found = unit.entering(hook, session, *given)
            if inspect.isawaitable(found):
                if inspect.iscoroutine(found):
                    found.close()
                raise ConfigurationError(
                    "before() and after() must be plain functions, as the sessions are no async ones"
                )
            unit.left()

    try:
        known = unit.open()
        if known is not None or asked.call is None:
            return known or {}
        ask(hooks.before, asked.call)
        job = unit.resolve(asked.call)
        ask(hooks.after, asked.call, job)
        answer = unit.close()
        session.commit()
    except BaseException as exc:
        raise unit.explain(exc) from exc
    return answer


async def run_async(session: AsyncSession, asked: Asked, hooks: Hooks) -> Answer:
    """The same with an `AsyncSession`. Raises `Refusal`."""
    unit = Unit(session.sync_session, asked)

    async def ask(hook: Hook | None, *given: object) -> None:
        if hook is not None:
            found = unit.entering(hook, session, *given)
            if inspect.isawaitable(found):
                await cast("Awaitable[object]", found)
            unit.left()

    try:
        known = await session.run_sync(lambda _: unit.open())
        if known is not None or asked.call is None:
            return known or {}
        call = asked.call
        await ask(hooks.before, call)
        job = await session.run_sync(lambda _: unit.resolve(call))
        await ask(hooks.after, call, job)
        answer = await session.run_sync(lambda _: unit.close())
        await session.commit()
    except BaseException as exc:
        task = asyncio.current_task()
        if isinstance(exc, GeneratorExit | KeyboardInterrupt) or (task is not None and task.cancelling()):
            raise
        raise await session.run_sync(_explained, unit, exc) from exc
    return answer


def _explained(_: Session, unit: Unit, exc: BaseException) -> Refusal:
    return unit.explain(exc)
