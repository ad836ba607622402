"""What was sent: bytes within their limits, JSON that can be stored, and the call that it means."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, cast
from uuid import UUID

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from awa_sqla import limits
from awa_sqla.errors import InvalidJob
from awa_sqla.web.answers import Refusal

#: A month: longer than any outside world should need, and a heartbeat may come again.
LONGEST = timedelta(days=30)
#: Deeper than data; PostgreSQL and the readers of JSON recurse.
DEPTH = 100

#: Of a length that nobody has.
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class CallbackCall:
    """What a request asks for, as `before` and `after` see it.

    `action` is complete, fail, heartbeat or resume. `payload` belongs to complete and resume, `error` to fail,
    `timeout` to heartbeat; elsewhere they are None.
    """

    callback_id: UUID
    action: str
    payload: Any = None
    error: str | None = None
    timeout: timedelta | None = None


class Body(BaseModel):
    """The base of the bodies: nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PayloadBody(Body):
    """Of complete and resume; an empty body means the same as `{}`."""

    payload: Any = Field(default=None, description="Any JSON value: the job's result, or what its handler waits for.")


class FailBody(Body):
    """Of fail."""

    error: str = Field(description="What went wrong, for the job's history.")


class HeartbeatBody(Body):
    """Of heartbeat."""

    timeout_seconds: Annotated[float, Field(ge=0.001, le=LONGEST.total_seconds())] = Field(
        description="How much longer the answer may take, from now."
    )


BODIES: dict[str, type[PayloadBody | FailBody | HeartbeatBody]] = {
    "complete": PayloadBody,
    "fail": FailBody,
    "heartbeat": HeartbeatBody,
    "resume": PayloadBody,
}


# ---------------------------------------------------------------------------------------------------------- bytes
async def read(request: Request, *, most: int, within: timedelta) -> bytes:
    """The body. Raises `Refusal` when it is larger than `most` bytes or takes longer than `within`."""
    if _promised(request) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        with anyio.fail_after(within.total_seconds()):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise Refusal("too_slow") from None
    except ClientDisconnect:
        raise Refusal("bad_json", "the body ends too early") from None  # nobody hears it
    return bytes(body)


def _promised(request: Request) -> int:
    """What Content-Length says; 0 when it says nothing, for then the bytes are counted."""
    said = request.headers.get("content-length", "")
    if not (said.isascii() and said.isdigit()):
        return 0
    return int(said) if len(said) < _DIGITS else sys.maxsize


def _too_large(most: int) -> Refusal:
    return Refusal("too_large", f"the body is too large: at most {most} bytes are taken")


# ----------------------------------------------------------------------------------------------------------- JSON
def meant(callback_id: UUID, action: str, body: bytes) -> CallbackCall:
    """The call that a body means. Raises `Refusal`: bad_json, invalid_body."""
    given: object = _parsed(body) if body else {}
    if not isinstance(given, dict):
        raise Refusal("invalid_body", "the body: must be an object")
    try:
        shape: Any = BODIES[action].model_validate(given)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refusal("invalid_body", f"{where or 'the body'}: {first['msg']}") from None
    seconds: float | None = getattr(shape, "timeout_seconds", None)
    return CallbackCall(
        callback_id,
        action,
        payload=getattr(shape, "payload", None),
        error=getattr(shape, "error", None),
        timeout=None if seconds is None else timedelta(seconds=seconds),
    )


def _parsed(body: bytes) -> object:
    try:
        value: object = json.loads(
            body.decode(), parse_constant=_constant, parse_float=_finite, object_pairs_hook=_object
        )
        _storable(value)
    except InvalidJob as exc:
        raise Refusal("bad_json", f"the body {exc.reason}") from None
    except RecursionError:
        raise Refusal("bad_json", "the body is nested too deep") from None
    except ValueError:
        raise Refusal("bad_json") from None
    return value


def _constant(name: str) -> float:
    raise InvalidJob("body", f"has {name}, which JSON does not have")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidJob("body", "has a number that is too large")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidJob("body", "has an object with the same key twice")
    return found


def _storable(value: object) -> None:
    """Refuse what PostgreSQL cannot store, level by level."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEPTH:
            raise InvalidJob("body", f"is nested too deep: at most {DEPTH} levels are taken")
        below: list[object] = []
        for item in level:
            if isinstance(item, str):
                limits.storable("body", item)
            elif isinstance(item, dict):
                below.extend(cast("dict[str, object]", item).keys())
                below.extend(cast("dict[str, object]", item).values())
            elif isinstance(item, list):
                below.extend(cast("Iterable[object]", item))
        level = below
