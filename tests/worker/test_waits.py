"""Handlers that wait for a callback where they are: `ctx.wait_for_callback`."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from awa_sqla import (
    CallbackNotFound,
    CallbackToken,
    ConfigurationError,
    InvalidJob,
    JobArgs,
    StaleJobError,
    cancel,
    complete_external,
    fail_external,
    resume_external,
    retry_external,
)
from awa_sqla.worker import run as running
from awa_sqla.worker.waits import Waits

HOUR = timedelta(hours=1)
COLOURS = pytest.mark.parametrize("colour", ["async", "def"])


class Pay(JobArgs, kind="waits_pay", max_attempts=2):
    order: int = 1


class Told(JobArgs, kind="waits_told"):
    job: int


class Handler:
    """A handler in either colour; `script` is a generator that yields what is to be awaited."""

    def __init__(self, stage: Any, colour: str, script: Callable[[Any], Any], **options: Any) -> None:
        self.stage = stage
        self.tokens: list[CallbackToken] = []
        self.errors: list[BaseException] = []
        self.runs = 0

        def steps(ctx: Any) -> Any:
            self.runs += 1
            steps = script(ctx)
            assert inspect.isgenerator(steps)
            return steps

        async def later(ctx: Any) -> Any:
            generator = steps(ctx)
            try:
                value = next(generator)
                while True:
                    try:
                        value = generator.send(self._note(await value))
                    except (Exception, asyncio.CancelledError) as exc:
                        if isinstance(exc, StopIteration):
                            return exc.value
                        self.errors.append(exc)
                        value = generator.throw(exc)
            except StopIteration as end:
                return end.value

        def now(ctx: Any) -> Any:
            generator = steps(_Eager(ctx, self.errors))
            try:
                value = next(generator)
                while True:
                    value = generator.send(self._note(value))
            except StopIteration as end:
                return end.value

        stage.app.task(Pay, **options)(later if colour == "async" else now)

    def _note(self, value: Any) -> Any:
        if isinstance(value, CallbackToken):
            self.tokens.append(value)
        return value

    def waits(self, number: int = 1) -> bool:
        """Whether it waits for its `number`-th token, by the database."""
        rows = self.stage.sql("SELECT callback_id FROM awa.jobs_hot WHERE attended_at IS NOT NULL")
        return len(self.tokens) == number and [row.callback_id for row in rows] == [self.tokens[-1].id]

    async def waiting(self, number: int = 1) -> None:
        await self.stage.until(lambda: self.waits(number))


class _Eager:
    """The context of a `def` handler, noting what its methods raise."""

    def __init__(self, ctx: Any, errors: list[BaseException]) -> None:
        self._ctx, self._errors = ctx, errors

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ctx, name)
        if name != "wait_for_callback":
            return found

        def noting(*args: Any) -> Any:
            try:
                return found(*args)
            except BaseException as exc:
                self._errors.append(exc)
                raise

        return noting


def once(ctx: Any) -> Any:
    token = yield ctx.register_callback(timeout=HOUR)
    answer = yield ctx.wait_for_callback(token)
    return {"answer": answer}


def resume(stage: Any, token: CallbackToken, payload: Any = None) -> None:
    with stage.sessions.begin() as session:
        resume_external(session, token.id, payload)


@COLOURS
@pytest.mark.parametrize("notify", [True, False])
def test_a_handler_waits_and_goes_on_with_the_payload(stage: Any, colour: str, notify: bool) -> None:
    handler = Handler(stage, colour, once)
    stage.app.on_waiting_for_callback(Pay, name="told")(lambda event: Told(job=event.job.id))
    [job] = stage.enqueue(Pay())

    async def answer(worker: Any) -> None:
        await handler.waiting()
        [row] = stage.jobs("waits_pay")
        assert (row.state, row.worker_id, row.heartbeat_at is None) == ("waiting_external", worker.id, False)
        assert [told.args for told in stage.jobs("waits_told")] == [{"job": job}]
        await asyncio.to_thread(resume, stage, handler.tokens[0], {"ok": [1]})

    stage.play(lambda: stage.states("waits_pay") == ["completed"], during=answer, notify=notify)
    [row] = stage.jobs("waits_pay")
    assert (row.result, row.attempt, row.callback_answer, row.attended_at) == ({"answer": {"ok": [1]}}, 1, None, None)
    assert len(stage.jobs("waits_told")) == 1


@COLOURS
def test_an_answer_before_the_wait_is_kept_for_it(stage: Any, colour: str) -> None:
    def script(ctx: Any) -> Any:
        token = yield ctx.register_callback(timeout=HOUR)
        resume(stage, token, None)
        answer = yield ctx.wait_for_callback(token)
        again = yield ctx.wait_for_callback(token)  # it stays until the next callback, or the end
        return [answer, again]

    Handler(stage, colour, script)
    stage.app.on_waiting_for_callback(Pay, name="told")(lambda event: Told(job=event.job.id))
    stage.enqueue(Pay())
    stage.play()
    [row] = stage.jobs()  # nothing ever waited, so nothing was told
    assert (row.state, row.result) == ("completed", [None, None])


@COLOURS
def test_one_callback_after_the_other(stage: Any, colour: str) -> None:
    def script(ctx: Any) -> Any:
        answers = []
        for _ in range(2):
            token = yield ctx.register_callback(timeout=HOUR)
            answers.append((yield ctx.wait_for_callback(token)))
        return answers

    handler = Handler(stage, colour, script)
    stage.enqueue(Pay())

    async def answer(_: Any) -> None:
        for number in (1, 2):
            await handler.waiting(number)
            await asyncio.to_thread(resume, stage, handler.tokens[-1], number)

    stage.play(during=answer)
    assert stage.jobs()[0].result == [1, 2]
    with pytest.raises(CallbackNotFound):
        resume(stage, handler.tokens[0])


@COLOURS
def test_a_token_that_was_replaced_is_refused(stage: Any, colour: str) -> None:
    def script(ctx: Any) -> Any:
        first = yield ctx.register_callback(timeout=HOUR)
        yield ctx.register_callback(timeout=HOUR)
        yield ctx.wait_for_callback(first)

    handler = Handler(stage, colour, script)
    stage.enqueue(Pay(), max_attempts=1)
    stage.play()
    [row] = stage.jobs()
    assert (row.state, row.errors[-1]["type"]) == ("failed", "awa_sqla.errors.CallbackNotFound")
    assert isinstance(handler.errors[0], CallbackNotFound)


ENDS = {
    "completed": lambda session, token, job: complete_external(session, token.id, {"by": "callback"}),
    "failed": lambda session, token, job: fail_external(session, token.id, "no money"),
    "cancelled": lambda session, token, job: cancel(session, job, reason="changed my mind"),
}


@COLOURS
@pytest.mark.parametrize("end", list(ENDS))
def test_a_job_that_ends_while_its_handler_waits_stays_as_it_ended(stage: Any, colour: str, end: str) -> None:
    handler = Handler(stage, colour, once)
    [job] = stage.enqueue(Pay())

    async def from_outside(worker: Any) -> None:
        await handler.waiting()
        with stage.sessions.begin() as session:
            ENDS[end](session, handler.tokens[0], job)
        await stage.until(lambda: worker.finished)

    stage.play(during=from_outside)
    [row] = stage.jobs()
    assert (row.state, handler.runs) == (end, 1)
    assert row.result == ({"by": "callback"} if end == "completed" else None)
    [error] = handler.errors
    assert isinstance(error, (asyncio.CancelledError, StaleJobError, Exception))
    if end != "cancelled":
        assert isinstance(error, StaleJobError)
        assert (error.state, error.run_lease) == (end, row.run_lease)


def test_a_retry_from_outside_starts_the_job_anew(stage: Any) -> None:
    handler = Handler(stage, "async", once)
    stage.enqueue(Pay())

    async def again(_: Any) -> None:
        await handler.waiting()
        with stage.sessions.begin() as session:
            retry_external(session, handler.tokens[0].id)
        await handler.waiting(2)
        await asyncio.to_thread(resume, stage, handler.tokens[1], "second")

    stage.play(during=again)
    [row] = stage.jobs()
    assert (row.state, row.result, row.attempt, handler.runs) == ("completed", {"answer": "second"}, 1, 2)


@COLOURS
def test_a_callback_that_does_not_come_ends_the_attempt(stage: Any, colour: str, quick: dict[str, Any]) -> None:
    def script(ctx: Any) -> Any:
        token = yield ctx.register_callback(timeout=timedelta(seconds=0.1))
        yield ctx.wait_for_callback(token)

    handler = Handler(stage, colour, script)
    stage.enqueue(Pay(), max_attempts=1)
    stage.play(**quick)
    [row] = stage.jobs()
    assert (row.state, row.errors[-1]["error"]) == ("failed", "callback timed out")
    assert [type(error) for error in handler.errors] == [StaleJobError]


def test_a_handler_may_give_up_and_wait_again(stage: Any) -> None:
    seen = []

    async def handler(ctx: Any) -> Any:
        token = await ctx.register_callback(timeout=HOUR)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await ctx.wait_for_callback(token)
            seen.append(stage.jobs()[0].state)
        await ctx.set_progress(50)
        resume(stage, token, "late")
        return await ctx.wait_for_callback(token)

    stage.app.task(Pay)(handler)
    stage.enqueue(Pay())
    stage.play()
    [row] = stage.jobs()
    assert (seen, row.state, row.result) == (["running", "running"], "completed", "late")


def test_an_outcome_counts_also_while_the_row_still_waits(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database is away just when the handler gives up: its row says waiting, and is still its own."""
    from awa_sqla.worker.waits import Waits

    async def away(self: Any, attempt: Any) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr(Waits, "go_on", away)

    async def handler(ctx: Any) -> Any:
        token = await ctx.register_callback(timeout=HOUR)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ctx.wait_for_callback(token)
        assert stage.jobs()[0].state == "waiting_external"
        return "gave up"

    stage.app.task(Pay)(handler)
    stage.enqueue(Pay())
    stage.play()
    assert [(row.state, row.result) for row in stage.jobs()] == [("completed", "gave up")]


