"""Writes `docs/reference/roles.md` from the roles of `awa_sqla.schema.grants`.

python docs/roles.py > docs/reference/roles.md
python docs/roles.py --check      # exit status 1 when the page is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from awa_sqla.schema.grants import FUNCTIONS, RELATIONS, ROLES, SEQUENCES, Role

PAGE = Path(__file__).parent / "reference" / "roles.md"

HEAD = """\
# Roles and their privileges

<!-- Written by docs/roles.py from awa_sqla/schema/grants.py: change that. -->

What each kind of process needs in the database, and nothing besides: without any one of these privileges something of
its work is refused. [How to grant them](../how-to/least-privilege.md). `owner` owns all of it.

"""
NOTES = """
S, I, U and D stand for SELECT, INSERT, UPDATE and DELETE on all columns, i and u for INSERT and UPDATE on those below.
Each role has USAGE on the schema. Where only one column may be updated, rows are locked and not changed: PostgreSQL
asks for an UPDATE then.

"""


def main(arguments: list[str]) -> int:
    """Print the page, or check that the written one is up to date."""
    if arguments == ["--check"]:
        return 0 if PAGE.exists() and PAGE.read_text("utf-8") == page() else 1
    sys.stdout.write(page())
    return 0


def page() -> str:
    """The page as the roles say it."""
    return "".join((HEAD, *_roles(), "\n", *_table(), NOTES, *_columns()))


def _roles() -> Iterator[str]:
    yield "| role | |\n| --- | --- |\n"
    for name, role in ROLES.items():
        yield f"| `{name}` | {role.may} |\n"


def _table() -> Iterator[str]:
    roles = {name: role for name, role in ROLES.items() if role.relations}
    yield f"| | {' | '.join(roles)} |\n| --- |{' --- |' * len(roles)}\n"
    for relation in RELATIONS:
        cells = [" ".join(map(_letter, role.relations.get(relation, ()))) for role in roles.values()]
        yield _row(relation, cells)
    for sequence in SEQUENCES:
        yield _row(sequence, ["USAGE" if sequence in role.sequences else "" for role in roles.values()])
    for function in FUNCTIONS:
        yield _row(function, ["EXECUTE" if function in role.functions else "" for role in roles.values()])


def _row(name: str, cells: list[str]) -> str:
    return f"| `{name}` | {' | '.join(cells)} |\n"


def _letter(privilege: str) -> str:
    return privilege[0].lower() if "(" in privilege else privilege[0]


def _columns() -> Iterator[str]:
    yield "| role | on | columns |\n| --- | --- | --- |\n"
    for name, role in ROLES.items():
        for relation, privilege in _of_columns(role):
            kind, _, columns = privilege.rstrip(")").partition(" (")
            listed = ", ".join(f"`{column}`" for column in columns.split(", "))
            yield f"| {name} | {kind} of `{relation}` | {listed} |\n"


def _of_columns(role: Role) -> Iterator[tuple[str, str]]:
    for relation, privileges in role.relations.items():
        yield from ((relation, privilege) for privilege in privileges if "(" in privilege)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
