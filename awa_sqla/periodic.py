"""A periodic schedule as an app declares it, and the columns it is stored as. No I/O.

Arguments that are given as such are stored with the schedule: any process can fire it. A callable that builds them is
code of one app, and only that app's processes can.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, TypedDict, cast, get_args

from awa_sqla import limits
from awa_sqla.args import JobArgs
from awa_sqla.cron import Schedule
from awa_sqla.errors import ConfigurationError, InvalidJob
from awa_sqla.requests import EnqueueRequest, Options
from awa_sqla.states import JobState
from awa_sqla.unique import Unique

#: What becomes of ticks that nobody fired in time.
MissedFires = Literal["coalesce", "catch_up", "skip"]
#: The most ticks that are ever caught up.
MOST_MISSED = 10_000

Built = JobArgs | EnqueueRequest
Source = JobArgs | Callable[[], Built] | Callable[[datetime], Built]


class JobDefaults(TypedDict, total=False):
    """The options of the jobs of a schedule."""

    queue: str | None
    priority: int | None
    max_attempts: int | None
    deadline: timedelta | None
    tags: Iterable[str] | None
    metadata: Mapping[str, Any] | None
    unique: Unique | None


@dataclass(frozen=True, slots=True)
class Periodic:
    """One schedule of an app: when, which job, and what becomes of missed ticks. Checked when it is built."""

    name: str
    schedule: Schedule
    source: Source
    options: Options
    missed_fires: MissedFires = "coalesce"
    most_missed: int = 1000
    _request: EnqueueRequest | None = field(init=False, repr=False, compare=False)
    _takes_tick: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        limits.text("name", self.name)
        if self.missed_fires not in get_args(MissedFires):
            choices = ", ".join(map(repr, get_args(MissedFires)))
            raise InvalidJob("missed_fires", f"must be one of {choices}, not {self.missed_fires!r}")
        limits.integer("most_missed", self.most_missed, 1, MOST_MISSED)
        static, takes_tick = None, False
        if isinstance(self.source, JobArgs):
            static = EnqueueRequest.of(self.source, self.options)
            static.columns()  # the arguments, too, are refused here or never
        else:
            takes_tick = _takes_tick(self.name, self.source)
        object.__setattr__(self, "_request", static)
        object.__setattr__(self, "_takes_tick", takes_tick)

    @property
    def builds(self) -> bool:
        """Whether the app builds the arguments when it fires."""
        return self._request is None

    def request(self, tick: datetime) -> EnqueueRequest:
        """The job of a tick, from the app's callable. Raises `InvalidJob` and what that raises."""
        if self._request is not None:
            return self._request
        source = cast("Callable[..., object]", self.source)
        built = source(self.schedule.local(tick)) if self._takes_tick else source()
        if isinstance(built, EnqueueRequest):
            return built
        if not isinstance(built, JobArgs):
            if inspect.iscoroutine(built):
                built.close()
            raise InvalidJob("args", f"must be built as a JobArgs or an EnqueueRequest, not {limits.type_name(built)}")
        return EnqueueRequest.of(built, self.options)

    def columns(self) -> dict[str, Any]:
        """What of its row the app declares, by column name."""
        options, request = self.options, self._request
        values: dict[str, Any] = {
            "name": self.name,
            "cron_expr": self.schedule.expr,
            "timezone": self.schedule.timezone,
            "kind": None,
            "queue": options.queue,
            "args": None,
            "args_version": 1,
            "priority": options.priority,
            "max_attempts": options.max_attempts,
            "deadline_seconds": options.deadline.total_seconds() if options.deadline else None,
            "tags": list(options.tags or ()),
            "metadata": dict(options.metadata or {}),
            "uniqueness": as_stored(options.unique if request is None else request.uniqueness),
            "missed_fire_policy": self.missed_fires,
            "most_missed": self.most_missed,
        }
        if request is not None:
            job = request.columns()
            values |= {key: job[key] for key in values.keys() & job.keys()}
        return values


def _takes_tick(name: str, source: object) -> bool:
    """Whether a callable is to be given the tick: when it does not go without."""
    if isinstance(source, EnqueueRequest):
        raise InvalidJob("args", "is an EnqueueRequest: give its options to periodic()")
    if isinstance(source, type) or not callable(source):
        raise InvalidJob("args", f"must be a JobArgs instance or a callable that returns one, not {source!r:.100}")
    plain: object = cast("partial[object]", source).func if isinstance(source, partial) else source
    if inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None)):  # noqa: B004
        raise ConfigurationError(
            f"periodic {name!r}: the arguments are built by a coroutine function, which nothing awaits there: make it "
            "a plain function, and do in the job's handler what needs to wait"
        )
    signature = inspect.signature(cast("Callable[..., object]", source))
    for given in ((), (None,)):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return bool(given)
    raise ConfigurationError(
        f"periodic {name!r}: a callable that builds arguments is called with the tick or with nothing, and this one "
        f"takes {signature}"
    )


def as_stored(unique: Unique | None) -> dict[str, Any] | None:
    """A `Unique` as a schedule's row holds it."""
    if unique is None:
        return None
    return {
        "by_args": unique.by_args,
        "by_queue": unique.by_queue,
        "period": unique.period.total_seconds() if unique.period else None,
        "states": sorted(unique.states),
    }


def from_stored(stored: Any) -> Unique:
    """The `Unique` of a row. Raises `InvalidJob` for what is none."""
    try:
        period, states = stored["period"], [JobState(state) for state in stored["states"]]
        return Unique(
            by_args=stored["by_args"],
            by_queue=stored["by_queue"],
            period=None if period is None else timedelta(seconds=period),
            states=states,
        )
    except (LookupError, TypeError, ValueError, OverflowError) as exc:
        raise InvalidJob("uniqueness", f"{stored!r:.200} is not what a schedule's row holds: {exc}") from exc


def metadata_of(name: str, tick: datetime) -> dict[str, Any]:
    """What the job of a tick is marked with."""
    return {"cron_name": name, "cron_fire_time": f"{tick:%Y-%m-%dT%H:%M:%SZ}"}
