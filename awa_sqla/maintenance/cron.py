"""Periodic schedules: looks which ticks are due by the database's clock, and fires them.

    cron = Cron(maker, app.schedules.values(), leading=lambda: True, call=threads.run)
    while True:
        await asyncio.sleep(await cron.look())

The leader fires what is stored whole. A schedule whose arguments an app builds is fired by the processes of that app:
its leader at once, the others when nobody has within a second. That any number of them may try is safe: the mark on the
schedule is a compare-and-set (`firing`). No schedule keeps another waiting: one that fails is tried again with growing
pauses, and an app's callable runs in a thread while all others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from awa_sqla import limits
from awa_sqla.errors import InvalidJob
from awa_sqla.maintenance.firing import fire, write_failure
from awa_sqla.maintenance.schedules import LATE, SEEN, Due, Stored, due, rewind, schedules, seen, sync
from awa_sqla.periodic import Periodic
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session.trouble import transient
from awa_sqla.sqlstates import LOCK_NOT_AVAILABLE, sqlstate

log = logging.getLogger("awa_sqla.maintenance")

#: Seconds between looks: the longest, since operators edit rows, and the longest without schedules; the shortest; and
#: the pause when another process held a schedule, or its jobs' key.
LOOK, IDLE, BREATH, AGAIN = 5.0, 10.0, 0.01, 0.25
#: Seconds that the leader is given before other processes fire what their app builds.
FIRST_GO = 1.0
#: Seconds that a look waits for callables, and that a callable may take.
WAITS, TAKES = 0.5, 30.0
#: Ticks that one schedule catches up in one look, and seconds after which a look leaves the rest to the next.
BURST, ENOUGH = 100, 1.0
#: Seconds: the longest pause after failures.
LONGEST = 300.0

Build = Callable[[], Any]


class _BuildError(Exception):
    """The app's callable has raised (the cause says what), or does not return."""


@dataclass(slots=True)
class _Trouble:
    """A schedule that fails: as it was defined then, how often, and until when it is left alone."""

    definition: tuple[str, str]
    failures: int = 0
    until: float = 0.0


