"""The fixtures of the command line's tests."""

from tests.worlds import database  # noqa: F401 - a fixture
