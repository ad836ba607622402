"""The race matrix: its worlds, its switch for sabotage, and its line at the end of a run.

    pytest tests/races -n 2                        # the matrix, as CI runs it
    AWA_LONG=1 pytest tests/races -n 2             # every cell in every world, flushed and unflushed
    pytest tests/races -n 2 --sabotage lease       # without one guard (see `sabotage.py`): must fail

Where the option is not known, because another directory was given to pytest, `AWA_SABOTAGE` does the same.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from awa_sqla import FollowUps
from tests.races.cells import ENDS, WINNERS
from tests.races.keys import Wait
from tests.races.race import Stage, follow_all
from tests.races.sabotage import CALLBACK_GUARDS, GUARDS, KEY_GUARDS, SWEEP_GUARDS
from tests.worlds import Database, database, follow_ups, pytest_pyfunc_call, world

__all__ = ["database", "follow_ups", "pytest_pyfunc_call", "world"]

VARIABLE = "AWA_SABOTAGE"
SWITCHES = GUARDS | SWEEP_GUARDS | CALLBACK_GUARDS | KEY_GUARDS
_totals: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The switch; another directory's tests may have it too."""
    with contextlib.suppress(ValueError):
        parser.addoption("--sabotage", choices=sorted(SWITCHES), help="run without this guard; the matrices must fail")


def pytest_configure(config: pytest.Config) -> None:
    """Hand the switch on to the processes of xdist."""
    guard = config.getoption("sabotage", None)
    if guard:
        os.environ[VARIABLE] = guard


@pytest.fixture(autouse=True)
def _sabotaged() -> Iterator[None]:
    guard = os.environ.get(VARIABLE)
    with SWITCHES[guard]() if guard else contextlib.nullcontext():
        yield


@pytest.fixture
def stage(database: Database, follow_ups: FollowUps) -> Stage:
    """The database, with a follow-up for every outcome."""
    follow_all(follow_ups)
    return Stage(database, follow_ups)


class Tally:
    """What a test has raced."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def add(self, sort: str, race: object, wrong: list[str], *also: str) -> None:
        """Count one race, and keep what was wrong with it."""
        self.counts.update([sort, *also])
        if wrong:
            self.counts["violations"] += 1
            self.wrong.append(f"{race}\n    " + "\n    ".join(wrong))

    def check(self) -> None:
        """Fail with everything that was wrong."""
        if self.wrong:
            pytest.fail("\n".join([f"{len(self.wrong)} races went wrong", *self.wrong]), pytrace=False)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts that end up in the line at the end of the run."""
    made = Tally()
    yield made
    request.node.user_properties.append(("races", dict(made.counts)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up, in whatever process the test has run."""
    if report.when == "teardown":
        for name, counts in report.user_properties:
            if name == "races" and isinstance(counts, dict):
                _totals.update(counts)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The counts of the run."""
    if not _totals:
        return
    terminalreporter.section("races")
    ends = _counted("", ENDS)
    winners = ", ".join(f"{who} {_totals[f'won by {who}']}" for who in WINNERS)
    terminalreporter.line(f"{_totals['cells']} cells: {ends}; won by {winners}")
    terminalreporter.line(f"{_totals['claims']} lost claims, {_totals['looks']} cancels of a job that moves")
    terminalreporter.line(f"{_totals['deliveries']} callbacks delivered twice at once")
    terminalreporter.line(f"{_totals['dead letters']} last attempts failed and rescued at once")
    terminalreporter.line(f"{_totals['keys']} cells about a key: {_counted('key ', ENDS)};")
    terminalreporter.line(f"    the second {_waits()}")
    terminalreporter.line(f"{_totals['orders']} batches of keys in different orders")
    terminalreporter.line(f"violations {_totals['violations']}")


def _counted(sort: str, ends: tuple[str, ...]) -> str:
    counts = {end: _totals[f"{sort}ended by {end}"] for end in ends}
    return ", ".join(f"{end} {count}" for end, count in counts.items() if count)


def _waits() -> str:
    return ", ".join(f"{wait} {_totals[f'key {wait}']}" for wait in Wait)
