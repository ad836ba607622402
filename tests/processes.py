"""Processes that tests start."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """As `preexec_fn`: a shell's background job ignores SIGINT, and would hand that down to what a test starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
