"""Declarative tables and views, and nothing that needs a session or a connection.

`base` holds states, outcomes and the MetaData; `job` the three job tables and the view over them;
`records` everything beside them; `upkeep` the tables of maintenance; `wakeups` the NOTIFY trigger and its names.
"""

from awa_sqla.models.base import MARK, SCHEMA, AwaBase, JobState, Outcome, ViewBase
from awa_sqla.models.job import Attempt, DeadLetter, Job, JobRecord, ScheduledJob
from awa_sqla.models.records import (
    CallbackReceipt,
    FollowUpSpec,
    Obligation,
    Queue,
    RuntimeInstance,
    SchemaVersion,
    UniqueClaim,
)
from awa_sqla.models.snapshot import JobSnapshot
from awa_sqla.models.upkeep import AuditEntry, CronSchedule, JobCount, Leader

metadata = AwaBase.metadata

for _table in (*metadata.tables.values(), *ViewBase.metadata.tables.values()):
    _table.info[MARK] = True

__all__ = [
    "SCHEMA",
    "Attempt",
    "AuditEntry",
    "AwaBase",
    "CallbackReceipt",
    "CronSchedule",
    "DeadLetter",
    "FollowUpSpec",
    "Job",
    "JobCount",
    "JobRecord",
    "JobSnapshot",
    "JobState",
    "Leader",
    "Obligation",
    "Outcome",
    "Queue",
    "RuntimeInstance",
    "ScheduledJob",
    "SchemaVersion",
    "UniqueClaim",
    "metadata",
]
