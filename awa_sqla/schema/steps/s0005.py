"""Step 5: rate limits of queues, and how busy each process is.

Frozen text: once released, a step never changes.
"""

from awa_sqla.schema.steps.step import Step, exclusive

UP = (
    """\
ALTER TABLE {schema}.queue_meta
    ADD COLUMN declared_rate_per_second DOUBLE PRECISION,
    ADD COLUMN declared_rate_burst INTEGER,
    ADD COLUMN override_rate_per_second DOUBLE PRECISION,
    ADD COLUMN override_rate_burst INTEGER,
    ADD CONSTRAINT ck_queue_meta_rates CHECK (declared_rate_per_second > 0 AND declared_rate_burst >= 1
        AND override_rate_per_second > 0 AND override_rate_burst >= 1)""",
    """\
ALTER TABLE {schema}.runtime_instances
    ADD COLUMN concurrency INTEGER DEFAULT 0 NOT NULL,
    ADD COLUMN running INTEGER DEFAULT 0 NOT NULL,
    ADD COLUMN listening BOOLEAN DEFAULT false NOT NULL""",
)

DOWN = (
    """\
ALTER TABLE {schema}.runtime_instances
    DROP COLUMN concurrency,
    DROP COLUMN running,
    DROP COLUMN listening""",
    """\
ALTER TABLE {schema}.queue_meta
    DROP CONSTRAINT ck_queue_meta_rates,
    DROP COLUMN declared_rate_per_second,
    DROP COLUMN declared_rate_burst,
    DROP COLUMN override_rate_per_second,
    DROP COLUMN override_rate_burst""",
)

_LOCKS = exclusive("queue_meta", "runtime_instances")

STEP = Step(UP, DOWN, locks=_LOCKS, down_locks=_LOCKS)
