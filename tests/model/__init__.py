"""The stateful model: random histories of several sessions, held against a queue in plain Python.

* `application` is the application under test: its kinds, three plain and four unique ones, their specs, hooks;
* `reference` is the queue in plain Python, with transactions and savepoints over the jobs of `rows`;
* `machine` draws the steps: `verbs`, `callbacks`, `boundaries` (transactions, identity map, crashes), `maintenance`,
  and `uniques` (unique, bulk and late-bound jobs); `stories` puts some of them in a row;
* `checks` compares what is committed.

Locks: in one thread a session that waited for another would wait for ever, so each step picks jobs that no other
session has changed and not yet committed, and unique keys that none has claimed or is going to claim; what skips locked
rows (claim, promote, rescue, dispatch) is drawn freely, but for a dispatch that would have to wait for a key.
All connections have a short `lock_timeout`: a statement that waits although it must not is an error, and fails the run.
"""
