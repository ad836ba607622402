"""The stored form of a set, the same in every process: its order depends on the process's hash seed otherwise.

Equal arguments must have equal unique keys, whoever enqueues them.
"""

# Values and their JSON are of any shape here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from pydantic import BaseModel


def in_order(value: Any, data: Any) -> Any:
    """`data` is how `value` was written as JSON: the same with the elements of every set in order.

    What was written by code of the app's own, in another shape than the value has, is left as it is.
    """
    if isinstance(data, list):
        items: list[Any] = data
        parts: list[Any] = list(value) if isinstance(value, list | tuple | AbstractSet) else []
        if len(parts) != len(items):
            return items
        items = [in_order(part, item) for part, item in zip(parts, items, strict=True)]
        if isinstance(value, AbstractSet):
            items.sort(key=lambda item: json.dumps(item, sort_keys=True))
        return items
    if isinstance(data, dict):
        written: dict[Any, Any] = data
        parts = _parts(value)
        if len(parts) == len(written):
            return {key: in_order(part, item) for part, (key, item) in zip(parts, written.items(), strict=True)}
    return data


def _parts(value: Any) -> list[Any]:
    """What the values of a JSON object were written from, in its order."""
    if isinstance(value, BaseModel):
        return [getattr(value, name) for name in type(value).model_fields]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        found: Mapping[Any, Any] = value
        return list(found.values())
    return []
