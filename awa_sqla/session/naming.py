"""Names that functions have in the database."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from awa_sqla import limits
from awa_sqla.errors import ConfigurationError, InvalidJob


def spec_name(function: Callable[..., Any], given: str | None = None) -> str:
    """`module:qualname`, or the name that was given.

    The name is the identity of a spec across processes, so `__main__` is replaced by the name under which
    other processes import the module. Raises `ConfigurationError` for lambdas and local functions without a name.
    """
    if given is not None:
        try:
            return limits.text("name", given)
        except InvalidJob as exc:
            raise ConfigurationError(f"follow-up spec: {exc}") from exc
    qualname: str = getattr(function, "__qualname__", "")
    if not qualname or "<" in qualname:
        raise ConfigurationError(
            f"follow-up spec {qualname or function!r} is a lambda or a local function and has no name that lasts: "
            "give it one with name='...'"
        )
    return f"{_module(function.__module__)}:{qualname}"


def _module(name: str) -> str:
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name).removesuffix(".__main__")
    return Path(getattr(main, "__file__", None) or "__main__").stem