class Cron:
    """Fires the schedules of a database, and writes those of an app into it.

    `periodics` are those of the app; `leading` says whether this process leads now; `call` runs a callable that does
    not raise in a thread. For one event loop; `look()` is not called twice at a time.
    """

    def __init__(
        self,
        maker: async_sessionmaker[AsyncSession],
        periodics: Iterable[Periodic],
        *,
        leading: Callable[[], bool],
        call: Callable[[Build], Awaitable[Any]],
    ) -> None:
        self._maker = maker
        self._own = {periodic.name: periodic for periodic in periodics}
        self._unwritten = frozenset(self._own)
        self._leading = leading
        self._call = call
        self._troubles: dict[str, _Trouble] = {}
        #: What fires with a callable, and whose callables are in a thread now.
        self._tasks: dict[str, asyncio.Task[float | None]] = {}
        self._running: set[str] = set()
        #: How many jobs it has made.
        self.fired = 0

    async def look(self) -> float:
        """Fire what is due; returns the seconds after which it wants to be called again.

        One SELECT when nothing is due. The first call writes the app's schedules, and later ones what it could not
        write then. Raises what the database raises when the fault is not that of one schedule.
        """
        leading = self._leading()
        if not self._own and not leading:
            return LOOK
        if self._unwritten:
            async with self._maker.begin() as session:
                missing = [self._own[name] for name in self._unwritten]
                self._unwritten = await session.run_sync(sync, missing)
        async with self._maker() as session:
            now, rows = await session.run_sync(schedules)
        if now is None:
            return IDLE
        read_at, before = monotonic(), set(self._tasks)
        await self._refresh(now, rows)
        if leading and any(row.since > now + LATE for row in rows) and await self._rewind():
            return BREATH
        mine = [row for row in rows if self._may_fire(row, leading=leading)]
        waits: list[float] = [LOOK, *(t.until - read_at for t in self._troubles.values() if t.until > read_at)]
        surveyed = await asyncio.to_thread(_survey, mine, now)
        began = monotonic()
        for row, found in surveyed:
            if isinstance(found, InvalidJob):
                wait: float | None = await self._failed(row, found)
            else:
                wait = await self._fire_due(row, found, now, leading=leading)
                if wait is None and found.next is not None:
                    wait = (found.next - now).total_seconds() - (monotonic() - read_at)
            if wait is not None:
                waits.append(wait)
            if isinstance(found, Due) and found.ticks and monotonic() - began > ENOUGH:
                waits.append(0)
                break
        waits += await self._callables([task for name, task in self._tasks.items() if name not in before])
        return max(min(waits), BREATH)

    @property
    def building(self) -> bool:
        """Whether a callable has been called whose job is not made yet."""
        return bool(self._tasks)

    async def close(self) -> None:
        """Give up the callables that still run. Their threads go on; what they return is not fired."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _rewind(self) -> bool:
        async with self._maker.begin() as session:
            if names := await session.run_sync(rewind):
                log.warning("the database's clock has gone back: schedules %s count from now", names)
        return bool(names)

    def _may_fire(self, row: Stored, *, leading: bool) -> bool:
        """Whether it is this process's turn with a schedule, if something is due."""
        trouble = self._troubles.get(row.name)
        if trouble is not None and trouble.definition != _definition(row):
            del self._troubles[row.name]
            trouble = None
        if row.paused or (trouble is not None and trouble.until > monotonic()):
            return False
        if not row.builds:
            return leading
        own = self._own.get(row.name)
        return own is not None and own.builds and row.name not in self._tasks and row.name not in self._running

    async def _refresh(self, now: datetime, rows: Iterable[Stored]) -> None:
        old = [row.name for row in rows if row.name in self._own and now - row.last_seen > SEEN]
        if old:
            async with self._maker.begin() as session:
                await session.run_sync(seen, old)

    # -------------------------------------------------------------------------------------------------------- firing
    async def _fire_due(self, row: Stored, found: Due, now: datetime, *, leading: bool) -> float | None:
        """Fire what is due of one schedule, or start to. Returns when to look again if not for the next tick."""
        if not found.ticks:
            return None
        if found.dropped:
            log.warning("schedule %r: %s older missed ticks are dropped", row.name, found.dropped)
        if not row.builds:
            return await self._fire(row, found.ticks)
        if not leading and (early := FIRST_GO - (now - found.ticks[0]).total_seconds()) > 0:
            return early
        self._tasks[row.name] = asyncio.create_task(self._fire(row, found.ticks, self._own[row.name]))
        return None

    async def _fire(self, row: Stored, ticks: list[datetime], periodic: Periodic | None = None) -> float | None:
        """Fire ticks of one schedule, a burst at most. Returns when to look again if not for the next tick."""
        for tick in ticks[:BURST]:
            try:
                request = None if periodic is None else await self._build(periodic, tick)
                async with self._maker.begin() as session:
                    fired = await session.run_sync(fire, row, tick, request)
                self.fired += fired is not None
            except Exception as exc:
                if isinstance(exc, DBAPIError) and sqlstate(exc) == LOCK_NOT_AVAILABLE:
                    return AGAIN  # an open transaction has claimed the key of the job
                if transient(exc):
                    raise
                return await self._failed(row, exc)
            if fired is None:
                return AGAIN
            row = row._replace(last_enqueued_at=tick)
        self._troubles.pop(row.name, None)
        return 0 if len(ticks) > BURST else None

    async def _failed(self, row: Stored, error: Exception) -> float:
        """Write and log that a schedule does not fire; returns how long it is left alone."""
        trouble = self._troubles.setdefault(row.name, _Trouble(_definition(row)))
        trouble.failures += 1
        pause = min(2.0 ** min(trouble.failures, 16), LONGEST)
        trouble.until = monotonic() + pause
        told = str(getattr(error, "orig", error)).partition("\n")[0]
        cause: BaseException | None = error.__cause__ if isinstance(error, _BuildError) else error
        if isinstance(error, InvalidJob | DBAPIError):
            cause = None  # the message says it all
        elif cause is error:
            told = f"{type(error).__name__}: {told}"
        log.error("schedule %r does not fire, tried again in %g s: %s", row.name, pause, told, exc_info=cause)
        async with self._maker.begin() as session:
            await session.run_sync(write_failure, row.name, limits.cleaned(told))
        return pause

    # ----------------------------------------------------------------------------------------------------- callables
    async def _build(self, periodic: Periodic, tick: datetime) -> EnqueueRequest:
        """What the app's callable makes for a tick. Raises `_BuildError`."""
        given_up = False

        def build() -> EnqueueRequest | BaseException:
            try:
                return TimeoutError() if given_up else periodic.request(tick)
            except BaseException as exc:  # noqa: BLE001 - SystemExit, too, must not end a thread of the worker
                return exc
            finally:
                self._running.discard(periodic.name)

        self._running.add(periodic.name)
        try:
            async with asyncio.timeout(TAKES):
                built: EnqueueRequest | BaseException = await self._call(build)
        except TimeoutError:
            raise _BuildError(
                f"the callable has not returned within {TAKES:g} s; it is not called again before it does"
            ) from None
        except Exception as exc:  # no thread is to be had
            self._running.discard(periodic.name)
            raise _BuildError(f"the callable could not be called: {exc}") from exc
        finally:
            given_up = True
        if isinstance(built, InvalidJob):
            raise built
        if isinstance(built, BaseException):
            raise _BuildError(f"the callable raised {type(built).__name__}: {built}") from built
        return built

    async def _callables(self, fresh: list[asyncio.Task[float | None]]) -> list[float]:
        """Give those that were just called a moment to return; returns when to look again for the sake of all."""
        if fresh:
            await asyncio.wait(fresh, timeout=WAITS)
        done = {name: task for name, task in self._tasks.items() if task.done()}
        for name in done:
            del self._tasks[name]
        errors = [error for task in done.values() if (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        waits = [task.result() for task in done.values()]
        return [wait for wait in waits if wait is not None] + [FIRST_GO] * bool(self._tasks)


def _definition(row: Stored) -> tuple[str, str]:
    return row.cron_expr, row.timezone


def _survey(rows: list[Stored], now: datetime) -> list[tuple[Stored, Due | InvalidJob]]:
    """What is due of each; those that have the most to catch up come last, those that fired lately after the others.

    In a thread: that may be 10,000 ticks.
    """
    found: list[tuple[Stored, Due | InvalidJob]] = []
    for row in rows:
        try:
            found.append((row, due(row, now)))
        except InvalidJob as exc:
            found.append((row, exc))
    return sorted(found, key=lambda pair: (len(pair[1].ticks) if isinstance(pair[1], Due) else 0, pair[0].since))
