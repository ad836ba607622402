"""`worker --reload`: the same command line again, in the same process, so that it runs the code that is there now."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click

from awa_sqla.app import Awa
from awa_sqla.cli.finding import Settings


class FileReloader:
    """Watches the Python files of an app and the working directory, and starts the program anew.

    That happens as the last step of a normal end, behind whatever the app does then. To be made before the app is
    imported: its `atexit` functions are to run first, and no change of what is imported shall be missed. Raises click's
    `UsageError` without watchfiles.
    """

    def __init__(self, settings: Settings) -> None:
        try:
            from watchfiles import PythonFilter, watch
        except ImportError as exc:
            raise click.UsageError("--reload needs watchfiles: pip install 'awa-sqla[reload]'") from exc
        self._settings = settings
        self.wanted = False
        # What the app changes of them is not for the program that comes next.
        self._directory, self._environment = Path.cwd(), dict(os.environ)
        atexit.register(self._at_exit)
        self._changes = watch(*self._places(), watch_filter=PythonFilter(), rust_timeout=200, yield_on_timeout=True)
        next(self._changes)  # begins to watch

    def load_app(self) -> Awa:
        """The app; while its module cannot be imported, the traceback is shown and a change is waited for."""
        try:
            return self._settings.load_app()
        except click.ClickException:
            raise
        except Exception:  # noqa: BLE001 - the module may raise anything
            traceback.print_exc()
        return self._restart_after_change()

    @contextmanager
    def watching(self, changed: Callable[[], None]) -> Generator[None]:
        """Call `changed` from a thread at the first change."""
        done = threading.Event()

        def watch() -> None:
            if self._wait(done):
                changed()

        thread = threading.Thread(target=watch, name="awa_sqla reload", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def restart(self) -> NoReturn:
        """Replace the program that runs in this process."""
        from awa_sqla.cel.evaluator import EVALUATOR

        EVALUATOR.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(self._directory)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], self._environment)  # noqa: S606 - as we began

    def _restart_after_change(self) -> NoReturn:
        click.echo("awa-sqla: the app cannot be loaded; waiting until a Python file changes", err=True)
        try:
            self._wait(threading.Event())
        except KeyboardInterrupt:
            sys.exit(130)
        self.restart()

    def _at_exit(self) -> None:
        if self.wanted:
            self.restart()

    def _wait(self, done: threading.Event) -> bool:
        """Wait for a change; False when `done` comes first."""
        for changes in self._changes:
            if changes or done.is_set():
                return bool(changes)
        return False

    def _places(self) -> set[Path]:
        """The working directory, and that of the app's package or module where it is elsewhere."""
        places = {self._directory}
        name = (self._settings.reference or "").partition(":")[0].partition(".")[0]
        found = importlib.util.find_spec(name) if name else None
        if found is not None and found.origin is not None and not Path(found.origin).is_relative_to(self._directory):
            places.add(Path(found.origin).parent)
        return places
