"""The statements that end many attempts at once."""

from __future__ import annotations

from sqlalchemy import BigInteger, and_, bindparam, column, func, select, update
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from awa_sqla.models.base import JobState
from awa_sqla.models.job import Job
from awa_sqla.session.guards import MANAGED
from awa_sqla.session.statements import effects, owned, stays_held
from awa_sqla.session.table import TRANSITIONS

# One dimension: a result may itself be a list, and would else be taken for a second one.
_held_rows = (
    func.unnest(
        bindparam("ids", type_=ARRAY(BigInteger)),
        bindparam("leases", type_=ARRAY(BigInteger)),
        bindparam("results", type_=ARRAY(JSONB(none_as_null=True), dimensions=1)),
    )
    .table_valued(column("id", BigInteger), column("run_lease", BigInteger), column("result", JSONB), name="held")
    .render_derived()
)

# Locked in the order of their ids: two batches cannot wait for each other.
_locked = (
    select(Job.id, _held_rows.c.result)
    .join(_held_rows, and_(Job.id == _held_rows.c.id, Job.run_lease == _held_rows.c.run_lease))
    .where(
        owned,
        stays_held(JobState.COMPLETED),
    )
    .order_by(Job.id)
    .with_for_update(of=Job, key_share=True)
    .cte("locked")
)

COMPLETE_MANY = (
    update(Job)
    .where(Job.id == _locked.c.id)
    .values(**effects(TRANSITIONS["complete"]), result=_locked.c.result)
    .returning(Job.id, Job.kind)
    .execution_options(synchronize_session=False, **{MANAGED: True})
)

#: Of jobs that were left out, those that are some attempt's: they have to claim their unique keys first.
LEFT_OUT = (
    select(Job.id, Job.run_lease)
    .where(
        Job.id == func.any(bindparam("ids", type_=ARRAY(BigInteger))),
        owned,
    )
    .order_by(Job.id)
)

LOAD_MANY = (
    select(Job)
    .where(Job.id == func.any(bindparam("ids", type_=ARRAY(BigInteger))))
    .order_by(Job.id)
    .execution_options(populate_existing=True)
)
