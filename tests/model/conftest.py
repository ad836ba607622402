"""The worlds of the model, and its counts at the end of the run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import URL, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from awa_sqla.session import catalogue
from tests.model.rig import impatient
from tests.races.sabotage import CALLBACK_GUARDS, GUARDS
from tests.worlds import WORLDS, AsyncWorld, World, database, pytest_pyfunc_call

__all__ = ["database", "pytest_pyfunc_call"]

PROPERTY = "model"


@pytest.fixture
def world(request: pytest.FixtureRequest, db_url: URL) -> Iterator[World]:
    """One of the worlds, on an engine of its own whose transactions wait for nobody."""
    cls, driver = WORLDS[request.param]
    catalogue.forget_cache()
    create: Any = create_async_engine if cls is AsyncWorld else create_engine
    engine = create(db_url.set(drivername=f"postgresql+{driver}"))
    made = cls(request.param, driver, db_url, engine)  # type: ignore[call-arg]
    impatient(made.engine)
    guard = os.environ.get("AWA_SABOTAGE")
    with (GUARDS | CALLBACK_GUARDS)[guard]() if guard else contextlib.nullcontext():
        yield made
    made.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the model has done, also when the tests ran in other processes."""
    lines = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == PROPERTY
    ]
    if lines:
        terminalreporter.section("stateful model")
        for line in lines:
            terminalreporter.write_line(line)
