"""Writes `docs/reference/alembic.md` from the situations below; `tests/schema/test_guard.py` tries each of them.

python docs/autogenerate.py > docs/reference/alembic.md
python docs/autogenerate.py --check       # exit status 1 when the page is not up to date
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent / "reference" / "alembic.md"

# ------------------------------------------------------------------------------- options that make no difference
#: An app's options and surroundings; the tests try every three values of three of them together.
AXES: dict[str, tuple[str, ...]] = {
    "`target_metadata`": ("the app's", "a list of the app's and ours", "the app's, with copies of ours"),
    "`include_schemas`": ("off", "on"),
    "filters": (
        "none",
        "`include_name`",
        "`include_object`",
        "both",
        "those of another schema",
    ),
    "`autogenerate_plugins`": ("not set", "with `awa_sqla.alembic`"),
    "search_path": ("of the server", "our schema first", "our schema last", "empty", "our schema first, by a late SET"),
    "our schema": ("`awa`", "another", "`public`"),
    "`version_table_schema`": ("not set", "`public`", "our schema"),
    "`naming_convention`": ("none", "of the app"),
    "tables of the app": ("in the default schema", "in a schema of its own"),
    "names of these tables": ("all its own", "two as ours"),
    "`schema_translate_map`": ("none", "from `awa` to our schema"),
}

Combination = dict[str, str]


def combinations(together: int) -> Iterator[Combination]:
    """So many that all values of every two or three axes meet somewhere; the same ones each time."""
    draw = random.Random(20)  # noqa: S311 - nothing secret
    uncovered = {
        met
        for axes in itertools.combinations(AXES.items(), together)
        for met in itertools.product(*([(axis, value) for value in values] for axis, values in axes))
    }
    while uncovered:
        wanted = dict(min(uncovered))
        drawn = [{axis: draw.choice(values) for axis, values in AXES.items()} | wanted for _ in range(25)]
        covered = [uncovered.intersection(itertools.combinations(each.items(), together)) for each in drawn]
        best = max(range(len(drawn)), key=lambda index: len(covered[index]))
        uncovered -= covered[best]
        yield drawn[best]


# ---------------------------------------------------------------------------------------- when op.awa_migrate is due
class Due(NamedTuple):
    """What is proposed for our schema, by the version that is installed."""

    metadata: str
    plugins: str
    awa_schema: str | list[str] | None
    nothing_there: str
    older: str
    latest: str
    newer: str


NOTHING = "nothing"
ALL = "`op.awa_migrate(from_=0, to=LATEST)`"
REST = "`op.awa_migrate(from_=1, to=LATEST)`"
REFUSED = "`SchemaVersionError`"

PLAIN, LISTED, COPIED = AXES["`target_metadata`"]
UNSET, NAMED = AXES["`autogenerate_plugins`"]

DUE = (
    Due(PLAIN, UNSET, None, NOTHING, NOTHING, NOTHING, NOTHING),
    Due(PLAIN, NAMED, None, ALL, REST, NOTHING, REFUSED),
    Due(LISTED, UNSET, None, ALL, REST, NOTHING, REFUSED),
    Due(LISTED, NAMED, None, ALL, REST, NOTHING, REFUSED),
    Due(COPIED, UNSET, None, ALL, REST, NOTHING, REFUSED),
    Due(COPIED, NAMED, None, ALL, REST, NOTHING, REFUSED),
    Due(PLAIN, NAMED, "jobs", ALL, REST, NOTHING, REFUSED),
    Due(LISTED, UNSET, "jobs", ALL, REST, NOTHING, REFUSED),
    Due(PLAIN, NAMED, ["awa", "jobs"], ALL, REST, NOTHING, REFUSED),
    Due(LISTED, NAMED, ["awa", "jobs"], ALL, REST, NOTHING, REFUSED),
    Due(PLAIN, NAMED, [], NOTHING, NOTHING, NOTHING, NOTHING),
)


# ------------------------------------------------------------------------------------------------- names like ours
class Alike(NamedTuple):
    """A table of the app that has a name of ours, and what is proposed for it."""

    says: str
    proposed: str
    #: Where ours are, and what follows `SET search_path`.
    ours: str = "awa"
    path: str = ""
    name: str = "audit_log"
    #: The schema that the model names, and that of its MetaData; the schemas where the app has such a table.
    schema: str | None = None
    home: str | None = None
    there: tuple[str, ...] = ()
    model: bool = True
    include_schemas: bool = False


CREATED, DROPPED, CLASH = "`op.create_table`", "`op.drop_table`", "`ConfigurationError`"

ALIKE = (
    Alike("a new model", CREATED),
    Alike("a new model, as our view", CREATED, name="jobs"),
    Alike("a model and its table", NOTHING, there=("public",)),
    Alike("a table whose model is gone", DROPPED, there=("public",), model=False),
    Alike("a new model", CREATED, path="public, awa"),
    Alike("a new model, as our view", CREATED, path="public, awa", name="jobs"),
    Alike("a model and its table", NOTHING, path="public, awa", there=("public",)),
    Alike("a table whose model is gone", DROPPED, path="public, awa", there=("public",), model=False),
    Alike("a new model: it would be made among ours", CLASH, path="awa, public"),
    Alike("a new model, as our view: it would be made among ours", CLASH, path="awa, public", name="jobs"),
    Alike("a model whose table is hidden by ours", CLASH, path="awa, public", there=("public",)),
    Alike(
        "a model that names its schema, and its table",
        NOTHING,
        path="awa, public",
        schema="public",
        there=("public",),
        include_schemas=True,
    ),
    Alike(
        "a table whose model, which named its schema, is gone",
        DROPPED,
        path="awa, public",
        there=("public",),
        model=False,
        include_schemas=True,
    ),
    Alike("a new model", CREATED, path="''"),
    Alike("a new model: it would be made among ours", CLASH, ours="public"),
    Alike("a new model of an app that shares its schema with us", CLASH, ours="shop", schema="shop", home="shop"),
    Alike("a new model in the app's schema", CREATED, schema="shop", home="shop", include_schemas=True),
    Alike("a model that names our schema, to read our table", NOTHING, schema="awa", include_schemas=True),
    Alike(
        "a new model in our schema, of a name we have not", CREATED, name="theirs", schema="awa", include_schemas=True
    ),
    Alike(
        "a table in our schema, of a name we have not, without a model",
        DROPPED,
        name="theirs",
        there=("awa",),
        model=False,
        include_schemas=True,
    ),
)


# ------------------------------------------------------------------------------------------------ without the guard
class Unguarded(NamedTuple):
    """Whether our tables are left alone where `autogenerate_plugins` does not let the guard run."""

    include_schemas: str
    filters: str
    path: str
    proposed: str


LOST = "**drops our tables**"

UNGUARDED = (
    Unguarded("off", "none", "", NOTHING),
    Unguarded("off", "none", "public, awa", LOST),
    Unguarded("off", "`include_name`", "public, awa", LOST),
    Unguarded("off", "`include_object`", "public, awa", LOST),
    Unguarded("on", "none", "", LOST),
    Unguarded("on", "`include_name`", "", NOTHING),
    Unguarded("on", "`include_object`", "", NOTHING),
    Unguarded("on", "both", "", NOTHING),
    Unguarded("on", "those of another schema", "", LOST),
)

# ---------------------------------------------------------------------------------------------------------- the page
INTRODUCTION = """\
# What autogenerate proposes

