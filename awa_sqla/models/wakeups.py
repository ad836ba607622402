"""Names of the wake-up channel: one per schema, constant-size payloads.

A wake-up is a hint that makes a worker look earlier; polling alone is always correct. The payload never
holds a queue's name, so it cannot grow past what NOTIFY takes, and an enqueue cannot fail because of it.
"""

from __future__ import annotations

from hashlib import sha256

#: `SET LOCAL awa.notify = 'off'` in a transaction silences its wake-ups.
SWITCH = "awa.notify"


def channel(schema: str) -> str:
    """The NOTIFY channel of a schema."""
    return f"awa_{sha256(schema.encode()).hexdigest()[:16]}"


def queue_payload(queue: str) -> str:
    """What is sent when jobs of `queue` become available."""
    return sha256(queue.encode()).hexdigest()[:16]


def cancel_payload(job_id: int, run_lease: int) -> str:
    """What is sent when a running attempt is cancelled."""
    return f"c:{job_id}:{run_lease}"
