"""Signatures of callback requests: known vectors, and that nothing else passes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from awa_sqla import CallbackRefused, ConfigurationError, InvalidJob, callback_url, sign_callback, verify_callback

KEY = bytes(range(32))
OTHER = bytes(32)
ID = uuid.UUID("0192d3f4-5a6b-4c7d-8e9f-a0b1c2d3e4f5")
ACTIONS = ("complete", "fail", "heartbeat", "resume")
BODY = b'{"payload": {"amount": 5}}'
NOW = int(time.time())
AGES_AGO = timedelta(days=365 * 100)

#: Computed once, and by any other implementation: `b3sum --keyed` over "{timestamp}\n{id}\n{action}\n" + body.
GOLDEN = [
    ("complete", b"", 0, "dfedba93550b37e096526701a1966f6a6bb0d3358140bd506946a1f3737ba44e"),
    ("complete", BODY, 1767225600, "aa68288b152ca78c4047253b3fe7861ce6473c451c52acfa760ce17461a1b6b1"),
    (
        "fail",
        '{"error": "zurückgewiesen"}'.encode(),
        1767225600,
        "df718185f5aa3a6f51d7918e4e7b7b916e3dd3adc3042e159468c02b2410de58",
    ),
    (
        "heartbeat",
        b'{"timeout_seconds": 60}',
        999999999999,
        "ea426a7d5b1b296b1c05271113dce02dc607452e541636f5618061d648fe2cdf",
    ),
    ("resume", bytes(range(256)), 1, "902f052efa19c44466849906a0a33965772bec2ab71b53c2676edd2a40f3b7d8"),
]


def refused(*args: Any, **options: Any) -> str:
    with pytest.raises(CallbackRefused) as caught:
        verify_callback(*args, **options)
    return caught.value.reason


@pytest.mark.parametrize(("action", "body", "timestamp", "digest"), GOLDEN)
def test_the_signature_is_the_published_one(action: str, body: bytes, timestamp: int, digest: str) -> None:
    headers = sign_callback(KEY, ID, action, body, timestamp=timestamp)
    assert headers == {"X-Awa-Timestamp": str(timestamp), "X-Awa-Signature": f"v1={digest}"}


@pytest.mark.parametrize("text", [str(ID), str(ID).upper(), ID.hex, f"{{{ID}}}", f"urn:uuid:{ID}"])
def test_every_way_of_writing_an_id_is_the_same_id(text: str) -> None:
    assert sign_callback(KEY, text, "complete", timestamp=5) == sign_callback(KEY, ID, "complete", timestamp=5)
    assert callback_url("https://shop.example/callbacks/", text, "fail") == (
        f"https://shop.example/callbacks/{ID}/fail"
    )


def test_what_is_signed_now_is_right_now() -> None:
    before = int(time.time())
    headers = sign_callback(KEY, ID, "complete", BODY)
    assert before <= int(headers["X-Awa-Timestamp"]) <= time.time()
    assert verify_callback(KEY, ID, "complete", BODY, headers) is None  # type: ignore[func-returns-value]


@given(
    key=st.binary(min_size=32, max_size=32),
    callback=st.uuids(),
    action=st.sampled_from(ACTIONS),
    body=st.binary(max_size=200),
)
def test_every_signed_request_is_right_with_either_key(key: bytes, callback: Any, action: str, body: bytes) -> None:
    headers = sign_callback(key, callback, action, body)
    verify_callback(key, callback, action, body, headers)
    verify_callback([OTHER, key], str(callback).upper(), action, body, headers)
    verify_callback((key, OTHER), callback, action, body, {k.lower(): v for k, v in headers.items()})


@st.composite
def two_requests(draw: st.DrawFn) -> tuple[Any, Any]:
    def request() -> tuple[bytes, uuid.UUID, str, bytes, int]:
        return (
            draw(st.binary(min_size=32, max_size=32)),
            draw(st.uuids()),
            draw(st.sampled_from(ACTIONS)),
            draw(st.binary(max_size=50)),
            draw(st.integers(NOW - 100, NOW + 100)),
        )

    first, changed = request(), list(request())
    keep = draw(st.lists(st.booleans(), min_size=5, max_size=5))
    second = tuple(a if kept else b for a, b, kept in zip(first, changed, keep, strict=True))
    return first, second


@given(two_requests())
def test_any_difference_is_refused(requests: tuple[Any, Any]) -> None:
    (key, callback, action, body, timestamp), (key2, callback2, action2, body2, timestamp2) = requests
    headers = sign_callback(key, callback, action, body, timestamp=timestamp)
    headers["X-Awa-Timestamp"] = str(timestamp2)
    if requests[0] == requests[1]:
        verify_callback(key2, callback2, action2, body2, headers, max_skew=timedelta(days=1))
    else:
        assert refused(key2, callback2, action2, body2, headers) == "wrong"


@pytest.mark.parametrize("changed", range(5))
def test_each_part_is_signed(changed: int) -> None:
    now = int(time.time())
    parts: list[Any] = [KEY, ID, "complete", BODY, now]
    headers = sign_callback(*parts[:4], timestamp=now)
    parts[changed] = [OTHER, uuid.uuid4(), "resume", BODY + b" ", now - 1][changed]
    assert refused(*parts[:4], headers | {"X-Awa-Timestamp": str(parts[4])}) == "wrong"


def test_a_part_cannot_move_into_the_next() -> None:
    """The action ends where the body begins, whatever the body says."""
    headers = sign_callback(KEY, ID, "complete", b"\nx")
    assert refused(KEY, ID, "complete", b"x", headers) == "wrong"


@pytest.mark.parametrize(("offset", "reason"), [(-302, "too old"), (302, "in the future"), (-295, None), (295, None)])
def test_a_signature_holds_for_five_minutes(offset: int, reason: str | None) -> None:
    headers = sign_callback(KEY, ID, "fail", BODY, timestamp=int(time.time()) + offset)
    if reason:
        assert refused(KEY, ID, "fail", BODY, headers) == reason
    else:
        verify_callback(KEY, ID, "fail", BODY, headers)


def test_the_skew_can_be_chosen() -> None:
    headers = sign_callback(KEY, ID, "fail", BODY, timestamp=int(time.time()) - 1000)
    assert refused(KEY, ID, "fail", BODY, headers) == "too old"
    verify_callback(KEY, ID, "fail", BODY, headers, max_skew=timedelta(hours=1))
    headers = sign_callback(KEY, ID, "fail", BODY, timestamp=0)
    verify_callback(KEY, ID, "fail", BODY, headers, max_skew=AGES_AGO)


def test_a_forged_request_does_not_learn_that_it_is_too_old() -> None:
    headers = sign_callback(OTHER, ID, "fail", BODY, timestamp=5)
    assert refused(KEY, ID, "fail", BODY, headers) == "wrong"


RIGHT = "v1=" + "a" * 64
MALFORMED: list[Mapping[Any, Any]] = [
    {"X-Awa-Timestamp": timestamp, "X-Awa-Signature": RIGHT}
    for timestamp in (
        *(
            "",
            " 5",
            "5 ",
            "+5",
            "-5",
            "05",
            "5.0",
            "1e9",
            "\N{ARABIC-INDIC DIGIT FIVE}",
            "\N{FULLWIDTH DIGIT FIVE}",
            "5_0",
            "5\n",
            "x",
        ),
        *(str(10**30), "9" * 5000, None, 5, b"\xff"),
    )
] + [
    {"X-Awa-Timestamp": "5", "X-Awa-Signature": signature}
    for signature in (
        *("", "v1=", "a" * 64, "v2=" + "a" * 64, RIGHT[:-1], RIGHT + "a", RIGHT.upper(), RIGHT + "\n", f" {RIGHT}"),
        *(
            "v1=" + "g" * 64,
            "v1=" + "\N{ARABIC-INDIC DIGIT FIVE}" * 64,
            f"{RIGHT},{RIGHT}",
            "\ud800" * 67,
            None,
            7,
            b"\xff" * 67,
        ),
    )
]


@pytest.mark.parametrize("headers", MALFORMED, ids=lambda headers: ascii(list(headers.values()))[:40])
def test_a_malformed_header_is_refused(headers: Mapping[Any, Any]) -> None:
    assert refused(KEY, ID, "complete", BODY, headers) == "malformed"


@pytest.mark.parametrize("missing", ["X-Awa-Timestamp", "X-Awa-Signature"])
def test_a_missing_header_is_refused(missing: str) -> None:
    headers = sign_callback(KEY, ID, "complete", BODY)
    del headers[missing]
    assert refused(KEY, ID, "complete", BODY, headers) == "missing"


@pytest.mark.parametrize("twice", ["X-Awa-Timestamp", "X-Awa-Signature"])
def test_a_header_that_is_there_twice_is_refused(twice: str) -> None:
    headers = sign_callback(KEY, ID, "complete", BODY)
    several = Headers(raw=[(k.lower().encode(), v.encode()) for k, v in [*headers.items(), (twice, headers[twice])]])
    assert refused(KEY, ID, "complete", BODY, several) == "malformed"
    assert refused(KEY, ID, "complete", BODY, headers | {twice.upper(): headers[twice]}) == "malformed"
    assert refused(KEY, ID, "complete", BODY, headers | {twice: [headers[twice]] * 2}) == "malformed"


@pytest.mark.parametrize(
    "kind",
    [
        Headers,
        lambda headers: {k.upper(): v for k, v in headers.items()},
        lambda headers: {k.encode(): v.encode() for k, v in headers.items()},
        lambda headers: {k: [v] for k, v in headers.items()},
        lambda headers: {**headers, 5: "x", None: None},
    ],
)
def test_the_headers_of_every_framework_are_read(kind: Any) -> None:
    verify_callback(KEY, ID, "complete", BODY, kind(sign_callback(KEY, ID, "complete", BODY)))


anything = st.one_of(st.none(), st.text(), st.binary(), st.integers(), st.lists(st.text()))


@given(
    st.dictionaries(
        st.one_of(anything.filter(lambda v: not isinstance(v, list)), st.just("X-Awa-Signature")), anything
    ),
    anything,
    anything,
)
def test_no_header_raises_anything_else(others: dict[Any, Any], timestamp: Any, signature: Any) -> None:
    headers = others | {"x-awa-timestamp": timestamp, "x-awa-signature": signature}
    assert refused(KEY, ID, "complete", BODY, headers) in ("missing", "malformed", "wrong")


@pytest.mark.parametrize("secret", [b"", b"short", bytes(31), bytes(33), "a" * 32, None, 5, [], [b"short"], [KEY, "x"]])
def test_a_secret_of_another_length_is_refused(secret: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^secret: ") as caught:
        verify_callback(secret, ID, "complete", BODY, {})
    assert "short" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"^secret: "):
        sign_callback(secret, ID, "complete", BODY)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"callback_id": "17"}, "callback_id"),
        ({"callback_id": 17}, "callback_id"),
        ({"action": "retry"}, "action"),
        ({"action": ["complete"]}, "action"),
        ({"body": "text"}, "body"),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, Any], field: str) -> None:
    arguments = {"callback_id": ID, "action": "complete", "body": BODY} | wrong
    with pytest.raises(InvalidJob, match=rf"^{field}: "):
        sign_callback(KEY, **arguments)
    with pytest.raises(InvalidJob, match=rf"^{field}: "):
        verify_callback(KEY, **arguments, headers={})


@pytest.mark.parametrize("timestamp", [-1, 10**12, 1.5, "5", True])
def test_a_wrong_timestamp_is_named(timestamp: Any) -> None:
    with pytest.raises(InvalidJob, match=r"^timestamp: "):
        sign_callback(KEY, ID, "complete", timestamp=timestamp)


@pytest.mark.parametrize("skew", [timedelta(0), timedelta(seconds=-1), 300, None])
def test_a_wrong_skew_is_named(skew: Any) -> None:
    with pytest.raises(InvalidJob, match=r"^max_skew: "):
        verify_callback(KEY, ID, "complete", BODY, {}, max_skew=skew)


@pytest.mark.parametrize("base", ["", "  ", "https://x.example/?a", "https://x.example/#a", "https://x example/", None])
def test_a_wrong_base_url_is_named(base: Any) -> None:
    with pytest.raises(InvalidJob, match=r"^base_url: "):
        callback_url(base, ID, "complete")
