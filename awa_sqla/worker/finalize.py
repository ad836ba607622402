"""Outcomes into the database: in batches where they go well, one by one where they do not.

Plain completions are written by one statement for a batch, follow-ups and all. If a batch fails, each of its
members is tried alone, so that one bad row or one raising spec cannot hold up its neighbours. An outcome whose
follow-up fails is committed with an obligation instead: the handler is not run again, nothing is lost, nothing
loops. While the database is away, outcomes wait; capacity is given back only when an outcome is acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

from sqlalchemy import exc as sa_exc
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from awa_sqla.errors import FollowUpError, StaleJobError
from awa_sqla.session.batch import Completion, complete_many
from awa_sqla.session.ledger import defer_all
from awa_sqla.session.trouble import transient
from awa_sqla.sqlstates import LOCK_NOT_AVAILABLE, sqlstate
from awa_sqla.worker.outcomes import Done, Failed, Result, Settled
from awa_sqla.worker.run import Run
from awa_sqla.worker.transaction import apply, ended_by_handler

log = logging.getLogger("awa_sqla.worker")
T = TypeVar("T")

BATCH = 500
#: Batches, and outcomes written one by one, that are under way at the same time.
BATCHES, SINGLES = 2, 4
#: How long an outcome waits for a row that somebody holds before it lets others pass.
_PATIENCE = text("SET LOCAL lock_timeout = '1s'")


class Acknowledged(Protocol):
    """Told of each run whose outcome is stored; only a plain completion is sure to have put nothing back."""

    def __call__(self, run: Run, *, completed: bool) -> None: ...


class Finalizer:
    """Takes finished runs, writes their outcomes, and tells when each is acknowledged."""

    def __init__(self, maker: async_sessionmaker[AsyncSession], settled: Acknowledged) -> None:
        self._maker = maker
        self._settled = settled
        self._finished: asyncio.Queue[tuple[Run, Result]] = asyncio.Queue()
        self._batches = asyncio.Semaphore(BATCHES)
        self._singles = asyncio.Semaphore(SINGLES)
        self._writing: set[asyncio.Task[None]] = set()

    def submit(self, run: Run, result: Result) -> None:
        """Hand over a finished run. From the loop's thread only."""
        if isinstance(result, Settled):
            self._settled(run, completed=False)
        else:
            self._finished.put_nowait((run, result))

    async def serve(self) -> None:
        """Write outcomes for ever. One that has to wait holds up nobody else's."""
        while True:
            items = [await self._finished.get()]
            async with self._batches:  # while all are busy, more outcomes gather
                while len(items) < BATCH and not self._finished.empty():
                    items.append(self._finished.get_nowait())
            plain = [(run, result) for run, result in items if isinstance(result, Done)]
            if plain:
                self._write(self._batch(plain))
            for run, result in items:
                if not isinstance(result, Done):
                    self._write(self._single(run, result))
            await asyncio.sleep(0)  # let the batch take its slot

    def close(self) -> None:
        """Give up what is still being written: the rows will be rescued."""
        for task in self._writing:
            task.cancel()

    def _write(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._writing.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._writing.discard)

    async def _batch(self, items: list[tuple[Run, Done]]) -> None:
        completions = [Completion(run.attempt, done.result) for run, done in items]
        try:
            async with self._batches:
                done = await self._persist(lambda session: complete_many(session, completions), waits=False)
        except Exception as exc:  # noqa: BLE001 - find the culprit by trying each alone
            log.info("a batch of %d completions failed, writing them one by one: %r", len(items), exc)
            for run, result in items:
                self._write(self._single(run, result))
            return
        if done.stale:
            log.warning("attempts of jobs %s had ended before their completion", done.stale)
        for run, _ in items:
            self._settled(run, completed=True)

    async def _single(self, run: Run, result: Result) -> None:
        try:
            await self._record(run, result)
        except StaleJobError as exc:
            if not ended_by_handler(exc):
                log.warning("%s", exc)
        except Exception:
            log.exception("the outcome of job %s cannot be recorded; it will be rescued", run.attempt.id)
        finally:
            self._settled(run, completed=False)

    async def _record(self, run: Run, result: Result) -> None:
        """Write one outcome; if its follow-up or row cannot be, the same with obligations; last, as a failure."""
        owed = isinstance(result, Failed) and result.owed
        try:
            await self._persist(lambda session: _apply(session, run, result, owed=owed))
        except StaleJobError:
            raise
        except Exception as exc:  # noqa: BLE001 - the transition must get through without user code
            log.error("job %s: %s; its follow-ups are owed", run.attempt.id, exc)
            await self._record_owed(run, result, exc)

    async def _record_owed(self, run: Run, result: Result, because: Exception) -> None:
        try:
            await self._persist(lambda session: _apply(session, run, result, owed=True, because=because))
        except StaleJobError:
            raise
        except Exception as exc:  # noqa: BLE001 - then the failure itself is what can be recorded
            failed = Failed(exc, terminal=True, in_place=True)
            await self._persist(lambda session: _apply(session, run, failed, owed=True))

    async def _persist(self, work: Callable[[Session], T], *, waits: bool = True) -> T:
        """Run `work` in a transaction, again and again while the database is the reason that it fails.

        A connection lost in COMMIT leaves it open whether the outcome is stored; the next try finds out, because
        the lease admits an outcome once. With `waits=False`, a row that somebody holds fails it.
        """

        def patient(session: Session) -> T:
            session.execute(_PATIENCE)
            return work(session)

        async def once() -> T:
            async with AsyncExitStack() as stack:
                if waits:
                    await stack.enter_async_context(self._singles)
                session = await stack.enter_async_context(self._maker.begin())
                return await session.run_sync(patient)

        return await insisting(once, waits=waits)


async def insisting(once: Callable[[], Awaitable[T]], *, waits: bool = True) -> T:
    """Await `once()` until it does not fail for a transient reason, with growing pauses up to 5 s.

    With `waits=False`, a lock that is not to be had is no such reason.
    """
    pause = 0.05
    while True:
        try:
            return await once()
        except Exception as exc:
            locked = isinstance(exc, sa_exc.DBAPIError) and sqlstate(exc) == LOCK_NOT_AVAILABLE
            if not transient(exc) or (locked and not waits):
                raise
            log.warning("the database is not available (%s), trying again in %.2f s", _brief(exc), pause)
        await asyncio.sleep(pause)
        pause = min(pause * 2, 5.0)


def _brief(exc: Exception) -> str:
    return str(getattr(exc, "orig", exc)).partition("\n")[0]


def _apply(session: Session, run: Run, result: Result, *, owed: bool, because: BaseException | None = None) -> None:
    if owed:
        defer_all(session, error=why_owed(because if because is not None else getattr(result, "error", None)))
    apply(session, run.attempt, result, run.task)


def why_owed(error: Any) -> str | None:
    """What stands on the obligations: the spec's own error."""
    if not isinstance(error, FollowUpError):
        return None
    cause = f": {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else ""
    return f"spec {error.spec!r} {error.detail}{cause}"
