"""The job that a stored schedule stands for, as a transient row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from awa_sqla.models.job import Job
from awa_sqla.models.upkeep import CronSchedule
from awa_sqla.periodic import from_stored

#: The columns of a job that a schedule holds under the same names.
JOB_COLUMNS = (
    "kind",
    "queue",
    "args",
    "args_version",
    "priority",
    "max_attempts",
    "deadline_seconds",
    "tags",
    "metadata",
)


def job_of(schedule: CronSchedule, metadata: Mapping[str, Any]) -> Job:
    """The job of a schedule whose arguments are stored, with the same values as `enqueue()` would give it.

    Raises `InvalidJob` for a stored uniqueness that is none.
    """
    values = {key: getattr(schedule, key) for key in JOB_COLUMNS if key != "metadata"}
    given = {key: value for key, value in values.items() if value is not None}
    job = Job(**given, meta={**schedule.meta, **metadata})
    if schedule.uniqueness is not None:
        unique = from_stored(schedule.uniqueness)
        job.unique_key = unique.key(job.kind, job.queue, job.args)
        job.unique_states = unique.mask
    return job
