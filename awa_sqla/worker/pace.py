"""The pace of a queue: a token bucket, asked before each claim."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from awa_sqla.worker.config import RateLimit

#: Seconds of tokens that are gathered before a claim, so that a high rate does not mean a claim for each job.
GATHER = 0.05


class Pace:
    """How many jobs may begin now, under a `RateLimit` or without one."""

    def __init__(self, limit: RateLimit | None, clock: Callable[[], float] = monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._tokens = float(limit.burst) if limit else 0.0
        self._at = clock()

    def change(self, limit: RateLimit | None) -> None:
        """Go on under another limit: with the tokens there are, up to its burst; a first limit starts full."""
        if limit == self._limit:
            return
        had = self._limit
        self._refill()
        self._limit = limit
        if limit is not None:
            self._tokens = float(limit.burst) if had is None else min(self._tokens, float(limit.burst))

    def take(self, wanted: int) -> int:
        """Up to `wanted` tokens; what is not used comes back by `give_back`."""
        if self._limit is None:
            return wanted
        self._refill()
        taken = min(wanted, int(self._tokens))
        self._tokens -= taken
        return taken

    def give_back(self, unused: int) -> None:
        """Tokens of a claim that found less than it was allowed."""
        if self._limit is not None:
            self._tokens = min(self._tokens + unused, float(self._limit.burst))

    def wait(self) -> float:
        """Seconds until a claim is worth its while, when `take` gave nothing."""
        if self._limit is None:
            return 0.0
        self._refill()
        rate = self._limit.per_second
        enough = min(max(1.0, rate * GATHER), float(self._limit.burst))
        return max((enough - self._tokens) / rate, 0.0)

    def _refill(self) -> None:
        now = self._clock()
        if self._limit is not None:
            self._tokens = min(self._tokens + (now - self._at) * self._limit.per_second, float(self._limit.burst))
        self._at = now
