"""What a sweep does with a job whose unique key was taken meanwhile: it is cancelled as a duplicate.

Jobs that are unique in some states only, pending ones for instance, hold no key in between. Coming back, they claim it
again; a person who brings them back is told of a conflict, a sweep has nobody to tell.
"""

from __future__ import annotations

import logging

from sqlalchemy import Text, bindparam, func, literal_column, select, true
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from awa_sqla.errors import UniqueConflict
from awa_sqla.models.base import JobState
from awa_sqla.models.job import Job, ScheduledJob
from awa_sqla.session.cancel import cancel_row
from awa_sqla.session.unique import comes_in, reenter
from awa_sqla.sqlstates import LOCK_NOT_AVAILABLE, sqlstate

log = logging.getLogger("awa_sqla.maintenance")

#: A sweep cannot wait for the transaction of whoever has claimed the key.
PATIENCE = "10ms"
_TIMEOUT = literal_column("'lock_timeout'", Text)
_GET = select(func.current_setting(_TIMEOUT))
_SET = select(func.set_config(_TIMEOUT, bindparam("timeout", type_=Text), true()))


def may_come_in(session: Session, job: Job | ScheduledJob, state: JobState) -> bool:
    """Claim the key of a locked row that comes back into its unique states, if it does.

    False when it may not: it was cancelled as a duplicate, its follow-ups owed, or must be looked at again later,
    because an open transaction has claimed the key.
    """
    if not comes_in(job.unique_states, job.state, state):
        return True
    job_id = job.id
    try:
        with session.begin_nested():
            before = session.scalar(_GET)
            session.execute(_SET, {"timeout": PATIENCE})
            reenter(session, job, state)
            session.execute(_SET, {"timeout": before})  # a savepoint that is rolled back does it by itself
    except UniqueConflict as exc:
        log.warning("job %s is cancelled: it became a duplicate of job %s", job_id, exc.existing_id)
        cancel_row(session, job_id, f"duplicate of job {exc.existing_id}", defer=True)
        return False
    except DBAPIError as exc:
        if sqlstate(exc) != LOCK_NOT_AVAILABLE:
            raise
        return False
    return True
