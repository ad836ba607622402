"""Claims jobs and runs their handlers.

`runner` is the life of the process; `dispatch` claims, `run` performs one attempt, `transaction` wraps handlers that
share a session with their outcome, `finalize` writes outcomes, `heartbeat` keeps leases alive from a thread of its
own, `listen` hears wake-ups, `upkeep` runs maintenance beside it all, and `maintainer` is the process that does nothing
else. Every change of a job goes through the verbs of `awa_sqla.session`; a handler never shares a session with the
worker's books.
"""

from awa_sqla.worker.config import QueueConfig, RateLimit, Retention
from awa_sqla.worker.context import JobContext
from awa_sqla.worker.maintainer import Maintenance
from awa_sqla.worker.outcomes import Cancel, RetryAfter, Snooze, WaitForCallback
from awa_sqla.worker.runner import Worker

__all__ = [
    "Cancel",
    "JobContext",
    "Maintenance",
    "QueueConfig",
    "RateLimit",
    "Retention",
    "RetryAfter",
    "Snooze",
    "WaitForCallback",
    "Worker",
]
