"""One request, one commit: the app's row, the job, its follow-up and the receipt, or nothing of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from awa_sqla import CallbackRefused, Completed, ConfigurationError, DeadLetter, Job, enqueue
from awa_sqla.web.callbacks import CallbackCall, router
from tests.app import NotifyOps, Order, Signup, Welcome
from tests.web.rig import SECRET, Waiting, Web, in_async_kinds, in_one_kind, in_two_kinds
from tests.worlds import Database

BODY = {"payload": {"amount": 5}}


def paid(session: Session, call: CallbackCall) -> None:
    """The app's `before`: its own row, and a job of its own."""
    session.add(Order(id=1, note=f"{call.action} {call.payload}"))
    enqueue(session, Welcome())


def noted(session: Session, call: CallbackCall, job: Job) -> None:
    """The app's `after`."""
    session.execute(text("UPDATE app_order SET note = note || :state"), {"state": f" {job.state.value}"})


def shop(web: Web) -> Any:
    """A webhook that writes rows of its own before and after; returns its session factory."""

    @web.follow_ups.on_completed(Signup, name="notify")
    def notify(event: Completed[Signup]) -> NotifyOps:
        return NotifyOps(job_id=event.job.id)

    factory = web.factory()
    web.serve(factory, before=web.hook(paid), after=web.hook(noted))
    return factory


def traces(database: Database, waiting: Waiting) -> tuple[Any, ...]:
    """Everything that the request writes: order, job, follow-ups, the app's own job, receipts."""
    return (
        [row.note for row in database.rows("SELECT note FROM app_order")],
        database.job(waiting.job_id).state,
        len(database.children(waiting.job_id)),
        database.kinds().count("welcome"),
        [row.answer for row in database.rows("SELECT answer FROM callback_receipts")],
    )


def everything(waiting: Waiting) -> tuple[Any, ...]:
    answer = {"id": waiting.job_id, "state": "completed"}
    return (["complete {'amount': 5} completed"], "completed", 1, 1, [answer])


NOTHING = ([], "waiting_external", 0, 0, [])


def engine_of(factory: Any) -> Any:
    bind = factory.kw["bind"]
    return getattr(bind, "sync_engine", bind)


@contextmanager
def at_statement(engine: Any, number: int, act: Callable[[], None]) -> Iterator[list[str]]:
    """Do something just before the statement of that number (from 1), or the COMMIT that follows the last one (0)."""
    sent: list[str] = []

    def statement(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement)
        if len(sent) == number:
            act()

    def commit(conn: Any) -> None:
        sent.append("COMMIT")
        if number == 0:
            act()

    event.listen(engine, "before_cursor_execute", statement)
    event.listen(engine, "commit", commit)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", statement)
        event.remove(engine, "commit", commit)


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


#: From the receipt to the answer on it; every one of them is made to fail below.
STATEMENTS = 7


def test_a_webhook_commits_everything_at_once(web: Web, database: Database) -> None:
    factory = shop(web)
    warm = web.parked()
    assert web.post(warm, "complete", BODY).status == 200
    assert traces(database, warm) == everything(warm)
    database.execute("DELETE FROM app_order; DELETE FROM jobs_hot; DELETE FROM callback_receipts")
    waiting = web.parked()
    with at_statement(engine_of(factory), -1, crash) as sent:
        assert web.post(waiting, "complete", BODY).status == 200
    assert traces(database, waiting) == everything(waiting)
    assert len(sent) == STATEMENTS + 1, sent
    assert sent[-1] == "COMMIT"
    assert [sql for sql in sent if "callback_receipts" in sql] == [sent[0], sent[-2]]


@in_two_kinds
@pytest.mark.parametrize("number", range(STATEMENTS + 1))
def test_whichever_statement_fails_nothing_is_committed(web: Web, database: Database, number: int) -> None:
    """Number 0 is the COMMIT itself."""
    factory = shop(web)
    assert web.post(web.parked(), "complete", BODY).status == 200  # the catalogue has been read
    database.execute("DELETE FROM app_order; DELETE FROM jobs_hot; DELETE FROM callback_receipts")
    waiting = web.parked()
    with at_statement(engine_of(factory), number, crash) as sent:
        assert web.post(waiting, "complete", BODY).is_problem(500, "internal")
    assert len(sent) == (number or STATEMENTS + 1)
    assert traces(database, waiting) == NOTHING
    reply = web.post(waiting, "complete", BODY)
    assert (reply.status, reply.json["state"]) == (200, "completed")
    assert traces(database, waiting) == everything(waiting)


