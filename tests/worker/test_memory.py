"""A worker keeps nothing of the jobs it has done: what is in memory after 2,000 is what is there after 6,000."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import (
    Backoff,
    CallbackNotFound,
    Cancel,
    EnqueueRequest,
    FollowUps,
    Hooks,
    JobArgs,
    JobFailed,
    QueueConfig,
    Snooze,
    Started,
    TerminalError,
    cancel,
    enqueue,
    enqueue_many,
    resume_external,
    wait_for,
)
from tests.worker.conftest import PATIENCE

MOMENT = timedelta(milliseconds=1)

#: Live jobs but those that nobody here knows.
LIVE = """
SELECT count(*) FROM awa.jobs WHERE state NOT IN ('completed', 'failed', 'cancelled') AND kind <> 'memory_stranger'
"""


#: Types of which a worker at rest has as many after many jobs as after few, but for the few that its lanes hold.
OURS = ("awa_sqla", "asyncio", "_asyncio", "session classes")


class Plain(JobArgs, kind="memory_plain", deadline=timedelta(hours=1)):
    number: int


class Threaded(Plain, kind="memory_threaded"):
    pass


class Parent(Plain, kind="memory_parent"):
    pass


class Flaky(Plain, kind="memory_flaky", backoff=Backoff(base=MOMENT, factor=1, jitter=0)):
    pass


class Ending(Plain, kind="memory_ending"):
    """Fails for good, cancels itself, or is snoozed, by its number."""


class Hanging(Plain, kind="memory_hanging"):
    """Runs until somebody cancels it."""


class Waiting(Plain, kind="memory_waiting"):
    """Waits for a callback that comes, or gives up."""


class Stranger(Plain, kind="memory_stranger"):
    """A kind that the worker does not know."""


class Crowd:
    """The jobs of this test, and what else happens around them."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.tokens: list[Any] = []
        app = stage.app
        app.queues["default"] = QueueConfig(concurrency=100)

        async def plain(ctx: Any) -> int:
            return ctx.args.number

        def threaded(ctx: Any) -> None:
            ctx.is_cancelled()

        async def flaky(ctx: Any) -> None:
            if ctx.attempt == 1:
                raise OSError("the first time")
            await ctx.set_progress(50)

        async def ending(ctx: Any) -> Any:
            if ctx.args.number % 3 == 0:
                raise TerminalError(f"number {ctx.args.number}")
            if ctx.args.number % 3 == 1:
                return Cancel(f"number {ctx.args.number}")
            return None if ctx.job.snoozes else Snooze(MOMENT)

        async def hanging(ctx: Any) -> None:
            await asyncio.Event().wait()

        async def waiting(ctx: Any) -> Any:
            token = await ctx.register_callback()
            if ctx.args.number % 2:
                self.tokens.append(token)
                return await ctx.wait_for_callback(token)
            try:
                async with asyncio.timeout(0.01):
                    await ctx.wait_for_callback(token)
            except TimeoutError:
                return "nobody came"

        for args_class, handler in (
            (Plain, plain),
            (Parent, plain),
            (Threaded, threaded),
            (Flaky, flaky),
            (Ending, ending),
            (Hanging, hanging),
            (Waiting, waiting),
        ):
            app.task(args_class)(handler)
        app.on_completed(Parent, name="child")(lambda event: Plain(number=event.args.number))
        app.hooks.on(Started, Threaded)(lambda event: None)

    async def pass_by(self, waits: async_sessionmaker[Any], count: int) -> None:
        """So many jobs, from their enqueueing to their ends."""
        jobs: list[JobArgs | EnqueueRequest] = []
        for n in range(count):
            few = {0: Ending, 1: Flaky, 2: Parent, 3: Threaded}.get(n % 100, Plain)
            jobs.append(few(number=n // 100))
        jobs += [Waiting(number=n) for n in range(10)] + [Stranger(number=n) for n in range(10)]
        with self.stage.sessions.begin() as session:
            ids = enqueue_many(session, jobs)
        hanging = self.stage.enqueue(*[Hanging(number=n) for n in range(10)])
        watched = [asyncio.create_task(self.watch(waits, job_id)) for job_id in [*ids[:10], *hanging]]
        self.register_and_forget()
        async with asyncio.timeout(PATIENCE):
            while self.stage.sql(LIVE)[0].count:
                await asyncio.to_thread(self._interfere)
                await asyncio.sleep(0.1)
        await asyncio.gather(*watched)

    async def watch(self, waits: async_sessionmaker[Any], job_id: int | None) -> None:
        assert job_id is not None
        with suppress(JobFailed):
            await wait_for(waits, job_id)

    def _interfere(self) -> None:
        """Resume what waits, cancel what hangs."""
        for token in list(self.tokens):
            try:
                with self.stage.sessions.begin() as session:
                    resume_external(session, token.id, 1)
            except CallbackNotFound:
                continue  # it does not wait yet
            self.tokens.remove(token)
        running = self.stage.sql("SELECT id FROM awa.jobs WHERE kind = 'memory_hanging' AND state = 'running'")
        for row in running:
            with self.stage.sessions.begin() as session:
                cancel(session, row.id, reason="enough")

    def register_and_forget(self) -> None:
        """Session factories, registries and their listeners that go out of use, some of them half-way."""
        for n in range(10):
            maker = sessionmaker(self.stage.sessions.kw["bind"])
            follow_ups, hooks = FollowUps(), Hooks()
            follow_ups.attach(maker)
            hooks.attach(maker)
            hooks.on(Started, Plain)(lambda event: None)
            session = maker()
            enqueue(session, Plain(number=n))
            session.flush()
            if n % 2:
                session.rollback()
                follow_ups.detach(maker)
            session.close()


def counted() -> Counter[str]:
    """What there is in memory, by type; session classes apart."""
    gc.collect()
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        if isinstance(one, type) and issubclass(one, Session):
            found["session classes"] += 1
        else:
            found[f"{type(one).__module__}.{type(one).__qualname__}"] += 1
    return found


def more(now: Counter[str], before: Counter[str]) -> dict[str, int]:
    """What there is more of than chance explains."""
    grown = now - before
    # The loop keeps up to a hundred alarms that were cancelled, until it looks through them.
    chance = {name: 5 if name.startswith(OURS) else 200 for name in grown} | {"asyncio.events.TimerHandle": 100}
    return {name: count for name, count in grown.items() if count > chance[name]}


async def at_rest(before: Counter[str] | None = None) -> Counter[str]:
    """The least of each over a while, in which lanes and jobs that nobody knows come and go."""
    least = counted()
    for _ in range(4 if before is None else 40):
        if before is not None and not more(least, before):
            break
        await asyncio.sleep(0.2)
        least &= counted()
    return least


@pytest.mark.slow
@pytest.mark.beside
def test_nothing_is_kept_of_the_jobs_that_are_done(
    stage: Any, quick: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "awa_sqla")  # pytest keeps what is logged, errors and their frames with it
    crowd = Crowd(stage)

    async def run() -> tuple[Counter[str], Counter[str]]:
        engine = create_async_engine(stage.url)
        waits = async_sessionmaker(engine)
        async with stage.app.worker(stage.url, **quick) as worker:
            await crowd.pass_by(waits, 2_000)
            before = await at_rest()
            for _ in range(2):
                await crowd.pass_by(waits, 2_000)
            after = await at_rest(before)
            assert worker._waits._waiting == {}
        await engine.dispose()
        return before, after

    before, after = asyncio.run(run())
    assert more(after, before) == {}
