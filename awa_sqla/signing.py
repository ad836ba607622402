"""Signatures of callback requests: who may answer for a job over HTTP.

    headers = sign_callback(secret, token.id, "complete", body)          # the sender
    verify_callback([new, old], callback_id, "complete", body, headers)  # the receiver; raises CallbackRefused

A signature is BLAKE3, keyed with a secret of 32 bytes, over the time, the callback, the action and the body as sent:

    X-Awa-Timestamp: 1767225600
    X-Awa-Signature: v1=<64 hexadecimal digits of BLAKE3(key, "{timestamp}\\n{callback_id}\\n{action}\\n" + body)>

Several keys may be valid at once, so that a secret can be replaced without a gap. `awa_sqla.web.callbacks` checks the
same signatures; use these functions with any other web framework.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

import blake3

from awa_sqla import limits
from awa_sqla.errors import CallbackRefused, ConfigurationError, InvalidJob

TIMESTAMP = "X-Awa-Timestamp"
SIGNATURE = "X-Awa-Signature"
ACTIONS = ("complete", "fail", "heartbeat", "resume")
SKEW = timedelta(minutes=5)
KEY_BYTES = 32

#: Past any clock, and short enough for every integer type.
_LATEST = 10**12 - 1
_DIGITS = re.compile(r"0|[1-9][0-9]{0,11}")
_VALUE = re.compile(r"v1=([0-9a-f]{64})")


def sign_callback(
    secret: bytes, callback_id: UUID | str, action: str, body: bytes = b"", *, timestamp: int | None = None
) -> dict[str, str]:
    """The headers that prove a request for a callback: `X-Awa-Timestamp` and `X-Awa-Signature`.

    `secret` is the shared key of 32 bytes, `callback_id` the token's id (a UUID or its text), `action` one of complete,
    fail, heartbeat and resume, `body` the bytes that will be sent. `timestamp` is in Unix seconds; None is now. No I/O.

    Raises `ConfigurationError` (secret), `InvalidJob` (callback_id, action, body, timestamp). (API: Callback ingress)
    """
    (key,) = keys([secret])
    moment = int(time.time()) if timestamp is None else limits.integer("timestamp", timestamp, 0, _LATEST)
    digest = _digest(key, moment, _message(callback_id, action, body))
    return {TIMESTAMP: str(moment), SIGNATURE: f"v1={digest.hex()}"}


def verify_callback(
    secrets: bytes | Sequence[bytes],
    callback_id: UUID | str,
    action: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    max_skew: timedelta = SKEW,
) -> None:
    """Check the signature of a request; returns nothing when it is right.

    `secrets` is the key, or several of which any may have signed (each 32 bytes); `body` the bytes as received, before
    any parsing; `headers` any mapping, looked up without regard to case. `max_skew` is how far the sender's clock may
    be from ours. A right signature says who sent it, not that it is sent for the first time. No I/O.

    Raises `CallbackRefused`, whose reason is "missing", "malformed", "wrong", "too old" or "in the future": answer all
    of them alike, with 401. Raises `ConfigurationError` (secrets) and `InvalidJob` (callback_id, action, body,
    max_skew) for what is wrong on our side. (API: Callback ingress)
    """
    skew = limits.duration("max_skew", max_skew)
    signed_at = authentic(keys(secrets), _message(callback_id, action, body), headers)
    if (reason := untimely(signed_at, skew)) is not None:
        raise CallbackRefused(reason)


def callback_url(base_url: str, callback_id: UUID | str, action: str) -> str:
    """Where to send a request: `{base_url}/{callback_id}/{action}`, for a `base_url` at which the router is mounted.

    No I/O. Raises `InvalidJob` (base_url, callback_id, action). (API: Callback ingress)
    """
    base = limits.text("base_url", base_url, longest=2000)
    if re.search(r"[\s?#]", base):
        raise InvalidJob("base_url", "must be a URL without spaces, query and fragment")
    return f"{base.rstrip('/')}/{canonical(callback_id)}/{checked_action(action)}"


# ------------------------------------------------------------------------------------------------------ the parts
def keys(secrets: object) -> tuple[bytes, ...]:
    """The keys of a secret or of several. Raises `ConfigurationError`; never shows one."""
    given: Any = [secrets] if isinstance(secrets, bytes) else secrets
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigurationError(f"secret: must be {KEY_BYTES} bytes, not {limits.type_name(secrets)}")
    found = tuple(cast("Iterable[object]", given))
    if not found:
        raise ConfigurationError(f"secret: give at least one key of {KEY_BYTES} bytes")
    for key in found:
        if not isinstance(key, bytes):
            raise ConfigurationError(f"secret: must be {KEY_BYTES} bytes, not {limits.type_name(key)}")
        if len(key) != KEY_BYTES:
            raise ConfigurationError(
                f"secret: has {len(key)} bytes, {KEY_BYTES} are needed; make one with secrets.token_bytes({KEY_BYTES})"
            )
    return cast("tuple[bytes, ...]", found)


def authentic(secrets: Sequence[bytes], message: bytes, headers: Mapping[Any, Any]) -> int:
    """When the request was signed, in Unix seconds, by one of our keys. Raises `CallbackRefused`."""
    moment, digest = _one(headers, TIMESTAMP), _one(headers, SIGNATURE)
    found = _VALUE.fullmatch(digest)
    if found is None or _DIGITS.fullmatch(moment) is None:
        raise CallbackRefused("malformed")
    signed_at, given = int(moment), bytes.fromhex(found[1])
    right = [hmac.compare_digest(_digest(key, signed_at, message), given) for key in secrets]
    if not any(right):  # all of them were compared, so that the time does not tell which key comes near
        raise CallbackRefused("wrong")
    return signed_at


def untimely(signed_at: int, skew: timedelta) -> str | None:
    """Why a request signed then is not accepted now, or None."""
    age = time.time() - signed_at
    if age > skew.total_seconds():
        return "too old"
    return "in the future" if -age > skew.total_seconds() else None


def request_message(callback_id: UUID, action: str, body: bytes) -> bytes:
    """What a request is, without when it was signed."""
    return f"{callback_id}\n{action}\n".encode() + body


def canonical(callback_id: object) -> UUID:
    """The UUID of a token. Raises `InvalidJob`."""
    if isinstance(callback_id, UUID):
        return callback_id
    if not isinstance(callback_id, str):
        raise InvalidJob("callback_id", f"must be a UUID or its text, not {limits.type_name(callback_id)}")
    try:
        return UUID(callback_id)
    except ValueError:
        raise InvalidJob("callback_id", f"{callback_id!r:.60} is no UUID") from None


def checked_action(action: object) -> str:
    """One of the actions. Raises `InvalidJob`."""
    if action not in ACTIONS:
        raise InvalidJob("action", f"must be one of {', '.join(ACTIONS)}, not {action!r:.60}")
    return str(action)


def _message(callback_id: object, action: object, body: object) -> bytes:
    if not isinstance(body, bytes):
        raise InvalidJob("body", f"must be bytes, as they are sent, not {limits.type_name(body)}")
    return request_message(canonical(callback_id), checked_action(action), body)


def _digest(key: bytes, signed_at: int, message: bytes) -> bytes:
    return blake3.blake3(f"{signed_at}\n".encode() + message, key=key).digest()


def _one(headers: Mapping[Any, Any], name: str) -> str:
    """The one value of a header. Raises `CallbackRefused` when it is missing, there twice, or no text."""
    values: list[Any] = []
    for key, value in headers.items():
        if _text(key).lower() == name.lower():
            values.extend(cast("Iterable[Any]", value) if isinstance(value, list | tuple) else [value])
    if not values:
        raise CallbackRefused("missing")
    if len(values) > 1:
        raise CallbackRefused("malformed")
    return _text(values[0])


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value if isinstance(value, str) else ""
