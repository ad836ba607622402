"""Step 3: callbacks are found by their id, and those that are late by their time.

Frozen text: once released, a step never changes.
"""

UP = (
    "CREATE UNIQUE INDEX ix_jobs_hot_callback ON {schema}.jobs_hot (callback_id) WHERE callback_id IS NOT NULL",
    """\
CREATE INDEX ix_jobs_hot_callback_timeout ON {schema}.jobs_hot (callback_timeout_at)
WHERE state = 'waiting_external'""",
)

DOWN = (
    "DROP INDEX {schema}.ix_jobs_hot_callback_timeout",
    "DROP INDEX {schema}.ix_jobs_hot_callback",
)
