"""Receipts: the same request again is answered as the first time, and executed once."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from anyio import to_thread

from awa_sqla import Completed
from awa_sqla.web import receipts
from awa_sqla.web.callbacks import CallbackCall
from tests.app import NotifyOps, Order, Signup
from tests.web.rig import SECRET, Reply, Waiting, Web, in_one_kind, in_two_kinds
from tests.worlds import Database

BODY = {"payload": {"amount": 5}}
NOW = 0


@pytest.fixture(autouse=True)
def the_time_of_this_test() -> None:
    """A test may come more than five minutes after this module was read."""
    global NOW
    NOW = int(time.time())


def count(database: Database) -> int:
    found: int = database.value("SELECT count(*) FROM callback_receipts")
    return found


def age(database: Database, hours: float) -> None:
    """Let the receipts have been written that long ago."""
    database.execute("UPDATE callback_receipts SET created_at = created_at - %s::interval", f"{hours} hours")


def deadline(database: Database) -> Any:
    return database.value("SELECT callback_timeout_at FROM jobs_hot")


ACTIONS: list[tuple[str, str, Any]] = [
    ("parked", "complete", BODY),
    ("parked", "fail", {"error": "no"}),
    ("running", "resume", {"payload": [1]}),
    ("parked", "heartbeat", {"timeout_seconds": 600}),
]


@pytest.mark.parametrize(("how", "action", "body"), ACTIONS, ids=lambda value: str(value)[:10])
def test_the_same_request_again_is_answered_the_same(
    web: Web, database: Database, how: str, action: str, body: Any
) -> None:
    waiting = getattr(web, how)()
    first = web.post(waiting, action, body, timestamp=NOW)
    row = database.job(waiting.job_id)
    again = web.post(waiting, action, body, timestamp=NOW)
    assert (first.status, first.json) == (again.status, again.json)
    assert first.status == 200
    assert database.job(waiting.job_id) == row
    assert count(database) == 1


@in_two_kinds
@pytest.mark.parametrize(("how", "action", "body"), ACTIONS[:3], ids=lambda value: str(value)[:10])
def test_a_request_that_is_signed_anew_is_the_same(
    web: Web, database: Database, how: str, action: str, body: Any
) -> None:
    """A sender that got no answer signs again when it tries again."""
    waiting = getattr(web, how)()
    first = web.post(waiting, action, body, timestamp=NOW - 60)
    again = web.post(waiting, action, body, timestamp=NOW)
    assert (again.status, again.json) == (200, first.json)
    assert count(database) == 1


@in_two_kinds
def test_a_request_signed_with_the_other_key_is_the_same(web: Web) -> None:
    web.serve(secret=[SECRET, bytes(32)])
    waiting = web.parked()
    first = web.post(waiting, "complete", BODY)
    assert web.post(waiting, "complete", BODY, key=bytes(32)).json == first.json


def test_an_answer_is_the_first_one_whatever_became_of_the_job(web: Web, database: Database) -> None:
    waiting = web.parked()
    first = web.post(waiting, "complete", BODY)
    database.execute("DELETE FROM jobs_hot")
    again = web.post(waiting, "complete", BODY)
    assert (again.status, again.json) == (200, first.json)


@in_two_kinds
def test_an_unsigned_request_again_is_answered_the_same(web: Web, database: Database) -> None:
    web.serve(allow_unsigned=True)
    waiting = web.parked()
    path = f"/callbacks/{waiting.callback_id}"
    assert web.send("POST", f"{path}/heartbeat", b'{"timeout_seconds": 60}').status == 200
    assert count(database) == 0  # whether it is the same one, nobody can tell
    first = web.send("POST", f"{path}/complete", b"{}")
    assert web.send("POST", f"{path}/complete", b"{}").json == first.json
    assert web.send("POST", f"{path}/complete", b"").is_problem(409, "already_resolved")
    assert count(database) == 1


def test_a_different_body_is_a_different_request(web: Web, database: Database) -> None:
    waiting = web.parked()
    assert web.post(waiting, "complete", b'{"payload": 1}').status == 200
    assert web.post(waiting, "complete", b'{"payload": 1 }').is_problem(409, "already_resolved")
    assert web.post(waiting, "complete", b'{"payload": 2}').is_problem(409, "already_resolved")
    assert count(database) == 1
    assert database.job(waiting.job_id).result == 1


# ------------------------------------------------------------------------------------------------------ heartbeats
def test_a_new_heartbeat_of_the_same_body_is_a_new_one(web: Web, database: Database) -> None:
    waiting = web.parked()
    body = {"timeout_seconds": 7200}
    assert web.post(waiting, "heartbeat", body, timestamp=NOW - 5).status == 200
    first = deadline(database)
    assert web.post(waiting, "heartbeat", body, timestamp=NOW).status == 200
    second = deadline(database)
    assert second > first
    assert web.post(waiting, "heartbeat", body, timestamp=NOW - 5).status == 200  # replayed by who has overheard it
    assert web.post(waiting, "heartbeat", body, timestamp=NOW).status == 200
    assert deadline(database) == second
    assert count(database) == 2


@in_two_kinds
def test_a_heartbeat_does_not_use_the_callback_up(web: Web, database: Database) -> None:
    waiting = web.parked()
    assert web.post(waiting, "heartbeat", {"timeout_seconds": 60}).status == 200
    database.execute("UPDATE jobs_hot SET callback_id = NULL, callback_timeout_at = NULL")
    assert web.post(waiting, "complete").is_problem(404, "unknown_callback")


# ----------------------------------------------------------------------------------------------------------- late
def test_a_request_that_is_too_old_is_answered_by_its_receipt_alone(web: Web, database: Database) -> None:
    waiting = web.parked()
    assert web.post(waiting, "complete", BODY, timestamp=NOW - 3600).is_problem(401, "unauthorized")
    assert database.job(waiting.job_id).state == "waiting_external"
    assert count(database) == 0
    first = web.post(waiting, "complete", BODY)
    late = web.post(waiting, "complete", BODY, timestamp=NOW - 3600)
    assert (late.status, late.json) == (200, first.json)
    assert web.post(waiting, "complete", {"payload": 6}, timestamp=NOW - 3600).is_problem(401, "unauthorized")
    age(database, 24)
    assert web.post(waiting, "complete", BODY, timestamp=NOW - 3600).is_problem(401, "unauthorized")


@in_two_kinds
def test_a_late_heartbeat_is_answered_by_the_receipt_of_its_time(web: Web, database: Database) -> None:
    web.serve(max_skew=timedelta(days=1))
    waiting, body = web.parked(), {"timeout_seconds": 60}
    assert web.post(waiting, "heartbeat", body, timestamp=NOW - 3600).status == 200
    until = deadline(database)
    web.serve()
    assert web.post(waiting, "heartbeat", body, timestamp=NOW - 3600).status == 200
    assert web.post(waiting, "heartbeat", body, timestamp=NOW - 3601).is_problem(401, "unauthorized")
    assert deadline(database) == until


@in_one_kind
def test_a_late_request_without_meaning_is_401(web: Web) -> None:
    assert web.post(web.parked(), "complete", b"{", timestamp=NOW - 3600).is_problem(401, "unauthorized")


# -------------------------------------------------------------------------------------------------------- expiry
def test_a_receipt_answers_for_24_hours(web: Web, database: Database) -> None:
    waiting = web.parked()
    first = web.post(waiting, "complete", BODY)
    age(database, 23.99)
    assert web.post(waiting, "complete", BODY).json == first.json
    assert web.post(waiting, "complete", b"{}").is_problem(409, "already_resolved")
    age(database, 0.02)
    assert web.post(waiting, "complete", b"{}").is_problem(404, "unknown_callback")
    assert web.post(waiting, "complete", BODY).is_problem(404, "unknown_callback")


def test_a_receipt_that_is_out_of_date_is_taken_over(web: Web, database: Database) -> None:
    """The same callback cannot come again; a heartbeat that a sender signs with one and the same time can."""
    web.serve(max_skew=timedelta(days=9))
    waiting = web.parked()
    assert web.post(waiting, "heartbeat", {"timeout_seconds": 60}, timestamp=NOW).status == 200
    first = deadline(database)
    age(database, 25)
    assert web.post(waiting, "heartbeat", {"timeout_seconds": 60}, timestamp=NOW).status == 200
    assert deadline(database) > first
    assert database.value("SELECT count(*) FROM callback_receipts WHERE created_at > now() - interval '1 hour'") == 1


@in_two_kinds
def test_each_receipt_removes_ten_that_are_out_of_date(web: Web, database: Database) -> None:
    database.execute(
        "INSERT INTO callback_receipts (request, callback_id, action, answer, created_at) "
        "SELECT decode(md5(n::text), 'hex'), gen_random_uuid(), 'complete', '{\"id\": 1}', "
        "now() - n * interval '1 hour' "
        "FROM generate_series(1, 49) n"
    )
    left = [39, 29, 23, 23]  # those of 1 to 23 hours stay; each time the new one comes on top
    for n, expected in enumerate(left, 1):
        assert web.post(web.parked(), "complete", BODY).status == 200
        assert count(database) == expected + n
    assert database.value("SELECT count(*) FROM callback_receipts WHERE created_at < now() - interval '24 hours'") == 0


@in_two_kinds
def test_a_receipt_that_another_transaction_holds_is_left_to_it(web: Web, database: Database) -> None:
    database.execute(
        "INSERT INTO callback_receipts (request, callback_id, action, answer, created_at) "
        "SELECT decode(md5(n::text), 'hex'), gen_random_uuid(), 'complete', '{\"id\": 1}', now() - interval '2 days' "
        "FROM generate_series(1, 3) n"
    )
    holding = database.another()
    holding.execute("BEGIN")
    holding.rows("SELECT FROM callback_receipts WHERE request = decode(md5('1'), 'hex') FOR UPDATE")
    assert web.post(web.parked(), "complete", BODY).status == 200
    holding.execute("COMMIT")
    holding.close()
    assert count(database) == 2


def test_a_receipt_without_an_answer_is_none(web: Web, database: Database) -> None:
    """App code that commits in the middle of a request leaves one."""
    waiting = web.parked()
    digest = receipts.digest_of(waiting.callback_id, "complete", b"{}", None)
    database.execute(
        "INSERT INTO callback_receipts (request, callback_id, action) VALUES (%s, %s, 'complete')",
        digest,
        waiting.callback_id,
    )
    assert web.post(uuid.uuid4(), "complete").is_problem(404, "unknown_callback")
    assert web.post(waiting, "complete", b"{}", timestamp=NOW - 3600).is_problem(401, "unauthorized")
    assert web.post(waiting, "complete", b"{}").json == {"id": waiting.job_id, "state": "completed"}


@in_two_kinds
def test_the_statements_of_a_request_are_few(web: Web, database: Database) -> None:
    from tests.web.test_atomic import at_statement, engine_of

    factory = web.factory()
    web.serve(factory)
    web.post(web.parked(), "complete", BODY)  # the catalogue has been read
    waiting = web.parked()
    with at_statement(engine_of(factory), -1, lambda: None) as sent:
        assert web.post(waiting, "complete", BODY).status == 200
        first = len(sent)
        assert web.post(waiting, "complete", BODY).status == 200
    assert first == 4, sent  # receipt, verb, answer, COMMIT
    assert len(sent) - first == 2, sent  # receipt, the answer that is there


# ----------------------------------------------------------------------------------------------------- concurrency
class Gate:
    """Holds the first request that comes by inside its transaction, until it is opened."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.reached, self.opened = threading.Event(), threading.Event()
        self._first = True

    def __call__(self, session: Any, call: CallbackCall, job: Any = None) -> None:
        if self._first:
            self._first = False
            self.reached.set()
            assert self.opened.wait(10)
            if self.error is not None:
                raise self.error


