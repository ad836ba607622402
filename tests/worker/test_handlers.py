"""What handlers are given, and what becomes of what they return and raise."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from awa_sqla import (
    Awa,
    Backoff,
    Cancel,
    ConfigurationError,
    DuplicateKind,
    InvalidJob,
    JobArgs,
    JobContext,
    QueueConfig,
    RetryAfter,
    Snooze,
    TerminalError,
    UnknownKind,
    enqueue,
)

NOW = timedelta(0)


class Work(JobArgs, max_attempts=2, backoff=Backoff(base=NOW)):
    text: str = ""


class Child(JobArgs):
    pass


ROADS = ["async", "def", "async transactional", "def transactional"]


def register(app: Awa, road: str, act: Any, **options: Any) -> None:
    """Register `act(ctx)` as a handler of this road; `act` may return an awaitable only on the async ones."""

    async def in_task(ctx: JobContext[Work]) -> Any:
        return act(ctx)

    def in_thread(ctx: JobContext[Work]) -> Any:
        return act(ctx)

    app.task(Work, transactional="transactional" in road, **options)(in_task if "async" in road else in_thread)


@pytest.mark.parametrize("road", ROADS)
def test_a_handler_completes_its_job_and_its_result_is_stored(stage, road):
    register(stage.app, road, lambda ctx: {"echo": ctx.args.text, "attempt": ctx.attempt})
    stage.enqueue(Work(text="é\n"))
    worker = stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.result, job.worker_id) == ("completed", {"echo": "é\n", "attempt": 1}, worker.id)
    assert job.finalized_at is not None
    assert job.heartbeat_at is job.deadline_at is None


ERRORS = {
    type(error).__name__: error
    for error in (
        ValueError("boom"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        GeneratorExit(),
        StopIteration(1),
    )
}


@pytest.mark.parametrize("road", ROADS)
def test_whatever_a_handler_raises_ends_its_attempt_and_not_the_worker(stage, road):
    def act(ctx):
        if ctx.args.text in ERRORS:
            raise ERRORS[ctx.args.text]

    register(stage.app, road, act)
    stage.enqueue(*(Work(text=name) for name in ERRORS), Work(text="good"))
    stage.play()
    *bad, good = stage.jobs()
    for job in bad:
        assert (job.state, job.attempt, len(job.errors)) == ("failed", 2, 2), job.args
        assert [entry["attempt"] for entry in job.errors] == [1, 2]
    assert (len(bad), good.state) == (len(ERRORS), "completed")


UNSTORABLE = {
    "object": (object(), "result: is a object"),
    "class": (RetryAfter, "is the class RetryAfter"),
    "error class": (TerminalError, "is the class TerminalError"),
    "error": (ValueError("x"), "raise it"),
    "nan": ({"x": float("nan")}, "result.x: is nan"),
    "nul": ({"x": ["\x00"]}, "result.x[0]: contains a NUL"),
    "large": ("x" * (1 << 20), "at most 1048576"),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.case(21)
@pytest.mark.case(22)
def test_a_value_that_cannot_be_stored_fails_the_attempt_and_says_so(stage, road):
    register(stage.app, road, lambda ctx: UNSTORABLE[ctx.args.text][0])
    stage.enqueue(*(Work(text=name) for name in UNSTORABLE))
    stage.play()
    jobs = stage.jobs()
    assert [job.state for job in jobs] == ["failed"] * len(UNSTORABLE)
    for job in jobs:
        assert UNSTORABLE[job.args["text"]][1] in job.errors[0]["error"]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.case(17)
def test_retry_after_counts_as_a_failed_attempt_and_exhausts(stage, road):
    register(stage.app, road, lambda ctx: RetryAfter(NOW, "not yet"))
    stage.enqueue(Work())
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.attempt) == ("failed", 2)
    assert [(e["error"], e["retry_after"]) for e in job.errors] == [("not yet", 0), ("not yet", 0)]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.case(18)
def test_snooze_is_free(stage, road):
    register(stage.app, road, lambda ctx: Snooze(NOW) if ctx.job.snoozes < 3 else None)
    stage.enqueue(Work())
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.attempt, job.snoozes, job.errors) == ("completed", 1, 3, [])


@pytest.mark.parametrize("road", ROADS)
def test_cancel_ends_the_job_with_its_reason(stage, road):
    register(stage.app, road, lambda ctx: Cancel("nobody wants it"))
    stage.enqueue(Work())
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.errors[0]["error"]) == ("cancelled", "cancelled: nobody wants it")


class GoneError(Exception):
    pass


@pytest.mark.parametrize(
    ("options", "error", "attempts"),
    [
        ({}, TerminalError("never"), 1),
        ({"discard_on": (GoneError,)}, GoneError(), 1),
        ({"discard_on": (GoneError,)}, ValueError(), 2),
        ({"retry_on": (OSError,)}, ConnectionError(), 2),
        ({"retry_on": (OSError,)}, ValueError(), 1),
    ],
)
def test_which_errors_are_tried_again_is_the_tasks_to_say(stage, options, error, attempts):
    def act(ctx):
        raise error

    register(stage.app, "async", act, **options)
    stage.enqueue(Work())
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.attempt) == ("failed", attempts)
    assert job.errors[0].get("terminal", False) is (attempts == 1)


@pytest.mark.case(52)
def test_a_row_that_does_not_fit_its_class_fails_alone_and_names_the_field(stage):
    register(stage.app, "async", lambda ctx: None)
    (bad,) = stage.enqueue(Work())
    stage.sql("UPDATE awa.jobs_hot SET args = '{\"text\": [1]}' WHERE id = %s", bad)
    stage.enqueue(*[Work() for _ in range(10)])
    stage.play()
    first, *others = stage.jobs()
    assert (first.state, first.attempt) == ("failed", 1)
    assert first.errors[0]["error"].startswith("args.text: does not fit the class")
    assert {job.state for job in others} == {"completed"}


@pytest.mark.case(52)
def test_an_unknown_kind_waits_uncharged_for_a_worker_that_knows_it(stage):
    class Unheard(JobArgs):
        pass

    register(stage.app, "async", lambda ctx: None)
    stage.enqueue(Unheard(), *[Work() for _ in range(10)])

    async def told(worker: Any) -> None:
        await stage.until(
            lambda: stage.states("work") == ["completed"] * 10 and stage.states("unheard") == ["scheduled"]
        )
        await stage.until(
            lambda: stage.sql("SELECT unknown_kinds AS k FROM awa.runtime_instances")[0].k == {"unheard": 1}
        )

    stage.play(lambda: True, during=told)
    (job,) = stage.jobs("unheard")
    assert (job.attempt, job.snoozes, job.errors) == (0, 0, [])
    assert stage.sql("SELECT now() + interval '25 s' < run_at AS far FROM awa.scheduled_jobs")[0].far


@pytest.mark.parametrize("road", ROADS)
def test_a_job_enqueued_in_a_handler_is_the_running_jobs_child(stage, road):
    def act(ctx):
        with stage.sessions.begin() as session:
            enqueue(session, Child())

    register(stage.app, road, act)
    stage.app.task(Child)(_nothing)
    (parent,) = stage.enqueue(Work())
    stage.play()
    (child,) = stage.jobs("child")
    assert (child.parent_id, child.root_id, child.parent_outcome) == (parent, parent, None)
    stage.enqueue(Child())
    assert stage.jobs("child")[-1].parent_id is None


async def _nothing(ctx: Any) -> None:
    return None


def test_context_variables_reach_a_thread(stage):
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")
    seen: list[tuple[str, bool]] = []

    def act(ctx):
        seen.append((tenant.get(), threading.current_thread() is threading.main_thread()))

    register(stage.app, "def", act)
    stage.enqueue(Work())
    tenant.set("ours")
    stage.play()
    assert seen == [("ours", False)]


@pytest.mark.parametrize("road", ROADS)
def test_progress_is_written_at_once_and_found_by_the_next_attempt(stage, road):
    seen: list[Any] = []

    async def later(ctx):
        await ctx.set_progress(50, "half", metadata={"page": 3})
        seen.append(stage.jobs()[0].progress)
        await ctx.checkpoint({"done": [1]})
        seen.append(dict(ctx.progress))
        raise ValueError

    def now(ctx):
        ctx.set_progress(50, "half", metadata={"page": 3})
        seen.append(stage.jobs()[0].progress)
        ctx.checkpoint({"done": [1]})
        seen.append(dict(ctx.progress))
        raise ValueError

    stage.app.task(Work, transactional="transactional" in road)(later if "async" in road else now)
    stage.enqueue(Work())
    stage.play()
    half = {"percent": 50, "message": "half", "metadata": {"page": 3}}
    done = half | {"metadata": {"page": 3, "done": [1]}}
    assert seen == [half, done, done, done]
    assert stage.jobs()[0].progress == done


def test_the_lifespan_wraps_the_worker_and_its_value_reaches_handlers(stage):
    told: list[Any] = []

    @asynccontextmanager
    async def lifespan(app):
        told.append(app)
        yield {"pool": 1}
        told.append("closed")

    stage.app.lifespan = lifespan
    register(stage.app, "async", lambda ctx: told.append(ctx.state))
    stage.enqueue(Work())
    stage.play()
    assert told == [stage.app, {"pool": 1}, "closed"]


def test_registering_refuses_what_would_fail_later():
    app = Awa()
    register(app, "async", lambda ctx: None)
    with pytest.raises(ConfigurationError, match="has a handler already"):
        register(app, "async", lambda ctx: None)
    with pytest.raises(DuplicateKind, match="'work'"):
        app.task(type("Other", (JobArgs,), {}, kind="work"))(_nothing)
    with pytest.raises(ConfigurationError, match="generator"):
        app.task(Child)(_generator)
    with pytest.raises(UnknownKind, match="did you mean 'work'"):
        app.tasks.named("wrok")
    with pytest.raises(InvalidJob, match="QueueConfig"):
        Awa(queues={"email": 5})  # type: ignore[dict-item]
    with pytest.raises(InvalidJob, match="concurrency"):
        QueueConfig(concurrency=0)


def _generator(ctx: Any) -> Any:
    yield 1


def test_a_session_is_for_transactional_handlers_only(stage):
    register(stage.app, "async", lambda ctx: ctx.session)
    stage.enqueue(Work())
    stage.play()
    assert "transactional=True" in stage.jobs()[0].errors[0]["error"]
