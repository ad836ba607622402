"""Outcomes, follow-ups and writes: what commits together, and what happens when user code fails."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import (
    Attempt,
    Backoff,
    Completed,
    ConfigurationError,
    Exhausted,
    FollowUps,
    JobArgs,
    QueueConfig,
    Retried,
    RetryAfter,
    cancel,
    complete,
    complete_many,
    set_progress,
)
from tests.app import Order

NOW = timedelta(0)

# Connections that a test cuts are dropped by their drivers without a close.
pytestmark = pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")


class Work(JobArgs, max_attempts=2, backoff=Backoff(base=NOW)):
    text: str = ""


class Next(JobArgs):
    text: str = ""


TRANSACTIONAL = ["async", "def"]


def transactional(stage: Any, road: str, act: Any) -> None:
    """A transactional handler that inserts an order and then does `act(ctx)`."""

    async def later(ctx: Any) -> Any:
        ctx.session.add(Order(note=ctx.args.text))
        returned = act(ctx)
        return await returned if asyncio.iscoroutine(returned) else returned

    def now(ctx: Any) -> Any:
        ctx.session.add(Order(note=ctx.args.text))
        return act(ctx)

    stage.app.task(Work, transactional=True)(later if road == "async" else now)


def orders(stage: Any) -> list[str]:
    return [row.note for row in stage.sql("SELECT note FROM app_order ORDER BY id")]


@pytest.mark.parametrize("road", TRANSACTIONAL)
def test_writes_outcome_and_follow_up_commit_together(stage, road):
    transactional(stage, road, lambda ctx: None)
    stage.app.on_completed(Work, name="next")(lambda event: Next(text=event.args.text))
    (work,) = stage.enqueue(Work(text="a"))
    stage.play(lambda: stage.jobs("next"))
    (follow_up,) = stage.jobs("next")
    assert orders(stage) == ["a"]
    assert (follow_up.parent_id, follow_up.parent_outcome, follow_up.args) == (work, "completed", {"text": "a"})
    assert (
        len(
            {
                row.x
                for row in stage.sql(
                    "SELECT xmin::text AS x FROM app_order "
                    "UNION SELECT xmin::text FROM awa.jobs_hot WHERE kind = 'work'"
                )
            }
        )
        == 1
    )


@pytest.mark.parametrize("road", TRANSACTIONAL)
def test_an_exception_discards_the_writes_and_a_returned_outcome_keeps_them(stage, road):
    def act(ctx: Any) -> Any:
        if ctx.args.text == "raises":
            raise ValueError
        return RetryAfter(NOW)

    transactional(stage, road, act)
    stage.enqueue(Work(text="raises"), Work(text="returns"))
    stage.play()
    assert orders(stage) == ["returns", "returns"]


@pytest.mark.parametrize("road", TRANSACTIONAL)
def test_a_handler_must_not_commit_the_session_it_shares_with_its_outcome(stage, road):
    transactional(stage, road, lambda ctx: ctx.session.commit())
    stage.enqueue(Work(text="a"))
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, orders(stage)) == ("failed", [])
    assert "must not commit ctx.session" in job.errors[0]["error"]


def test_a_handler_may_use_savepoints(stage):
    def act(ctx: Any) -> None:
        with ctx.session.begin_nested():
            ctx.session.add(Order(note="kept"))
        savepoint = ctx.session.begin_nested()
        ctx.session.add(Order(note="dropped"))
        savepoint.rollback()

    transactional(stage, "def", act)
    stage.enqueue(Work(text="a"))
    stage.play()
    assert sorted(orders(stage)) == ["a", "kept"]


@pytest.mark.parametrize("road", TRANSACTIONAL)
@pytest.mark.case(16)
def test_a_stale_attempt_commits_nothing(stage, road):
    reached, go = threading.Event(), threading.Event()

    def act(ctx: Any) -> Any:
        reached.set()
        if road == "def":
            go.wait(10)
            return None
        return asyncio.to_thread(go.wait, 10)

    transactional(stage, road, act)
    stage.app.on_completed(Work, name="next")(lambda event: Next())
    (job_id,) = stage.enqueue(Work(text="a"))

    async def steal(worker: Any) -> None:
        await stage.until(reached.is_set)
        stage.sql(
            "UPDATE awa.jobs_hot SET run_lease = nextval('awa.run_lease_seq'), worker_id = 'thief' WHERE id = %s",
            job_id,
        )
        go.set()

    worker = stage.play(lambda: True, during=steal)
    (job,) = stage.jobs()
    assert (job.state, job.worker_id, worker.abandoned) == ("running", "thief", 0)
    assert orders(stage) == stage.jobs("next") == []


@pytest.mark.case(25)
def test_a_job_that_its_handler_finished_itself_is_a_success(stage):
    def act(ctx: Any) -> None:
        with stage.sessions.begin() as session:
            complete(session, ctx.lease, result="mine")

    transactional(stage, "def", act)
    stage.enqueue(Work(text="a"))
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.result, job.errors, orders(stage)) == ("completed", "mine", [], ["a"])


@pytest.mark.case(25)
def test_an_error_after_the_handler_finished_the_job_changes_nothing(stage):
    def act(ctx: Any) -> None:
        with stage.sessions.begin() as session:
            complete(session, ctx.lease, result="mine")
        raise ValueError

    transactional(stage, "def", act)
    stage.enqueue(Work(text="a"))
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.result, job.errors, orders(stage)) == ("completed", "mine", [], [])


# --------------------------------------------------------------- failing specs


@pytest.mark.case(63)
def test_a_raising_spec_costs_an_obligation_and_no_second_run(stage):
    runs: list[int] = []

    async def handler(ctx: Any) -> None:
        runs.append(ctx.attempt)

    def broken(event: Completed[Work]) -> Next:
        raise RuntimeError("no such template")

    stage.app.task(Work)(handler)
    stage.app.on_completed(Work, name="broken")(broken)
    stage.enqueue(Work())
    stage.play(lambda: stage.obligations() and stage.obligations()[0].attempts, maintenance=True)
    (owed,) = stage.obligations()
    assert (runs, stage.states("work"), stage.jobs("next")) == ([1], ["completed"], [])
    assert (owed.spec, owed.outcome, owed.attempts) == ("broken", "completed", 1)
    assert "no such template" in owed.last_error
    assert owed.snapshot["state"] == "completed"


def test_a_mended_spec_settles_its_obligation_once(stage):
    broken = True

    def spec(event: Completed[Work]) -> Next:
        if broken:
            raise RuntimeError("soon")
        return Next(text=f"{event.args.text} {event.result}")

    async def handler(ctx: Any) -> int:
        return 7

    stage.app.task(Work)(handler)
    stage.app.on_completed(Work, name="spec")(spec)
    (work,) = stage.enqueue(Work(text="a"))
    stage.play(stage.obligations, maintenance=False)
    assert "soon" in stage.obligations()[0].last_error
    broken = False
    stage.play(lambda: not stage.obligations())
    (follow_up,) = stage.jobs("next")
    assert (follow_up.args, follow_up.parent_id, follow_up.parent_outcome) == ({"text": "a 7"}, work, "completed")


def test_one_raising_spec_does_not_hold_up_its_batch(stage):
    def spec(event: Completed[Work]) -> list[Next]:
        if event.args.text == "bad":
            raise RuntimeError
        return [Next(text=event.args.text)]

    async def handler(ctx: Any) -> None:
        return None

    stage.app.task(Work)(handler)
    stage.app.on_completed(Work, name="spec")(spec)
    stage.enqueue(*[Work(text=str(n)) for n in range(20)], Work(text="bad"))
    stage.play(lambda: stage.states("work") == ["completed"] * 21, maintenance=False)
    assert sorted(int(job.args["text"]) for job in stage.jobs("next")) == list(range(20))
    assert len(stage.obligations()) == 1


@pytest.mark.parametrize("road", TRANSACTIONAL)
@pytest.mark.case(63)
def test_a_raising_spec_discards_a_transactional_handlers_writes_and_fails_its_attempt(stage, road):
    def spec(event: Completed[Work]) -> Next:
        raise RuntimeError("no such template")

    transactional(stage, road, lambda ctx: None)
    stage.app.on_completed(Work, name="spec")(spec)
    stage.app.on_exhausted(Work, name="tell")(lambda event: Next(text=event.error))
    stage.enqueue(Work(text="a"))
    stage.play(lambda: stage.states("work") == ["failed"], maintenance=True)
    (job,) = stage.jobs("work")
    assert orders(stage) == []
    assert "'spec' raised RuntimeError" in job.errors[0]["error"]
    assert "no such template" in job.errors[0]["error"]
    stage.play(lambda: stage.jobs("next"))
    assert "'spec' raised RuntimeError" in stage.jobs("next")[0].args["text"]


def test_events_carry_what_the_attempt_was(stage):
    def fail(ctx: Any) -> None:
        raise ValueError("boom")

    retried: list[tuple[str, int, bool]] = []
    exhausted: list[tuple[str, int, str]] = []

    def on_retried(event: Retried[Work]) -> list[Next]:
        retried.append((event.error, event.attempt, event.next_run_at == event.job.run_at))
        return []

    def on_exhausted(event: Exhausted[Work]) -> list[Next]:
        exhausted.append((event.error, event.attempt, event.job.state))
        return []

    stage.app.task(Work)(fail)
    stage.app.on_retried(Work, name="r")(on_retried)
    stage.app.on_exhausted(Work, name="e")(on_exhausted)
    stage.enqueue(Work())
    stage.play()
    assert (retried, exhausted) == ([("boom", 1, True)], [("boom", 2, "failed")])


def test_a_queue_that_keeps_dead_letters_gets_them(stage):
    stage.app.queues["default"] = QueueConfig(dead_letters=True)

    def fail(ctx: Any) -> None:
        raise ValueError("boom")

    stage.app.task(Work)(fail)
    stage.enqueue(Work())
    stage.play()
    (letter,) = stage.sql("SELECT * FROM awa.dlq_entries")
    assert (letter.dlq_reason, letter.state, letter.original_run_lease) == (
        "max_attempts_exhausted",
        "failed",
        letter.run_lease,
    )


# ------------------------------------------------------------------ sessions


def test_sessions_come_from_the_apps_own_factories(stage, engine):
    made: list[type] = []

    class OurSession(Session):
        pass

    def handler(ctx: Any) -> None:
        made.append(type(ctx.session))

    stage.app.task(Work, transactional=True)(handler)
    stage.app.queues["default"] = QueueConfig(concurrency=2)
    factory = sessionmaker(engine, class_=OurSession)
    stage.enqueue(Work())
    stage.play(session_factory=factory)
    assert issubclass(made[0], OurSession)


def test_async_sessions_come_from_the_apps_own_factory(stage):
    binds: list[Any] = []
    engine = create_async_engine(stage.url.set(drivername="postgresql+asyncpg"))

    async def handler(ctx: Any) -> None:
        binds.append(ctx.session.bind)

    stage.app.task(Work, transactional=True)(handler)
    stage.enqueue(Work())

    async def dispose(worker: Any) -> None:
        await stage.until(stage.all_ended)
        await engine.dispose()

    stage.app.queues["default"] = QueueConfig(concurrency=2)
    stage.play(async_session_factory=async_sessionmaker(engine), during=dispose)
    assert binds == [engine]


def test_a_factory_with_other_follow_ups_is_refused(stage, engine):
    factory = sessionmaker(engine)
    other = FollowUps()
    other.attach(factory)
    stage.app.task(Work, transactional=True)(lambda ctx: None)
    with pytest.raises(ConfigurationError, match="another FollowUps"):
        stage.play(session_factory=factory)


# ----------------------------------------------------------- cancel, deadline


@pytest.mark.parametrize("road", TRANSACTIONAL)
@pytest.mark.case(60)
def test_cancelling_a_running_job_reaches_its_handler_and_wins(stage, road):
    reached = threading.Event()

    async def later(ctx: Any) -> None:
        reached.set()
        await asyncio.sleep(20)

    def now(ctx: Any) -> None:
        reached.set()
        while not ctx.is_cancelled():
            threading.Event().wait(0.01)
        raise ValueError("interrupted")

    stage.app.task(Work)(later if road == "async" else now)
    stage.app.on_cancelled(Work, name="c")(lambda event: Next(text=event.reason))
    (job_id,) = stage.enqueue(Work())

    async def stop(worker: Any) -> None:
        await stage.until(reached.is_set)
        with stage.sessions.begin() as session:
            cancel(session, job_id, reason="changed my mind")
        await stage.until(lambda: worker.finished >= 1)

    stage.play(lambda: stage.states("work") == ["cancelled"], during=stop)
    assert [job.args["text"] for job in stage.jobs("next")] == ["changed my mind"]
    assert [e["error"] for e in stage.jobs("work")[0].errors] == ["cancelled: changed my mind"]


def test_an_attempt_that_outlives_its_deadline_is_stopped_and_has_failed(stage):
    class Slow(JobArgs, max_attempts=1, deadline=timedelta(seconds=0.2)):
        pass

    async def handler(ctx: Any) -> None:
        await asyncio.sleep(20)

    stage.app.task(Slow)(handler)
    stage.enqueue(Slow())
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, job.errors[0]["error"]) == ("failed", "hard deadline exceeded")


def test_an_attempt_is_its_id_and_its_lease(stage):
    seen: list[Attempt] = []

    async def handler(ctx: Any) -> None:
        seen.append(ctx.lease)

    stage.app.task(Work)(handler)
    stage.enqueue(Work())
    stage.play()
    (job,) = stage.jobs()
    assert seen == [Attempt(job.id, job.run_lease)]


# ---------------------------------------------------------- the handler's own job


@pytest.mark.parametrize("road", TRANSACTIONAL)
@pytest.mark.parametrize("verb", ["complete", "cancel", "complete_many", "set_progress"])
def test_a_verb_on_the_handlers_own_job_through_its_session_is_refused(stage, road, verb):
    def act(ctx: Any) -> Any:
        calls = {
            "complete": lambda session: complete(session, ctx.lease),
            "cancel": lambda session: cancel(session, ctx.job.id, reason="x"),
            "complete_many": lambda session: complete_many(session, [ctx.lease]),
            "set_progress": lambda session: set_progress(session, ctx.lease, 5),
        }
        return ctx.session.run_sync(calls[verb]) if road == "async" else calls[verb](ctx.session)

    transactional(stage, road, act)
    stage.enqueue(Work(text="a"))
    stage.play()
    (job,) = stage.jobs()
    assert (job.state, orders(stage)) == ("failed", [])
    assert "return the outcome" in job.errors[0]["error"]


def test_other_jobs_are_open_to_the_handlers_session(stage):
    (other,) = stage.enqueue(Next(), queue="elsewhere")
    transactional(stage, "def", lambda ctx: cancel(ctx.session, other, reason="not needed") and None)
    stage.enqueue(Work(text="a"))
    stage.play()
    assert (stage.states("next"), stage.states("work")) == (["cancelled"], ["completed"])


def test_progress_does_not_wait_for_ever_for_a_row_that_the_handlers_session_holds(stage):
    def act(ctx: Any) -> None:
        ctx.session.execute(text("SELECT 1 FROM awa.jobs_hot WHERE id = :id FOR UPDATE"), {"id": ctx.job.id})
        ctx.set_progress(20)

    transactional(stage, "def", act)
    stage.enqueue(Work(text="a"), max_attempts=1)
    stage.play()
    (job,) = stage.jobs()
    assert "another transaction holds this job's row" in job.errors[0]["error"]