def test_the_deadline_stands_still_during_the_wait_and_counts_afterwards(stage: Any) -> None:
    async def handler(ctx: Any) -> Any:
        token = await ctx.register_callback(timeout=HOUR)
        answers.append(await ctx.wait_for_callback(token))
        tokens.append(token)
        await asyncio.sleep(30)

    answers: list[Any] = []
    tokens: list[CallbackToken] = []
    stage.app.task(Pay)(handler)
    stage.enqueue(Pay(), deadline=timedelta(seconds=1), max_attempts=1)

    async def late(_: Any) -> None:
        await stage.until(lambda: stage.sql("SELECT 1 FROM awa.jobs_hot WHERE attended_at < now() - interval '2 s'"))
        [row] = stage.sql("SELECT callback_id FROM awa.jobs_hot")
        with stage.sessions.begin() as session:
            job = resume_external(session, row.callback_id, "late")
            assert job.deadline_at is not None
            assert job.attempted_at is not None
            assert job.deadline_at - job.attempted_at > timedelta(seconds=3)

    begun = time.monotonic()
    stage.play(during=late, maintenance=False)
    [row] = stage.jobs()
    assert answers == ["late"]
    assert (row.state, row.errors[-1]["error"]) == ("failed", "hard deadline exceeded")
    assert time.monotonic() - begun < 20


