"""What operators override while the worker runs, and queues side by side."""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta
from typing import Any

import pytest

from awa_sqla import JobArgs, QueueConfig, RateLimit
from awa_sqla.worker import runner
from awa_sqla.worker.survey import Found, Settings, rationed


class Work(JobArgs):
    pass


class Other(JobArgs, queue="other"):
    pass


class Crowd:
    """Handlers that stay until they are let go; the most that there were at once since last asked."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.gates: list[asyncio.Event] = []

    async def __call__(self, ctx: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        gate = asyncio.Event()
        self.gates.append(gate)
        await gate.wait()
        self.now -= 1

    def let_go(self, number: int = 1000) -> None:
        for gate in [gate for gate in self.gates if not gate.is_set()][:number]:
            gate.set()


@pytest.fixture
def crowd(stage, monkeypatch):
    monkeypatch.setattr(runner, "POLL", 0.05)
    crowd = Crowd()

    async def handler(ctx: Any) -> None:
        await crowd(ctx)

    stage.app.queues["default"] = QueueConfig(concurrency=3)
    stage.app.task(Work)(handler)
    return crowd


def override(stage: Any, **values: Any) -> None:
    for name, value in values.items():
        stage.sql(f"UPDATE awa.queue_meta SET override_{name} = %s WHERE queue = 'default'", value)


def test_a_higher_and_a_lower_concurrency_hold_within_one_poll(stage, crowd):
    stage.enqueue(*[Work() for _ in range(30)])

    async def during(worker: Any) -> None:
        await stage.until(lambda: crowd.now == 3)
        override(stage, concurrency=7)
        await stage.until(lambda: crowd.now == 7)
        override(stage, concurrency=2)
        await stage.until(lambda: worker._loops["default"].capacity == 2)
        crowd.let_go(5)  # five end and none begins: two are left
        await stage.until(lambda: stage.states().count("completed") == 5)
        assert crowd.now == 2
        crowd.most = 0
        crowd.let_go(2)
        await stage.until(lambda: stage.states().count("completed") == 7 and crowd.now == 2)
        assert crowd.most == 2
        override(stage, concurrency=0)
        await stage.until(lambda: worker._loops["default"].capacity == 0)
        crowd.let_go()
        await stage.until(lambda: worker._loops["default"].busy == 0)
        await asyncio.sleep(0.2)
        assert (crowd.now, stage.states().count("available")) == (0, 21)
        override(stage, concurrency=None)
        await stage.until(lambda: crowd.now == 3)
        assert worker._loops["default"].capacity == 3
        worker.interrupt()

    stage.play(lambda: True, during=during)


def test_an_override_from_before_the_start_holds_from_the_first_claim(stage, crowd):
    stage.sql("INSERT INTO awa.queue_meta (queue, override_concurrency) VALUES ('default', 1)")
    stage.enqueue(Work(), Work(), Work())

    async def during(worker: Any) -> None:
        for done in range(3):
            await stage.until(lambda done=done: crowd.now == 1 and stage.states().count("completed") == done)
            crowd.let_go()

    stage.play(during=during)
    assert crowd.most == 1


def test_a_rate_limit_can_be_overridden_while_jobs_wait(stage, crowd):
    stage.app.queues["default"] = QueueConfig(concurrency=100)
    stage.sql(
        "INSERT INTO awa.queue_meta (queue, override_rate_per_second, override_rate_burst) VALUES ('default', 0.001, 2)"
    )
    stage.enqueue(*[Work() for _ in range(10)])

    async def during(worker: Any) -> None:
        await stage.until(lambda: crowd.now == 2)
        await asyncio.sleep(0.2)
        assert crowd.now == 2
        override(stage, rate_per_second=None, rate_burst=None)
        await stage.until(lambda: crowd.now == 10)
        crowd.let_go()

    stage.play(during=during)


def test_the_deadline_of_an_operator_holds_for_the_next_claim(stage, crowd):
    stage.enqueue(Work(), max_attempts=1)
    stage.sql("INSERT INTO awa.queue_meta (queue, override_deadline_seconds) VALUES ('default', 0.2)")
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.errors[0]["error"]) == ("failed", "hard deadline exceeded")


def test_a_poll_interval_can_be_overridden_without_notifications(stage, crowd):
    stage.app.queues["default"] = QueueConfig(concurrency=3, poll_interval=timedelta(milliseconds=20))

    async def during(worker: Any) -> None:
        override(stage, poll_seconds=0.07)
        await stage.until(lambda: worker._patience() == 0.07)
        override(stage, poll_seconds=None)
        await stage.until(lambda: worker._patience() == 0.02)

    stage.play(during=during, notify=False)


def test_a_paused_queue_is_not_claimed_from_until_the_pause_ends(stage, crowd):
    claims: list[int] = []
    stage.sql(
        "INSERT INTO awa.queue_meta (queue, paused_at, paused_until) VALUES ('default', now(), now() + interval '1 s')"
    )
    stage.enqueue(Work())

    async def during(worker: Any) -> None:
        claim = worker._loops["default"]._claim

        async def counted(limit: int) -> Any:
            claims.append(limit)
            return await claim(limit)

        worker._loops["default"]._claim = counted
        await stage.until(lambda: crowd.now == 1)
        crowd.let_go()

    stage.play(during=during)
    assert (
        len(claims) <= 6
    )  # at the start, for the listener, at the pause's end, after the job; not for each of 20 polls


def test_a_full_queue_keeps_no_other_queue_waiting(stage, crowd):
    done: list[int] = []

    async def other(ctx: Any) -> None:
        done.append(ctx.job.id)

    stage.app.task(Other)(other)
    stage.enqueue(*[Work() for _ in range(2000)])

    async def during(worker: Any) -> None:
        await stage.until(lambda: crowd.now == 3)
        ids = stage.enqueue(*[Other() for _ in range(100)])
        await stage.until(lambda: sorted(done) == ids)
        assert crowd.now == 3  # all the while
        stage.sql("DELETE FROM awa.jobs_hot WHERE state = 'available'")
        crowd.let_go()

    stage.play(during=during)


DECLARED = QueueConfig(concurrency=5, rate_limit=RateLimit(3, 4))


@pytest.mark.parametrize(
    ("found", "in_force"),
    [
        (Found("q", True, None, None, None, None), Settings(5, 0.2, RateLimit(3, 4))),
        (Found("q", True, 9, 1.5, 7.0, 8), Settings(9, 1.5, RateLimit(7.0, 8))),
        (Found("q", True, None, None, 7.0, None), Settings(5, 0.2, RateLimit(7.0, 7))),
        (Found("q", True, None, None, None, 2), Settings(5, 0.2, RateLimit(3, 2))),
        (Found("q", True, -3, -1.0, math.nan, None), Settings(0, 0.01, RateLimit(3, 4))),
        (Found("q", True, 2**31 - 1, math.nan, math.inf, 2**31 - 1), Settings(100_000, 0.01, RateLimit(1e6, 10**6))),
    ],
)
def test_whatever_stands_in_the_table_settings_stay_within_their_limits(found, in_force):
    assert found.in_force(DECLARED) == in_force


def test_overrides_are_rationed_where_a_pool_sets_the_limit():
    settings = {name: Settings(number, 1, None) for name, number in {"a": 60, "b": 30, "c": 1, "d": 0}.items()}
    assert rationed(settings, None) == {"a": 60, "b": 30, "c": 1, "d": 0}
    assert rationed(settings, 91) == {"a": 60, "b": 30, "c": 1, "d": 0}
    assert rationed(settings, 40) == {"a": 25, "b": 13, "c": 1, "d": 0}
    settings = {name: Settings(number, 1, None) for name, number in {"a": 1, "b": 1, "c": 1000}.items()}
    assert rationed(settings, 3) == {"a": 1, "b": 1, "c": 1}
