"""What keeps the tables moving when nobody claims, and small when nobody looks.

Promotion, rescue, obligations; retention. Each lane is a plain function over the caller's Session that does one bounded
piece of work; SKIP LOCKED makes it safe to run the same lane in several processes. Workers run them beside their queues
(`awa_sqla.worker`).
"""

from awa_sqla.maintenance.obligations import Dispatched, any_due, dispatch_obligation
from awa_sqla.maintenance.promote import Promoted, next_due, promote
from awa_sqla.maintenance.prune import Pruned, prune_dead_letters, prune_jobs, prune_records
from awa_sqla.maintenance.rescue import rescue, rescue_callbacks, rescue_overdue, rescue_stale

__all__ = [
    "Dispatched",
    "Promoted",
    "Pruned",
    "any_due",
    "dispatch_obligation",
    "next_due",
    "promote",
    "prune_dead_letters",
    "prune_jobs",
    "prune_records",
    "rescue",
    "rescue_callbacks",
    "rescue_overdue",
    "rescue_stale",
]
