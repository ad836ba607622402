"""From staged transitions to rows: call the specs, add what they return, owe what others must do.

The drain adds rows and never takes one back: everything is computed before anything is added, so a spec
that raises leaves no half of a follow-up behind. Its transition stays staged, and every later flush and commit
raises again until the caller rolls back: transition and follow-up cannot be parted.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from awa_sqla.models.base import Outcome
from awa_sqla.models.records import Obligation
from awa_sqla.models.snapshot import JobSnapshot
from awa_sqla.session import catalogue, ledger
from awa_sqla.session.events import plain
from awa_sqla.session.ledger import Staged
from awa_sqla.session.marks import registry_of


def drain(session: Session, *, outer: bool = False) -> None:
    """Bring everything staged in the innermost transaction into `session.new`; with `outer`, in all open ones.

    Not re-entrant: a spec that queries would otherwise flush, and run a second time. Raises `FollowUpError`.
    """
    innermost = ledger.current(session)
    found = ledger.unsettled(session) if outer else [innermost] if innermost is not None else []
    if any(one.draining for one in found) or not any(one.staged for one in found):
        return
    for one in found:
        one.draining = True
    try:
        with session.no_autoflush:
            while fresh := [entry for one in found for entry in one.staged if not entry.computed]:
                brought = [_follow_ups(session, entry) for entry in fresh]
                for entry, rows in zip(fresh, brought, strict=True):
                    entry.rows.extend(rows)
                    entry.computed = True
            for entry in [entry for one in found for entry in one.staged]:
                # Added again when they were expunged meanwhile, by a vetoed flush or expunge_all().
                session.add_all(row for row in ledger.missing(session, entry.rows) if row not in session)
    finally:
        for one in found:
            one.draining = False


def _follow_ups(session: Session, entry: Staged) -> list[object]:
    outcome = entry.outcome
    if outcome is None:
        return []
    registry, snapshot = registry_of(session), entry.snapshot
    local = registry.specs_of(snapshot.kind, outcome) if registry else ()
    # A spec that is older than the row cannot read it: a process of the newer version will dispatch it.
    able = [] if entry.defer else [spec for spec in local if snapshot.args_version <= spec.args_class.__awa__.version]
    owed = [spec.name for spec in local if spec not in able]
    owed += sorted(catalogue.names(session, snapshot.kind, outcome) - {spec.name for spec in local})
    rows = [row for spec in able for row in spec.rows(snapshot, entry.context)]
    why = ledger.reason_to_defer(session)
    return rows + [_obligation(snapshot, outcome, name, entry, why) for name in owed]


def _obligation(snapshot: JobSnapshot, outcome: Outcome, name: str, entry: Staged, error: str | None) -> Obligation:
    return Obligation(
        job_id=snapshot.id,
        kind=snapshot.kind,
        outcome=outcome.value,
        spec=name,
        snapshot=snapshot.to_json(),
        context=plain(entry.context),
        last_error=error,
    )
