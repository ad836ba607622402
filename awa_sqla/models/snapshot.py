"""`JobSnapshot`: a job's row as frozen plain data, for events, hooks, handlers and obligations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Self
from uuid import UUID

from pydantic import TypeAdapter
from sqlalchemy import inspect
from sqlalchemy.orm import InstanceState

from awa_sqla.args import A
from awa_sqla.models.base import JobState
from awa_sqla.models.job import SHARED, Attempt, DeadLetter, Job, JobRecord, ScheduledJob
from awa_sqla.stored import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """How a job stood at one moment: the columns of the job tables, detached from any session."""

    id: int
    parent_id: int | None = None
    root_id: int | None = None
    run_lease: int = 0
    run_at: datetime
    created_at: datetime
    attempted_at: datetime | None = None
    heartbeat_at: datetime | None = None
    deadline_at: datetime | None = None
    finalized_at: datetime | None = None
    callback_timeout_at: datetime | None = None
    deadline_seconds: float | None = None
    snoozes: int = 0
    priority: int = 2
    attempt: int = 0
    max_attempts: int = 25
    unique_states: int | None = None
    callback_id: UUID | None = None
    state: JobState
    kind: str
    queue: str = "default"
    worker_id: str | None = None
    parent_outcome: str | None = None
    unique_key: bytes | None = None
    args: dict[str, Any]
    meta: dict[str, Any]
    progress: dict[str, Any] | None = None
    result: Any = None
    tags: list[str]
    errors: list[dict[str, Any]]
    callback_filter: str | None = None
    callback_on_complete: str | None = None
    callback_on_fail: str | None = None
    callback_transform: str | None = None
    args_version: int = 1
    attended_at: datetime | None = None
    callback_answer: dict[str, Any] | None = None

    @classmethod
    def of(cls, row: Job | ScheduledJob | DeadLetter | JobRecord) -> Self:
        """The snapshot of a loaded row. Does no I/O; a row that is not loaded is a `KeyError`."""
        state: InstanceState[Any] = inspect(row)
        loaded = state.dict
        return cls(**{key: loaded[key] for key in SHARED})

    @property
    def lease(self) -> Attempt:
        """The attempt that this row was under."""
        return Attempt(self.id, self.run_lease)

    def args_as(self, args_class: type[A], /) -> A:
        """The arguments as an instance of `args_class`; raises like `Job.args_as`."""
        return decode(args_class, self.args, self.args_version)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data from which `from_json` makes an equal snapshot."""
        data: dict[str, Any] = _adapter.dump_python(self, mode="json", exclude={"unique_key"})
        return data | {"unique_key": None if self.unique_key is None else self.unique_key.hex()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobSnapshot:
        """The snapshot that `to_json` wrote, also one of an older or newer version of the package."""
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        if values.get("unique_key") is not None:
            values["unique_key"] = bytes.fromhex(values["unique_key"])
        return _adapter.validate_python(values)


_adapter = TypeAdapter(JobSnapshot)
