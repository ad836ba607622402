"""What a handler writes about its own attempt while it runs, each in a short transaction of the worker's."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from awa_sqla import limits
from awa_sqla.cel.policy import CallbackPolicy, checked_policy
from awa_sqla.errors import ConfigurationError, FollowUpError
from awa_sqla.models.job import Attempt
from awa_sqla.session import verbs
from awa_sqla.session.attending import Answer, attend, go_on, look
from awa_sqla.session.callbacks import CallbackToken, register_callback
from awa_sqla.session.ledger import defer_all
from awa_sqla.session.results import checked_progress
from awa_sqla.sqlstates import LOCK_NOT_AVAILABLE, sqlstate
from awa_sqla.worker.finalize import insisting, why_owed

log = logging.getLogger("awa_sqla.worker")
T = TypeVar("T")

#: A transactional handler's own session may hold the row; waiting for it would never end.
_LOCK_TIMEOUT = text("SET LOCAL lock_timeout = '2s'")


#: Writes that are under way at the same time: claims and outcomes, over the same pool, must not wait for those of
#: handlers that write much. Fifty threads that do nothing else kept them waiting for 4 s.
WRITES = 4


class Noted:
    """What several calls of one attempt want written, and what came of it."""

    def __init__(self) -> None:
        self.percent: float | None = None
        self.message: str | None = None
        self.metadata: dict[str, Any] = {}
        self._bytes = 0
        self.stored: dict[str, Any] | None = None
        self.error: Exception | None = None

    def add(self, percent: float | None, message: str | None, metadata: Mapping[str, Any] | None) -> bool:
        """The same as if it were written after what is here; False when it is too much for one write.

        Raises `InvalidJob`.
        """
        checked_progress(percent, message, metadata)
        size = len(json.dumps(dict(metadata), ensure_ascii=False).encode()) if metadata else 0
        if self._bytes and self._bytes + size > limits.PROGRESS_BYTES:
            return False
        self._bytes += size
        self.percent = self.percent if percent is None else percent
        self.message = self.message if message is None else message
        self.metadata |= metadata or {}
        return True


class Progress:
    """Progress of one attempt: one write is under way, and what comes meanwhile is noted for the next."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.next = Noted()
        self.callers = 0


class Books:
    """Writes for `JobContext`."""

    def __init__(self, maker: async_sessionmaker[AsyncSession]) -> None:
        self._maker = maker
        self._few = asyncio.Semaphore(WRITES)
        self._progress: dict[Attempt, Progress] = {}

    async def set_progress(
        self, attempt: Attempt, percent: float | None, message: str | None, metadata: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Write progress; returns the stored one.

        Calls that come while one is being written are written together, in their order: a thousand at once are two
        transactions, unless their metadata is too much for that, and the last percentage stays.
        """
        progress = self._progress.setdefault(attempt, Progress())
        progress.callers += 1
        try:
            noted = progress.next
            if not noted.add(percent, message, metadata):
                noted = progress.next = Noted()
                noted.add(percent, message, metadata)
            async with progress.turn:
                if noted.stored is None and noted.error is None:
                    if progress.next is noted:
                        progress.next = Noted()
                    await self._write_noted(attempt, noted)
            if noted.error is not None:
                raise noted.error
            return dict(noted.stored or {})
        finally:
            progress.callers -= 1
            if not progress.callers:
                del self._progress[attempt]

    async def _write_noted(self, attempt: Attempt, noted: Noted) -> None:
        def work(session: Session) -> dict[str, Any]:
            row = verbs.set_progress(session, attempt, noted.percent, message=noted.message, metadata=noted.metadata)
            return dict(row.progress or {})

        try:
            noted.stored = await self._write(work, "progress is written")
        except Exception as exc:  # noqa: BLE001 - for all who wait for it
            noted.error = exc

    async def register_callback(
        self,
        attempt: Attempt,
        timeout: timedelta,  # noqa: ASYNC109
        policy: CallbackPolicy | None,
    ) -> CallbackToken:
        """Register a callback; its token is durable when this returns."""
        if policy is not None:
            await asyncio.to_thread(checked_policy, policy)  # once for each: what was checked is remembered
        return await self._write(
            lambda session: register_callback(session, attempt, timeout=timeout, policy=policy),
            "a callback is registered",
        )

    async def attend(self, attempt: Attempt, token: CallbackToken) -> Answer | None:
        """Begin to wait for a callback; the answer when it is there already. No follow-up can keep it from waiting."""

        def work(session: Session) -> Answer | None:
            return attend(session, attempt, token)

        def owing(session: Session) -> Answer | None:
            defer_all(session, error=because)
            return attend(session, attempt, token)

        try:
            return await self._write(work, "a wait begins")
        except FollowUpError as exc:
            log.error("job %s: %s; its follow-ups are owed", attempt.id, exc)
            because = why_owed(exc)
            return await self._write(owing, "a wait begins")

    async def look(self, attempt: Attempt, token: CallbackToken) -> Answer | None:
        """The answer to a wait, if it is there."""
        return await self._write(lambda session: look(session, attempt, token), "a wait goes on")

    async def go_on(self, attempt: Attempt) -> None:
        """The handler waits no longer."""
        await self._write(lambda session: go_on(session, attempt), "a wait ends")

    async def _write(self, work: Callable[[Session], T], what: str) -> T:
        def quickly(session: Session) -> T:
            session.execute(_LOCK_TIMEOUT)
            return work(session)

        async def once() -> T:
            try:
                async with self._few, self._maker.begin() as session:
                    return await session.run_sync(quickly)
            except DBAPIError as exc:
                if sqlstate(exc) != LOCK_NOT_AVAILABLE:
                    raise
                raise ConfigurationError(
                    f"another transaction holds this job's row, probably ctx.session: {what} in a "
                    "transaction of its own and cannot wait for it. Leave the job to ctx and the outcome"
                ) from exc

        return await insisting(once)
