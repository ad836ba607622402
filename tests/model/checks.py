"""What is committed, compared with the reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tests.model.application import Cause, Key, cause_of, key_of
from tests.model.reference import Reference, Row
from tests.worlds import Database

_JOBS = """
SELECT jobs.*, jobs.run_at <= clock_timestamp() AS due, jobs.callback_timeout_at < clock_timestamp() AS expired,
    dlq_reason, original_run_lease
FROM jobs LEFT JOIN dlq_entries USING (id)
"""
_OWED = """
SELECT id, job_id, outcome, spec, attempts, last_error, (snapshot ->> 'run_lease')::bigint AS lease
FROM follow_up_obligations
"""
#: A claim without a row that has its key, in one of its unique states; or a row in one without its claim.
_LIES = """
SELECT claim.job_id, job.id FROM job_unique_claims claim
FULL JOIN (SELECT * FROM jobs WHERE unique_key IS NOT NULL AND in_unique_state(state, unique_states)) job
ON claim.job_id = job.id AND claim.unique_key = job.unique_key
WHERE claim.job_id IS NULL OR job.id IS NULL
"""
#: Of dead letters.
REASONS = (
    "terminal_error",
    "max_attempts_exhausted",
    "heartbeat_stale",
    "callback_timeout",
    "callback_failed",
    "wait_for_callback_contract_violation",
)


def compare(reference: Reference, database: Database, told: list[Any]) -> None:
    """Everything that must hold after a commit. Learns the ids of new jobs. Raises AssertionError."""
    found: dict[Key, Any] = {}
    for row in database.rows(_JOBS):
        key = key_of(row.kind, row.args, row.metadata)
        assert key not in found, f"{key} is stored twice: {found[key].stored_in} and {row.stored_in}"
        found[key] = row
    assert len({row.id for row in found.values()}) == len(found), "two jobs have one id"
    _same("jobs", set(found), set(reference.committed))
    for key, row in found.items():
        expected = reference.committed[key]
        _compare_row(row, expected)
        if expected.id is None:
            reference.committed[key] = replace(expected, id=row.id)
    _compare_claims(reference, database)
    leases = [row.run_lease for row in found.values() if row.run_lease]
    assert len(set(leases)) == len(leases), "two jobs have one lease"
    _compare_follow_ups(reference, database, Counter(filter(None, map(cause_of, found))))
    assert told == reference.told, f"hooks were told {told}, and should have been {reference.told}"


def _compare_claims(reference: Reference, database: Database) -> None:
    """Each claim has its row, each row in a unique state its claim, and no key has two."""
    assert database.rows(_LIES) == []
    holders = [row for row in reference.committed.values() if row.holds]
    assert len({row.claim for row in holders}) == len(holders), f"a key is held twice: {holders}"
    claims = database.rows("SELECT job_id FROM job_unique_claims")
    _same("holders", {claim.job_id for claim in claims}, {row.id for row in holders})


def _compare_row(row: Any, expected: Row) -> None:
    ended = row.state in ("completed", "failed", "cancelled", "retryable")
    actual = {
        "id": row.id if expected.id is not None else None,
        "state": row.state,
        "store": row.stored_in,
        "queue": row.queue,
        "priority": row.priority,
        "attempt": row.attempt,
        "max_attempts": row.max_attempts,
        "snoozes": row.snoozes,
        "lease": row.run_lease,
        "errors": tuple(entry["error"] for entry in row.errors),
        "progress": row.progress,
        "result": row.result,
        "due": row.due if row.stored_in == "scheduled" else expected.due,
        "callback": row.callback_id and str(row.callback_id),
        "expired": bool(row.expired),
        "attended": row.attended_at is not None,
        "answer": row.callback_answer,
        "parent": row.parent_id,
        "root": row.root_id,
        "parent_outcome": row.parent_outcome,
    }
    wanted = {name: getattr(expected, name) for name in actual}
    wrong = {name: (value, wanted[name]) for name, value in actual.items() if value != wanted[name]}
    assert not wrong, f"{expected.key} (job {row.id}): {{column: (found, expected)}} is {wrong}"
    assert all({"error", "type", "attempt", "at"} <= set(entry) for entry in row.errors), row.errors
    assert (row.heartbeat_at is not None) == expected.is_held, f"the heartbeat of {row}"
    assert (row.callback_timeout_at is None) == (row.callback_id is None), f"the timeout of {row}"
    assert (row.finalized_at is not None) == ended, f"finalized_at of {row}"
    assert row.deadline_at is None
    if row.stored_in == "dead":
        assert row.original_run_lease == row.run_lease
        assert row.dlq_reason in REASONS


def _compare_follow_ups(reference: Reference, database: Database, made: Counter[Cause]) -> None:
    """Follow-ups and obligations are the committed outcomes times their specs, once each, but for duplicates."""
    obligations = database.rows(_OWED)
    owed = Counter((row.job_id, row.outcome, row.lease, row.spec) for row in obligations)
    due = {happened.cause(spec): spec.parts for happened in reference.outcomes for spec in happened.specs}
    assert len(due) == sum(len(happened.specs) for happened in reference.outcomes), "an outcome happened twice"
    skipped = reference.skipped
    _same("causes", set(made) | set(owed) | set(skipped), set(due))
    for cause, parts in due.items():
        found = (made[cause] + skipped[cause], owed[cause])
        assert found in ((parts, 0), (0, 1)), f"{cause}: made {made[cause]}, owed {owed[cause]}"
    _same("obligations", set(owed), set(reference.owed))
    for row in obligations:
        expected = reference.owed[row.job_id, row.outcome, row.lease, row.spec]
        assert (row.attempts, row.last_error is not None) == (expected.tries, bool(expected.tries)), row


def _same(what: str, found: set[Any], expected: set[Any]) -> None:
    assert found == expected, f"{what}: too many {found - expected}, missing {expected - found}"