@in_two_kinds
@pytest.mark.parametrize("number", [0, 1, 2, 4, STATEMENTS])
def test_a_connection_that_is_cut_commits_nothing(web: Web, database: Database, number: int) -> None:
    factory = shop(web)
    assert web.post(web.parked(), "complete", BODY).status == 200
    database.execute("DELETE FROM app_order; DELETE FROM jobs_hot; DELETE FROM callback_receipts")
    waiting = web.parked()
    web.engine.dispose()
    with at_statement(engine_of(factory), number, lambda: cut(database)):
        reply = web.post(waiting, "complete", BODY)
    assert reply.is_problem(503, "unavailable")
    assert reply.headers["retry-after"] == "5"
    assert traces(database, waiting) == NOTHING
    assert web.post(waiting, "complete", BODY).status == 200
    assert traces(database, waiting) == everything(waiting)


def cut(database: Database) -> None:
    """End every other connection, and wait until it is gone."""
    database.rows(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )


def test_an_answer_that_is_lost_after_the_commit_is_given_again(web: Web, database: Database) -> None:
    """The process ends between COMMIT and its answer; the sender tries again, as another process would see it."""
    factory = shop(web)
    waiting = web.parked()

    def lost(session: Any) -> None:
        raise Crash

    target = factory.kw.get("sync_session_class") or factory.class_
    event.listen(target, "after_commit", lost)
    try:
        assert web.post(waiting, "complete", BODY).is_problem(500, "internal")
    finally:
        event.remove(target, "after_commit", lost)
    reply = web.post(waiting, "complete", BODY)
    assert (reply.status, reply.json) == (200, {"id": waiting.job_id, "state": "completed"})
    assert traces(database, waiting) == everything(waiting)