@COLOURS
def test_a_worker_that_stops_puts_a_waiting_job_back_uncharged(stage: Any, colour: str) -> None:
    handler = Handler(stage, colour, once)
    stage.enqueue(Pay())
    stage.play(handler.waits, grace=timedelta(seconds=0.1))
    [row] = stage.jobs()
    assert (row.state, row.attempt, row.errors) == ("scheduled", 0, [])
    assert (row.attended_at, row.callback_id, row.heartbeat_at) == (None, None, None)


def test_heartbeats_go_on_while_a_handler_waits(stage: Any, quick: dict[str, Any]) -> None:
    handler = Handler(stage, "async", once)
    stage.enqueue(Pay())

    async def long(_: Any) -> None:
        await handler.waiting()
        await stage.until(lambda: stage.sql("SELECT 1 FROM awa.jobs_hot WHERE heartbeat_at > attended_at + '2 s'"))
        await asyncio.to_thread(resume, stage, handler.tokens[0])

    stage.play(during=long, **quick)
    assert [(row.state, row.attempt) for row in stage.jobs()] == [("completed", 1)]


@COLOURS
def test_a_wait_survives_the_loss_of_every_connection(stage: Any, colour: str) -> None:
    handler = Handler(stage, colour, once)
    stage.enqueue(Pay())

    async def cut(_: Any) -> None:
        await handler.waiting()
        for _ in range(3):
            stage.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            await asyncio.sleep(0.3)
        stage.sql(
            "UPDATE awa.jobs_hot SET state = 'running', attended_at = NULL, callback_id = NULL, callback_answer "
            "= jsonb_build_object('callback', callback_id, 'payload', 'x')"
        )  # without a notification

    stage.play(during=cut)
    assert [(row.state, row.result) for row in stage.jobs()] == [("completed", {"answer": "x"})]


