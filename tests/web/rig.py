"""What the tests of the ingress share: an app around the router, a sender, and jobs that wait for callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast
from uuid import UUID

import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.routing import Mount

from awa_sqla import FollowUps, Job, JobArgs, park, register_callback, sign_callback
from awa_sqla.web.callbacks import router
from tests.session.steps import HOUR, running

SECRET = bytes(range(32))
KINDS = ("sync-psycopg", "async-psycopg", "async-asyncpg")

#: For what the kind of session has no part in.
in_one_kind = pytest.mark.parametrize("web", KINDS[:1], indirect=True)
#: For long lists: a sync one and an async one.
in_two_kinds = pytest.mark.parametrize("web", KINDS[::2], indirect=True)
#: For coroutine functions.
in_async_kinds = pytest.mark.parametrize("web", KINDS[1:], indirect=True)


@dataclass(frozen=True)
class Reply:
    """What a sender gets back."""

    status: int
    json: Any
    headers: httpx.Headers

    @property
    def code(self) -> str:
        """The code of an error."""
        found: str = self.json["error"]["code"]
        return found

    def is_problem(self, status: int, code: str) -> bool:
        """Whether it is exactly this problem; fails with the whole answer otherwise."""
        assert (self.status, self.code) == (status, code), (self.status, self.json)
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"code", "message"}
        return True


@dataclass(frozen=True)
class Waiting:
    """A job that waits for its callback."""

    job_id: int
    callback_id: UUID


class Web:
    """One kind of session factory, the router on it, and a sender."""

    def __init__(self, kind: str, url: URL, portal: BlockingPortal) -> None:
        self.kind, self.url, self.portal = kind, url, portal
        self.follow_ups = FollowUps()
        self._undo: list[Callable[[], Any]] = [self.follow_ups.__init__]  # type: ignore[misc]
        self.engine: Engine = _engine(url, None)
        self._undo.append(self.engine.dispose)
        self.sessions = sessionmaker(self.engine)
        self.follow_ups.attach(self.sessions)
        self.app: Any = None

    @property
    def is_async(self) -> bool:
        return self.kind.startswith("async")

    def factory(self, *, attach: bool = True, url: URL | None = None, **options: Any) -> Any:
        """A session factory of this kind; `options` are the engine's."""
        driver = f"postgresql+{self.kind.partition('-')[2]}"
        address = (url or self.url).set(drivername=driver)
        if self.is_async:
            engine = create_async_engine(address, **options) if options else _engine(address, self.portal)
            self._undo.append(lambda: self.portal.call(engine.dispose))
            made: Any = async_sessionmaker(engine)
        else:
            sync_engine = create_engine(address, **options) if options else _engine(address, None)
            self._undo.append(sync_engine.dispose)
            made = sessionmaker(sync_engine)
        if attach:
            self.follow_ups.attach(made)
        return made

    def serve(self, factory: Any = None, **options: Any) -> Any:
        """Mount the router in an app; signed unless said otherwise."""
        if not options.get("allow_unsigned"):
            options.setdefault("secret", SECRET)
        inner = router(self.factory() if factory is None else factory, **options)
        self.app = Starlette(routes=[Mount("/callbacks", inner)])
        return self.app

    def hook(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Sync code as the app's `before` or `after` of this kind: a coroutine function where that is usual."""
        if not self.is_async:
            return act

        async def hook(session: Any, *rest: Any) -> Any:
            return await session.run_sync(act, *rest)

        return hook

    # ------------------------------------------------------------------------------------------------- the sender
    def send(self, method: str, path: str, body: Any = b"", headers: Any = None) -> Reply:
        """A request as it is."""
        if self.app is None:
            self.serve()
        return self.portal.call(self._send, method, path, body, headers)

    async def _send(self, method: str, path: str, body: Any, headers: Any) -> Reply:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.request(method, path, content=body, headers=headers, timeout=60)
            return Reply(response.status_code, response.json(), response.headers)

    def post(self, waiting: Waiting | UUID | str, action: str, body: Any = b"", **signing: Any) -> Reply:
        """A signed request; a body that is no bytes is sent as JSON."""
        callback = waiting.callback_id if isinstance(waiting, Waiting) else waiting
        data = as_bytes(body)
        headers = sign_callback(signing.pop("key", SECRET), callback, action, data, **signing)
        return self.send("POST", f"/callbacks/{callback}/{action}", data, headers)

    # ----------------------------------------------------------------------------------------------------- the jobs
    def running(self, args: JobArgs | None = None, **options: Any) -> Waiting:
        """A running job with a callback."""
        return self._waiting(args, options, then=lambda session, job, token: None)

    def parked(self, args: JobArgs | None = None, **options: Any) -> Waiting:
        """A job that waits for its callback."""
        return self._waiting(args, options, then=park)

    def _waiting(self, args: JobArgs | None, options: dict[str, Any], then: Callable[..., Any]) -> Waiting:
        with self.sessions() as session:
            job = running(session, args, **options)
            token = register_callback(session, job, timeout=HOUR)
            session.commit()
            job_id = cast("Job", job).id
            then(session, job, token)
            session.commit()
            return Waiting(job_id, token.id)

    def in_session(self) -> Session:
        """A session for the test itself."""
        return self.sessions()

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()


@cache
def _engine(url: URL, portal: BlockingPortal | None) -> Any:
    """One engine for many tests: its connections end with each test, its compiled statements stay."""
    return create_engine(url) if portal is None else create_async_engine(url)


def as_bytes(body: Any) -> bytes:
    """A body as it is sent."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@contextmanager
def portal() -> Iterator[BlockingPortal]:
    """An event loop in a thread, for requests from many threads."""
    with start_blocking_portal("asyncio") as made:
        yield made
