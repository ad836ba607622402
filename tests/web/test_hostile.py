"""Whatever is sent, signed or not: an answer of the document, and never a 500.

The number of examples for each operation is `AWA_EXAMPLES` (20; 500 and more for a long run), the seed `AWA_SEED`.
"""

from __future__ import annotations

import json
import os
import random
import uuid
from typing import Any, cast

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from awa_sqla import sign_callback
from awa_sqla.web.callbacks import router
from awa_sqla.web.openapi import document
from tests.web.rig import SECRET, Waiting, Web, in_two_kinds
from tests.worlds import Database

EXAMPLES = int(os.environ.get("AWA_EXAMPLES", "20"))
SEED = int(os.environ.get("AWA_SEED") or random.randrange(2**32))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    positive_data_acceptance,
]
SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = {result.ok().definition.raw["operationId"]: result.ok() for result in SCHEMA.get_all_operations()}
HOW = {"complete": "parked", "fail": "parked", "heartbeat": "parked", "resume": "running"}


def exploring(examples: int) -> Any:
    """The decorators of a search that can be repeated."""
    print(f"AWA_SEED={SEED} AWA_EXAMPLES={EXAMPLES}")
    options = settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    return lambda test: seed(SEED)(options(test))


class Target:
    """A job that waits; another one once it has been resolved."""

    def __init__(self, web: Web, action: str) -> None:
        self._web, self._action, self._count = web, action, 0
        self._waiting: Waiting | None = None

    @property
    def callback_id(self) -> str:
        if self._waiting is None:
            self._count += 1
            self._waiting = getattr(self._web, HOW[self._action])(queue=f"q{self._count}")
        return str(self._waiting.callback_id)

    def used(self) -> None:
        if self._action != "heartbeat":
            self._waiting = None


async def sent(app: Any, method: str, url: str, body: bytes, headers: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, url, content=body, headers=headers)


@in_two_kinds
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("action", list(OPERATIONS))
def test_the_document_tells_the_truth(web: Web, database: Database, action: str, mode: GenerationMode) -> None:
    """Signed requests, made from the document: right ones, and wrong ones."""
    app = router(web.factory(), secret=SECRET)
    target = Target(web, action)
    seen: dict[int, int] = {}

    @exploring(EXAMPLES)
    @given(case=OPERATIONS[action].as_strategy(generation_mode=mode), real=st.booleans())
    def explore(case: schemathesis.Case, real: bool) -> None:
        if real:
            case.path_parameters["callback_id"] = target.callback_id
        request = httpx_request(case)
        callback = request.url.path.split("/")[1]
        headers = {"Content-Type": request.headers.get("content-type", "application/json")}
        try:
            headers |= sign_callback(SECRET, callback, action, request.content)
        except ValueError:
            headers |= sign_callback(SECRET, uuid.uuid4(), action, request.content)
        response = web.portal.call(sent, app, request.method, request.url.raw_path.decode(), request.content, headers)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        if response.status_code == 200:
            target.used()
        left_out = []
        if real:
            left_out.append(negative_data_rejection)  # what was wrong may have been the id
        if b"\\u0000" in request.content:
            left_out.append(positive_data_acceptance)  # the one thing that JSON Schema cannot say of any payload
        case.validate_response(response, checks=[check for check in CHECKS if check not in left_out])

    explore()
    print(action, mode.value, seen)
    assert sum(seen.values()) >= min(EXAMPLES, 10)
    if mode is GenerationMode.POSITIVE:
        assert seen.get(200)
    assert not any(status >= 500 for status in seen)


def httpx_request(case: schemathesis.Case) -> httpx.Request:
    """The request of a case, as bytes."""
    arguments = case.as_transport_kwargs(base_url="http://test")
    given: dict[str, Any] = {key: arguments[key] for key in ("method", "url", "headers") if key in arguments}
    if "json" in arguments:
        given["content"] = json.dumps(arguments["json"]).encode()
    elif isinstance(arguments.get("data"), bytes | str):
        given["content"] = arguments["data"]
    given["headers"] = {k: v for k, v in dict(given.get("headers") or {}).items() if k.lower() == "content-type"}
    return httpx.Request(**given)


# ------------------------------------------------------------------------------------------------- bodies and headers
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)
fields = st.sampled_from(["payload", "error", "timeout_seconds", "more", ""])
bodies = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=100).map(lambda text: text.encode(errors="surrogatepass")),
    st.dictionaries(fields, values, max_size=2).map(lambda value: json.dumps(value).encode()),
    st.dictionaries(fields, values, max_size=2).map(
        lambda value: json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    ),
    st.builds(lambda n: b'{"payload": ' + b"[" * n + b"]" * n + b"}", st.integers(0, 5000)),
)


@in_two_kinds
def test_no_body_is_a_500(web: Web, database: Database) -> None:
    web.serve()
    targets = {action: Target(web, action) for action in HOW}
    seen: dict[int, int] = {}

    @exploring(EXAMPLES * 4)
    @given(action=st.sampled_from(list(HOW)), body=bodies)
    def explore(action: str, body: bytes) -> None:
        reply = web.post(targets[action].callback_id, action, body)
        seen[reply.status] = seen.get(reply.status, 0) + 1
        assert reply.status in (200, 400, 422)
        if reply.status == 200:
            targets[action].used()

    explore()
    print(seen)
    assert {200, 400, 422} <= set(seen)


header_text = st.one_of(
    st.binary(max_size=80),
    st.from_regex(rb"v1=[0-9a-f]{64}", fullmatch=True),
    st.integers(-(10**40), 10**40).map(lambda number: str(number).encode()),
)


@in_two_kinds
def test_no_header_is_a_500(web: Web, database: Database) -> None:
    """As the server hands them on: bytes, of any kind, any number of times."""
    web.serve()
    waiting = web.parked()

    @exploring(EXAMPLES * 4)
    @given(
        st.lists(
            st.tuples(st.sampled_from([b"x-awa-timestamp", b"x-awa-signature", b"content-length", b"x"]), header_text),
            max_size=5,
        )
    )
    def explore(headers: list[tuple[bytes, bytes]]) -> None:
        answers: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            answers.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/callbacks/{waiting.callback_id}/complete",
            "headers": headers,
            "query_string": b"",
        }
        web.portal.call(cast("Any", web.app), scope, receive, send)
        assert answers[0]["status"] in (401, 413)
        assert set(json.loads(answers[1]["body"])) == {"error"}

    explore()
    assert database.job(waiting.job_id).state == "waiting_external"
