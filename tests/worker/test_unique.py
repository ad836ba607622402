"""Unique jobs in a worker: an outcome that would bring a job back beside its twin cancels it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from awa_sqla import Backoff, Cancelled, JobArgs, JobState, RetryAfter, Snooze, Unique, enqueue
from tests.app import Order, Signup

NOW = timedelta(0)
WAITING = Unique(states={JobState.SCHEDULED, JobState.AVAILABLE, JobState.RETRYABLE})


class Sync(JobArgs, kind="worker_sync", unique=WAITING, max_attempts=3, backoff=Backoff(base=NOW)):
    shop: int


class Told(JobArgs, kind="worker_told"):
    reason: str


def _raise(ctx: Any) -> Any:
    raise LookupError("not yet")


OUTCOMES: dict[str, Any] = {
    "raises": _raise,
    "RetryAfter": lambda ctx: RetryAfter(NOW),
    "Snooze": lambda ctx: Snooze(NOW),
}


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_job_that_cannot_come_back_is_cancelled_as_a_duplicate(stage: Any, outcome: str, transactional: bool) -> None:
    twins: list[int] = []

    @stage.app.task(Sync, transactional=transactional)
    def sync(ctx: Any) -> Any:
        with stage.sessions.begin() as session:
            twin = enqueue(session, Sync(shop=1), delay=timedelta(hours=1))
            session.flush()
            twins.append(twin.id)
        if transactional:
            ctx.session.add(Order(note=outcome))
        return OUTCOMES[outcome](ctx)

    stage.app.on_cancelled(Sync, name="told")(_told)
    stage.app.task(Told)(lambda ctx: None)
    [first] = stage.enqueue(Sync(shop=1))
    stage.play(lambda: stage.states("worker_told") == ["completed"])
    jobs = {row.id: row for row in stage.jobs()}
    assert (jobs[first].state, jobs[first].errors[-1]["error"]) == (
        "cancelled",
        f"cancelled: duplicate of job {twins[0]}",
    )
    assert jobs[twins[0]].state == "scheduled"
    [told] = stage.jobs("worker_told")
    assert (told.parent_id, told.args) == (first, {"reason": f"duplicate of job {twins[0]}"})
    written = [row.note for row in stage.sql("SELECT note FROM app_order")]
    assert written == ([outcome] if transactional and outcome != "raises" else [])
    assert [row.job_id for row in stage.sql("SELECT job_id FROM awa.job_unique_claims")] == twins


def _told(event: Cancelled[Sync]) -> Told:
    return Told(reason=event.reason)


@pytest.mark.parametrize("transactional", [False, True])
def test_a_duplicate_that_a_handler_enqueues_is_its_own_failure(stage: Any, transactional: bool) -> None:
    @stage.app.task(Signup, transactional=transactional)
    def signup(ctx: Any) -> None:
        if transactional:
            enqueue(ctx.session, Sync(shop=1))
        else:
            with stage.sessions.begin() as session:
                enqueue(session, Sync(shop=1))

    stage.app.task(Sync)(lambda ctx: None)
    stage.enqueue(Sync(shop=1), delay=timedelta(hours=1))
    [job] = stage.enqueue(Signup(), max_attempts=1)
    stage.play(lambda: stage.states("signup") == ["failed"])
    [row] = stage.jobs("signup")
    assert row.id == job
    assert row.errors[0]["type"].endswith("UniqueConflict")
    assert stage.states("worker_sync") == ["scheduled"]
