"""What a handler may return besides a result: how its attempt ends.

A handler that returns None or JSON data has completed its job. It raises `TerminalError` to fail at once, and
anything else to be tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from awa_sqla import limits
from awa_sqla.errors import InvalidJob
from awa_sqla.session.callbacks import CallbackToken, checked_token


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Run the job again after `delay` (zero or longer); counts as a failed attempt. `error` says why."""

    delay: timedelta
    error: str = ""

    def __post_init__(self) -> None:
        limits.duration("delay", self.delay, zero=True)
        if not isinstance(self.error, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidJob("error", f"must be text, not {type(self.error).__name__}")


@dataclass(frozen=True, slots=True)
class Snooze:
    """Run the job again after `delay` (zero or longer); the attempt is not charged and nothing has failed."""

    delay: timedelta

    def __post_init__(self) -> None:
        limits.duration("delay", self.delay, zero=True)


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the job as cancelled, for `reason`: neither a success nor a failure."""

    reason: str

    def __post_init__(self) -> None:
        limits.text("reason", self.reason, longest=limits.ERROR_CHARACTERS)


@dataclass(frozen=True, slots=True)
class WaitForCallback:
    """End the attempt by waiting for the callback of `token`, which `ctx.register_callback()` gave."""

    token: CallbackToken

    def __post_init__(self) -> None:
        checked_token(self.token)


@dataclass(frozen=True, slots=True)
class Done:
    """The handler returned a result (JSON data or None)."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed. With `owed`, by a follow-up's fault: record it and call no spec.

    `in_place` leaves the row in its table: for rows that cannot be moved.
    """

    error: BaseException
    terminal: bool = False
    owed: bool = False
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class PutBack:
    """Give the job back uncharged after `delay`: shutdown, or a kind this worker does not know."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome is committed already, or nobody's any more: nothing is left to record."""


Result = Done | RetryAfter | Snooze | Cancel | WaitForCallback | Failed | PutBack | Settled
