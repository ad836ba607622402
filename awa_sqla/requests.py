"""One request to enqueue, as data: the args and the options of one job, checked when it is built.

Every road that makes a job (`enqueue`, `Job.of`, a follow-up, a dispatched obligation) goes through an
`EnqueueRequest`, so that defaults, limits and error texts are the same on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Self

from awa_sqla import limits
from awa_sqla.args import JobArgs
from awa_sqla.errors import InvalidJob
from awa_sqla.stored import dump
from awa_sqla.unique import OnConflict, Unique, checked, on_conflict


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one job; None takes the default of its args class. Checked when it is built."""

    queue: str | None = None
    priority: int | None = None
    max_attempts: int | None = None
    run_at: datetime | None = None
    delay: timedelta | None = None
    deadline: timedelta | None = None
    tags: Iterable[str] | None = None
    metadata: Mapping[str, Any] | None = None
    unique: Unique | None = None
    on_conflict: OnConflict | None = None

    def __post_init__(self) -> None:
        if self.queue is not None:
            object.__setattr__(self, "queue", limits.text("queue", self.queue))
        if self.priority is not None:
            object.__setattr__(self, "priority", limits.priority(self.priority))
        if self.max_attempts is not None:
            most = limits.integer("max_attempts", self.max_attempts, 1, limits.ATTEMPTS)
            object.__setattr__(self, "max_attempts", most)
        if self.run_at is not None:
            limits.moment("run_at", self.run_at)
            if self.delay is not None:
                raise InvalidJob("delay", "cannot be given together with run_at")
        if self.delay is not None:
            limits.duration("delay", self.delay)
        if self.deadline is not None:
            limits.duration("deadline", self.deadline)
        if self.tags is not None:
            object.__setattr__(self, "tags", limits.tags(self.tags))
        if self.metadata is not None:
            object.__setattr__(self, "metadata", limits.metadata(self.metadata))
        checked(self.unique)
        if self.on_conflict is not None:
            on_conflict(self.on_conflict)

    @property
    def scheduled(self) -> bool:
        """Whether this makes a `ScheduledJob`: whenever a due time was given, also a past one."""
        return self.run_at is not None or self.delay is not None


@dataclass(frozen=True, slots=True)
class EnqueueRequest(Options):
    """What `enqueue()` would be called with: for follow-up specs that need options, and for `enqueue_many()`.

    `args` is a `JobArgs` instance; what is None takes the default of its class. `queue` is text of at
    most 200 characters, `priority` 1 (first) to 4, `max_attempts` 1 to 1000. `run_at` (an aware
    datetime) or `delay` (a positive timedelta, counted by the database's clock from the flush) make it a
    scheduled job; giving both is refused. `deadline` (a positive timedelta) bounds one attempt's run.
    `tags` (at most 20) replace those of the class. `metadata` is a JSON object. `unique` says of which jobs
    this would be a duplicate, and `on_conflict` what happens to one: "raise" or "skip".

    Does no I/O. Raises `InvalidJob` naming the field.
    """

    args: JobArgs

    def __post_init__(self) -> None:
        if not isinstance(self.args, JobArgs):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidJob("args", f"must be a JobArgs instance, not {type(self.args).__name__}")
        Options.__post_init__(self)

    @classmethod
    def of(cls, args: JobArgs, options: Options) -> Self:
        """A request with options that were built before."""
        return cls(args, **{field.name: getattr(options, field.name) for field in fields(Options)})

    def columns(self) -> dict[str, Any]:
        """Values for the mapped attributes of the new row; what has a server default may be absent.

        `delay` is not among them: its due time is computed from the database's clock in the flush.
        """
        data = dump(self.args)
        values = self.settings()
        if (unique := self.uniqueness) is not None:
            values["unique_key"] = unique.key(values["kind"], values["queue"], data)
            values["unique_states"] = unique.mask
        return values | {"args": data}

    @property
    def uniqueness(self) -> Unique | None:
        """What makes another job the same, by the request or by its class."""
        return type(self.args).__awa__.unique if self.unique is None else self.unique

    def settings(self) -> dict[str, Any]:
        """The columns that do not depend on what the arguments hold."""
        kind = type(self.args).__awa__
        deadline = kind.deadline if self.deadline is None else self.deadline
        values: dict[str, Any] = {
            "kind": kind.kind,
            "queue": kind.queue if self.queue is None else self.queue,
            "priority": kind.priority if self.priority is None else self.priority,
            "max_attempts": kind.max_attempts if self.max_attempts is None else self.max_attempts,
        }
        if tags := kind.tags if self.tags is None else self.tags:
            values["tags"] = list(tags)
        if deadline is not None:
            values["deadline_seconds"] = deadline.total_seconds()
        if self.metadata is not None:
            values["meta"] = self.metadata
        if self.run_at is not None:
            values["run_at"] = self.run_at
        if kind.version != 1:
            values["args_version"] = kind.version
        return values
