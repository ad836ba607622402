"""Maintenance in a process of ours: the lanes over its engines, with what its app adds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack

from sqlalchemy.ext.asyncio import async_sessionmaker

from awa_sqla.maintenance.lanes import Duties, Lanes, Means
from awa_sqla.maintenance.leader import NAME
from awa_sqla.maintenance.leadership import Leadership
from awa_sqla.maintenance.service import Service
from awa_sqla.worker.application import Application
from awa_sqla.worker.engines import Engines
from awa_sqla.worker.heartbeat import Identity
from awa_sqla.worker.threads import Threads


class Upkeep(AsyncExitStack):
    """The lanes of a process, for `async with` around `service.serve()`: at its end, another process may lead.

    `only` names lanes; they then stand for election among processes that run the same ones.
    """

    def __init__(
        self,
        engines: Engines,
        app: Application,
        identity: Identity,
        *,
        woken: Callable[[frozenset[str]], None] | None = None,
        only: Iterable[str] | None = None,
    ) -> None:
        super().__init__()
        self.maker = async_sessionmaker(engines.upkeep, expire_on_commit=False)
        app.attach(self.maker)
        # One for each schedule that the app builds: a callable that hangs keeps no other from being called.
        self._threads = Threads(sum(periodic.builds for periodic in app.schedules.values()))
        self.callback(self._threads.close)
        chosen = None if only is None else sorted(set(only))
        name = NAME if chosen is None else f"{NAME}: {', '.join(chosen)}"
        leadership = Leadership(engines.alone, identity.worker_id, identity.stale_after, name=name)
        self.push_async_callback(leadership.release)
        means = Means(self.maker, engines.looks, self._threads.run)
        duties = Duties(app.tasks.backoff, app.follow_ups.specs, tuple(app.schedules.values()))
        lanes = Lanes(means, duties, identity.stale_after, leadership, woken)
        self.push_async_callback(lanes.close)
        self.service = Service(lanes, leadership, only=chosen)
        identity.lanes = self.service.fares