<!-- Written by docs/autogenerate.py: change the situations there. tests/schema/test_guard.py tries each of them. -->

[Alembic in your app](../how-to/alembic.md) is the recipe; this page says what `alembic revision --autogenerate` writes
and `alembic check` reports for our tables, and for yours where the two could be confused.

With the package installed, Alembic loads two plugins of it. `awa_sqla.alembic` proposes `op.awa_migrate` and runs where
`autogenerate_plugins` names it. `alembic.autogenerate.awa_sqla` is a guard: it runs after all comparisons, under the
`alembic.autogenerate.*` that Alembic uses when nothing is said, and takes out what concerns our tables. It finds them
by asking the database which schemas have them, and only where some name is like one of ours: an app without our
tables, or on a database that is not PostgreSQL, runs no statement more than before.
"""

NO_DIFFERENCE = """\
## What makes no difference

Our tables are never created, altered, renamed or dropped, and what is proposed for the tables of the app is what
Alembic would propose if ours were not there, whatever the combination of:
"""

DUE_INTRODUCTION = """\
## When `op.awa_migrate` is proposed

`LATEST` is the version that the package needs. With several schemas there is a line for each, in the order of
`awa_schema`. `nothing` in the first row means that such an app writes the line by hand.
"""

ALIKE_INTRODUCTION = """\
## Tables of the app that have a name of ours

An unqualified name means what PostgreSQL finds for it on the search_path. Where that is a table of ours, Alembic would
compare the model with it; the guard proposes the table that the model needs. Where that table would have to be made
among ours, nothing could work, neither the revision nor the app: `ConfigurationError` names the table. The model is
`audit_log`, or `jobs` where it is said to be named as our view.
"""

UNGUARDED_INTRODUCTION = """\
## Without the guard

`autogenerate_plugins` may list single plugins instead of `alembic.autogenerate.*`, or exclude the guard as
`~alembic.autogenerate.awa_sqla`. If `awa_sqla.alembic` is not in the list either, only the filters of
`awa_sqla.alembic` are left:
"""

END = """\
The guard sees what Alembic's own comparisons find. Plugins that compare views, functions or triggers have filters of
their own: tell them to leave our schema out.
"""


def page() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        NO_DIFFERENCE,
        grid(("option", "values"), [(axis, "; ".join(values)) for axis, values in AXES.items()]),
        DUE_INTRODUCTION,
        grid(
            (
                "`target_metadata`",
                "`autogenerate_plugins`",
                "`awa_schema`",
                "no tables",
                "version 1",
                "`LATEST`",
                "newer",
            ),
            [(row.metadata, row.plugins, code(row.awa_schema), *row[3:]) for row in DUE],
        ),
        ALIKE_INTRODUCTION,
        grid(("ours in", "search_path", "the app has", "proposed"), map(alike, ALIKE)),
        UNGUARDED_INTRODUCTION,
        grid(
            ("`include_schemas`", "filters", "search_path", "proposed"),
            [(row.include_schemas, row.filters, path(row.path), row.proposed) for row in UNGUARDED],
        ),
        END,
    ]
    return "\n".join(parts)


def alike(row: Alike) -> tuple[str, ...]:
    """A row of the table of names like ours."""
    return (f"`{row.ours}`", path(row.path), row.says, row.proposed)


def path(value: str) -> str:
    """A search_path, as it is shown."""
    return {"": "of the server", "''": "empty"}.get(value, f"`{value}`")


def code(value: str | list[str] | None) -> str:
    """An option, as it is shown."""
    return "not set" if value is None else "`" + repr(value).replace("'", '"') + "`"


def grid(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def main(arguments: list[str]) -> int:
    """Print the page, or compare it with the file."""
    text = page()
    if arguments == ["--check"]:
        if PAGE.is_file() and PAGE.read_text("utf-8") == text:
            return 0
        sys.stderr.write(f"{PAGE} is not up to date: python docs/autogenerate.py > docs/reference/alembic.md\n")
        return 1
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