def gated(web: Web, gate: Gate, where: str = "before") -> None:
    """Serve with the gate as the app's code; on the event loop it must not block the others."""

    async def hook(session: Any, *rest: Any) -> None:
        await to_thread.run_sync(gate, session, *rest)

    web.serve(**{where: hook if web.is_async else gate})  # type: ignore[arg-type]


def race(
    web: Web,
    database: Database,
    first: Callable[[], Reply],
    second: Callable[[], Reply],
    *,
    gate: Gate | None = None,
    where: str = "before",
) -> tuple[Reply, Reply]:
    """The second request comes while the first one is in the middle, and waits for its lock."""
    gate = gate or Gate()
    gated(web, gate, where)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        assert gate.reached.wait(10)
        two = pool.submit(second)
        database.wait_until_one_is_blocked()
        gate.opened.set()
        return one.result(20), two.result(20)


def test_a_duplicate_waits_for_the_first_and_answers_the_same(web: Web, database: Database) -> None:
    @web.follow_ups.on_completed(Signup, name="notify")
    def notify(event: Completed[Signup]) -> NotifyOps:
        return NotifyOps(job_id=event.job.id)

    waiting = web.parked()
    both = race(
        web,
        database,
        lambda: web.post(waiting, "complete", BODY, timestamp=NOW),
        lambda: web.post(waiting, "complete", BODY, timestamp=NOW - 1),
    )
    assert [reply.status for reply in both] == [200, 200]
    assert both[0].json == both[1].json
    assert len(database.children(waiting.job_id)) == 1


