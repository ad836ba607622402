"""Guards that a soak can take out of its processes: those of the races, and what keeps a tick from firing twice."""

from __future__ import annotations

import re

from tests.races.sabotage import GUARDS as OF_RACES
from tests.races.sabotage import SWEEP_GUARDS, edited

_SEEN = re.compile(
    r"(awa\.)?cron_jobs\.last_enqueued_at IS NOT DISTINCT FROM ((%\(seen\)s|\$\d+)(::TIMESTAMP WITH TIME ZONE)?)"
)


def _without_seen(statement: str) -> str:
    """Whatever a schedule has fired since it was read."""
    return _SEEN.sub(r"\2 IS NOT DISTINCT FROM \2", statement)


GUARDS = OF_RACES | SWEEP_GUARDS | {"cron": lambda: edited(_without_seen)}
