"""Every answer of the ingress, one after the other."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from datetime import timedelta
from typing import Any

import pytest

from awa_sqla import (
    Completed,
    ConfigurationError,
    Exhausted,
    InvalidJob,
    JobArgs,
    JobState,
    Unique,
    complete_external,
    enqueue,
    sign_callback,
)
from awa_sqla.session.trouble import passing
from awa_sqla.web.callbacks import router
from tests.app import NotifyOps, Signup
from tests.web.rig import SECRET, Web, in_one_kind
from tests.worlds import Database

OTHER = bytes(32)
ID = uuid.UUID("0192d3f4-5a6b-4c7d-8e9f-a0b1c2d3e4f5")
ACTIONS = {
    "complete": {"payload": {"amount": 5}},
    "fail": {"error": "refused"},
    "heartbeat": {"timeout_seconds": 600},
    "resume": {"payload": 1},
}


HELD = set(JobState) - {JobState.WAITING_EXTERNAL, JobState.FAILED, JobState.CANCELLED}


class Once(JobArgs, unique=Unique(states=HELD)):
    """Unique when it is done; while one waits, another may come."""

    day: int


# ----------------------------------------------------------------------------------------------------------- 200
@pytest.mark.parametrize("how", ["running", "parked"])
def test_complete_completes_the_job_with_its_follow_ups(web: Web, database: Database, how: str) -> None:
    @web.follow_ups.on_completed(Signup, name="notify")
    def notify(event: Completed[Signup]) -> NotifyOps:
        return NotifyOps(job_id=event.job.id)

    waiting = getattr(web, how)()
    reply = web.post(waiting, "complete", {"payload": {"amount": 5}})
    assert (reply.status, reply.json) == (200, {"id": waiting.job_id, "state": "completed"})
    row = database.job(waiting.job_id)
    assert (row.state, row.result) == ("completed", {"amount": 5})
    assert [child.kind for child in database.children(waiting.job_id)] == ["notify_ops"]


def test_an_empty_body_completes_without_a_result(web: Web, database: Database) -> None:
    waiting = web.parked()
    assert web.post(waiting, "complete").status == 200
    assert database.job(waiting.job_id).result is None


def test_fail_fails_the_job_for_good(web: Web, database: Database) -> None:
    @web.follow_ups.on_exhausted(Signup, name="notify")
    def notify(event: Exhausted[Signup]) -> NotifyOps:
        return NotifyOps(job_id=event.job.id, text=event.error)

    waiting = web.parked()
    reply = web.post(waiting, "fail", {"error": "card declined"})
    assert (reply.status, reply.json) == (200, {"id": waiting.job_id, "state": "failed"})
    assert database.job(waiting.job_id).errors[-1]["error"] == "card declined"
    assert [child.args["text"] for child in database.children(waiting.job_id)] == ["card declined"]


def test_a_queue_with_dead_letters_gets_one(web: Web, database: Database) -> None:
    waiting = web.parked()
    database.keep_dead_letters("default")
    assert web.post(waiting, "fail", {"error": "no"}).json == {"id": waiting.job_id, "state": "failed"}
    assert database.job(waiting.job_id).stored_in == "dead"


def test_heartbeat_gives_more_time(web: Web, database: Database) -> None:
    waiting = web.parked()
    reply = web.post(waiting, "heartbeat", {"timeout_seconds": 7200})
    assert (reply.status, reply.json["state"]) == (200, "waiting_external")
    assert database.value("SELECT callback_timeout_at > clock_timestamp() + interval '90 min' FROM jobs_hot")


def test_resume_wakes_the_handler(web: Web, database: Database) -> None:
    waiting = web.running()
    reply = web.post(waiting, "resume", {"payload": ["yes"]})
    assert (reply.status, reply.json) == (200, {"id": waiting.job_id, "state": "running"})
    assert database.value("SELECT callback_answer IS NOT NULL FROM jobs_hot")


def test_an_id_may_be_written_in_capitals(web: Web) -> None:
    waiting = web.parked()
    assert web.post(str(waiting.callback_id).upper(), "complete").status == 200


@in_one_kind
@pytest.mark.parametrize(
    "body", ["{}", '{"payload": null}', '{"payload": "\\ud83d\\ude00 \u00e9"}', " \n{} ", '{"payload": 1e308}']
)
def test_every_json_value_is_a_payload(web: Web, body: str) -> None:
    assert web.post(web.parked(), "complete", body.encode()).status == 200


# ----------------------------------------------------------------------------------------------------------- 400
BAD_IDS = [
    "17",
    "x" * 36,
    ID.hex,
    f"{{{ID}}}",
    f"{ID}%00",
    "%F0%9F%98%80",
    "%ff",
    "\N{ARABIC-INDIC DIGIT ONE}" * 36,
]


@in_one_kind
@pytest.mark.parametrize("bad", BAD_IDS)
def test_a_bad_id_is_400(web: Web, bad: str) -> None:
    assert web.send("POST", f"/callbacks/{bad}/complete").is_problem(400, "bad_callback_id")


BAD_JSON = [
    *(
        b"{",
        b"{'a': 1}",
        b"nul",
        b" ",
        b"\xff",
        b'{"payload": "\xff"}',
        b"\xef\xbb\xbf{}",
        '{"payload": 1}'.encode("utf-16"),
    ),
    *(b'{"payload": NaN}', b'{"payload": -Infinity}', b'{"payload": 1e999}', b'{"payload": [{"a": -1e999}]}'),
    *(
        b'{"payload": "\\u0000"}',
        b'{"payload": {"a\\u0000": 1}}',
        b'{"payload": "\\ud800"}',
        b'{"payload": "\\udc00\\ud800"}',
    ),
    *(b'{"payload": ' + b"[" * 200 + b"]" * 200 + b"}", b"[" * 200_000, b'{"a":' * 40_000),
    *(b'{"payload": 1, "payload": 2}', b'{"payload": ' + b"9" * 5000 + b"}", b'{"payload": 1} x'),
]


@in_one_kind
@pytest.mark.parametrize("body", BAD_JSON, ids=lambda body: repr(body[:30]))
def test_a_body_that_is_no_json_is_400(web: Web, database: Database, body: bytes) -> None:
    waiting = web.parked()
    assert web.post(waiting, "complete", body).is_problem(400, "bad_json")
    assert database.job(waiting.job_id).state == "waiting_external"


# ----------------------------------------------------------------------------------------------------------- 401
UNAUTHORIZED: dict[str, Any] = {
    "missing": lambda signed, now: {},
    "no timestamp": lambda signed, now: {"X-Awa-Signature": signed["X-Awa-Signature"]},
    "malformed": lambda signed, now: signed | {"X-Awa-Signature": "v1=abc"},
    "another time": lambda signed, now: signed | {"X-Awa-Timestamp": str(now - 1)},
    "twice": lambda signed, now: [*signed.items(), ("X-Awa-Signature", signed["X-Awa-Signature"])],
    "absurd": lambda signed, now: signed | {"X-Awa-Timestamp": str(10**30)},
}


@in_one_kind
def test_every_wrong_signature_is_the_same_401(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    waiting = web.parked()
    now = int(time.time())
    path = f"/callbacks/{waiting.callback_id}/complete"
    replies = []
    for headers in UNAUTHORIZED.values():
        signed = sign_callback(SECRET, waiting.callback_id, "complete", b"{}", timestamp=now)
        replies.append(web.send("POST", path, b"{}", headers(signed, now)))
    replies.append(web.post(waiting, "complete", b"{}", key=OTHER))
    replies.append(web.post(waiting, "complete", b"{}", timestamp=now - 302))
    replies.append(web.post(waiting, "complete", b"{}", timestamp=now + 302))
    with_another = sign_callback(SECRET, waiting.callback_id, "resume", b"{}")
    replies.append(web.send("POST", path, b"{}", with_another))
    assert all(reply.is_problem(401, "unauthorized") for reply in replies)
    assert len({str(reply.json) for reply in replies}) == 1
    assert {reply.headers["www-authenticate"] for reply in replies} == {"AwaSignature"}


@in_one_kind
@pytest.mark.parametrize("body", [b"", b"{", b'{"unknown": 1}', b"x" * 1000])
def test_a_request_that_nobody_signed_never_reaches_the_database(web: Web, body: bytes) -> None:
    made: list[Any] = []
    factory = web.factory()
    web.serve(lambda: made.append(1) or factory())
    callback = uuid.uuid4()
    assert web.post(callback, "complete", body, key=OTHER).is_problem(401, "unauthorized")
    assert web.post(callback, "complete", body, timestamp=int(time.time()) + 1000).is_problem(401, "unauthorized")
    assert made == []
    assert web.post(callback, "complete", b"{}").is_problem(404, "unknown_callback")
    assert made == [1]


@in_one_kind
def test_either_of_two_keys_is_right(web: Web) -> None:
    web.serve(secret=[OTHER, SECRET])
    assert web.post(web.parked(), "complete", key=SECRET).status == 200
    assert web.post(web.parked(), "complete", key=OTHER).status == 200
    web.serve(secret=[OTHER])
    assert web.post(web.parked(), "complete", key=SECRET).is_problem(401, "unauthorized")


@in_one_kind
def test_the_skew_can_be_chosen(web: Web) -> None:
    web.serve(max_skew=timedelta(hours=1))
    assert web.post(web.parked(), "complete", timestamp=int(time.time()) - 3000).status == 200


def test_unsigned_requests_are_taken_when_asked_for(web: Web, database: Database) -> None:
    web.serve(allow_unsigned=True)
    waiting = web.parked()
    assert web.send("POST", f"/callbacks/{waiting.callback_id}/complete", b'{"payload": 7}').status == 200
    assert database.job(waiting.job_id).result == 7


# ----------------------------------------------------------------------------------------------------- 404 and 405
@in_one_kind
@pytest.mark.parametrize("path", ["/", "/x", f"/{ID}", f"/{ID}/retry", f"/{ID}/complete//", "/a/b/c"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unknown_path_is_404(web: Web, path: str, method: str) -> None:
    assert web.send(method, f"/callbacks{path}").is_problem(404, "not_found")


@pytest.mark.parametrize("action", list(ACTIONS))
def test_an_unknown_callback_is_404(web: Web, database: Database, action: str) -> None:
    callback = uuid.uuid4()
    assert web.post(callback, action, ACTIONS[action]).is_problem(404, "unknown_callback")
    assert database.value("SELECT count(*) FROM callback_receipts") == 0


@in_one_kind
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_another_method_is_405(web: Web, method: str) -> None:
    reply = web.send(method, f"/callbacks/{uuid.uuid4()}/complete")
    assert reply.is_problem(405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    assert web.send("POST", "/callbacks/openapi.json").is_problem(405, "method_not_allowed")


# ----------------------------------------------------------------------------------------------------------- 409
@pytest.mark.parametrize("second", list(ACTIONS))
def test_a_callback_that_another_request_has_resolved_is_409(web: Web, database: Database, second: str) -> None:
    waiting = web.parked()
    assert web.post(waiting, "complete", {"payload": 0}).status == 200
    before = database.job(waiting.job_id)
    assert web.post(waiting, second, ACTIONS[second]).is_problem(409, "already_resolved")
    assert database.job(waiting.job_id) == before


@in_one_kind
def test_a_callback_that_the_app_itself_has_resolved_is_404(web: Web) -> None:
    waiting = web.parked()
    with web.in_session() as session:
        complete_external(session, waiting.callback_id)
        session.commit()
    assert web.post(waiting, "complete").is_problem(404, "unknown_callback")


def test_a_job_that_would_get_a_twin_is_409(web: Web, database: Database) -> None:
    waiting = web.parked(Once(day=1))
    with web.in_session() as session:
        enqueue(session, Once(day=1))
        session.commit()
    assert web.post(waiting, "complete").is_problem(409, "unique_conflict")
    assert database.job(waiting.job_id).state == "waiting_external"
    assert database.value("SELECT count(*) FROM callback_receipts") == 0


# ----------------------------------------------------------------------------------------------------------- 413
@in_one_kind
def test_a_body_over_the_limit_is_413(web: Web) -> None:
    web.serve(max_body=100)
    waiting = web.parked()
    reply = web.post(waiting, "complete", b'{"payload": "' + b"x" * 86 + b'"}')
    assert reply.is_problem(413, "too_large")
    assert reply.headers["connection"] == "close"
    assert web.post(waiting, "complete", b'{"payload": "' + b"x" * 85 + b'"}').status == 200


@in_one_kind
def test_the_limit_is_256_kib(web: Web) -> None:
    waiting = web.parked()
    most = 256 * 1024 - len('{"payload": ""}')
    assert web.post(waiting, "complete", {"payload": "x" * (most + 1)}).is_problem(413, "too_large")
    assert web.post(waiting, "complete", {"payload": "x" * most}).status == 200


@in_one_kind
@pytest.mark.parametrize("said", ["9" * 5000, "300000", "-5", "+5", "\N{ARABIC-INDIC DIGIT FIVE}", "abc", ""])
def test_the_bytes_are_counted_whatever_is_promised(web: Web, said: str) -> None:
    """A server refuses most of these itself; an ASGI app must not trust that."""
    sent: list[Any] = []
    waiting = web.parked()
    web.serve(max_body=1000)
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/callbacks/{waiting.callback_id}/complete",
        "headers": [(b"content-length", said.encode())],
        "query_string": b"",
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        await asyncio.wait_for(web.app(scope, receive, send), 10)

    web.portal.call(run)
    assert sent[0]["status"] == 413


# ----------------------------------------------------------------------------------------------------------- 422
WRONG_SHAPES: list[tuple[str, Any]] = [
    *(("complete", shape) for shape in ([], 5, None, "x", {"payload": 1, "more": 2}, {"Payload": 1}, {"error": "x"})),
    *(("resume", shape) for shape in ([], {"timeout_seconds": 1})),
    *(("fail", shape) for shape in (b"", {}, {"error": None}, {"error": 5}, {"error": ["x"]}, {"error": "x", "y": 1})),
    *(("heartbeat", shape) for shape in (b"", {}, {"timeout_seconds": None}, {"timeout_seconds": "60"})),
    *(("heartbeat", {"timeout_seconds": n}) for n in (0, -1, 1e-9, 5e-324, 86400 * 30 + 1, 1e300, 10**400, True)),
]


@in_one_kind
@pytest.mark.parametrize(("action", "body"), WRONG_SHAPES, ids=lambda value: repr(value)[:40])
def test_a_wrong_shape_is_422(web: Web, database: Database, action: str, body: Any) -> None:
    waiting = web.parked()
    reply = web.post(waiting, action, body)
    assert reply.is_problem(422, "invalid_body")
    assert "Body" not in reply.json["error"]["message"]
    assert database.job(waiting.job_id).state == "waiting_external"
    assert database.value("SELECT count(*) FROM callback_receipts") == 0


@in_one_kind
def test_a_month_is_the_longest_heartbeat(web: Web) -> None:
    assert web.post(web.parked(), "heartbeat", {"timeout_seconds": 86400 * 30}).status == 200


@in_one_kind
def test_what_the_verb_refuses_is_422(web: Web, database: Database) -> None:
    web.serve(max_body=3 << 20)
    waiting = web.parked()
    assert web.post(waiting, "complete", {"payload": "x" * (1 << 20)}).is_problem(422, "invalid_body")
    assert web.post(waiting, "complete", b'{"payload": ' + b"9" * 4100 + b"}").is_problem(422, "invalid_body")
    assert database.job(waiting.job_id).state == "waiting_external"


# ----------------------------------------------------------------------------------------------------------- 500
def test_a_follow_up_that_fails_leaves_the_callback_open(web: Web, database: Database) -> None:
    broken = True

    @web.follow_ups.on_completed(Signup, name="notify")
    def notify(event: Completed[Signup]) -> NotifyOps:
        if broken:
            raise RuntimeError("secret detail")
        return NotifyOps(job_id=event.job.id)

    waiting = web.parked()
    reply = web.post(waiting, "complete", {"payload": 1})
    assert reply.is_problem(500, "follow_up_failed")
    assert "secret" not in str(reply.json)
    assert database.job(waiting.job_id).state == "waiting_external"
    assert database.value("SELECT count(*) FROM callback_receipts") == 0
    broken = False
    assert web.post(waiting, "complete", {"payload": 1}).status == 200
    assert len(database.children(waiting.job_id)) == 1


def test_a_process_that_forgot_to_attach_its_follow_ups_is_told_so(
    web: Web, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    web.follow_ups.on_completed(Signup, name="notify")(lambda event: NotifyOps(job_id=event.job.id))
    web.serve(web.factory(attach=False))
    waiting = web.parked()
    with caplog.at_level(logging.ERROR, "awa_sqla.web"):
        assert web.post(waiting, "complete").is_problem(500, "internal")
    assert "follow_ups.attach(your_sessionmaker)" in caplog.text
    assert database.job(waiting.job_id).state == "waiting_external"


def test_without_a_registry_the_follow_up_is_owed(web: Web, database: Database) -> None:
    database.execute(
        "INSERT INTO follow_up_specs (kind, outcome, name, created_at) "
        "VALUES ('signup', 'completed', 'elsewhere:notify', now() - interval '1 hour')"
    )
    web.serve(web.factory(attach=False))
    waiting = web.parked()
    assert web.post(waiting, "complete", {"payload": 5}).status == 200
    [owed] = database.obligations()
    assert (owed.job_id, owed.spec, owed.context["result"]) == (waiting.job_id, "elsewhere:notify", 5)


# ------------------------------------------------------------------------------------------------------ the document
@in_one_kind
def test_the_document_says_where_it_is_and_how_to_sign(web: Web) -> None:
    found = web.send("GET", "/callbacks/openapi.json").json
    assert found["servers"] == [{"url": "/callbacks"}]
    assert {f"/{{callback_id}}/{action}" for action in ACTIONS} == set(found["paths"])
    assert found["security"] == [{"timestamp": [], "signature": []}]
    responses = found["paths"]["/{callback_id}/complete"]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "404", "405", "408", "409", "413", "422", "500", "503"}
    web.serve(allow_unsigned=True)
    found = web.send("GET", "/callbacks/openapi.json").json
    assert "security" not in found
    assert "401" not in found["paths"]["/{callback_id}/complete"]["post"]["responses"]


# ------------------------------------------------------------------------------------------------------ its settings
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "secret: give the key"),
        ({"secret": SECRET, "allow_unsigned": True}, "one of the two"),
        ({"secret": b"short"}, "secret: has 5 bytes"),
        ({"secret": []}, "secret: give at least one"),
        ({"secret": "a" * 32}, "secret: must be 32 bytes, not str"),
        ({"secret": SECRET, "before": 5}, "before: must be a function"),
        ({"secret": SECRET, "after": "x"}, "after: must be a function"),
        ({"secret": SECRET, "max_skew": timedelta(0)}, "max_skew"),
        ({"secret": SECRET, "max_body": 0}, "max_body"),
        ({"secret": SECRET, "max_body": 1.5}, "max_body"),
        ({"secret": SECRET, "read_timeout": timedelta(0)}, "read_timeout"),
        ({"secret": SECRET, "read_timeout": 10}, "read_timeout"),
    ],
)
def test_a_wrong_setting_is_named(options: Any, says: str) -> None:
    with pytest.raises((ConfigurationError, InvalidJob), match=says):
        router(lambda: None, **options)


def test_an_error_that_comes_from_a_new_connection_passes_too() -> None:
    class CannotConnectNow(Exception):
        sqlstate = "57P03"

    class WrongPassword(Exception):
        sqlstate = "28P01"

    assert passing(CannotConnectNow())
    assert not passing(WrongPassword())