def test_a_duplicate_of_a_request_that_fails_is_carried_out(web: Web, database: Database) -> None:
    waiting = web.parked()
    failed = threading.Event()

    @web.follow_ups.on_completed(Signup, name="notify")
    def notify(event: Completed[Signup]) -> NotifyOps:
        if not failed.is_set():
            failed.set()
            raise RuntimeError
        return NotifyOps(job_id=event.job.id)

    first, second = race(
        web, database, lambda: web.post(waiting, "complete", BODY), lambda: web.post(waiting, "complete", BODY)
    )
    assert first.is_problem(500, "follow_up_failed")
    assert second.status == 200
    assert len(database.children(waiting.job_id)) == 1


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@in_two_kinds
def test_a_duplicate_under_a_higher_isolation_is_told_to_come_again(web: Web, database: Database, level: str) -> None:
    factory = web.factory(isolation_level=level)
    gate = Gate()
    gated(web, gate)
    app = web.app
    web.serve(factory)
    plain, web.app = web.app, app
    waiting = web.parked()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(web.post, waiting, "complete", BODY)
        assert gate.reached.wait(10)
        web.app = plain
        two = pool.submit(web.post, waiting, "complete", BODY)
        database.wait_until_one_is_blocked()
        gate.opened.set()
        assert one.result(20).status == 200
        assert two.result(20).is_problem(503, "unavailable")
    assert web.post(waiting, "complete", BODY).status == 200


