"""What holds for a queue about which nobody has said anything: one place for workers and maintenance."""

from datetime import timedelta

#: How long ended jobs are kept: completed ones, failed and cancelled ones, dead letters.
KEEP_COMPLETED = timedelta(hours=24)
KEEP_FAILED = timedelta(hours=72)
KEEP_DEAD = timedelta(days=30)

#: How long a job waits for each level that its priority rises.
PRIORITY_AGING = timedelta(seconds=60)
