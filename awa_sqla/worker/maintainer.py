"""`Maintenance`: a process that runs no jobs and keeps the tables moving, beside workers or for producers alone.

It stands for election like every worker with `maintenance=True`; `once()` is for schedulers that start a process now
and then, and for serverless functions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from contextlib import AsyncExitStack
from typing import Any, Self

from awa_sqla.errors import ConfigurationError
from awa_sqla.maintenance.prune import forget_dead
from awa_sqla.maintenance.service import Service
from awa_sqla.worker.application import Application
from awa_sqla.worker.config import MaintenanceOptions
from awa_sqla.worker.engines import Engines, Given
from awa_sqla.worker.flight import Flight
from awa_sqla.worker.heartbeat import Heart, Identity
from awa_sqla.worker.loops import check_loop, ended
from awa_sqla.worker.upkeep import Upkeep
from awa_sqla.worker.visible import Visible

log = logging.getLogger("awa_sqla.maintenance")


class Maintenance(Visible):
    """Maintains inside `async with awa.maintenance(...)`, or once."""

    def __init__(self, app: Application, given: Given, options: MaintenanceOptions) -> None:
        super().__init__(app.version, options)
        self._app = app
        self._options = options
        self.id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._engines = Engines(given, 1)
        self._flight, self._loops = Flight(), {}
        self._stop = asyncio.Event()
        self._stack, self._entered = AsyncExitStack(), False
        self._identity = Identity(self.id, app.version, (), (), app.follow_ups.specs, role="maintenance")
        self._identity.stale_after = options.stale_after
        self._service: Service | None = None

    async def __aenter__(self) -> Self:
        self._enter()
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop.set()
        self._identity.stopping = True
        await self._stack.aclose()

    async def once(self) -> dict[str, dict[str, Any]] | None:
        """Take the lead, run every lane until it finds no more to do, at most a minute each, and end.

        Returns for each lane what it did and its error, if it failed; None, and nothing was done, when another process
        leads. Raises what `async with` raises.
        """
        self._enter()
        async with self._stack:
            upkeep = await self._prepare()
            return upkeep.service.fares() if await upkeep.service.once() else None

    def request_stop(self) -> None:
        """Ask it to stop; `wait()` returns. From the loop's thread."""
        self._stop.set()

    async def wait(self) -> None:
        """Until somebody asks to stop."""
        await self._stop.wait()

    def interrupt(self) -> None:
        """Nothing here has to be waited for: a stop cuts each pass, and its transaction rolls back."""

    @property
    def leads(self) -> bool:
        """Whether this process leads now."""
        return self._service is not None and self._service.leading

    def dump(self) -> str:
        """How the lanes fare, for a person."""
        lines = [f"maintenance {self.id}: {'leads' if self.leads else 'stands by'}"]
        fares = {} if self._service is None else self._service.fares()
        lines += [
            f"  {name}: " + ", ".join(f"{key} {value}" for key, value in fare.items()) for name, fare in fares.items()
        ]
        return "\n".join(lines) + "\n"

    def _enter(self) -> None:
        if self._entered:
            raise ConfigurationError("a maintenance process lives once: make another with awa.maintenance(...)")
        self._entered = True

    async def _prepare(self) -> Upkeep:
        self._stack.callback(self._take_thread())
        await self._stack.enter_async_context(self._health)
        self._stack.push_async_callback(self._engines.dispose)
        await self._engines.check()
        upkeep = Upkeep(self._engines, self._app, self._identity, only=self._options.only)
        self._service = upkeep.service
        await self._stack.enter_async_context(upkeep)
        return upkeep

    async def _start(self) -> None:
        check_loop(self._options.uvloop)
        upkeep = await self._prepare()
        async with upkeep.maker.begin() as session:
            await session.run_sync(forget_dead)
            await session.run_sync(self._identity.write)
        self._heart = Heart(self._engines.heart, self._identity, self._options.heartbeat, self._flight)
        await asyncio.to_thread(self._heart.beat)
        self._heart.start()
        self._stack.push_async_callback(asyncio.to_thread, self._heart.stop)
        self._stack.push_async_callback(ended, [asyncio.create_task(self._serve(upkeep.service))])
        self._health.started(self._heart, None)
        log.info("maintenance process %s, lanes %s", self.id, ", ".join(lane.name for lane in upkeep.service.lanes))

    async def _serve(self, service: Service) -> None:
        while True:
            try:
                await service.serve()
            except Exception:
                log.exception("maintenance broke, starting it again")
                await asyncio.sleep(1)
