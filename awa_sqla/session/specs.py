"""One registered follow-up, and what may come out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from awa_sqla import limits
from awa_sqla.args import JobArgs
from awa_sqla.errors import FollowUpError
from awa_sqla.models.base import Outcome
from awa_sqla.models.snapshot import JobSnapshot
from awa_sqla.requests import EnqueueRequest
from awa_sqla.session.events import EVENTS
from awa_sqla.session.lineage import Parent
from awa_sqla.session.rows import build


@dataclass(frozen=True, slots=True)
class Spec:
    """One registered follow-up: its identity in the database is (kind, outcome, name)."""

    kind: str
    outcome: Outcome
    name: str
    args_class: type[JobArgs]
    function: Callable[[Any], Any]

    def rows(self, snapshot: JobSnapshot, context: Mapping[str, Any]) -> list[object]:
        """The transient rows of what the function returns for one transition.

        Raises `FollowUpError` for whatever goes wrong in it; the user's exception is the cause.
        """
        parent = Parent.of(snapshot, self.outcome)
        try:
            event = EVENTS[self.outcome].load(self.args_class, snapshot, context)
            return [self._row(request, parent) for request in _requests(self.function(event))]
        except _NonsenseError as exc:
            raise FollowUpError(self.name, snapshot.id, self.kind, self.outcome, str(exc)) from None
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # SystemExit in a spec must end neither a worker nor a rescue
            detail = f"raised {type(exc).__name__}"
            raise FollowUpError(self.name, snapshot.id, self.kind, self.outcome, detail) from exc

    def _row(self, request: EnqueueRequest, parent: Parent) -> object:
        row = build(request, parent)
        row.origin = (self.name, parent.id, self.kind, self.outcome)
        row.on_conflict = request.on_conflict or "skip"  # a duplicate must not block its trigger
        return row


class _NonsenseError(TypeError):
    pass


def _requests(returned: object) -> Iterator[EnqueueRequest]:
    if isinstance(returned, JobArgs):  # before "iterable": a pydantic model iterates over its fields
        yield EnqueueRequest(returned)
    elif isinstance(returned, EnqueueRequest):
        yield returned
    elif returned is None:
        raise _NonsenseError("returned None (a forgotten return?); return [] when nothing is to follow")
    elif isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping):
        for item in cast("Iterable[object]", returned):
            if isinstance(item, JobArgs):
                yield EnqueueRequest(item)
            elif isinstance(item, EnqueueRequest):
                yield item
            else:
                raise _NonsenseError(f"returned a {type(item).__name__} among its follow-ups, not a JobArgs")
    else:
        kind = limits.type_name(returned)
        raise _NonsenseError(f"returned a {kind}, not a JobArgs, EnqueueRequest or list of those")
