"""The lanes at work: each in a task of its own, supervised, and most of them only where this process leads.

A lane that fails is reported and tried again with growing pauses; one that takes too long is cut. Neither touches the
others: each pass has a connection of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from awa_sqla.maintenance.lanes import LANES, Lanes, Pass
from awa_sqla.maintenance.leadership import Leadership, cancelled
from awa_sqla.session.trouble import transient

log = logging.getLogger("awa_sqla.maintenance")

#: Seconds between the first passes of lanes: those of one pace would else want connections in the same moment for ever.
STEP = 0.1
#: Seconds: the shortest sleep between two passes, what one pass may take, and the longest pause after failures.
BREATH, BUDGET, PATIENCE = 0.05, 60.0, 60.0


@dataclass(slots=True)
class Lane:
    """One lane, and how it fares."""

    name: str
    work: Callable[[], Awaitable[Pass]]
    #: Whether it runs in every process, not only where maintenance is led.
    everywhere: bool = False
    #: Seconds that a pass may take.
    budget: float = field(default_factory=lambda: BUDGET)
    done: int = 0
    failures: int = 0
    error: str | None = None
    seconds: float | None = None
    ended: float | None = None

    def fares(self) -> dict[str, Any]:
        """How it fares, as data: what `runtime_instances.lanes` holds."""
        ago = None if self.ended is None else round(time.monotonic() - self.ended, 1)
        took = None if self.seconds is None else round(self.seconds, 4)
        return {"done": self.done, "ago": ago, "seconds": took, "failures": self.failures, "error": self.error}

    async def run(self) -> Pass | None:
        """One pass, within its budget; None when it failed, which is reported."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.budget):
                found = await self.work()
        except Exception as exc:  # noqa: BLE001 - whatever it is, the other lanes and later passes go on
            self._failed(exc, time.monotonic() - began)
            return None
        self.ended = time.monotonic()
        self.seconds = self.ended - began
        self.done += found.done
        if self.failures:
            log.info("lane %s works again, after %d failures", self.name, self.failures)
        self.failures, self.error = 0, None
        return found

    def pause(self) -> float:
        """Seconds to wait after a failure."""
        return min(2.0 ** min(self.failures - 1, 10), PATIENCE)

    def _failed(self, exc: Exception, seconds: float) -> None:
        self.failures += 1
        self.seconds = seconds
        cut = isinstance(exc, TimeoutError) and seconds >= self.budget
        text = f"took longer than {self.budget:g} s and was cut" if cut else _brief(exc)
        self.error = text
        log.log(
            logging.WARNING if transient(exc) else logging.ERROR,
            "lane %s of maintenance %s (%d in a row), trying again in %.0f s",
            self.name,
            text if cut else f"failed: {text}",
            self.failures,
            self.pause(),
            exc_info=None if transient(exc) or self.failures > 1 else exc,  # the same again and again
        )


class Service:
    """All lanes of one process."""

    def __init__(self, lanes: Lanes, leadership: Leadership, *, only: Collection[str] | None = None) -> None:
        self._lanes = lanes
        self._leadership = leadership
        self._nudged = asyncio.Event()
        self.lanes = [lane for lane in _all(lanes) if only is None or lane.name in only]

    @property
    def leading(self) -> bool:
        """Whether this process leads now."""
        return self._leadership.leading()

    def resign(self) -> None:
        """Lead no more, from now on: this process is about to end, and another may go on at once."""
        self._leadership.resign()

    def nudge(self) -> None:
        """This process has put a job back: its due time may be earlier than promotion thinks."""
        self._nudged.set()

    def fares(self) -> dict[str, Any]:
        """How each lane that has run here fares."""
        return {lane.name: lane.fares() for lane in self.lanes if lane.seconds is not None}

    async def serve(self) -> None:
        """Run the lanes for ever, those that are led while this process leads."""
        async with asyncio.TaskGroup() as group:
            for lane in self.lanes:
                if lane.everywhere:
                    group.create_task(self._run(lane))
            group.create_task(self._leadership.serve(self._lead))

    async def once(self) -> bool:
        """Run every lane once, until it finds no more to do; False, and nothing done, when another process leads.

        A lane that fails does not keep the others from running: see `failures`. Once the lead is lost, the rest is the
        other process's.
        """
        try:
            if not await self._leadership.seek():
                return False
            for lane in self.lanes:
                ends = time.monotonic() + lane.budget
                while (found := await lane.run()) is not None and time.monotonic() < ends:
                    if not self._has_more(found):
                        break
                    await asyncio.sleep(BREATH if found.pause else 0)
                    if not await self._leadership.seek():  # renews it
                        log.warning("another process leads maintenance now")
                        return True
        finally:
            await self._leadership.release()
        return True

    def _has_more(self, found: Pass) -> bool:
        """Whether a pass is worth another at once: what it wanted and could not have, somebody holds."""
        if not found.pause:
            return found.done > 0
        return found.pause <= BREATH or self._lanes.building

    async def _lead(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._nudged.set()  # promotion looks at all from now on
            for lane in self.lanes:
                if not lane.everywhere:
                    group.create_task(self._run(lane, self._leadership.leading))
                    await asyncio.sleep(STEP)

    async def _run(self, lane: Lane, may: Callable[[], bool] = lambda: True) -> None:
        while may():  # asked before each pass: a process that was frozen wakes up anywhere
            found = await lane.run()
            if cancelled():
                return
            pause = lane.pause() if found is None else found.pause
            if lane.name == "promote":
                await self._sleep_until_nudged(pause)
            else:
                await asyncio.sleep(max(pause or 0, BREATH))

    async def _sleep_until_nudged(self, pause: float | None) -> None:
        await asyncio.sleep(BREATH)
        with suppress(TimeoutError):
            async with asyncio.timeout(None if pause is None else max(pause - BREATH, 0)):
                await self._nudged.wait()
        self._nudged.clear()


def _all(lanes: Lanes) -> list[Lane]:
    everywhere: set[str] = {"promote", "obligations"} | ({"cron"} if lanes.builds else set[str]())
    names = [name for name in LANES if name != "obligations" or lanes.owes]
    return [Lane(name, getattr(lanes, name), everywhere=name in everywhere) for name in names]


def _brief(exc: BaseException) -> str:
    text = str(getattr(exc, "orig", exc)).partition("\n")[0]
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__
