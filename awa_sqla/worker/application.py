"""What a worker needs of the application it runs: the shape of `Awa`, which is built on top of workers."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from awa_sqla.periodic import Periodic
from awa_sqla.session.follow_ups import FollowUps
from awa_sqla.session.hooks import Hooks
from awa_sqla.worker.config import QueueConfig
from awa_sqla.worker.tasks import Tasks


class Application(Protocol):
    """Tasks, follow-ups, queues and lifespan of one application."""

    queues: dict[str, QueueConfig]
    tasks: Tasks
    follow_ups: FollowUps
    schedules: dict[str, Periodic]
    hooks: Hooks
    lifespan: Any

    @property
    def version(self) -> str: ...

    def attach(self, target: object, /) -> None: ...

    def lifespan_context(self) -> AbstractAsyncContextManager[Any]: ...