# ----------------------------------------------------------------------------------------------- before and after
@in_two_kinds
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(
    "error", [RuntimeError("secret"), SystemExit(3), asyncio.CancelledError(), KeyError("x"), OSError("disk full")]
)
def test_an_error_of_the_apps_code_is_500_and_changes_nothing(
    web: Web, database: Database, where: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def act(session: Session, call: CallbackCall, *job: Any) -> None:
        session.add(Order(id=1, note="x"))
        session.flush()
        raise error

    web.serve(**{where: web.hook(act)})
    waiting = web.parked()
    with caplog.at_level(logging.ERROR, "awa_sqla.web"):
        reply = web.post(waiting, "complete", BODY)
    assert reply.is_problem(500, "internal")
    assert "secret" not in str(reply.json)
    assert type(error).__name__ in caplog.text
    assert traces(database, waiting) == NOTHING
    web.serve()
    assert web.post(waiting, "complete", BODY).status == 200


@in_two_kinds
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(
    ("reason", "shown"), [("amount differs", "amount differs"), ("\x00\ud800", "\ufffd?"), ("x" * 10**6, None)]
)
def test_what_the_app_refuses_is_422_with_its_reason(
    web: Web, database: Database, where: str, reason: str, shown: str | None
) -> None:
    def act(session: Session, call: CallbackCall, *job: Any) -> None:
        session.add(Order(id=1, note="x"))
        raise CallbackRefused(reason)

    web.serve(**{where: web.hook(act)})
    waiting = web.parked()
    reply = web.post(waiting, "complete", BODY)
    assert reply.is_problem(422, "refused")
    assert len(reply.json["error"]["message"]) <= 300
    if shown is not None:
        assert reply.json["error"]["message"] == shown
    assert traces(database, waiting) == NOTHING


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@in_two_kinds
@pytest.mark.parametrize("where", ["before", "after"])
def test_app_code_that_ends_the_transaction_is_told_so(
    web: Web, database: Database, where: str, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    def act(session: Session, call: CallbackCall, *job: Any) -> None:
        getattr(session, ending)()

    web.serve(**{where: web.hook(act)})
    waiting = web.parked()
    assert web.post(waiting, "complete", BODY).is_problem(500, "internal")
    assert "leave that to the router" in caplog.text
    if (where, ending) != ("after", "commit"):  # that one has committed the verb, too
        web.serve()
        assert web.post(waiting, "complete", BODY).status == 200
        assert database.job(waiting.job_id).state == "completed"
        [row] = database.rows("SELECT answer FROM callback_receipts")
        assert row.answer == {"id": waiting.job_id, "state": "completed"}


def test_a_savepoint_of_the_app_is_the_apps(web: Web, database: Database) -> None:
    def act(session: Session, call: CallbackCall) -> None:
        with session.begin_nested() as savepoint:
            session.add(Order(id=1, note="gone"))
            session.flush()
            savepoint.rollback()
        with session.begin_nested():
            session.add(Order(id=2, note="stays"))

    web.serve(before=web.hook(act))
    waiting = web.parked()
    assert web.post(waiting, "complete", BODY).status == 200
    assert traces(database, waiting)[:2] == (["stays"], "completed")


def test_a_savepoint_that_is_left_open_is_a_mistake(web: Web, database: Database) -> None:
    """`after` could roll it back, and the verb with it, under an answer that says it is done."""
    web.serve(before=web.hook(lambda session, call: session.begin_nested()))
    waiting = web.parked()
    assert web.post(waiting, "complete", BODY).is_problem(500, "internal")
    assert traces(database, waiting) == ([], "waiting_external", 0, 0, [])


def test_the_apps_code_sees_the_call_and_the_job(web: Web) -> None:
    seen: list[Any] = []
    web.serve(
        before=web.hook(lambda session, call: seen.append(call)),
        after=web.hook(lambda session, call, job: seen.append((call, type(job), job.state.value, job.args))),
    )
    one, two, three, four = web.parked(), web.parked(), web.running(), web.parked()
    web.post(one, "complete", BODY)
    web.post(two, "fail", {"error": "no"})
    web.post(three, "resume")
    web.post(four, "heartbeat", {"timeout_seconds": 1.5})
    calls = [
        CallbackCall(one.callback_id, "complete", payload={"amount": 5}),
        CallbackCall(two.callback_id, "fail", error="no"),
        CallbackCall(three.callback_id, "resume"),
        CallbackCall(four.callback_id, "heartbeat", timeout=timedelta(seconds=1.5)),
    ]
    states = ["completed", "failed", "running", "waiting_external"]
    assert seen[::2] == calls
    args = {"email": "ada@example.org"}
    assert seen[1::2] == [(call, Job, state, args) for call, state in zip(calls, states, strict=True)]


def test_after_sees_a_dead_letter(web: Web, database: Database) -> None:
    seen: list[Any] = []
    database.keep_dead_letters("default")
    web.serve(after=web.hook(lambda session, call, job: seen.append(job)))
    assert web.post(web.parked(), "fail", {"error": "no"}).status == 200
    assert isinstance(seen[0], DeadLetter)


def test_the_same_request_again_does_not_call_the_apps_code(web: Web) -> None:
    seen: list[str] = []
    web.serve(
        before=web.hook(lambda session, call: seen.append("before")),
        after=web.hook(lambda session, call, job: seen.append("after")),
    )
    waiting = web.parked()
    assert web.post(waiting, "complete", BODY).status == 200
    assert web.post(waiting, "complete", BODY).status == 200
    assert seen == ["before", "after"]


@in_async_kinds
def test_an_async_session_is_what_async_code_gets(web: Web, database: Database) -> None:
    async def before(session: AsyncSession, call: CallbackCall) -> None:
        await session.execute(text("INSERT INTO app_order (id, note) VALUES (1, 'async')"))

    def after(session: AsyncSession, call: CallbackCall, job: Any) -> None:
        session.add(Order(id=2, note=str(job.id)))  # a plain function may do what is no I/O

    web.serve(before=before, after=after)
    waiting = web.parked()
    assert web.post(waiting, "complete", BODY).status == 200
    assert traces(database, waiting)[:2] == (["async", str(waiting.job_id)], "completed")


async def coroutine(session: Any, call: CallbackCall) -> None:
    raise AssertionError("nobody awaits this")


@in_one_kind
def test_a_coroutine_function_needs_async_sessions(web: Web, database: Database) -> None:
    factory = web.factory()
    with pytest.raises(ConfigurationError, match="is a coroutine function"):
        router(factory, secret=SECRET, before=coroutine)
    web.serve(lambda: factory(), before=coroutine)  # noqa: PLW0108 - whose kind is not known before it is called
    waiting = web.parked()
    assert web.post(waiting, "complete", BODY).is_problem(500, "internal")
    assert traces(database, waiting) == NOTHING


def test_a_lost_connection_in_the_apps_code_is_503(web: Web, database: Database) -> None:
    web.serve(
        before=web.hook(lambda session, call: session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())")))
    )
    waiting = web.parked()
    assert web.post(waiting, "complete", BODY).is_problem(503, "unavailable")
    assert traces(database, waiting) == NOTHING


def test_a_refusal_of_the_database_in_the_apps_code_is_500(web: Web, database: Database) -> None:
    web.serve(before=web.hook(lambda session, call: session.execute(text("SELECT secret FROM nowhere"))))
    reply = web.post(web.parked(), "complete", BODY)
    assert reply.is_problem(500, "internal")
    assert "nowhere" not in str(reply.json)
