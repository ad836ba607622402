"""Progress and checkpoints: what survives which end of an attempt, on every road, and what writing them costs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, text

from awa_sqla import (
    Backoff,
    Cancel,
    InvalidJob,
    Job,
    JobArgs,
    QueueConfig,
    RetryAfter,
    Snooze,
    StaleJobError,
    TerminalError,
    WaitForCallback,
    cancel,
    complete_external,
    fail_external,
    retry_external,
)
from awa_sqla.worker import books, runner
from tests.worker.test_life import _spawn, _until

MOMENT = timedelta(milliseconds=1)
HOUR = timedelta(hours=1)
ROADS = ["async", "def", "async transactional", "def transactional"]
on_every_road = pytest.mark.parametrize("road", ROADS)

#: What `reach` leaves behind.
KEPT = {"percent": 40, "message": "pages", "metadata": {"page": 3}}

Script = Callable[[Any], Generator[Any, Any, Any]]


class Work(JobArgs, max_attempts=3, backoff=Backoff(base=MOMENT, factor=1, jitter=0)):
    text: str = ""


class Other(JobArgs):
    number: int


def register(stage: Any, road: str, script: Script) -> None:
    """Register a handler in either colour; `script` is a generator that yields what is to be awaited."""

    async def in_task(ctx: Any) -> Any:
        steps = script(ctx)
        try:
            awaited = next(steps)
            while True:
                try:
                    value = await awaited
                except Exception as exc:
                    awaited = steps.throw(exc)
                else:
                    awaited = steps.send(value)
        except StopIteration as end:
            return end.value

    def in_thread(ctx: Any) -> Any:
        steps = script(ctx)
        try:
            value = next(steps)
            while True:
                value = steps.send(value)
        except StopIteration as end:
            return end.value

    handler = in_task if "async" in road else in_thread
    stage.app.task(Work, transactional="transactional" in road)(handler)


def reach(ctx: Any) -> Generator[Any, Any, None]:
    """The first half of the work."""
    yield ctx.checkpoint({"page": 3})
    yield ctx.set_progress(40, "pages")


class Resuming:
    """A script that ends its first attempt as `end` says and goes on from its checkpoint in the next."""

    def __init__(self, end: Callable[[Any], Generator[Any, Any, Any]]) -> None:
        self.seen: list[dict[str, Any]] = []
        self._end = end

    def __call__(self, ctx: Any) -> Generator[Any, Any, Any]:
        self.seen.append(ctx.progress)
        if len(self.seen) == 1:
            yield from reach(ctx)
            return (yield from self._end(ctx))
        return ctx.progress["metadata"]["page"]


# ---------------------------------------------------------------------------------------------- from run to run
def raised(ctx: Any) -> Generator[Any, Any, Any]:
    yield ctx.set_progress()
    raise ValueError("half-way")


def later(ctx: Any) -> Generator[Any, Any, Any]:
    yield ctx.set_progress()
    return RetryAfter(MOMENT)


def snoozed(ctx: Any) -> Generator[Any, Any, Any]:
    yield ctx.set_progress()
    return Snooze(MOMENT)


@on_every_road
@pytest.mark.parametrize("end", [raised, later, snoozed])
def test_a_checkpoint_outlives_its_attempt(stage, road, end):
    script = Resuming(end)
    register(stage, road, script)
    stage.enqueue(Work())
    stage.play()
    (job,) = stage.jobs()
    assert script.seen == [{}, KEPT]
    assert (job.state, job.result) == ("completed", 3)


@pytest.mark.parametrize("end", [RetryAfter(HOUR), Snooze(HOUR)], ids=lambda end: type(end).__name__)
def test_a_checkpoint_waits_with_its_job_and_is_promoted_with_it(stage, end):
    def put_off(ctx: Any) -> Generator[Any, Any, Any]:
        yield ctx.set_progress()
        return end

    script = Resuming(put_off)
    register(stage, "async", script)
    stage.enqueue(Work())
    waiting: list[Any] = []

    async def look_and_hurry(worker: Any) -> None:
        await stage.until(lambda: stage.jobs()[0].stored_in == "scheduled")
        waiting.append(stage.jobs()[0].progress)
        stage.sql("UPDATE awa.scheduled_jobs SET run_at = now()")

    stage.play(during=look_and_hurry)
    assert (waiting, script.seen) == ([KEPT], [{}, KEPT])


@on_every_road
@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")  # of the abandoned thread
def test_a_checkpoint_outlives_the_worker_that_is_stopped(stage, road, monkeypatch):
    monkeypatch.setattr(runner, "LAST_CALL", 0.2)
    reached, go = threading.Event(), threading.Event()

    def long(ctx: Any) -> Generator[Any, Any, Any]:
        reached.set()
        if "async" in road:
            yield asyncio.sleep(60)
        go.wait(1)  # a thread that does not end in time is left behind

    script = Resuming(long)
    register(stage, road, script)
    stage.enqueue(Work())

    async def half_way(worker: Any) -> None:
        await stage.until(reached.is_set)

    stage.play(lambda: True, during=half_way, grace=timedelta(seconds=0.1))
    (job,) = stage.jobs()
    assert (job.stored_in, job.attempt, job.progress) == ("scheduled", 0, KEPT)
    go.set()
    stage.play()
    assert script.seen == [{}, KEPT]
    assert stage.jobs()[0].result == 3


@pytest.mark.slow
def test_a_checkpoint_outlives_a_worker_that_is_killed(stage, quick, tmp_path):
    marker = tmp_path / "reached"
    stage.enqueue(Work(), max_attempts=2)
    process = _spawn(
        stage,
        "import pathlib, time; ctx.checkpoint({'page': 3}); ctx.set_progress(40, 'pages'); "
        f"pathlib.Path({str(marker)!r}).touch(); time.sleep(60)",
    )
    _until(marker.exists)
    process.kill()
    process.wait()
    script = Resuming(raised)
    script.seen.append({})  # the attempt that was killed
    register(stage, "async", script)
    stage.play(**quick)
    assert script.seen == [{}, KEPT]
    assert stage.jobs()[0].result == 3


@on_every_road
@pytest.mark.parametrize("resolve", [retry_external, fail_external])
def test_a_checkpoint_waits_for_the_callback_with_its_job(stage, road, resolve):
    tokens: list[Any] = []

    def parked(ctx: Any) -> Generator[Any, Any, Any]:
        tokens.append((yield ctx.register_callback()))
        return WaitForCallback(tokens[0])

    script = Resuming(parked)
    register(stage, road, script)
    stage.enqueue(Work(), max_attempts=1 if resolve is fail_external else 2)

    async def answer(worker: Any) -> None:
        await stage.until(lambda: stage.states() == ["waiting_external"])
        assert stage.jobs()[0].progress == KEPT
        with stage.sessions.begin() as session:
            resolve(session, tokens[0].id, *(["no"] if resolve is fail_external else []))

    stage.play(during=answer)
    (job,) = stage.jobs()
    if resolve is fail_external:  # for good
        assert (job.state, job.progress) == ("failed", KEPT)
    else:
        assert (job.state, script.seen) == ("completed", [{}, KEPT])


# --------------------------------------------------------------------------------------------------- at the end
@on_every_road
def test_a_completed_job_has_no_progress(stage, road):
    def script(ctx: Any) -> Generator[Any, Any, Any]:
        yield from reach(ctx)
        assert stage.jobs()[0].progress == KEPT
        return dict(ctx.progress)

    register(stage, road, script)
    stage.enqueue(Work())
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.progress, job.result) == ("completed", None, KEPT)


def test_a_job_that_a_callback_completes_has_no_progress(stage):
    tokens: list[Any] = []

    def script(ctx: Any) -> Generator[Any, Any, Any]:
        yield from reach(ctx)
        tokens.append((yield ctx.register_callback()))
        return WaitForCallback(tokens[0])

    register(stage, "async", script)
    stage.enqueue(Work())

    async def answer(worker: Any) -> None:
        await stage.until(lambda: stage.states() == ["waiting_external"])
        with stage.sessions.begin() as session:
            complete_external(session, tokens[0].id, "done")

    stage.play(during=answer)
    (job,) = stage.jobs()
    assert (job.state, job.progress, job.result) == ("completed", None, "done")


@on_every_road
@pytest.mark.parametrize("keeps", [True, False], ids=["dead letter", "failed"])
def test_a_job_that_failed_for_good_says_how_far_it_came(stage, road, keeps):
    def script(ctx: Any) -> Generator[Any, Any, Any]:
        yield from reach(ctx)
        raise TerminalError("no page 4")

    stage.app.queues["default"] = QueueConfig(dead_letters=keeps)
    register(stage, road, script)
    stage.enqueue(Work())
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.stored_in, job.progress) == ("failed", "dead" if keeps else "hot", KEPT)


def test_a_job_that_cancels_itself_says_how_far_it_came(stage):
    def script(ctx: Any) -> Generator[Any, Any, Any]:
        yield from reach(ctx)
        return Cancel("no page 4")

    register(stage, "async", script)
    stage.enqueue(Work())
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.progress) == ("cancelled", KEPT)


# ------------------------------------------------------------------------------------------------------ too late
@on_every_road
@pytest.mark.parametrize("how", ["taken", "cancelled"])
def test_progress_of_an_attempt_that_has_ended_is_an_error(stage, road, how):
    errors: list[StaleJobError] = []

    def script(ctx: Any) -> Generator[Any, Any, Any]:
        yield from reach(ctx)
        if how == "taken":
            stage.sql("UPDATE awa.jobs_hot SET run_lease = nextval('awa.run_lease_seq')")
        else:
            with stage.sessions.begin() as session:
                cancel(session, ctx.job.id, reason="enough")
        for write in (lambda: ctx.set_progress(90), lambda: ctx.checkpoint({"page": 9})):
            try:
                yield write()
            except StaleJobError as exc:
                errors.append(exc)

    register(stage, road, script)
    stage.enqueue(Work())
    # Without notifications nobody interrupts the handler before it has found out by itself.
    stage.play(lambda: len(errors) == 2, notify=False)
    (job,) = stage.jobs()
    assert [error.job_id for error in errors] == [job.id] * 2
    assert (job.progress, job.result) == (KEPT, None)


@on_every_road
def test_wrong_progress_is_refused_and_changes_nothing(stage, road):
    fields: list[str] = []

    def script(ctx: Any) -> Generator[Any, Any, Any]:
        yield from reach(ctx)
        for wrong in (lambda: ctx.set_progress(101), lambda: ctx.checkpoint({"at": object()})):
            try:
                yield wrong()
            except InvalidJob as exc:
                fields.append(exc.field)
        return dict(ctx.progress)

    register(stage, road, script)
    stage.enqueue(Work())
    stage.play()
    assert fields == ["percent", "metadata.at"]
    assert stage.jobs()[0].result == KEPT


# ----------------------------------------------------------------------------------------------------- how often
@pytest.fixture
def counting() -> Iterator[list[str]]:
    """What writes progress, over whichever engine."""
    written: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "SET progress" in statement:
            written.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield written
    event.remove(Engine, "before_cursor_execute", note)


@pytest.mark.parametrize("road", ["async", "def"])
def test_each_call_that_is_waited_for_is_durable(stage, road, counting):
    def script(ctx: Any) -> Generator[Any, Any, Any]:
        for n in range(1, 101):
            yield ctx.set_progress(n, metadata={str(n % 10): n})
            if n % 50 == 0:
                assert stage.jobs()[0].progress["percent"] == n
        return dict(ctx.progress["metadata"])

    register(stage, road, script)
    stage.enqueue(Work())
    stage.play()
    assert len(counting) == 100
    assert stage.jobs()[0].result == {str(n % 10): n for n in range(91, 101)}


def test_a_thousand_calls_at_once_are_written_together_and_in_their_order(stage, counting):
    def script(ctx: Any) -> Generator[Any, Any, Any]:
        calls = [ctx.set_progress(n / 10, f"call {n}", metadata={str(n % 7): n}) for n in range(1000)]
        calls.append(ctx.set_progress())  # nothing new
        yield asyncio.gather(*calls)
        stored = stage.jobs()[0].progress
        assert ctx.progress == stored
        return stored

    register(stage, "async", script)
    stage.enqueue(Work())
    stage.play()
    assert len(counting) == 2
    assert stage.jobs()[0].result == {
        "percent": 99.9,
        "message": "call 999",
        "metadata": {str(n % 7): n for n in range(993, 1000)},
    }


def test_a_wrong_call_among_many_fails_alone(stage):
    def script(ctx: Any) -> Generator[Any, Any, Any]:
        calls = [ctx.set_progress(percent) for percent in (1, 2, 300, 4)]
        found = yield asyncio.gather(*calls, return_exceptions=True)
        return [type(one).__name__ for one in found] + [stage.jobs()[0].progress["percent"]]

    register(stage, "async", script)
    stage.enqueue(Work())
    stage.play()
    assert stage.jobs()[0].result == ["NoneType", "NoneType", "InvalidJob", "NoneType", 4]


def test_calls_that_are_too_much_together_are_written_in_several_transactions(stage, counting):
    def script(ctx: Any) -> Generator[Any, Any, Any]:
        calls = [ctx.set_progress(n, metadata={str(n): "x" * 30_000}) for n in range(7)]
        yield asyncio.gather(*calls)
        return [stage.jobs()[0].progress["percent"], sorted(stage.jobs()[0].progress["metadata"])]

    register(stage, "async", script)
    stage.enqueue(Work())
    stage.play()
    assert stage.jobs()[0].result == [6, [str(n) for n in range(7)]]
    assert len(counting) == 4


def test_all_calls_of_an_attempt_that_has_ended_fail_together(stage, counting):
    found: list[Any] = []

    def script(ctx: Any) -> Generator[Any, Any, Any]:
        stage.sql("UPDATE awa.jobs_hot SET run_lease = nextval('awa.run_lease_seq')")
        found.extend((yield asyncio.gather(*[ctx.set_progress(n) for n in range(5)], return_exceptions=True)))

    register(stage, "async", script)
    stage.enqueue(Work())
    stage.play(lambda: found, notify=False)
    assert [type(one) for one in found] == [StaleJobError] * 5
    assert len(counting) == 2


def test_a_call_that_is_cancelled_leaves_the_others_to_be_written(stage):
    """Also when it is the one that writes for all of them."""

    def script(ctx: Any) -> Generator[Any, Any, Any]:
        with stage.sessions.begin() as holder:
            holder.execute(select(Job).where(Job.id == ctx.job.id).with_for_update())
            calls = [ctx.set_progress(n, metadata={str(n): n}) for n in range(4)]
            yield stage.until(lambda: blocked(stage) == 1)
            calls[0].cancel()
            yield asyncio.sleep(0)
            yield stage.until(lambda: blocked(stage) == 1)
            calls[1].cancel()
        found = yield asyncio.gather(*calls, return_exceptions=True)
        return [type(one).__name__ for one in found] + sorted(stage.jobs()[0].progress["metadata"])

    register(stage, "async", script)
    stage.enqueue(Work())
    stage.play()
    first, second, *rest = stage.jobs()[0].result
    assert (first, second) == ("CancelledError", "CancelledError")
    assert rest[:2] == ["NoneType"] * 2
    assert rest[2:] == ["1", "2", "3"]


def blocked(stage: Any) -> int:
    """How many transactions wait for a lock."""
    (row,) = stage.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    return row.count


def test_progress_that_has_to_wait_keeps_no_other_job_from_running(stage, monkeypatch):
    monkeypatch.setattr(books, "_LOCK_TIMEOUT", text("SET LOCAL lock_timeout = 0"))
    stage.app.queues["default"] = QueueConfig(concurrency=100)

    locked = asyncio.Event()

    def script(ctx: Any) -> Generator[Any, Any, Any]:
        yield locked.wait()
        yield ctx.set_progress(5)

    async def other(ctx: Any) -> None:
        pass

    register(stage, "async", script)
    stage.app.task(Other)(other)
    ids = stage.enqueue(*[Work() for _ in range(30)])

    async def hold(worker: Any) -> None:
        await stage.until(lambda: stage.states("work") == ["running"] * 30)
        with stage.sessions.begin() as holder:
            holder.execute(select(Job).where(Job.id.in_(ids)).with_for_update())
            locked.set()
            await stage.until(lambda: blocked(stage) >= books.WRITES)
            stage.enqueue(*[Other(number=n) for n in range(5)])
            await stage.until(lambda: stage.states("other") == ["completed"] * 5)
            assert set(stage.states("work")) == {"running"}

    stage.play(during=hold)
    assert set(stage.states()) == {"completed"}
