"""Processes that tests start."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """As `preexec_fn`: a shell's background job ignores SIGINT, under nohup also SIGHUP, and would hand that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
