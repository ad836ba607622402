"""Bounds of what a handler hands back: results and progress."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from awa_sqla import limits
from awa_sqla.errors import InvalidJob


def checked_result(value: Any, *, field: str = "result") -> Any:
    """`value` as JSON data of at most 1 MiB, or `InvalidJob` with the path of what is wrong."""
    if value is None:
        return None
    try:
        limits.json_value(field, value)
        _bounded(field, value, limits.RESULT_BYTES)
    except RecursionError:
        raise InvalidJob(field, "is nested too deep") from None
    return value


def checked_progress(percent: object, message: object, metadata: object) -> dict[str, Any]:
    """The binds of `set_progress`."""
    if percent is not None:
        if not isinstance(percent, int | float) or isinstance(percent, bool) or not math.isfinite(percent):
            raise InvalidJob("percent", f"must be a number, not {percent!r}")
        if not 0 <= percent <= 100:
            raise InvalidJob("percent", f"must be from 0 to 100, not {percent}")
    if message is not None:
        if not isinstance(message, str):
            raise InvalidJob("message", f"must be text, not {type(message).__name__}")
        limits.storable("message", message)
        _bounded("message", message, limits.PROGRESS_BYTES)
    plain: dict[str, Any] = {}
    if metadata is not None:
        if not isinstance(metadata, Mapping):
            raise InvalidJob("metadata", f"must be a mapping, not {type(metadata).__name__}")
        plain = limits.metadata(metadata)  # pyright: ignore[reportUnknownArgumentType]
        _bounded("metadata", plain, limits.PROGRESS_BYTES)
    return {"percent": percent, "message": message, "given_metadata": plain}


def _bounded(field: str, value: Any, most: int) -> None:
    size = len(json.dumps(value, ensure_ascii=False).encode())
    if size > most:
        raise InvalidJob(field, f"takes {size} bytes as JSON, at most {most} are allowed")
