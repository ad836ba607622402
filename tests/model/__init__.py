"""The stateful model: random histories of several sessions, held against a queue in plain Python.

* `application` is the application under test: three kinds, their specs, hooks;
* `reference` is the queue in plain Python, with transactions and savepoints;
* `machine` draws the steps: `verbs`, `boundaries` (transactions, identity map, crashes), `maintenance`;
* `checks` compares what is committed.

Locks: in one thread a session that waited for another would wait for ever, so each step picks jobs that no other
session has changed and not yet committed; what skips locked rows (claim, promote, rescue, dispatch) is drawn freely.
All connections have a short `lock_timeout`: a statement that waits although it must not is an error, and fails the run.
"""
