"""Everything that happens inside the caller's transaction, and nothing that begins or ends one.

The way in: `enqueue` adds a job; `verbs` (claim, complete, fail, retry_after, snooze, set_progress), `cancel`
and `batch` (complete_many) change one. The way through: a verb runs a guarded statement (`statements`, built
from `table`), stages its outcome in the `ledger` of the innermost transaction, and the next flush (`listeners`)
`drain`s it: registered `follow_ups` are called, and specs that only the `catalogue` knows become obligations.
`guards` refuse every other way of writing job rows.

Nothing here knows of workers, and nothing here opens a session or a connection of its own.
"""
