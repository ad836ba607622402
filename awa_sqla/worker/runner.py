"""`Worker`: the life of one process that runs jobs.

Claimed rows become `Run`s; each is performed, its outcome handed to the finalizer, and its slot freed when the
outcome is acknowledged. Stopping goes in steps: no more claims; the running ones end by themselves while heartbeats
go on; after `grace` they are asked to stop; what still runs then is put back uncharged and abandoned.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Self

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from awa_sqla.errors import ConfigurationError
from awa_sqla.maintenance.prune import forget_dead
from awa_sqla.maintenance.schedules import sync
from awa_sqla.maintenance.service import Service
from awa_sqla.models.job import Attempt
from awa_sqla.models.wakeups import queue_payload
from awa_sqla.session.events import Started
from awa_sqla.session.happenings import Happening
from awa_sqla.worker import run as running
from awa_sqla.worker.application import Application
from awa_sqla.worker.claimed import Claimed
from awa_sqla.worker.config import CONCURRENCY, Queues, WorkerOptions
from awa_sqla.worker.dispatch import Claimant, QueueLoop
from awa_sqla.worker.engines import Engines, Given
from awa_sqla.worker.finalize import Finalizer, insisting
from awa_sqla.worker.flight import Flight
from awa_sqla.worker.heartbeat import Heart, Identity, declare_queues
from awa_sqla.worker.listen import Listener, notify
from awa_sqla.worker.loops import check_loop, ended
from awa_sqla.worker.outcomes import Failed, PutBack, Result, Settled
from awa_sqla.worker.pools import most_served
from awa_sqla.worker.run import Run
from awa_sqla.worker.survey import rationed, survey
from awa_sqla.worker.threads import Threads
from awa_sqla.worker.transaction import around, async_around
from awa_sqla.worker.upkeep import Upkeep
from awa_sqla.worker.visible import Visible
from awa_sqla.worker.waits import Waits

log = logging.getLogger("awa_sqla.worker")

#: Seconds between polls of all queues while the listener is healthy.
POLL = 2.0
#: How long a job of a kind nobody here knows, or of a newer version of it, is put back for.
UNKNOWN = timedelta(seconds=30)
#: What a cancel sends; anybody may NOTIFY anything.
_CANCEL = re.compile(r"c:(\d{1,19}):(\d{1,19})")
#: What the answer to a waiting handler sends.
_ANSWERED = re.compile(r"w:(\d{1,19})")
#: Seconds that interrupted handlers have to end after `grace`.
LAST_CALL = 2.0


class Worker(Visible):
    """Runs the jobs of an app inside `async with awa.worker(...)`."""

    def __init__(self, app: Application, given: Given, options: WorkerOptions) -> None:
        super().__init__(app.version, options)
        self._app = app
        self._options = options
        self._queues = Queues.of(app.queues, app.tasks.queues, options.queues).configs
        self.id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._concurrency = sum(config.concurrency for config in self._queues.values())
        self._engines = Engines(given, self._concurrency)
        self._flight = Flight()
        self._bodies: dict[str, running.Body] = {}
        self._loops: dict[str, QueueLoop] = {}
        self._stop = asyncio.Event()
        self._state: Any = None
        self._stack, self._entered = AsyncExitStack(), False
        self._services: list[asyncio.Task[None]] = []
        self._upkeep: Service | None = None

    async def __aenter__(self) -> Self:
        if self._entered:
            raise ConfigurationError("a worker lives once: make another with awa.worker(...)")
        self._entered = True
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._drain()
        finally:  # also when the drain itself is cancelled: a heart that beats on would hold its jobs for ever
            await self._stack.aclose()

    def request_stop(self) -> None:
        """Ask for a graceful stop; `wait()` returns. From the loop's thread."""
        self._stop.set()

    async def wait(self) -> None:
        """Until somebody asks to stop."""
        await self._stop.wait()

    def interrupt(self) -> None:
        """Do not wait for grace: ask every running handler to stop now."""
        self._flight.stop(running.SHUTDOWN)

    # ------------------------------------------------------------- start

    async def _start(self) -> None:
        check_loop(self._options.uvloop)
        self._loop = asyncio.get_running_loop()
        self._stack.callback(self._take_thread())
        await self._stack.enter_async_context(self._health)
        self._stack.push_async_callback(self._engines.dispose)
        await self._engines.check()
        self._maker = async_sessionmaker(self._engines.book, expire_on_commit=False)
        self._app.attach(self._maker)
        self._waits = Waits(self._maker, self._flight, lambda: min(POLL, self._patience()))
        self._threads = Threads(CONCURRENCY)  # no more than there are slots
        self._stack.callback(self._threads.close)
        await self._prepare_bodies()
        if self._app.lifespan is not None:
            self._state = await self._stack.enter_async_context(self._app.lifespan_context())
        self._identity = Identity(
            self.id, self._app.version, sorted(self._queues), self._app.tasks.kinds, self._app.follow_ups.specs
        )
        self._identity.concurrency, self._identity.stale_after = self._concurrency, self._options.stale_after
        async with self._maker.begin() as session:
            await session.run_sync(declare_queues, dict(self._queues))
            await session.run_sync(sync, self._app.schedules.values())
            await session.run_sync(forget_dead)
            await session.run_sync(self._identity.write)
        self._finalizer = Finalizer(self._maker, self._acknowledged)
        claimant = Claimant(self._engines.book, self.id, self._options.claim_batch)
        self._loops = {name: QueueLoop(name, config, claimant) for name, config in self._queues.items()}
        self._payloads = {queue_payload(name): loop for name, loop in self._loops.items()}
        self._heart = Heart(self._engines.heart, self._identity, self._options.heartbeat, self._flight)
        await asyncio.to_thread(self._heart.beat)
        self._heart.start()
        self._stack.push_async_callback(asyncio.to_thread, self._heart.stop)
        await self._survey()
        if self._options.maintenance:
            upkeep = Upkeep(self._engines, self._app, self._identity, woken=self._wake)
            self._upkeep = (await self._stack.enter_async_context(upkeep)).service
        self._stack.callback(self._finalizer.close)
        self._stack.push_async_callback(ended, self._services)
        self._claims = [self._spawn(loop.serve, self._begin) for loop in self._loops.values()]
        self._spawn(self._finalizer.serve)
        self._spawn_helpers()
        self._health.started(self._heart, self._listener)
        log.info("worker %s serves %s", self.id, ", ".join(sorted(self._queues)))

    def _spawn_helpers(self) -> None:
        self._listener: Listener | None = None
        if self._options.notify:
            conninfo = self._engines.conninfo(self._options.listen_url)
            self._listener = listener = Listener(conninfo, self._engines.channel, self._heard, self._ring)
            self._identity.listening = lambda: listener.healthy
            self._spawn(listener.serve)
        self._spawn(self._poll)
        self._spawn(self._waits.serve)
        if self._upkeep is not None:
            self._spawn(self._upkeep.serve)

    async def _prepare_bodies(self) -> None:
        """A body for each task, with a session around the transactional ones; enough connections for all of them."""
        tasks = [self._app.tasks.named(kind) for kind in self._app.tasks.kinds]
        factories: dict[bool, Any] = {}
        for is_async in {task.is_async for task in tasks if task.transactional}:
            factories[is_async] = self._factory(is_async=is_async)
            self._app.attach(factories[is_async])
        for task in tasks:
            if not task.transactional:
                self._bodies[task.kind] = task.handler
            else:
                wrap: Any = async_around if task.is_async else around
                self._bodies[task.kind] = wrap(task, factories[task.is_async])
        self._most = most_served(factories, {name: config.concurrency for name, config in self._queues.items()})
        if factories:
            await self._engines.check_room(self._concurrency, maintenance=self._options.maintenance)

    def _factory(self, *, is_async: bool) -> Any:
        if is_async:
            given = self._options.async_session_factory
            return given or async_sessionmaker(self._engines.async_work(), expire_on_commit=False)
        return self._options.session_factory or sessionmaker(self._engines.work())

    def _spawn(self, serve: Callable[..., Awaitable[None]], *args: Any) -> asyncio.Task[None]:
        """Run a service until the worker ends; one that breaks is reported and started again."""

        async def supervised() -> None:
            while True:
                try:
                    await serve(*args)
                except Exception:
                    log.exception("%s broke, starting it again", getattr(serve, "__qualname__", serve))
                    await asyncio.sleep(1)
                else:
                    return

        task = asyncio.create_task(supervised())
        self._services.append(task)
        return task

    # ------------------------------------------------------------ waking

    def _heard(self, payload: str | None) -> None:
        if payload is None:  # connected anew: whatever was sent in between went unheard
            self._wake(frozenset(self._loops))
            self._waits.wake_all()
            self._heart.soon()
        elif payload in self._payloads:
            self._payloads[payload].wake()
        elif (told := _CANCEL.fullmatch(payload)) is not None:
            self._flight.stop(running.CANCELLED, Attempt(int(told[1]), int(told[2])))
        elif (told := _ANSWERED.fullmatch(payload)) is not None:
            self._waits.wake(int(told[1]))

    async def _ring(self, payload: str) -> None:
        """Send a payload to the channel, for the listener to hear."""
        await insisting(lambda: notify(self._engines.alone, self._engines.channel, payload))

    def _wake(self, queues: frozenset[str]) -> None:
        for name in queues & self._loops.keys():
            self._loops[name].wake()

    def _patience(self) -> float:
        """Seconds until the next look at what notifications should have told."""
        if self._listener is not None and self._listener.healthy:
            return POLL
        return min(loop.poll_interval for loop in self._loops.values())

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._patience())
            await self._survey()

    async def _survey(self) -> None:
        """Wake the queues that have work, and follow the settings that are in force by now."""
        found = await insisting(lambda: survey(self._engines.alone, list(self._loops)))
        settings = {one.queue: one.in_force(self._queues[one.queue]) for one in found}
        numbers = rationed(settings, self._most)
        for name, in_force in settings.items():
            self._loops[name].follow(in_force, numbers[name])
        self._identity.concurrency = sum(numbers.values())
        self._wake(frozenset(one.queue for one in found if one.has_work))

    # ----------------------------------------------------------- running

    def _begin(self, claimed: Claimed) -> None:
        run = Run(claimed, self._app.tasks.get(claimed.kind, claimed.args_version))
        self._flight.add(run)
        left = claimed.seconds_left
        if left is not None:
            run.alarm = self._loop.call_later(left, run.stop, running.OVERDUE)
        run.asyncio_task = self._loop.create_task(self._perform(run))
        if run.task is not None and self._app.hooks.wants(Started, claimed.kind):
            self._tell_started(claimed)

    def _tell_started(self, claimed: Claimed) -> None:
        try:
            self._app.hooks.tell([Happening(Started, claimed.snapshot, {})])
        except Exception:  # a row that cannot be read must keep no other of its claim from beginning
            log.exception("the hooks of Started were not told of job %s", claimed.attempt.id)

    async def _perform(self, run: Run) -> None:
        result: Result = Settled()
        run.started = True  # until here a cancellation would end the task before its first step
        try:
            result = await self._outcome(run)
        except Exception as exc:  # noqa: BLE001 - whatever went wrong, the attempt must get an outcome
            result = Failed(exc)
        finally:
            self._finalizer.submit(run, result)

    async def _outcome(self, run: Run) -> Result:
        task = run.task
        if task is None:
            kind, version = run.claimed.kind, run.claimed.args_version
            if self._identity.unknown(kind):  # the first; there may be thousands
                log.warning("no task for %r, version %d; its jobs are put back for others", kind, version)
                self._heart.soon()
            return PutBack(UNKNOWN)
        try:
            context = run.context(self._waits, self._state, None if task.is_async else self._loop)
        except ValidationError as exc:
            return running.undecodable(exc)
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - a validator of the app may raise anything
            return Failed(exc, terminal=True)
        if run.stop_reason is not None and task.is_async:
            return running.interrupted(run.stop_reason)
        return await running.perform(run, context, self._bodies[task.kind], self._threads)

    def _acknowledged(self, run: Run, *, completed: bool) -> None:
        if not self._flight.land(run):
            return
        self.finished += 1
        if not completed and self._upkeep is not None:
            self._upkeep.nudge()
        self._loops[run.claimed.queue].release()

    # ---------------------------------------------------------- stopping

    async def _drain(self) -> None:
        self._stop.set()
        self._identity.stopping = True
        self._heart.soon()
        if self._upkeep is not None:
            self._upkeep.resign()
        for loop in self._loops.values():
            loop.stop()
        grace = self._options.grace.total_seconds()
        started = self._loop.time()
        _, hanging = await asyncio.wait(self._claims, timeout=grace + LAST_CALL)
        await ended(hanging)  # the database does not answer: what it may have given us will be rescued
        if await self._flight.landed_within(grace - (self._loop.time() - started)):
            return
        log.warning("%d attempts still run after grace: asking them to stop", len(self._flight))
        self.interrupt()
        if not await self._flight.landed_within(LAST_CALL):
            self._abandon([run for run in self._flight if run.asyncio_task is None or not run.asyncio_task.done()])
            if not await self._flight.landed_within(LAST_CALL):
                log.error(
                    "outcomes of jobs %s are not written, others will rescue them", [r.attempt.id for r in self._flight]
                )

    def _abandon(self, runs: list[Run]) -> None:
        if not runs:
            return
        self.abandoned = len(runs)
        log.error("abandoned jobs %s: their handlers do not end", [run.attempt.id for run in runs])
        for run in runs:
            run.left_behind = True
            self._finalizer.submit(run, PutBack(timedelta(0)))
