"""Writes `docs/reference/transitions.md` from the table of transitions.

python docs/transitions.py > docs/reference/transitions.md
python docs/transitions.py --check      # exit status 1 when the page is not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

from awa_sqla.session.table import ATTEMPT_COLUMNS, TRANSITIONS, Guard, Transition

PAGE = Path(__file__).parent / "reference" / "transitions.md"

HEAD = f"""\
# Transitions

<!-- Written by docs/transitions.py from awa_sqla/session/table.py: change that. -->

Each row says from which states a transition starts, what it must match besides, the state and table it leads to,
what it clears, and which follow-ups it brings. A transition whose guard matches no row raises `StaleJobError` (by
attempt) or looks elsewhere (by id); nothing changes then, and the caller's transaction stays usable.

"attempt" in the column *clears* stands for {", ".join(f"`{name}`" for name in ATTEMPT_COLUMNS)}.

The number of statements is what the verb itself sends with a warm catalogue, the INSERT of a moved row included;
follow-ups are INSERTs of the same flush on top. Once in 10 seconds, for each engine and schema, the first transition
reads the catalogue of follow-up specs (one SELECT more). A stale attempt costs one SELECT more, to say how the row
stands.

| transition | by | from | guard | to | table | clears | finalized_at | follow-ups of | statements |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def main(arguments: list[str]) -> int:
    """Print the page, or check that the written one is up to date."""
    if arguments == ["--check"]:
        return 0 if PAGE.exists() and PAGE.read_text("utf-8") == page() else 1
    sys.stdout.write(page())
    return 0


def page() -> str:
    """The page as the table says it."""
    return HEAD + "".join(f"| {' | '.join(cells(name, row))} |\n" for name, row in TRANSITIONS.items())


def cells(name: str, row: Transition) -> tuple[str, ...]:
    """One row of the page."""
    others = [f"`{column}`" for column in row.clears if column not in ATTEMPT_COLUMNS]
    cleared = (["attempt"] if set(ATTEMPT_COLUMNS) <= set(row.clears) else []) + others
    return (
        name,
        row.verb,
        ", ".join(row.sources),
        row.guard.value if row.guard is not Guard.LEASE else "id, run_lease",
        row.target.value,
        row.store.value,
        ", ".join(cleared) or "nothing",
        "set" if row.finalizes else "as it was",
        ", ".join(row.outcomes) or "none",
        "" if row.statements is None else str(row.statements),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
