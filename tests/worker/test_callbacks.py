"""Handlers that wait for the outside: `ctx.register_callback` and `WaitForCallback`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from awa_sqla import CallbackToken, JobArgs, WaitForCallback, complete_external
from tests.app import Order

HOUR = timedelta(hours=1)


class Pay(JobArgs, kind="worker_pay", max_attempts=2):
    order: int = 1


class Receipt(JobArgs, kind="worker_receipt"):
    amount: int


def handle(stage: Any, road: str, seen: list[CallbackToken], answer: Any = WaitForCallback) -> None:
    """A handler that registers a callback and returns `answer(token)`."""

    async def later(ctx: Any) -> Any:
        seen.append(await ctx.register_callback(timeout=HOUR))
        if road == "async transactional":
            ctx.session.add(Order(note="pending"))
        return answer(seen[-1])

    def now(ctx: Any) -> Any:
        seen.append(ctx.register_callback(timeout=HOUR))
        if road == "def transactional":
            ctx.session.add(Order(note="pending"))
        return answer(seen[-1])

    stage.app.task(Pay, transactional="transactional" in road)(now if road.startswith("def") else later)


ROADS = ["async", "def", "async transactional", "def transactional"]


@pytest.mark.case(43)
@pytest.mark.parametrize("road", ROADS)
def test_a_job_waits_for_its_callback_and_is_completed_by_it(stage: Any, road: str) -> None:
    seen: list[CallbackToken] = []
    durable: list[bool] = []

    def answer(token: CallbackToken) -> WaitForCallback:
        durable.append(stage.sql("SELECT callback_id FROM awa.jobs_hot")[0].callback_id == token.id)
        return WaitForCallback(token)

    handle(stage, road, seen, answer)
    stage.app.on_completed(Pay, name="receipt")(lambda event: Receipt(amount=event.result["amount"]))
    [job] = stage.enqueue(Pay())
    stage.play(lambda: stage.states("worker_pay") == ["waiting_external"])
    assert durable == [True]
    assert [row.note for row in stage.sql("SELECT note FROM app_order")] == (
        ["pending"] if "transactional" in road else []
    )
    with stage.sessions.begin() as session:
        complete_external(session, seen[0].id, {"amount": 5})
    [row] = stage.jobs("worker_pay")
    assert (row.id, row.state, row.result, row.attempt) == (job, "completed", {"amount": 5}, 1)
    assert [receipt.args for receipt in stage.jobs("worker_receipt")] == [{"amount": 5}]


@pytest.mark.case(14)
@pytest.mark.parametrize("road", ROADS)
def test_an_answer_before_the_handler_returns_is_not_lost(stage: Any, road: str) -> None:
    seen: list[CallbackToken] = []

    def answer(token: CallbackToken) -> WaitForCallback:
        with stage.sessions.begin() as session:
            complete_external(session, token.id, {"amount": 7})
        return WaitForCallback(token)

    handle(stage, road, seen, answer)
    stage.enqueue(Pay())
    stage.play(lambda: stage.states("worker_pay") == ["completed"])
    [row] = stage.jobs("worker_pay")
    assert (row.result, row.attempt, row.errors) == ({"amount": 7}, 1, [])


@pytest.mark.parametrize("road", ["async", "def transactional"])
def test_a_token_of_an_earlier_registration_fails_the_attempt(stage: Any, road: str) -> None:
    seen: list[CallbackToken] = []

    def answer(token: CallbackToken) -> WaitForCallback:
        stage.sql("UPDATE awa.jobs_hot SET callback_id = gen_random_uuid()")
        return WaitForCallback(token)

    handle(stage, road, seen, answer)
    stage.enqueue(Pay(), max_attempts=1)
    stage.play(lambda: stage.states("worker_pay") == ["failed"])
    [row] = stage.jobs("worker_pay")
    assert row.errors[0]["type"].endswith("CallbackNotFound")


def test_what_is_no_token_fails_the_attempt(stage: Any) -> None:
    seen: list[CallbackToken] = []
    handle(stage, "async", seen, lambda token: WaitForCallback(token.id))  # type: ignore[arg-type]
    stage.enqueue(Pay(), max_attempts=1)
    stage.play(lambda: stage.states("worker_pay") == ["failed"])
    assert "must be the CallbackToken" in stage.jobs("worker_pay")[0].errors[0]["error"]


def test_the_class_instead_of_an_outcome_fails_the_attempt(stage: Any) -> None:
    handle(stage, "async", [], lambda token: WaitForCallback)
    stage.enqueue(Pay(), max_attempts=1)
    stage.play(lambda: stage.states("worker_pay") == ["failed"])
    assert "is the class WaitForCallback" in stage.jobs("worker_pay")[0].errors[0]["error"]


def test_a_callback_that_does_not_come_is_tried_again(stage: Any, quick: Any) -> None:
    seen: list[CallbackToken] = []
    handle(stage, "async", seen)
    stage.enqueue(Pay())

    def expired() -> bool:
        # Passing over what the worker holds: its event loop is this thread's.
        for table, change in (
            ("jobs_hot", "callback_timeout_at = now() - interval '1 s'"),
            ("scheduled_jobs", "run_at = now()"),
        ):
            stage.sql(
                f"UPDATE awa.{table} SET {change} WHERE state IN ('waiting_external', 'retryable') "
                f"AND id IN (SELECT id FROM awa.{table} FOR UPDATE SKIP LOCKED)"
            )
        return stage.states("worker_pay") == ["failed"]

    stage.play(expired, **quick)
    [row] = stage.jobs("worker_pay")
    assert [entry["error"] for entry in row.errors] == ["callback timed out"] * 2
    assert len({token.id for token in seen}) == 2
