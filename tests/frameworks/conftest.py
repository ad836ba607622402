"""Fixtures for applications: one for each of `tests.frameworks.apps`, and coroutine tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import URL

from awa_sqla import Completed, FollowUps, Hooks
from awa_sqla.session import catalogue
from tests.app import Signup, Welcome
from tests.frameworks.apps import APPS, App
from tests.worlds import database

__all__ = ["database"]


@pytest.fixture(params=list(APPS))
def app(request: pytest.FixtureRequest, db_url: URL) -> Iterator[App]:
    """Each of the applications in turn."""
    catalogue.forget_cache()
    yield from APPS[request.param](db_url)


@pytest.fixture
def follow_ups() -> Iterator[FollowUps]:
    """A registry with one spec, attached nowhere yet; emptied afterwards, for the process remembers it."""
    made = FollowUps()
    made.on_completed(Signup, name="welcome")(lambda event: Welcome(email=event.args.email))
    yield made
    made._specs.clear()


@pytest.fixture
def told() -> list[Any]:
    """What hooks were told."""
    return []


@pytest.fixture
def hooks(told: list[Any]) -> Hooks:
    """Hooks that write down the completion of each `Signup`, attached nowhere yet."""
    made = Hooks()
    made.on(Completed, Signup)(told.append)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run a coroutine test in an event loop of its own."""
    test = pyfuncitem.obj
    if asyncio.iscoroutinefunction(test):
        pyfuncitem.obj = lambda **arguments: asyncio.run(test(**arguments))  # type: ignore[attr-defined]
    return (yield)
