"""A worker as a process: signals and exit status."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable

from awa_sqla.errors import ConfigurationError
from awa_sqla.worker.runner import Worker

log = logging.getLogger("awa_sqla.worker")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_until_stopped(make: Callable[[], Worker]) -> int:
    """Run a worker until it is told to stop; 0, or 1 when jobs had to be abandoned."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "run_worker() handles signals and needs the main thread; elsewhere use `async with awa.worker(...)`"
        )
    return asyncio.run(_run(make))


async def _run(make: Callable[[], Worker]) -> int:
    loop = asyncio.get_running_loop()
    worker = make()
    told = 0

    def on_signal(number: int) -> None:
        nonlocal told
        told += 1
        name = signal.Signals(number).name
        if told == 1:
            log.info("%s: no more claims, running jobs may end", name)
            worker.request_stop()
        elif told == 2:
            log.warning("%s again: asking running jobs to stop", name)
            worker.interrupt()
        else:
            log.error("%s a third time: leaving at once", name)
            os._exit(128 + number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with worker:
            await worker.wait()
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    if worker.abandoned:
        # Their threads cannot be ended, and the interpreter would wait for them.
        logging.shutdown()
        os._exit(1)
    return 0
