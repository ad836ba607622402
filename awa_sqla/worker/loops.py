"""Which event loop a worker runs in: uvloop's, where it is wanted and installed, or asyncio's own."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Collection

from awa_sqla.errors import ConfigurationError


def loop_factory(wanted: bool | None) -> Callable[[], asyncio.AbstractEventLoop] | None:  # noqa: FBT001
    """What makes the loop, for `asyncio.Runner`; None is asyncio's default.

    `wanted` is the option `uvloop`. Raises `ConfigurationError` when it is True and uvloop is not installed.
    """
    if wanted is False:
        return None
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError as exc:
        if wanted:
            raise ConfigurationError("uvloop=True, but it is not installed: pip install 'awa-sqla[uvloop]'") from exc
        return None
    return factory


def check_loop(wanted: bool | None) -> None:  # noqa: FBT001
    """Whether the running loop is what the option says. Raises `ConfigurationError`."""
    loop = type(asyncio.get_running_loop())
    if wanted and loop.__module__.partition(".")[0] != "uvloop":
        raise ConfigurationError(
            f"uvloop=True, but this worker starts in a running {loop.__module__}.{loop.__name__}: run your program "
            "with uvloop.run(), or leave the option out"
        )


async def ended(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel all at once: where the database does not answer, each takes the ten seconds that its driver waits."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
