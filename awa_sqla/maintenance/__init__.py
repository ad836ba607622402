"""What keeps the tables moving when nobody claims, and small when nobody looks.

Promotion, rescue, obligations; ageing, retention, counts; periodic schedules. Each lane is a plain function over the
caller's Session that does one bounded piece of work; SKIP LOCKED and compare-and-set make it safe to run the same lane
in several processes. `leader` and `leadership` say which process runs them, `lanes` what a pass is, `service` when.
Workers have a service beside their queues (`awa_sqla.worker`).
"""

from awa_sqla.maintenance.age import age
from awa_sqla.maintenance.cron import Cron
from awa_sqla.maintenance.obligations import Dispatched, any_due, dispatch_obligation
from awa_sqla.maintenance.promote import Promoted, next_due, promote
from awa_sqla.maintenance.prune import Pruned, prune_dead_letters, prune_jobs, prune_records
from awa_sqla.maintenance.rescue import rescue, rescue_callbacks, rescue_overdue, rescue_stale
from awa_sqla.maintenance.rollup import Counted, count_finished, finished_counts

__all__ = [
    "Counted",
    "Cron",
    "Dispatched",
    "Promoted",
    "Pruned",
    "age",
    "any_due",
    "count_finished",
    "dispatch_obligation",
    "finished_counts",
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
