"""Every kind of session factory; every session is closed; and a database that is away or read-only."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
from sqlalchemy import URL, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from awa_sqla import ConfigurationError
from awa_sqla.web.callbacks import CallbackCall, router
from tests.app import Order
from tests.web.rig import SECRET, Web, in_async_kinds, in_one_kind, in_two_kinds
from tests.web.test_atomic import engine_of
from tests.worlds import Database

BODY = {"payload": 5}


class OwnSession(Session):
    pass


class OwnAsyncSession(AsyncSession):
    pass


def scoped(web: Web, factory: Any) -> Any:
    if not web.is_async:
        return scoped_session(factory)
    import asyncio

    return async_scoped_session(factory, scopefunc=asyncio.current_task)


FACTORIES: dict[str, Any] = {
    "maker": lambda web, factory: factory,
    "scoped": scoped,
    "function": lambda web, factory: lambda: factory(),  # noqa: PLW0108
    "no autobegin": lambda web, factory: factory.configure(autobegin=False) or factory,
    "no autoflush": lambda web, factory: factory.configure(autoflush=False) or factory,
    "no expiry": lambda web, factory: factory.configure(expire_on_commit=False) or factory,
    "own class": lambda web, factory: (
        async_sessionmaker(factory.kw["bind"], class_=OwnAsyncSession)
        if web.is_async
        else sessionmaker(factory.kw["bind"], class_=OwnSession)
    ),
    "begun": lambda web, factory: lambda: begun(factory()),
}


def begun(session: Any) -> Any:
    getattr(session, "sync_session", session).begin()
    return session


@pytest.mark.parametrize("kind", list(FACTORIES))
def test_every_kind_of_factory_serves_and_leaves_no_session_open(web: Web, database: Database, kind: str) -> None:
    def order(session: Session, call: CallbackCall) -> None:
        session.add(Order(note=call.action))

    factory = web.factory(pool_size=1, max_overflow=0, pool_timeout=5)
    engine = engine_of(factory)
    web.serve(FACTORIES[kind](web, factory), before=web.hook(order))
    waiting = web.parked()
    replies = [
        web.post(waiting, "complete", BODY),
        web.post(waiting, "complete", BODY),
        web.post(waiting, "fail", {"error": "x"}),
        web.post(uuid.uuid4(), "complete"),
    ]
    assert [reply.status for reply in replies] == [200, 200, 409, 404]
    assert engine.pool.checkedout() == 0
    assert database.value("SELECT count(*) FROM app_order") == 1
    assert database.value("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'") == 0


@in_two_kinds
def test_scoped_sessions_of_requests_at_once_are_different_ones(web: Web, database: Database) -> None:
    def order(session: Session, call: CallbackCall) -> None:
        session.add(Order(note=str(call.callback_id)))

    web.serve(scoped(web, web.factory(pool_size=8)), before=web.hook(order))
    waiting = [web.parked(queue=f"q{n}") for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda one: web.post(one, "complete", BODY), waiting))
    assert [reply.status for reply in replies] == [200] * 8
    notes = {row.note for row in database.rows("SELECT note FROM app_order")}
    assert notes == {str(one.callback_id) for one in waiting}


@in_one_kind
def test_a_sync_session_does_not_block_the_event_loop(web: Web) -> None:
    inside, free = threading.Event(), threading.Event()

    def hold(session: Session, call: CallbackCall) -> None:
        inside.set()
        assert free.wait(10)

    web.serve(before=hold)
    waiting = web.parked()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(web.post, waiting, "complete", BODY)
        assert inside.wait(10)
        assert web.send("GET", "/callbacks/openapi.json").status == 200  # the loop answers meanwhile
        free.set()
        assert held.result(10).status == 200


@in_async_kinds
def test_a_cancelled_request_leaves_nothing_behind(web: Web, database: Database) -> None:
    entered = threading.Event()

    async def hold(session: AsyncSession, call: CallbackCall) -> None:
        session.add(Order(note="x"))
        await session.flush()
        entered.set()
        await anyio.sleep_forever()

    factory = web.factory(pool_size=1, max_overflow=0)
    web.serve(factory, before=hold)
    waiting = web.parked()

    async def give_up() -> None:
        async with anyio.create_task_group() as tasks:
            from awa_sqla import sign_callback

            path = f"/callbacks/{waiting.callback_id}/complete"
            tasks.start_soon(web._send, "POST", path, b"", sign_callback(SECRET, waiting.callback_id, "complete"))
            await anyio.to_thread.run_sync(entered.wait, 10)
            tasks.cancel_scope.cancel()

    web.portal.call(give_up)
    assert engine_of(factory).pool.checkedout() == 0
    assert database.job(waiting.job_id).state == "waiting_external"
    web.serve(factory)
    assert web.post(waiting, "complete").status == 200
    assert database.value("SELECT count(*) FROM app_order") == 0


@in_one_kind
@pytest.mark.parametrize("gives", [None, 5, "session", object()])
def test_a_factory_that_gives_something_else_is_500(web: Web, gives: Any, caplog: pytest.LogCaptureFixture) -> None:
    web.serve(lambda: gives)
    assert web.post(web.parked(), "complete").is_problem(500, "internal")
    assert "the session factory gave a" in caplog.text


@in_one_kind
@pytest.mark.parametrize("error", [RuntimeError("secret"), SystemExit(1)])
def test_a_factory_that_raises_is_500(web: Web, error: BaseException) -> None:
    def factory() -> Any:
        raise error

    web.serve(factory)
    reply = web.post(web.parked(), "complete")
    assert reply.is_problem(500, "internal")
    assert "secret" not in str(reply.json)


async def a_coroutine() -> Any:
    raise AssertionError


def a_generator() -> Any:
    yield


@pytest.mark.parametrize("factory", [None, 5, a_coroutine, a_generator])
def test_what_is_no_factory_is_refused(factory: Any) -> None:
    with pytest.raises(ConfigurationError, match="session_factory: must be a sessionmaker"):
        router(factory, secret=SECRET)


# ------------------------------------------------------------------------------------------------ 503
def test_a_database_that_is_away_is_503(web: Web) -> None:
    nobody = URL.create("postgresql", "nobody", host="127.0.0.1", port=1, database="nowhere")
    web.serve(web.factory(url=nobody))
    for callback in (uuid.uuid4(), web.parked()):
        reply = web.post(callback, "complete")
        assert reply.is_problem(503, "unavailable")
        assert reply.headers["retry-after"] == "5"
        assert "127.0.0.1" not in str(reply.json)


@in_two_kinds
def test_a_database_that_is_away_is_503_for_an_unsigned_heartbeat_too(web: Web) -> None:
    """It has no receipt: the app's own code would be the first to connect."""
    nobody = URL.create("postgresql", "nobody", host="127.0.0.1", port=1, database="nowhere")
    web.serve(
        web.factory(url=nobody),
        allow_unsigned=True,
        before=web.hook(lambda session, call: session.execute(text("SELECT 1"))),
    )
    path = f"/callbacks/{uuid.uuid4()}/heartbeat"
    assert web.send("POST", path, b'{"timeout_seconds": 5}').is_problem(503, "unavailable")


