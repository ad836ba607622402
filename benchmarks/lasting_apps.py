"""The workers that `idle` and `memory` watch: `python -m benchmarks.lasting_apps idle|mixed URL ...`."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from awa_sqla import (
    Awa,
    Backoff,
    Cancel,
    Completed,
    JobArgs,
    JobContext,
    QueueConfig,
    RetryAfter,
    Snooze,
    TerminalError,
)
from benchmarks.adapters.app import url
from benchmarks.adapters.common import stop_event

SOON = timedelta(milliseconds=50)


class Tick(JobArgs):
    """A job that never comes."""


class Tock(JobArgs):
    """What would follow on it."""


async def idle(dsn: str, queues: str, notify: str) -> None:
    """Serve so many queues that stay empty, with a transactional task and a follow-up, as most apps have."""
    told = stop_event()
    names = [f"queue{n}" for n in range(int(queues))]
    awa = Awa(queues={name: QueueConfig() for name in names})

    @awa.task(Tick, transactional=True)
    async def tick(ctx: JobContext[Tick]) -> None:
        """Nothing."""

    @awa.on_completed(Tick, name="tock")
    def tock(event: Completed[Tick]) -> Tock:  # noqa: ARG001
        return Tock()

    # The task's own queue, "default", is not served: the number of queues is what was asked for.
    async with awa.worker(url(dsn), notify=notify == "notify", queues=names):
        print("ready", flush=True)
        await told.wait()


# ------------------------------------------------------------------------------------------------------- many kinds
class Numbered(JobArgs, abstract=True):
    """A job of `memory`."""

    number: int


class Noop(Numbered):
    """Nothing, in a task."""


class Threaded(Numbered):
    """Nothing, in a thread."""


class Flaky(Numbered, backoff=Backoff(base=SOON, factor=1, jitter=0)):
    """Fails at first."""


class Doomed(Numbered):
    """Fails for good."""


class Unwanted(Numbered):
    """Cancels itself."""


class Sleepy(Numbered):
    """Is put back once by its handler: snoozed, or to be retried."""


class Reporting(Numbered):
    """Writes its progress."""


class Parent(Numbered):
    """Brings about a child."""


class Child(Numbered):
    """Of a parent; nothing."""


class Broken(Numbered):
    """Its follow-up raises, and is owed."""


class Stranger(Numbered):
    """A kind that the worker does not know."""


#: Of a thousand jobs.
KINDS: dict[type[Numbered], int] = {
    Noop: 875,
    Threaded: 50,
    Flaky: 20,
    Doomed: 5,
    Unwanted: 5,
    Sleepy: 10,
    Reporting: 4,
    Parent: 30,
    Broken: 1,
}


def many_kinds() -> Awa:
    """The app of `mixed`."""
    awa = Awa(queues={"default": QueueConfig(concurrency=200)})

    async def nothing(ctx: JobContext[Any]) -> None:
        pass

    for plain in (Noop, Parent, Child, Broken):
        awa.task(plain)(nothing)

    @awa.task(Threaded)
    def threaded(ctx: JobContext[Threaded]) -> int:
        return ctx.args.number

    @awa.task(Flaky)
    async def flaky(ctx: JobContext[Flaky]) -> None:
        if ctx.attempt == 1:
            raise OSError("the first time")

    @awa.task(Doomed)
    async def doomed(ctx: JobContext[Doomed]) -> None:
        raise TerminalError(f"number {ctx.args.number}")

    @awa.task(Unwanted)
    async def unwanted(ctx: JobContext[Unwanted]) -> Cancel:  # noqa: ARG001
        return Cancel("not wanted")

    @awa.task(Sleepy)
    async def sleepy(ctx: JobContext[Sleepy]) -> Snooze | RetryAfter | None:
        if ctx.job.snoozes or ctx.attempt > 1:
            return None
        return Snooze(SOON) if ctx.args.number % 2 else RetryAfter(SOON)

    @awa.task(Reporting)
    async def reporting(ctx: JobContext[Reporting]) -> None:
        await ctx.set_progress(50, "half")
        await ctx.checkpoint({"number": ctx.args.number})

    @awa.on_completed(Parent, name="child")
    def child(event: Completed[Parent]) -> Child:
        return Child(number=event.args.number)

    @awa.on_completed(Broken, name="broken")
    def broken(event: Completed[Broken]) -> Child:
        raise ValueError(f"number {event.args.number}")

    return awa


async def mixed(dsn: str, trace: str) -> None:
    """Drain jobs of many kinds; on standard input, "objects" and "trace" ask what there is in memory."""
    told = stop_event()
    if trace == "trace":
        tracemalloc.start(5)
    first: list[tracemalloc.Snapshot] = []

    def objects() -> str:
        gc.collect()
        return json.dumps(Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects()))

    def traced() -> str:
        gc.collect()
        now = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(inclusive=False, filename_pattern="*tracemalloc*")]
        )
        first.append(now)
        grown = now.compare_to(first[0], "traceback")[:8]
        return " | ".join(f"{one} <- {' <- '.join(map(str, list(one.traceback)[-2::-1]))}" for one in grown)

    answers: dict[str, Callable[[], str]] = {"objects": objects, "trace": traced}

    def asked() -> None:
        line = sys.stdin.readline().strip()
        if line:
            print(answers[line](), flush=True)

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), asked)
    async with many_kinds().worker(url(dsn)):
        print("ready", flush=True)
        await told.wait()


if __name__ == "__main__":
    asyncio.run({"idle": idle, "mixed": mixed}[sys.argv[1]](*sys.argv[2:]))
