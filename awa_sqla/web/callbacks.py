"""Callbacks over HTTP: a router that an app mounts, and that resolves them in the app's own transactions.

    app.mount("/callbacks", router(SessionLocal, secret=SECRET))

    POST /callbacks/{callback_id}/complete     {"payload": ...}
    POST /callbacks/{callback_id}/fail         {"error": "..."}
    POST /callbacks/{callback_id}/heartbeat    {"timeout_seconds": 600}
    POST /callbacks/{callback_id}/resume       {"payload": ...}
    GET  /callbacks/openapi.json

The order of checks is the promise: method and path, size, signature, shape, and only then the database. A request that
nobody has signed never reaches it. `before` and `after` are the app's code in the same transaction: its rows, the job,
the follow-ups and the receipt are one commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from awa_sqla import limits
from awa_sqla.errors import CallbackRefused, ConfigurationError
from awa_sqla.signing import ACTIONS, SKEW, authentic, keys, request_message, untimely

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError("awa_sqla.web needs starlette: pip install 'awa-sqla[web]'", name="starlette") from exc

from awa_sqla.web.answers import Refusal, done, logger
from awa_sqla.web.bodies import CallbackCall, meant, read
from awa_sqla.web.openapi import document
from awa_sqla.web.receipts import digest_of
from awa_sqla.web.sessions import Sessions
from awa_sqla.web.transaction import Asked, Hooks

__all__ = ["CallbackCall", "router"]

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
#: Litestar adds a slash to the path of what is mounted.
_ENDS = ("", "/")
_CODES = {404: "not_found", 405: "method_not_allowed"}


def router(
    session_factory: object,
    *,
    secret: bytes | Sequence[bytes] | None = None,
    allow_unsigned: bool = False,
    max_skew: timedelta = SKEW,
    max_body: int = 256 * 1024,
    read_timeout: timedelta = timedelta(seconds=10),
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> Starlette:
    """An ASGI app that resolves callbacks: mount it, or serve it alone.

    `session_factory` is a sessionmaker, an async_sessionmaker, a scoped session of either, or a callable that gives a
    new Session or AsyncSession. Attach your follow-ups to it (`Awa.attach`); with none in the process, what follows is
    left as obligations for a worker. Sync sessions run in a thread; each request has its own session, which is closed.

    - `secret`: the key of 32 bytes that senders sign with (`sign_callback`), or several, to replace one without a gap.
    - `allow_unsigned` (False): take requests without a signature, and no secret. Then whoever knows a token can answer.
    - `max_skew` (5 minutes): how old a signature may be, and how far the sender's clock may be ahead.
    - `max_body` (262144): the largest body, in bytes.
    - `read_timeout` (10 s): how long a sender may take for its body.
    - `before(session, call)` and `after(session, call, job)`: the app's code in the same transaction, before and after
      the callback is resolved; coroutine functions too when the sessions are AsyncSessions. `call` is a
      `CallbackCall`, `job` the `Job` (or `DeadLetter`) as it is then, fully loaded. `CallbackRefused` out of them is
      answered with 422 and its reason, anything else with 500; either way nothing is committed. They must not commit.

    No I/O until a request comes. Raises `ConfigurationError` (session_factory, secret, before, after) and `InvalidJob`
    (max_skew, max_body, read_timeout). (API: Callback ingress)
    """
    for name, hook in (("before", before), ("after", after)):
        if hook is not None and not callable(hook):  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigurationError(f"{name}: must be a function, not {limits.type_name(hook)}")
    ingress = _Ingress(
        sessions=Sessions(session_factory, Hooks(before, after)),
        keys=_keys(secret, allow_unsigned=allow_unsigned),
        max_skew=limits.duration("max_skew", max_skew),
        max_body=limits.integer("max_body", max_body, 1, 2**31),
        read_timeout=limits.duration("read_timeout", read_timeout),
    )
    routes = [Route(f"/openapi.json{end}", ingress.describe, methods=["GET"]) for end in _ENDS]
    for action in ACTIONS:
        respond = partial(ingress.respond, action)
        routes.extend(Route(f"/{{callback_id}}/{action}{end}", respond, methods=["POST"]) for end in _ENDS)
    app = Starlette(routes=routes, exception_handlers={HTTPException: not_here})
    app.router.redirect_slashes = False
    return app


def _keys(secret: bytes | Sequence[bytes] | None, *, allow_unsigned: bool) -> tuple[bytes, ...]:
    if secret is None and not allow_unsigned:
        raise ConfigurationError("secret: give the key that senders sign with, or say allow_unsigned=True")
    if secret is not None and allow_unsigned:
        raise ConfigurationError("secret: with allow_unsigned=True it would not be asked for; give one of the two")
    return () if secret is None else keys(secret)


@dataclass(frozen=True, slots=True)
class _Ingress:
    """A router's settings, and how it handles a request."""

    sessions: Sessions
    keys: tuple[bytes, ...]
    max_skew: timedelta
    max_body: int
    read_timeout: timedelta

    async def describe(self, request: Request) -> Response:
        """The OpenAPI document."""
        return JSONResponse(document(mounted_at=_mounted_at(request), signed=bool(self.keys)))

    async def respond(self, action: str, request: Request) -> Response:
        """One request, from its path to its answer."""
        try:
            return done(await self.sessions.answer(await self._asked(action, request)))
        except Refusal as refusal:
            return refusal.response()
        except Exception:  # noqa: BLE001 - whatever it is, the sender gets an answer that says nothing of it
            logger.exception("a callback's request could not be handled")
            return Refusal("internal").response()

    async def _asked(self, action: str, request: Request) -> Asked:
        """What is asked for, once it is known who asks. Raises `Refusal`."""
        given: str = request.path_params["callback_id"]
        if _UUID.fullmatch(given) is None:
            raise Refusal("bad_callback_id")
        callback_id = UUID(given)
        body = await read(request, most=self.max_body, within=self.read_timeout)
        if not self.keys:
            return Asked(meant(callback_id, action, body), digest_of(callback_id, action, body, None))
        try:
            signed_at = authentic(self.keys, request_message(callback_id, action, body), request.headers)
        except CallbackRefused as refused:
            raise _unauthorized(refused.reason) from None
        digest = digest_of(callback_id, action, body, signed_at)
        reason = untimely(signed_at, self.max_skew)
        if reason == "too old":
            return Asked(None, digest)  # it may have been here when it was new
        if reason is not None:
            raise _unauthorized(reason)
        return Asked(meant(callback_id, action, body), digest)


def _mounted_at(request: Request) -> str:
    """The path at which the router is mounted, also where the framework does not say so."""
    known: str = request.scope.get("root_path", "")
    whole: bytes = request.scope.get("raw_path") or b""
    return known or whole.decode("latin-1").rstrip("/").removesuffix("/openapi.json")


def _unauthorized(reason: str) -> Refusal:
    """One answer for every cause: only our own log says which."""
    logger.info("a callback's request was not accepted: its signature is %s", reason)
    return Refusal("unauthorized")


async def not_here(request: Request, exc: Exception) -> Response:  # noqa: ARG001
    """No such path or method here, as JSON: a handler of `HTTPException`."""
    assert isinstance(exc, HTTPException)  # noqa: S101
    return Refusal(_CODES.get(exc.status_code, "internal")).response(dict(exc.headers or {}))
