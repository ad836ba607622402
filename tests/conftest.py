"""What every test run needs: a PostgreSQL to test with, or a plain message before any test.

The fixtures are in `tests.databases`.  A run without PostgreSQL fails; it is no green run of skipped tests.
"""

import gc
import logging
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from awa_sqla.localpg import PostgresUnavailable, find_binaries
from awa_sqla.maintenance.leadership import Contact
from awa_sqla.session.marks import FOLLOW_UPS

pytest_plugins = ["tests.databases"]

SERVER_VARIABLE = "AWA_TEST_DATABASE_URL"


def pytest_configure(config: pytest.Config) -> None:
    """Check for a server, and keep the user's settings for other servers away from ours."""
    if os.environ.get(SERVER_VARIABLE):
        # A run that was killed may have left its databases on a server that is not thrown away.
        config.option.postgresql_drop_test_database = True
        return
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]  # PGSSLMODE=require would break every connection
    # An exit in a fixture is an internal error under xdist, so the check is here, in the controlling process.
    if hasattr(config, "workerinput") or config.option.collectonly or config.option.help:
        return
    try:
        find_binaries()
    except PostgresUnavailable as exc:
        raise pytest.UsageError(f"the tests need PostgreSQL. {exc.message(SERVER_VARIABLE)}") from None


def pytest_collection_finish() -> None:
    """What is there by now stays: later collections of garbage, of which some tests ask for one each, pass over it."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Which server the run is about."""
    if os.environ.get(SERVER_VARIABLE):
        return f"postgresql: the server of {SERVER_VARIABLE}"
    try:
        binaries = find_binaries()
    except PostgresUnavailable:
        return "postgresql: none found"
    major, minor = binaries.version
    return f"postgresql: a throw-away {major}.{minor} from {binaries.source}"


CASES = 64


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many of the public bug reports that the design answers have a test; counted in the files, for xdist."""
    found = {
        int(number)
        for path in Path(__file__).parent.rglob("test_*.py")
        for number in re.findall(r"mark\.case\((\d+)\)", path.read_text("utf-8"))
    }
    missing = " ".join(str(number) for number in range(1, CASES + 1) if number not in found)
    terminalreporter.write_line(f"cases of public bug reports with a test: {len(found)}/{CASES} (not yet: {missing})")


@pytest.fixture(autouse=True)
def what_is_logged_is_the_same_for_every_test() -> Iterator[None]:
    """The command line sets a level, benchmarks silence warnings, web frameworks set up the root: in this process."""
    loggers = (logging.getLogger("awa_sqla"), logging.getLogger())
    before = [logger.level for logger in loggers]
    disabled = logging.root.manager.disable
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
    logging.disable(disabled)


@pytest.fixture(autouse=True)
def no_registry_outlives_its_test() -> Iterator[None]:
    """The process remembers every registry that was attached, and asks for it in sessions that have none."""
    before = set(FOLLOW_UPS.ever)
    yield
    for registry in set(FOLLOW_UPS.ever) - before:
        FOLLOW_UPS.ever.discard(registry)


@pytest.fixture
def an_old_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's server has just started, after which rescue waits for the hearts."""
    note = Contact.note
    old = timedelta(days=1)
    monkeypatch.setattr(Contact, "note", lambda self, sent, standing: note(self, sent, standing._replace(up=old)))
