"""Writes `docs/reference/steps.md` from the schema's steps.

python docs/steps.py > docs/reference/steps.md
python docs/steps.py --check       # exit status 1 when the page is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from awa_sqla.schema.steps import STEPS, Step

PAGE = Path(__file__).parent / "reference" / "steps.md"

INTRODUCTION = """\
# The steps of the schema

<!-- Written by docs/steps.py from awa_sqla/schema/steps: change those. -->

What each step locks of relations that are there before it, in the order in which they are taken, and what follows on
its short transaction beside the traffic. In a transaction of the caller (`create_all`, `op.awa_migrate` without
`concurrently=True`) the second part belongs to that transaction, and locks its table against writers. How locks are
taken is in [Migrations](../how-to/migrations.md); a step locks what it says, no more and no less: a test compares it
with `pg_locks`.
"""

STRONG = "ACCESS EXCLUSIVE"


def shown(locks: Mapping[str, str]) -> str:
    """Relations, and the mode where it is not the strongest."""
    names = (f"`{name}`" if mode == STRONG else f"`{name}` ({mode})" for name, mode in locks.items())
    return ", ".join(names) or "nothing"


def rows(number: int, step: Step) -> Iterator[str]:
    """The section of one step."""
    title = (import_module(f"awa_sqla.schema.steps.s{number:04}").__doc__ or "").splitlines()[0]
    yield f"\n## {title.rstrip('.')}\n"
    yield f"- **Locks** {shown(step.locks)}; on the way back {shown(step.down_locks)}."
    if step.after:
        yield f"- **Beside the traffic**: {'; '.join(work.what for work in step.after)}."


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION.rstrip("\n")]
    for number, step in enumerate(STEPS, 1):
        lines += rows(number, step)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text("utf-8") == page() else f"{PAGE} is not up to date: python docs/steps.py > {PAGE}")
    sys.stdout.write(page())
