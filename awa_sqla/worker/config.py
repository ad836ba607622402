"""Settings of queues and workers, checked when they are made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import defaults, limits
from awa_sqla.errors import ConfigurationError, InvalidJob
from awa_sqla.maintenance.lanes import LANES

#: Attempts at a time of one queue in one process.
CONCURRENCY = 100_000
#: After how long a silence a worker is taken for dead.
STALE_AFTER = timedelta(seconds=90)
#: Jobs in a second: one in about three hours, and more than one process can begin.
LOWEST_RATE, HIGHEST_RATE = 0.0001, 1_000_000


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `per_second` jobs of a queue begin in a second, on average, in each process; at most `burst` at once.

    `per_second` may be a fraction (0.1 is one in ten seconds). Left out, `burst` is `per_second` rounded up. Attempts
    count, retries too. A token bucket: it starts full.
    """

    per_second: float
    burst: int = 0

    def __post_init__(self) -> None:
        rate: Any = self.per_second
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not LOWEST_RATE <= rate <= HIGHEST_RATE:
            raise InvalidJob("per_second", f"must be a number from {LOWEST_RATE} to {HIGHEST_RATE}, not {rate!r}")
        if self.burst == 0:
            object.__setattr__(self, "burst", math.ceil(self.per_second))
        limits.integer("burst", self.burst, 1, HIGHEST_RATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long a queue keeps what has ended: `completed` jobs (24 h), `failed` and cancelled ones (72 h), and `dead`
    letters (30 days). None keeps them for ever, `timedelta(0)` until the next pass of maintenance.
    """

    completed: timedelta | None = defaults.KEEP_COMPLETED
    failed: timedelta | None = defaults.KEEP_FAILED
    dead: timedelta | None = defaults.KEEP_DEAD

    def __post_init__(self) -> None:
        for name in ("completed", "failed", "dead"):
            if getattr(self, name) is not None:
                limits.duration(name, getattr(self, name), zero=True)


_ADDRESS = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]*)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """How this process serves one queue.

    `concurrency`: attempts at a time in this process (50). `deadline`: longest run of one attempt, for jobs
    without their own (none). `poll_interval`: how often to look for work when there is no listener (0.2 s).
    `rate_limit`: how fast jobs may begin in this process (as fast as they can). `priority_aging`: how long a job
    waits for each level that its priority then rises (60 s; None for never). `dead_letters`: keep jobs that failed
    for good as dead letters for an operator (no). `retention`: how long jobs that have ended are kept. Workers
    write these as the queue's declared settings when they start, and follow what an operator overrides within 2 s,
    or the poll interval if that is longer.
    """

    concurrency: int = 50
    deadline: timedelta | None = None
    poll_interval: timedelta = timedelta(milliseconds=200)
    rate_limit: RateLimit | None = None
    priority_aging: timedelta | None = defaults.PRIORITY_AGING
    dead_letters: bool = False
    retention: Retention = Retention()

    def __post_init__(self) -> None:
        limits.integer("concurrency", self.concurrency, 1, CONCURRENCY)
        limits.duration("poll_interval", self.poll_interval)
        if self.deadline is not None:
            limits.duration("deadline", self.deadline)
        if self.rate_limit is not None and not isinstance(self.rate_limit, RateLimit):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidJob("rate_limit", f"must be a RateLimit(...), not {limits.type_name(self.rate_limit)}")
        if self.priority_aging is not None:
            limits.duration("priority_aging", self.priority_aging)
        if not isinstance(self.retention, Retention):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidJob("retention", f"must be a Retention(...), not {limits.type_name(self.retention)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of `awa.worker()`; see there."""

    session_factory: sessionmaker[Session] | None = None
    async_session_factory: async_sessionmaker[AsyncSession] | None = None
    queues: Sequence[str] | None = None
    listen_url: str | None = None
    notify: bool = True
    heartbeat: timedelta = timedelta(seconds=30)
    stale_after: timedelta = STALE_AFTER
    grace: timedelta = timedelta(seconds=30)
    maintenance: bool = True
    claim_batch: int = 500
    health: str | None = None
    uvloop: bool | None = None

    def __post_init__(self) -> None:
        for name in ("heartbeat", "stale_after"):
            limits.duration(name, getattr(self, name))
        limits.duration("grace", self.grace, zero=True)
        limits.integer("claim_batch", self.claim_batch, 1, 10_000)
        if self.heartbeat * 3 > self.stale_after:
            raise ConfigurationError(
                f"heartbeat={self.heartbeat} is more than a third of stale_after={self.stale_after}: one late beat "
                "would hand a living worker's jobs to another. Shorten the first or lengthen the second"
            )
        if self.health is not None:
            host_and_port(self.health)
        if not isinstance(cast("object", self.uvloop), bool | None):
            raise ConfigurationError(f"uvloop must be True, False or None, not {self.uvloop!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceOptions:
    """Options of `awa.maintenance()`; see there."""

    heartbeat: timedelta = timedelta(seconds=30)
    stale_after: timedelta = STALE_AFTER
    only: Sequence[str] | None = None
    health: str | None = None
    uvloop: bool | None = None

    def __post_init__(self) -> None:
        for name in ("heartbeat", "stale_after"):
            limits.duration(name, getattr(self, name))
        if self.only is not None:
            object.__setattr__(self, "only", lanes_named(self.only))
        if self.health is not None:
            host_and_port(self.health)


@dataclass(frozen=True, slots=True)
class Queues:
    """The queues a worker serves."""

    configs: Mapping[str, QueueConfig] = field(default_factory=dict[str, QueueConfig])

    @classmethod
    def of(cls, declared: Mapping[str, QueueConfig], needed: set[str], subset: Sequence[str] | None) -> Queues:
        """What was declared plus the default queue of each task, cut down to `subset`.

        Raises `ConfigurationError` when `subset` names a queue nobody declared or nothing is left.
        """
        known: dict[str, Any] = {name: QueueConfig() for name in sorted(needed)} | dict(declared)
        if subset is not None:
            unknown = [name for name in subset if name not in known]
            if unknown:
                raise ConfigurationError(f"queues {unknown} are not declared; known are {sorted(known)}")
            known = {name: known[name] for name in subset}
        if not known:
            raise ConfigurationError(
                "this worker has no queue to serve: register a task with @awa.task(...) or declare queues in Awa(...)"
            )
        return cls(known)


def checked_queues(queues: object) -> dict[str, QueueConfig]:
    """The `queues=` of `Awa(...)`."""
    if queues is None:
        return {}
    if not isinstance(queues, Mapping):
        raise InvalidJob("queues", "must map queue names to QueueConfig(...)")
    found: dict[str, QueueConfig] = {}
    for name, config in cast("Mapping[object, object]", queues).items():
        if not isinstance(config, QueueConfig):
            raise InvalidJob(f"queues[{name!r}]", f"must be a QueueConfig, not {limits.type_name(config)}")
        found[limits.text("queues", name)] = config
    return found


def lanes_named(names: object) -> tuple[str, ...]:
    """The lanes of `only=`; "rescue" is all of its lanes. Raises `ConfigurationError` for one there is not."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigurationError(f"only={names!r} must be several names of lanes")
    given = [str(name) for name in cast("Iterable[object]", names)]
    known = [lane for lane in LANES if lane in given or lane.partition("_")[0] in given]
    unknown = [name for name in given if name not in LANES and not any(lane.startswith(f"{name}_") for lane in LANES)]
    if unknown or not known:
        raise ConfigurationError(f"no lanes {unknown}; there are {', '.join(LANES)}, and rescue for all of its lanes")
    return tuple(known)


def host_and_port(address: object) -> tuple[str, int]:
    """The host, empty for all interfaces, and the port of `health=`. Raises `ConfigurationError`."""
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or int(found[3]) > 65535:
        raise ConfigurationError(f"health={address!r} is no address; write 'host:port', ':8081' or '[::1]:8081'")
    return found[1] or found[2] or "", int(found[3])
