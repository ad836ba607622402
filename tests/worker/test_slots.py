"""Slots, tokens and outcomes when something goes wrong: nothing leaks, nobody else pays."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

from awa_sqla import JobArgs, QueueConfig, RateLimit, Started
from awa_sqla.worker.dispatch import QueueLoop
from awa_sqla.worker.finalize import Finalizer


class Work(JobArgs):
    pass


class Other(JobArgs):
    pass


async def nothing(ctx: Any) -> None:
    return None


def test_a_row_that_no_hook_can_be_told_of_keeps_no_other_from_beginning(stage, caplog):
    told: list[str] = []

    stage.app.task(Work)(nothing)
    stage.app.task(Other)(nothing)
    stage.app.hooks.on(Started, Work)(lambda event: told.append(event.job.kind))
    stage.app.queues["default"] = QueueConfig(concurrency=3)
    stage.enqueue(Work(), Other(), Other())
    stage.sql(
        """UPDATE awa.jobs_hot SET metadata = ('{"n": ' || repeat('9', 5000) || '}')::jsonb WHERE kind = 'work'"""
    )

    def states() -> list[str]:
        return [row.state for row in stage.sql("SELECT state FROM awa.jobs ORDER BY id")]

    async def during(worker: Any) -> None:
        await stage.until(lambda: "running" not in states() and "available" not in states())
        await stage.until(lambda: worker.load() == {"default": (0, 3)})

    stage.play(lambda: True, during=during)
    assert states()[1:] == ["completed", "completed"]
    assert told == []
    assert "were not told of job" in caplog.text


def test_a_claim_that_broke_gives_its_tokens_back(stage, monkeypatch):
    claim, broken = QueueLoop._claim, []

    async def breaks_once(self: QueueLoop, limit: int) -> Any:
        if not broken:
            broken.append(limit)
            raise ValueError("no error that passes by itself")
        return await claim(self, limit)

    monkeypatch.setattr(QueueLoop, "_claim", breaks_once)
    stage.app.task(Work)(nothing)
    stage.app.queues["default"] = QueueConfig(rate_limit=RateLimit(0.001, 2))
    stage.enqueue(Work(), Work())
    stage.play()
    assert broken == [2]


def test_where_no_thread_can_start_the_job_runs_later_once_and_uncharged(stage, caplog):
    runs: list[tuple[int, int]] = []
    go = threading.Event()

    def handler(ctx: Any) -> None:
        runs.append((ctx.job.id, ctx.attempt))
        go.wait(20)

    stage.app.task(Work)(handler)
    first = stage.enqueue(Work())

    async def during(worker: Any) -> None:
        await stage.until(lambda: runs)
        before = threading.stack_size(1 << 44)  # more than there can be
        try:
            more.extend(stage.enqueue(Work(), Work(), max_attempts=1))
            await stage.until(lambda: stage.states().count("scheduled") == 2)
        finally:
            threading.stack_size(before)
            go.set()

    more: list[int] = []
    stage.play(during=during)
    assert sorted(runs) == [(number, 1) for number in first + more]
    assert stage.states() == ["completed"] * 3
    assert "can't start new thread" in caplog.text


def test_a_job_that_is_done_and_not_written_yet_is_not_abandoned(stage, monkeypatch):
    done: list[int] = []
    write = Finalizer._batch

    async def late(self: Finalizer, items: Any) -> None:
        await asyncio.sleep(2.5)  # longer than grace and the last call
        await write(self, items)

    async def handler(ctx: Any) -> None:
        done.append(ctx.job.id)

    monkeypatch.setattr(Finalizer, "_batch", late)
    stage.app.task(Work)(handler)
    stage.enqueue(Work())
    worker = stage.play(lambda: done, grace=timedelta(seconds=0.1))
    assert (stage.states(), worker.abandoned) == (["completed"], 0)
