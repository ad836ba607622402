"""`Awa`: the tasks, follow-ups and queues of one application, and the way to run them.

    awa = Awa(queues={"email": QueueConfig(concurrency=20)})

    @awa.task(SendEmail)
    async def send_email(ctx: JobContext[SendEmail]) -> None:
        await mailer.send(ctx.args.to, ctx.args.subject)

    @awa.on_completed(Charge)
    def receipt(event: Completed[Charge]) -> SendReceipt:
        return SendReceipt(order_id=event.args.order_id)

    awa.attach(SessionLocal)
    awa.run_worker("postgresql+psycopg://...")

Registering does no I/O; a module that defines an `Awa` can be imported by web processes and workers alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from importlib.metadata import version
from typing import Any, TypedDict, Unpack

from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from awa_sqla.args import A
from awa_sqla.cron import Schedule
from awa_sqla.errors import ConfigurationError
from awa_sqla.periodic import JobDefaults, MissedFires, Periodic, Source
from awa_sqla.requests import Options as JobOptions
from awa_sqla.session.follow_ups import FollowUps
from awa_sqla.session.hooks import Hooks
from awa_sqla.worker.config import MaintenanceOptions, QueueConfig, WorkerOptions, checked_queues
from awa_sqla.worker.context import JobContext
from awa_sqla.worker.engines import Given
from awa_sqla.worker.maintainer import Maintenance
from awa_sqla.worker.process import run_until_stopped
from awa_sqla.worker.runner import Worker
from awa_sqla.worker.tasks import Tasks

Lifespan = Callable[..., AbstractAsyncContextManager[Any]]


class Options(TypedDict, total=False):
    """The options of a worker."""

    session_factory: sessionmaker[Any] | None
    async_session_factory: async_sessionmaker[Any] | None
    queues: Iterable[str] | None
    listen_url: str | None
    notify: bool
    heartbeat: timedelta
    stale_after: timedelta
    grace: timedelta
    maintenance: bool
    claim_batch: int
    health: str | None
    uvloop: bool | None


class Upkeep(TypedDict, total=False):
    """The options of a maintenance process."""

    heartbeat: timedelta
    stale_after: timedelta
    only: Sequence[str] | None
    health: str | None
    uvloop: bool | None


class Awa:
    """One application: what its jobs do and what follows on them.

    `queues` maps queue names to their `QueueConfig`; the default queues of all tasks are served too. `lifespan` is
    an async context manager function, called with the app (or with nothing) when a worker starts; what it yields
    is `ctx.state`. `database_url` is used when none is given elsewhere. Raises `InvalidJob` for bad queues.
    """

    def __init__(
        self,
        *,
        queues: Mapping[str, QueueConfig] | None = None,
        lifespan: Lifespan | None = None,
        database_url: str | None = None,
    ) -> None:
        self.queues = checked_queues(queues)
        self.lifespan = lifespan
        self.database_url = database_url
        self.tasks = Tasks()
        self.follow_ups = FollowUps()
        self.hooks = Hooks()
        self.schedules: dict[str, Periodic] = {}
        registry = self.follow_ups
        self.on_completed = registry.on_completed
        self.on_retried = registry.on_retried
        self.on_exhausted = registry.on_exhausted
        self.on_cancelled = registry.on_cancelled
        self.on_waiting_for_callback = registry.on_waiting_for_callback
        self.on_rescued = registry.on_rescued

    def task(
        self,
        args_class: type[A],
        /,
        *,
        transactional: bool = False,
        retry_on: Iterable[type[BaseException]] | None = None,
        discard_on: Iterable[type[BaseException]] = (),
    ) -> Callable[[Callable[[JobContext[A]], Any]], Callable[[JobContext[A]], Any]]:
        """Register the handler of a kind: an `async def` runs as a task, a `def` in a thread.

        With `transactional`, `ctx.session` carries the handler's writes, the outcome and its follow-ups in one
        commit. `retry_on` names the errors that are tried again (default: all); `discard_on` those that fail the
        job at once, as `TerminalError` does. Raises `DuplicateKind`, `ConfigurationError`, `InvalidJob`.
        """

        def register(handler: Callable[[JobContext[A]], Any]) -> Callable[[JobContext[A]], Any]:
            self.tasks.add(args_class, handler, transactional=transactional, retry_on=retry_on, discard_on=discard_on)
            return handler

        return register

    def periodic(
        self,
        name: str,
        cron_expr: str,
        args: Source,
        /,
        *,
        timezone: str = "UTC",
        missed_fires: MissedFires = "coalesce",
        most_missed: int = 1000,
        **options: Unpack[JobDefaults],
    ) -> Periodic:
        """Enqueue a job again and again: at each tick of `cron_expr` in `timezone`, a name of the IANA database.

        `name` is the schedule's identity in the database. `cron_expr` has five fields, or six with seconds first. A
        fixed local time that a clock change skips fires at the shift, one that comes twice at the first; schedules with
        a wildcard or a step in hours or minutes fire by elapsed time (`awa_sqla.cron` says all of it). `args` is a
        `JobArgs`, stored with the schedule, or a callable that returns one or an `EnqueueRequest`: that is called for
        each tick, in a thread, with the tick in the schedule's zone if it needs an argument, and only processes of this
        app fire it. It may be called for a tick that another process fires in the end, so it should do nothing else.

        `missed_fires` says what becomes of ticks that nobody fired in time: "coalesce" fires the latest, "catch_up" all
        of them, but at most the latest `most_missed`, "skip" none that is more than a minute late. The other options
        are those of `enqueue()`; a unique job that is there already is left out. Does no I/O: workers write their app's
        schedules when they start, and one that is new, or has another expression or zone, counts from then on.

        Returns what was registered. Raises `InvalidJob` naming the field, `ConfigurationError` for a second schedule of
        this name and for a coroutine function.
        """
        if name in self.schedules:
            raise ConfigurationError(
                f"there are two periodic schedules {name!r} in this app: the name tells them apart in the database"
            )
        if unknown := options.keys() - JobDefaults.__annotations__.keys():
            raise TypeError(f"periodic() takes no {', '.join(sorted(unknown))}")
        schedule = Schedule(cron_expr, timezone)
        made = Periodic(name, schedule, args, JobOptions(**options), missed_fires, most_missed)
        self.schedules[made.name] = made
        return made

    def attach(self, target: object, /) -> None:
        """Make this app's follow-ups and hooks hold in the sessions of `target`; see `FollowUps.attach`."""
        self.follow_ups.attach(target)
        self.hooks.attach(target)

    def detach(self, target: object, /) -> None:
        """Undo `attach(target)`."""
        self.follow_ups.detach(target)
        self.hooks.detach(target)

    def worker(self, engine_or_url: Given | None = None, /, **options: Unpack[Options]) -> Worker:
        """A worker for `async with`: it runs jobs inside the block and stops gracefully at its end.

        `engine_or_url` is a database URL, an Engine or an AsyncEngine. Options: `session_factory` and
        `async_session_factory` make `ctx.session` (default: on engines of the worker's own; they are attached),
        `queues` serves only these, `listen_url` is a direct URL for LISTEN where the other goes through a pooler,
        `notify=False` polls only, `heartbeat` (30 s) at most a third of `stale_after` (90 s), `grace` (30 s) for
        running jobs at a stop, `maintenance=False` leaves the upkeep to others, `claim_batch` (500).
        `health` ("host:port") serves `/healthz` and `/readyz` there; port 0 is any that is free, `health_address` of
        the worker tells which. `uvloop` is for `run_worker`; True refuses another running loop here.

        A `def` handler that does not end within `grace` is abandoned: its job is put back, its thread goes on until
        the interpreter ends, which does not wait for it. An `async def` handler that will not be cancelled is
        abandoned too, but `asyncio.run` waits for its task.

        Raises `ConfigurationError` and `InvalidJob` here, `SchemaVersionError` and `ConfigurationError` on entry.
        """
        return Worker(self, self._database(engine_or_url), WorkerOptions(**_sequences(options)))

    def run_worker(self, engine_or_url: Given | None = None, /, **options: Unpack[Options]) -> int:
        """Run a worker until SIGINT or SIGTERM. Blocks; returns 0, or ends with status 1 when jobs were abandoned.

        The first signal stops claiming and lets running jobs end within `grace`, the second asks them to stop, the
        third exits at once, with status 130 or 143. SIGHUP is a first signal that may come twice; SIGUSR1 writes the
        running jobs with their stacks to stderr. Options are those of `worker`; the loop is uvloop's where that is
        installed, unless `uvloop=False`. Raises what `worker` and its entry raise.
        """
        return run_until_stopped(lambda: self.worker(engine_or_url, **options), uvloop=options.get("uvloop"))

    def maintenance(self, engine_or_url: Given | None = None, /, **options: Unpack[Upkeep]) -> Maintenance:
        """A maintenance process for `async with`, which runs no jobs; `await ....once()` runs every lane once.

        Every worker with `maintenance=True` does the same beside its jobs, and all of them elect one that leads. This
        is for databases without workers, for workers with `maintenance=False`, and for `awa-sqla maintenance`.
        `engine_or_url` is that of `worker`. Options: `heartbeat` (30 s), `stale_after` (90 s; a worker with a longer
        one is given that), `only` names the lanes to run, `health` ("host:port") serves `/healthz` and `/readyz`.

        Raises `ConfigurationError` and `InvalidJob` here, `SchemaVersionError` and `ConfigurationError` on entry.
        (DESIGN 8)
        """
        return Maintenance(self, self._database(engine_or_url), MaintenanceOptions(**options))

    def run_maintenance(self, engine_or_url: Given | None = None, /, **options: Unpack[Upkeep]) -> int:
        """Maintain until SIGINT or SIGTERM. Blocks; returns 0. Options and errors are those of `maintenance`."""
        return run_until_stopped(lambda: self.maintenance(engine_or_url, **options), uvloop=options.get("uvloop"))

    def lifespan_context(self) -> AbstractAsyncContextManager[Any]:
        """The context manager of one worker's life."""
        if self.lifespan is None:  # pragma: no cover - asked before
            raise ConfigurationError("this app has no lifespan")
        takes_app = bool(inspect.signature(self.lifespan).parameters)
        return self.lifespan(self) if takes_app else self.lifespan()

    @property
    def version(self) -> str:
        """The version of this package, for the worker's row."""
        return version("awa-sqla")

    def _database(self, given: Given | None) -> Given:
        found = self.database_url if given is None else given
        if found is None:
            raise ConfigurationError("no database: give the worker a URL or an engine, or Awa(database_url=...)")
        return found


def _sequences(options: Options) -> dict[str, Any]:
    values: dict[str, Any] = dict(options)
    if values.get("queues") is not None:
        values["queues"] = tuple(values["queues"])
    return values
