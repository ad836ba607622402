"""One bad row, lock, spec or payload is its own trouble: the worker and everybody else's jobs go on."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from pydantic import field_validator
from sqlalchemy import text

from awa_sqla import Backoff, JobArgs, QueueConfig
from awa_sqla.models.wakeups import channel


class Work(JobArgs, max_attempts=2, backoff=Backoff(base=timedelta(0))):
    number: float = 0


class Zoned(JobArgs):
    zone: str = "UTC"

    @field_validator("zone")
    @classmethod
    def known(cls, value: str) -> str:
        ZoneInfo(value)
        return value


class Next(JobArgs):
    pass


async def nothing(ctx: Any) -> None:
    return None


def test_a_row_that_somebody_holds_keeps_no_other_outcome_waiting(stage):
    ended: list[float] = []

    async def handler(ctx: Any) -> None:
        await asyncio.sleep(0.5 if ctx.args.number == 0 else 0.01)
        ended.append(time.monotonic())

    stage.app.queues["default"] = QueueConfig(concurrency=5)
    stage.app.task(Work)(handler)
    held, *_ = stage.enqueue(*[Work(number=n) for n in range(60)])

    async def hold(worker: Any) -> None:
        await asyncio.sleep(0.1)
        with stage.sessions() as holder:
            holder.execute(text("SELECT 1 FROM awa.jobs_hot WHERE id = :id FOR UPDATE"), {"id": held})
            await stage.until(lambda: stage.states().count("completed") == 59)
            assert stage.jobs()[0].state == "running"

    stage.play(during=hold)
    assert stage.states() == ["completed"] * 60


@pytest.mark.case(52)
def test_a_validator_that_raises_anything_fails_its_own_job(stage):
    stage.app.task(Zoned)(nothing)
    stage.enqueue(Zoned(), Zoned())
    stage.sql('UPDATE awa.jobs_hot SET args = \'{"zone": "Old/Zone"}\' WHERE id = (SELECT min(id) FROM awa.jobs_hot)')
    stage.play()
    bad, good = stage.jobs()
    assert (bad.state, bad.attempt, good.state) == ("failed", 1, "completed")
    assert "Old/Zone" in bad.errors[0]["error"]


def test_a_lost_connection_is_tried_again_whatever_retry_on_says(stage):
    def handler(ctx: Any) -> None:
        pid = ctx.session.scalar(text("SELECT pg_backend_pid()"))
        if ctx.attempt == 1:
            stage.sql("SELECT pg_terminate_backend(%s, 5000)", pid)
            if ctx.args.number:
                ctx.session.execute(text("SELECT 1"))

    stage.app.task(Work, transactional=True, retry_on=(KeyError,))(handler)
    stage.enqueue(Work(number=0), Work(number=1))
    stage.play()
    assert [(job.state, job.attempt) for job in stage.jobs()] == [("completed", 2)] * 2


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_row_that_cannot_be_written_anew_fails_where_it_is(stage, driver, quick):
    async def handler(ctx: Any) -> None:
        if ctx.args.number:
            raise ValueError

    stage.app.task(Work)(handler)
    stage.sql("INSERT INTO awa.jobs_hot (kind, args) VALUES ('work', '{\"number\": 1e400}')")
    stage.sql(
        "INSERT INTO awa.jobs_hot (kind, args, state, run_lease, heartbeat_at, attempt) "
        "VALUES ('work', '{\"number\": 1e400}', 'running', 1, now() - interval '1 h', 1), "
        "('work', '{}', 'running', 2, now() - interval '1 h', 1)"
    )
    stage.enqueue(Work())
    stage.play(url=stage.url.set(drivername=f"postgresql+{driver}"), **quick)
    assert stage.states() == ["failed", "failed", "completed", "completed"]


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_whatever_a_spec_raises_ends_neither_the_worker_nor_the_dispatch(stage, error):
    def spec(event: Any) -> Next:
        raise error

    stage.app.task(Work)(nothing)
    stage.app.on_completed(Work, name="spec")(spec)
    stage.enqueue(Work())
    stage.play(lambda: stage.obligations() and stage.obligations()[0].attempts == 1)
    assert stage.states() == ["completed"]
    assert error.__name__ in stage.obligations()[0].last_error


def test_a_payload_that_anybody_may_send_does_not_break_the_listener(stage):
    stage.app.task(Work)(nothing)

    async def shout(worker: Any) -> None:
        await stage.until(lambda: worker._listener.healthy)
        for payload in ("c:1", "c:x:y", "c:1:2:3", "c:99999999999999999999999:1", "", "\N{SNOWMAN}"):
            stage.sql(f"NOTIFY {channel('awa')}, '{payload}'")
        stage.enqueue(Work())
        await stage.until(stage.all_ended)
        assert worker._listener.healthy

    stage.play(during=shout)
