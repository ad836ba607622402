"""One look at all queues: which have work, and what operators have set since.

The same query is the poll behind the notifications and the reading of overrides: an idle worker sends it every two
seconds, for any number of queues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, bindparam, column, false, func, or_, select
from sqlalchemy.dialects.postgresql import ARRAY, TEXT
from sqlalchemy.ext.asyncio import AsyncEngine

from awa_sqla.models.job import Job
from awa_sqla.models.records import Queue
from awa_sqla.session.statements import AS_OF, among
from awa_sqla.session.table import TRANSITIONS
from awa_sqla.worker.config import CONCURRENCY, HIGHEST_RATE, LOWEST_RATE, QueueConfig, RateLimit

#: Seconds: the shortest poll interval that an override can set.
SHORTEST_POLL = 0.01

_asked = func.unnest(bindparam("queues", type_=ARRAY(TEXT))).table_valued(column("queue", TEXT), name="asked")
_asked = _asked.render_derived()
_paused = and_(Queue.paused_at.is_not(None), or_(Queue.paused_until.is_(None), Queue.paused_until > AS_OF))
_has_work = (
    select(Job.id)
    .where(among(Job.state, TRANSITIONS["claim"].sources), Job.queue == _asked.c.queue, Job.run_at <= AS_OF)
    .correlate(_asked)
    .exists()
)

#: Of each of these queues: whether it has due work, and its overrides. One index probe each.
SURVEY = select(
    _asked.c.queue,
    and_(_has_work, ~func.coalesce(_paused, false())).label("has_work"),
    Queue.override_concurrency,
    Queue.override_poll_seconds,
    Queue.override_rate_per_second,
    Queue.override_rate_burst,
).select_from(_asked.outerjoin(Queue, Queue.queue == _asked.c.queue))


@dataclass(frozen=True, slots=True)
class Settings:
    """What is in force for a queue in this process: the override, else what the process declares."""

    concurrency: int
    poll_interval: float
    rate_limit: RateLimit | None


@dataclass(frozen=True, slots=True)
class Found:
    """One queue as the survey found it."""

    queue: str
    has_work: bool
    concurrency: int | None
    poll_seconds: float | None
    rate_per_second: float | None
    rate_burst: int | None

    def in_force(self, declared: QueueConfig) -> Settings:
        """The settings over `declared`. Values that only hand-written SQL can have set are brought within limits."""
        concurrency = declared.concurrency if self.concurrency is None else self.concurrency
        poll = declared.poll_interval.total_seconds() if self.poll_seconds is None else self.poll_seconds
        rate, burst = self.rate_per_second, self.rate_burst
        limit = declared.rate_limit
        if rate is not None and not math.isnan(rate):
            limit = RateLimit(min(max(rate, LOWEST_RATE), HIGHEST_RATE), min(burst or 0, HIGHEST_RATE))
        elif burst is not None and limit is not None:
            limit = RateLimit(limit.per_second, min(burst, HIGHEST_RATE))
        return Settings(min(max(concurrency, 0), CONCURRENCY), max(SHORTEST_POLL, poll), limit)


async def survey(engine: AsyncEngine, queues: Sequence[str]) -> list[Found]:
    """Look at `queues`. One query."""
    async with engine.connect() as connection:
        rows: Sequence[Sequence[Any]] = (await connection.execute(SURVEY, {"queues": list(queues)})).all()
    return [Found(*row) for row in rows]


def rationed(settings: Mapping[str, Settings], most: int | None) -> dict[str, int]:
    """The concurrency of each queue, so that all together need no more than `most` connections, if that is limited."""
    wanted = {queue: one.concurrency for queue, one in settings.items()}
    total = sum(wanted.values())
    if most is None or total <= most:
        return wanted
    least = {queue: min(number, 1) for queue, number in wanted.items()}
    left, more = max(most - sum(least.values()), 0), max(total - sum(least.values()), 1)
    return {queue: least[queue] + (number - least[queue]) * left // more for queue, number in wanted.items()}
