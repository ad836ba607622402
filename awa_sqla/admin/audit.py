"""The audit log: each deed of an operator leaves an entry in the transaction of the deed."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import insert
from sqlalchemy.orm import Session

from awa_sqla import limits
from awa_sqla.models.upkeep import AuditEntry

#: Text of a reason, in characters.
REASON = 2000


@dataclass(frozen=True, slots=True)
class Deed:
    """Who does something, why, and by which way. Raises `InvalidJob` naming `actor` or `reason`."""

    actor: str | None = None
    reason: str | None = None
    source: str = "python"

    def __post_init__(self) -> None:
        if self.actor is not None:
            limits.text("actor", self.actor)
        if self.reason is not None:
            limits.text("reason", self.reason, longest=REASON)

    def record(self, session: Session, verb: str, target: str, *, count: int = 1) -> None:
        """Write the entry: what was done, to which thing, and to how many."""
        session.execute(
            insert(AuditEntry).values(
                actor=self.actor, reason=self.reason, source=self.source, verb=verb, target=target, count=count
            )
        )
