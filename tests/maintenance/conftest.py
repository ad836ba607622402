"""Tests that ask for a world run in every world of `tests.worlds`."""

from tests.worlds import database, follow_ups, other, pytest_pyfunc_call, session, world

__all__ = ["database", "follow_ups", "other", "pytest_pyfunc_call", "session", "world"]