def test_a_read_only_database_is_503(web: Web, database: Database) -> None:
    waiting = web.parked()
    web.serve(web.factory(pool_pre_ping=True))  # an engine of its own, which has not connected yet
    database.execute(f"ALTER DATABASE {web.url.database} SET default_transaction_read_only = on")
    try:
        assert web.post(waiting, "complete").is_problem(503, "unavailable")
        assert web.post(waiting, "complete", timestamp=1000).is_problem(401, "unauthorized")
    finally:
        database.execute("SET default_transaction_read_only = off")
        database.execute(f"ALTER DATABASE {web.url.database} RESET default_transaction_read_only")
    assert database.job(waiting.job_id).state == "waiting_external"


def test_a_pool_that_is_used_up_is_503(web: Web) -> None:
    factory = web.factory(pool_size=1, max_overflow=0, pool_timeout=0.05)
    inside, free = threading.Event(), threading.Event()

    def hold(session: Any, call: CallbackCall) -> None:
        inside.set()
        assert free.wait(10)

    async def hold_async(session: Any, call: CallbackCall) -> None:
        await anyio.to_thread.run_sync(hold, session, call)

    web.serve(factory, before=hold_async if web.is_async else hold)
    one, two = web.parked(queue="a"), web.parked(queue="b")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(web.post, one, "complete")
        assert inside.wait(10)
        assert web.post(two, "complete").is_problem(503, "unavailable")
        free.set()
        assert held.result(10).status == 200
    assert web.post(two, "complete").status == 200


def test_a_lock_that_is_not_had_in_time_is_503(web: Web, database: Database) -> None:
    waiting = web.parked()
    database.execute(f"ALTER DATABASE {web.url.database} SET lock_timeout = '50ms'")
    holding = database.another()
    try:
        holding.execute("BEGIN")
        holding.rows("SELECT FROM jobs_hot FOR UPDATE")
        web.serve(web.factory(pool_pre_ping=True))  # an engine of its own, which has not connected yet
        assert web.post(waiting, "complete").is_problem(503, "unavailable")
    finally:
        holding.execute("ROLLBACK")
        holding.close()
        database.execute(f"ALTER DATABASE {web.url.database} RESET lock_timeout")
    assert web.post(waiting, "complete").status == 200


@in_one_kind
def test_an_autocommit_engine_is_a_mistake_of_the_set_up(
    web: Web, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    web.serve(web.factory(isolation_level="AUTOCOMMIT"))
    waiting = web.parked()
    assert web.post(waiting, "complete").is_problem(500, "internal")
    assert "AUTOCOMMIT" in caplog.text
    assert database.value("SELECT count(*) FROM callback_receipts") == 0
