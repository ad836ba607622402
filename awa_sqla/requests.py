"""One request to enqueue, as data: the args and the options of one job, checked when it is built.

Every road that makes a job (`enqueue`, `Job.of`, a follow-up, a dispatched obligation) goes through an
`EnqueueRequest`, so that defaults, limits and error texts are the same on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from awa_sqla import limits
from awa_sqla.args import JobArgs, dump
from awa_sqla.errors import InvalidJob


@dataclass(frozen=True, slots=True)
class EnqueueRequest:
    """What `enqueue()` would be called with. Returned by follow-up specs that need options.

    `args` is a `JobArgs` instance; what is None takes the default of its class. `queue` is text of at
    most 200 characters, `priority` 1 (first) to 4, `max_attempts` 1 to 1000. `run_at` (an aware
    datetime) or `delay` (a positive timedelta, counted by the database's clock from the flush) make it a
    scheduled job; giving both is refused. `deadline` (a positive timedelta) bounds one attempt's run.
    `tags` (at most 20) replace those of the class. `metadata` is a JSON object.

    Does no I/O. Raises `InvalidJob` naming the field.
    """

    args: JobArgs
    queue: str | None = None
    priority: int | None = None
    max_attempts: int | None = None
    run_at: datetime | None = None
    delay: timedelta | None = None
    deadline: timedelta | None = None
    tags: Iterable[str] | None = None
    metadata: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.args, JobArgs):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidJob("args", f"must be a JobArgs instance, not {type(self.args).__name__}")
        if self.queue is not None:
            limits.text("queue", self.queue)
        if self.priority is not None:
            limits.priority(self.priority)
        if self.max_attempts is not None:
            limits.integer("max_attempts", self.max_attempts, 1, limits.ATTEMPTS)
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

    @property
    def scheduled(self) -> bool:
        """Whether this makes a `ScheduledJob`: whenever a due time was given, also a past one."""
        return self.run_at is not None or self.delay is not None

    def columns(self) -> dict[str, Any]:
        """Values for the mapped attributes of the new row; what has a server default may be absent.

        `delay` is not among them: its due time is computed from the database's clock in the flush.
        """
        kind = type(self.args).__awa__
        deadline = kind.deadline if self.deadline is None else self.deadline
        values: dict[str, Any] = {
            "args": dump(self.args),
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
        return values