@pytest.mark.parametrize("colour", ["async", "def"])
def test_a_transactional_handler_may_not_wait(stage: Any, colour: str) -> None:
    handler = Handler(stage, colour, once, transactional=True)
    stage.enqueue(Pay(), max_attempts=1)
    stage.play()
    [row] = stage.jobs()
    assert (row.state, row.errors[-1]["type"]) == ("failed", "awa_sqla.errors.ConfigurationError")
    assert "WaitForCallback" in row.errors[-1]["error"]
    assert [type(error) for error in handler.errors] == [ConfigurationError]


def test_what_is_no_token_is_refused(stage: Any) -> None:
    async def handler(ctx: Any) -> None:
        with pytest.raises(InvalidJob) as caught:
            await ctx.wait_for_callback("6e0d7a2c-0000-4000-8000-000000000000")
        assert caught.value.field == "token"

    stage.app.task(Pay)(handler)
    stage.enqueue(Pay())
    stage.play()
    assert stage.states() == ["completed"]


def test_a_follow_up_that_raises_is_owed_and_the_handler_waits_all_the_same(stage: Any) -> None:
    handler = Handler(stage, "async", once)

    @stage.app.on_waiting_for_callback(Pay, name="broken")
    def broken(event: Any) -> Told:
        raise ZeroDivisionError("of the spec")

    [job] = stage.enqueue(Pay())

    async def answer(_: Any) -> None:
        await handler.waiting()
        await asyncio.to_thread(resume, stage, handler.tokens[0], 1)

    stage.play(lambda: stage.states() == ["completed"], during=answer, maintenance=False)
    [owed] = stage.obligations()
    assert (owed.job_id, owed.outcome, owed.spec) == (job, "waiting_for_callback", "broken")
    assert "of the spec" in owed.last_error


def test_a_wait_that_is_given_up_leaves_the_next_one_alone(stage: Any) -> None:
    """Cancelled and not awaited: it puts its row right while the next wait begins."""
    tokens = []

    async def handler(ctx: Any) -> Any:
        token = await ctx.register_callback(timeout=HOUR)
        first = ctx.wait_for_callback(token)
        await stage.until(lambda: stage.states() == ["waiting_external"])
        first.cancel()
        tokens.append(token)
        return await ctx.wait_for_callback(token)

    stage.app.task(Pay)(handler)
    stage.enqueue(Pay())

    async def answer(_: Any) -> None:
        await stage.until(lambda: tokens)
        await asyncio.sleep(1)
        assert stage.states() == ["waiting_external"]
        await asyncio.to_thread(resume, stage, tokens[0], "late")

    stage.play(during=answer)
    assert stage.jobs()[0].result == "late"


def test_of_two_waits_at_once_one_may_end_before_the_other(stage: Any) -> None:
    tokens = []

    async def handler(ctx: Any) -> Any:
        async def reminded() -> str:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await ctx.wait_for_callback(token)
            assert stage.states() == ["waiting_external"]
            tokens.append(token)
            return "reminded"

        token = await ctx.register_callback(timeout=HOUR)
        return await asyncio.gather(ctx.wait_for_callback(token), reminded(), ctx.wait_for_callback(token))

    stage.app.task(Pay)(handler)
    stage.enqueue(Pay(), deadline=timedelta(seconds=2))

    async def answer(_: Any) -> None:
        await stage.until(lambda: tokens)
        await asyncio.sleep(2.5)
        await asyncio.to_thread(resume, stage, tokens[0], "paid")

    stage.play(during=answer)
    [row] = stage.jobs()
    assert (row.result, row.attempt) == (["paid", "reminded", "paid"], 1)


