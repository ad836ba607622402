"""From a request to a transient row."""

from __future__ import annotations

from awa_sqla.models.job import Job, ScheduledJob
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session.lineage import Parent


def build(request: EnqueueRequest, parent: Parent | None) -> Job | ScheduledJob:
    """The transient row of a request."""
    values = request.columns()
    if parent is not None:
        values["parent_id"], values["root_id"] = parent.id, parent.root_id
        values["parent_outcome"] = None if parent.outcome is None else parent.outcome.value
    if not request.scheduled:
        return Job(**values)
    job = ScheduledJob(**values)
    job.pending_delay = request.delay
    return job
