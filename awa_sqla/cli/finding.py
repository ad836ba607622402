"""Which app and which database a command means.

App: `--app module:attribute`, else `AWA_APP`, else `[tool.awa-sqla] app` in the nearest pyproject.toml. Database:
`--database-url`, else `AWA_DATABASE_URL`, `DATABASE_URL`, or the app's own.
"""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from awa_sqla.app import Awa

EXIT_NOT_FOUND = 3


class NotFoundError(click.ClickException):
    """App, module or database setting not found."""

    exit_code = EXIT_NOT_FOUND


@dataclass(frozen=True)
class Settings:
    """What was given on the command line."""

    app: str | None
    database_url: str | None

    def load_app(self) -> Awa:
        """Import the app. Raises `NotFoundError`; an error inside the module is let through untouched."""
        app = self.find_app()
        if app is None:
            raise NotFoundError(
                "no app: give --app module:attribute, set AWA_APP, or write [tool.awa-sqla] app = '...' in "
                "pyproject.toml"
            )
        return app

    def find_app(self) -> Awa | None:
        """The same for commands that can do without: None when no app is named anywhere."""
        reference = self.reference
        return _imported(reference) if reference else None

    @property
    def reference(self) -> str | None:
        """Which app is named, as module:attribute."""
        return self.app or os.environ.get("AWA_APP") or _from_pyproject()

    def database(self, app: Awa | None = None) -> str:
        """The database URL. Raises `NotFoundError`."""
        found = self.given_database() or os.environ.get("DATABASE_URL") or (app.database_url if app else None)
        if not found:
            raise NotFoundError("no database: give --database-url, or set AWA_DATABASE_URL or DATABASE_URL")
        return found

    def given_database(self) -> str | None:
        """What was said to us alone: `--database-url` or `AWA_DATABASE_URL`."""
        return self.database_url or os.environ.get("AWA_DATABASE_URL") or None


def _imported(reference: str) -> Awa:
    module_name, _, attribute = reference.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not (module_name == exc.name or module_name.startswith(f"{exc.name}.")):
            raise  # an import inside the module failed: the traceback says which
        hint = f"; without .py: {module_name[:-3]}" if module_name.endswith(".py") else ""
        where = f"(looked from {Path.cwd()})"
        raise NotFoundError(f"no module {exc.name!r} {where}; --app is module:attribute{hint}") from None
    if attribute:
        found: Any = module
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise NotFoundError(f"module {module_name!r} has no {attribute!r}")
            found = getattr(found, part)
    else:
        apps = {name: value for name, value in vars(module).items() if isinstance(value, Awa)}
        if len(apps) != 1:
            raise NotFoundError(
                f"module {module_name!r} has {len(apps)} apps {sorted(apps)}; say which: module:attribute"
            )
        (found,) = apps.values()
    if not isinstance(found, Awa) and callable(found):
        found = found()
    if not isinstance(found, Awa):
        raise NotFoundError(f"{reference!r} is of type {type(found).__name__}, not an Awa")
    return found


def _from_pyproject() -> str | None:
    for folder in (Path.cwd(), *Path.cwd().parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            with file.open("rb") as stream:
                app: str | None = tomllib.load(stream).get("tool", {}).get("awa-sqla", {}).get("app")
                return app
    return None
