"""What each role is for, done for real: small programs that run as that role alone.

Each duty arranges what it needs as the owner and then works as the role. All of them together take every privilege of
the role to get through: `test_roles` takes one after the other away.
"""

from collections.abc import Callable

from tests.schema.roles.duties.apps import cancels, enqueues, enqueues_many, looks, reads, receives, resolves, resumes
from tests.schema.roles.duties.given import Duty
from tests.schema.roles.duties.processes import handles, maintains, runs, stands_by
from tests.schema.roles.least import DRIVERS

DUTIES: dict[str, tuple[Duty, ...]] = {
    "producer": (enqueues, enqueues_many, cancels, reads),
    "worker": (handles, runs, enqueues, enqueues_many, cancels),
    "maintenance": (maintains, stands_by),
    "callback": (resolves, resumes, receives),
    "viewer": (looks,),
}
#: With the drivers in which they may differ: processes send the same statements as sessions, over two of them.
EACH: list[tuple[str, Callable[..., None], str]] = [
    *(("producer", duty, driver) for duty in (enqueues, enqueues_many, cancels) for driver in DRIVERS),
    *(("worker", handles, driver) for driver in DRIVERS),
    *(("worker", runs, driver) for driver in DRIVERS[::3]),
    *(("maintenance", maintains, driver) for driver in DRIVERS[::3]),
    *(("callback", resolves, driver) for driver in DRIVERS),
    *(("callback", receives, driver) for driver in DRIVERS[::3]),
    *(("viewer", looks, driver) for driver in DRIVERS),
]
