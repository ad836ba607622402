"""`complete_many()`: a batch of attempts in one statement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import inspect
from sqlalchemy.orm import Session

from awa_sqla.errors import InvalidJob
from awa_sqla.models.base import Outcome
from awa_sqla.models.job import Attempt, Job
from awa_sqla.session import batch_statements, catalogue, happenings, ledger, marks
from awa_sqla.session.events import EVENTS
from awa_sqla.session.ledger import Staged
from awa_sqla.session.results import checked_result
from awa_sqla.session.rows import expire_record
from awa_sqla.session.steps import entered, refuse_reserved
from awa_sqla.session.target import SyncSession
from awa_sqla.session.verbs import complete_claiming


class Completion(NamedTuple):
    """One attempt to complete, with its result (JSON data of at most 1 MiB)."""

    attempt: Attempt
    result: Any = None


@dataclass(frozen=True, slots=True)
class CompletedBatch:
    """Ids of the jobs that were completed, and of those whose attempt had ended; both in input order."""

    completed: list[int]
    stale: list[int]


def complete_many(session: SyncSession, items: Iterable[Job | Attempt | Completion], /) -> CompletedBatch:
    """Complete many attempts at once; stale ones are listed, not raised.

    `items` are claimed Jobs, Attempts, or Completions with a result; several for one job are refused. Rows are
    locked in the order of their ids. One statement, and one more where rows must be loaded: for kinds that have
    follow-ups, and for jobs this session holds; and one where some are stale. Completed follow-ups come with the next
    flush.

    Raises `InvalidJob` (job, result; nothing was sent), `UniqueConflict` (like `complete()`, and some are completed:
    roll back), `FollowUpsNotAttached`, `UnsupportedSession`, `ConfigurationError`. (DESIGN 5)
    """
    target = entered(session, "complete_many", transition=True)
    if not isinstance(items, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJob("items", f"must be several attempts, not {type(items).__name__}")
    wanted = [_completion(item) for item in items]
    by_id = {item.attempt.id: item for item in wanted}
    for job_id in by_id:
        refuse_reserved(target, job_id)
    if len(by_id) != len(wanted):
        raise InvalidJob("items", "names the same job twice")
    if not wanted:
        return CompletedBatch([], [])
    parameters = {
        "ids": [item.attempt.id for item in wanted],
        "leases": [item.attempt.run_lease for item in wanted],
        "results": [item.result for item in wanted],
    }
    kinds: dict[int, str] = {row[0]: row[1] for row in target.execute(batch_statements.COMPLETE_MANY, parameters)}
    claimed = _claiming(target, [item for item in wanted if item.attempt.id not in kinds])
    _stage(target, kinds, by_id)
    for row in claimed:
        ledger.stage(target, Staged(row, Outcome.COMPLETED, {"result": by_id[row.id].result}))
    done = kinds.keys() | {row.id for row in claimed}
    return CompletedBatch(
        completed=[item.attempt.id for item in wanted if item.attempt.id in done],
        stale=[item.attempt.id for item in wanted if item.attempt.id not in done],
    )


def _claiming(session: Session, left: list[Completion]) -> list[Job]:
    """Complete those of the others that come back into their unique states, one by one. Nothing is staged yet."""
    if not left:
        return []
    rows = session.execute(batch_statements.LEFT_OUT, {"ids": [item.attempt.id for item in left]})
    there = {Attempt(*row) for row in rows}
    return [complete_claiming(session, item.attempt, item.result) for item in left if item.attempt in there]


def _stage(session: Session, kinds: dict[int, str], by_id: dict[int, Completion]) -> None:
    followed = {kind for kind in set(kinds.values()) if needs_row(session, kind, Outcome.COMPLETED)}
    key = inspect(Job).identity_key_from_primary_key
    for id_ in kinds:
        expire_record(session, id_)
    load = [id_ for id_, kind in kinds.items() if kind in followed or key((id_,)) in session.identity_map]
    if load:
        for row in session.scalars(batch_statements.LOAD_MANY, {"ids": load}):
            ledger.stage(session, Staged(row, Outcome.COMPLETED, {"result": by_id[row.id].result}))


def needs_row(session: Session, kind: str, outcome: Outcome) -> bool:
    """Whether a hook, or a follow-up here or elsewhere, wants to see the row after this transition."""
    registry = marks.registry_of(session)
    if registry is not None and registry.specs_of(kind, outcome):
        return True
    return happenings.wanted(session, EVENTS[outcome], kind) or bool(catalogue.names(session, kind, outcome))


def _completion(item: object) -> Completion:
    if isinstance(item, Completion):
        return Completion(Attempt.of(item.attempt), checked_result(item.result))
    return Completion(Attempt.of(item))