def test_an_attempt_that_has_ended_does_not_take_the_next_ones_wait(stage: Any) -> None:
    """Both run in this worker: the old one's thread has not noticed yet that its job was taken away."""
    tokens: list[CallbackToken] = []
    noticed = threading.Event()
    errors = []

    def handler(ctx: Any) -> Any:
        token = ctx.register_callback(timeout=HOUR)
        tokens.append(token)
        if len(tokens) == 1:
            noticed.wait(30)
            with pytest.raises(StaleJobError) as caught:
                ctx.wait_for_callback(token)
            errors.append(caught.value)
        return ctx.wait_for_callback(token)

    stage.app.task(Pay)(handler)
    stage.enqueue(Pay())

    async def answer(_: Any) -> None:
        await stage.until(lambda: tokens)
        stage.sql("UPDATE awa.jobs_hot SET state = 'available', callback_id = NULL, callback_timeout_at = NULL")
        await stage.until(lambda: stage.states() == ["waiting_external"])
        noticed.set()
        await stage.until(lambda: errors)
        await asyncio.to_thread(resume, stage, tokens[1], "paid")

    stage.play(during=answer)
    assert stage.jobs()[0].result == "paid"


def test_a_thread_that_waits_again_is_interrupted_again(stage: Any) -> None:
    errors: list[Exception] = []

    def handler(ctx: Any) -> Any:
        token = ctx.register_callback(timeout=HOUR)
        for _ in range(3):
            try:
                return ctx.wait_for_callback(token)
            except Exception as exc:
                errors.append(exc)
        raise errors[-1]

    stage.app.task(Pay)(handler)
    stage.enqueue(Pay())
    worker = stage.play(lambda: stage.states() == ["waiting_external"], grace=timedelta(seconds=0.1))
    assert (len(errors), worker.abandoned) == (3, 0)
    assert [(row.state, row.attempt) for row in stage.jobs()] == [("scheduled", 0)]


def test_a_thread_whose_job_is_cancelled_gets_a_stale_job_error(stage: Any) -> None:
    handler = Handler(stage, "def", once)
    [job] = stage.enqueue(Pay())

    async def from_outside(_: Any) -> None:
        await handler.waiting()
        with stage.sessions.begin() as session:
            cancel(session, job, reason="changed my mind")
        await stage.until(lambda: handler.errors)

    stage.play(during=from_outside)
    assert [(type(error), error.state) for error in handler.errors] == [(StaleJobError, "cancelled")]  # type: ignore[attr-defined]


def test_a_stop_that_comes_while_a_wait_looks_is_followed_by_another_look(stage: Any, monkeypatch: Any) -> None:
    """The look was too early to see why; the handler must be told what the database knows."""
    handler = Handler(stage, "def", once)
    [job] = stage.enqueue(Pay())
    real, looks = Waits.look, []

    async def look(self: Any, *arguments: Any) -> Any:
        answer = await real(self, *arguments)
        if not looks:
            with stage.sessions.begin() as session:
                cancel(session, job, reason="changed my mind")
            for run in self._flight:
                run.stop(running.CANCELLED)
        looks.append(answer)
        return answer

    monkeypatch.setattr(Waits, "look", look)

    async def from_outside(worker: Any) -> None:
        await handler.waiting()
        worker._waits.wake(job)
        await stage.until(lambda: handler.errors)

    stage.play(during=from_outside, notify=False)
    assert [(type(error), error.state) for error in handler.errors] == [(StaleJobError, "cancelled")]  # type: ignore[attr-defined]
    assert looks == [None]


def test_a_task_that_its_handler_has_left_behind_waits_for_nothing(stage: Any) -> None:
    left: list[asyncio.Task[Any]] = []

    async def handler(ctx: Any) -> None:
        async def later() -> Any:
            await stage.until(lambda: stage.states() == ["completed"])
            await asyncio.sleep(0.2)
            return await ctx.wait_for_callback(token)

        token = await ctx.register_callback(timeout=HOUR)
        left.append(asyncio.create_task(later()))

    stage.app.task(Pay)(handler)
    stage.enqueue(Pay())

    async def during(_: Any) -> None:
        await stage.until(lambda: left)
        with pytest.raises(StaleJobError):
            await left[0]

    stage.play(during=during)
