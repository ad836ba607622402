"""What operators do: the one service layer for the command line, the web and your own code.

Like the other verbs these are operations of the caller's session: what they change is committed with the caller's
transaction, and so is their entry in the audit log, which says who (`actor`) did what and why (`reason`). What they
return is fully loaded and belongs to no session, unless it says otherwise. `awa_sqla.asyncio.admin` mirrors them.
"""

from awa_sqla.admin.schedules import (
    delete_schedule,
    list_schedules,
    next_fires,
    pause_schedule,
    resume_schedule,
    trigger_schedule,
)

__all__ = [
    "delete_schedule",
    "list_schedules",
    "next_fires",
    "pause_schedule",
    "resume_schedule",
    "trigger_schedule",
]