@pytest.mark.parametrize("spread", [1, 4])
def test_exactly_one_of_many_resolvers_wins(web: Web, database: Database, spread: int) -> None:
    """Eight requests at once, for one callback: `spread` different ones, the rest duplicates of those."""

    @web.follow_ups.on_completed(Signup, name="notify")
    def notify(event: Completed[Signup]) -> NotifyOps:
        return NotifyOps(job_id=event.job.id)

    def order(session: Any, call: CallbackCall) -> None:
        session.add(Order(note=f"{call.payload}"))

    web.serve(web.factory(pool_size=8), before=web.hook(order))
    rounds = 3
    for n in range(rounds):
        waiting = web.parked(queue=f"round-{n}")
        barrier = threading.Barrier(8)

        def send(n: int, waiting: Waiting = waiting, barrier: threading.Barrier = barrier) -> Reply:
            barrier.wait(10)
            return web.post(waiting, "complete", {"payload": n % spread})

        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(send, range(8)))
        statuses = Counter(reply.status for reply in replies)
        assert +statuses == +Counter({200: 8 // spread, 409: 8 - 8 // spread})
        assert {reply.code for reply in replies if reply.status == 409} <= {"already_resolved"}
        won = database.job(waiting.job_id).result
        assert {n % spread for n, reply in enumerate(replies) if reply.status == 200} == {won}
        assert len(database.children(waiting.job_id)) == 1
    assert database.value("SELECT count(*) FROM app_order") == rounds


@pytest.mark.parametrize("ending", ["commits", "fails"])
def test_a_different_request_waits_for_the_first(web: Web, database: Database, ending: str) -> None:
    """It loses when the first one commits, and wins when that fails."""
    waiting = web.parked()
    gate = Gate(RuntimeError() if ending == "fails" else None)
    first, second = race(
        web,
        database,
        lambda: web.post(waiting, "complete", BODY),
        lambda: web.post(waiting, "fail", {"error": "no"}),
        gate=gate,
        where="after",
    )
    if ending == "commits":
        assert first.status == 200
        assert second.is_problem(409, "already_resolved")
    else:
        assert first.is_problem(500, "internal")
        assert second.status == 200
    assert database.job(waiting.job_id).state == ("completed" if ending == "commits" else "failed")


def test_the_digest_is_of_everything_that_makes_a_request(web: Web) -> None:
    one, two = uuid.uuid4(), uuid.uuid4()
    digests = [
        receipts.digest_of(*parts)
        for parts in (
            *((one, "complete", b"", None), (two, "complete", b"", None), (one, "resume", b"", None)),
            *((one, "complete", b"{}", None), (one, "heartbeat", b"", 1), (one, "heartbeat", b"", 2)),
        )
    ]
    assert len(set(digests)) == 6
    assert receipts.digest_of(one, "complete", b"", 5) == digests[0]
    assert receipts.digest_of(one, "heartbeat", b"", None) is None
