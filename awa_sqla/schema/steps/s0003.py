"""Step 3: callbacks are found by their id, and those that are late by their time.

Frozen text: once released, a step never changes.
"""

from awa_sqla.schema.steps.step import Index, Step, exclusive

DOWN = (
    "DROP INDEX IF EXISTS {schema}.ix_jobs_hot_callback_timeout",
    "DROP INDEX IF EXISTS {schema}.ix_jobs_hot_callback",
)

STEP = Step(
    (),
    DOWN,
    locks={},
    down_locks=exclusive("jobs_hot"),
    after=(
        Index("jobs_hot", "ix_jobs_hot_callback", "(callback_id) WHERE callback_id IS NOT NULL", unique=True),
        Index("jobs_hot", "ix_jobs_hot_callback_timeout", "(callback_timeout_at) WHERE state = 'waiting_external'"),
    ),
)
