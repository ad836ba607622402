"""What keeps the tables moving when nobody claims: promotion, rescue, obligations, periodic schedules.

Each lane is a plain function over the caller's Session that does one bounded piece of work; SKIP LOCKED makes it
safe to run the same lane in several processes. Workers run them beside their queues (`awa_sqla.worker`).
"""

from awa_sqla.maintenance.cron import Cron
from awa_sqla.maintenance.obligations import Dispatched, any_due, dispatch_obligation
from awa_sqla.maintenance.promote import Promoted, next_due, promote
from awa_sqla.maintenance.rescue import rescue

__all__ = ["Cron", "Dispatched", "Promoted", "any_due", "dispatch_obligation", "next_due", "promote", "rescue"]
