"""Rate limits: the bucket by itself, and a worker that keeps to it."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from awa_sqla import InvalidJob, JobArgs, QueueConfig, RateLimit
from awa_sqla.worker.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_without_a_limit_everything_may_begin(clock):
    pace = Pace(None, clock)
    assert (pace.take(500), pace.wait()) == (500, 0.0)


def test_a_bucket_starts_full_and_fills_at_its_rate(clock):
    pace = Pace(RateLimit(2, 10), clock)
    assert [pace.take(4), pace.take(4), pace.take(4), pace.take(4)] == [4, 4, 2, 0]
    clock.now += 1.5
    assert [pace.take(10), pace.take(10)] == [3, 0]
    clock.now += 3600
    assert pace.take(100) == 10


def test_what_was_not_used_comes_back_and_no_more_than_the_burst(clock):
    pace = Pace(RateLimit(1, 5), clock)
    assert pace.take(5) == 5
    pace.give_back(3)
    assert pace.take(5) == 3
    pace.give_back(50)
    assert pace.take(50) == 5


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [(RateLimit(2, 10), 0.5), (RateLimit(0.1, 1), 10.0), (RateLimit(1000, 1000), 0.05), (RateLimit(1000, 5), 0.005)],
)
def test_it_waits_for_a_claim_that_is_worth_its_while(clock, limit, seconds):
    pace = Pace(limit, clock)
    pace.take(limit.burst)
    assert pace.wait() == pytest.approx(seconds)
    clock.now += pace.wait() + 1e-9
    assert pace.take(limit.burst) >= 1


def test_a_clock_that_stands_still_or_goes_on_by_years_gives_no_more_than_the_burst(clock):
    pace = Pace(RateLimit(1000, 7), clock)
    assert pace.take(7) == 7
    assert pace.take(7) == 0
    clock.now += 1e9
    assert pace.take(1000) == 7


def test_another_limit_goes_on_with_the_tokens_there_are(clock):
    pace = Pace(RateLimit(1, 10), clock)
    pace.take(8)
    pace.change(RateLimit(1, 100))
    assert pace.take(100) == 2
    pace.change(None)
    assert pace.take(100) == 100
    clock.now += 50
    pace.change(RateLimit(1, 4))
    assert pace.take(100) == 4
    pace.change(RateLimit(1, 4))
    assert pace.take(100) == 0


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf, "5", True, None, 1e7])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(InvalidJob) as caught:
        RateLimit(rate)
    assert caught.value.field == "per_second"


@pytest.mark.parametrize("burst", [-1, 1.5, True, 10_000_000])
def test_a_burst_that_is_none_is_refused(burst):
    with pytest.raises(InvalidJob) as caught:
        RateLimit(1, burst)
    assert caught.value.field == "burst"


def test_a_burst_left_out_is_the_rate_rounded_up():
    assert [RateLimit(rate).burst for rate in (0.1, 1, 2.5)] == [1, 1, 3]


def test_a_rate_limit_that_is_none_is_refused_by_the_queue():
    with pytest.raises(InvalidJob, match="must be a RateLimit"):
        QueueConfig(rate_limit=5)


class Call(JobArgs, queue="slow"):
    pass


class Quick(JobArgs, queue="quick"):
    pass


def test_a_worker_keeps_to_the_rate_and_other_queues_do_not_wait(stage):
    began: list[float] = []
    quick: list[float] = []

    async def call(ctx: Any) -> None:
        began.append(time.monotonic())

    async def fast(ctx: Any) -> None:
        quick.append(time.monotonic())

    stage.app.queues["slow"] = QueueConfig(rate_limit=RateLimit(10, 5))
    stage.app.task(Call)(call)
    stage.app.task(Quick)(fast)
    stage.enqueue(*[Call() for _ in range(25)])
    stage.enqueue(*[Quick() for _ in range(200)])
    start = time.monotonic()
    stage.play()
    assert (len(began), len(quick)) == (25, 200)
    # By any time no more have begun than the burst and what the rate has added since; half a token is for rounding.
    assert all(number <= 5 + 10 * (when - start) + 0.5 for number, when in enumerate(began, 1))
    assert max(quick) < began[-1]
