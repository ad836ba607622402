"""The fixtures of the ingress's tests."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakSet

import pytest
from anyio.from_thread import BlockingPortal
from sqlalchemy import URL

from awa_sqla.session import catalogue
from awa_sqla.session.marks import FOLLOW_UPS
from tests.web import rig
from tests.worlds import database  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """An event loop in a thread."""
    with rig.portal() as made:
        yield made


@pytest.fixture(params=rig.KINDS)
def web(request: pytest.FixtureRequest, db_url: URL, portal: BlockingPortal) -> Iterator[rig.Web]:
    """The router on each kind of session factory in turn."""
    catalogue.forget_cache()
    ever, FOLLOW_UPS.ever = FOLLOW_UPS.ever, WeakSet()  # the registries of other tests are not this process's
    made = rig.Web(request.param, db_url, portal)
    yield made
    made.close()
    FOLLOW_UPS.ever = ever
