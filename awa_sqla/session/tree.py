"""`lineage()`: the whole tree a job belongs to, wherever its rows live."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from sqlalchemy import BigInteger, bindparam, or_, select

from awa_sqla.errors import JobNotFound
from awa_sqla.models.job import DeadLetter, Job, JobRecord, ScheduledJob
from awa_sqla.models.snapshot import JobSnapshot
from awa_sqla.session.cancel import id_of
from awa_sqla.session.target import SyncSession, sync_session

_root = bindparam("root", type_=BigInteger)
_TREE = (
    select(JobRecord)
    .where(or_(JobRecord.id == _root, JobRecord.root_id == _root))
    .order_by(JobRecord.id)
    .execution_options(populate_existing=True)
)


def lineage(
    session: SyncSession, job_or_id: Job | ScheduledJob | DeadLetter | JobRecord | JobSnapshot | int, /
) -> list[JobRecord]:
    """The tree of `job_or_id`: the root and everything it brought about, depth first, siblings by id.

    Any job of the tree will do, as an object or by its id. Jobs that retention has removed are missing, and what they
    brought about stands at the top level then. Returns this session's records, fully loaded and as they are now. Two
    statements. Raises `JobNotFound`, `InvalidJob` (job), `UnsupportedSession`. (DESIGN 6.2)
    """
    target = sync_session(session, "lineage")
    job_id = id_of(target, job_or_id)
    found = target.execute(select(JobRecord.root_id).where(JobRecord.id == job_id)).one_or_none()
    if found is None:
        raise JobNotFound(job_id)
    records = target.scalars(_TREE, {"root": job_id if found[0] is None else found[0]}).all()
    return list(_depth_first(records))


def _depth_first(records: Sequence[JobRecord]) -> Iterator[JobRecord]:
    present = {record.id for record in records}
    below: defaultdict[int | None, list[JobRecord]] = defaultdict(list)
    for record in records:
        below[record.parent_id if record.parent_id in present else None].append(record)
    open_ends = below[None][::-1]
    while open_ends:
        record = open_ends.pop()
        yield record
        open_ends.extend(reversed(below[record.id]))
