"""One form for equal arguments, in every process: what the database makes of numbers, and the order of sets.

Equal arguments must have equal unique keys, whoever enqueues them.
"""

# Values and their JSON are of any shape here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, RootModel


def as_kept(value: Any) -> Any:
    """JSON data as `jsonb` gives it back: numbers without an exponent and a negative zero, keys in its own order."""
    if isinstance(value, float):
        written = float.__repr__(value)
        return int(Decimal(written)) if "e+" in written else value or 0.0
    if isinstance(value, dict):
        items: Any = value.items()
        return {key: as_kept(item) for key, item in sorted(items, key=lambda item: (len(item[0].encode()), item[0]))}
    if isinstance(value, list | tuple):
        return [as_kept(item) for item in value]
    return value


def in_order(value: Any, data: Any) -> Any:
    """`data` is how `value` was written as JSON: the same with the elements of every set in order.

    The order of a set depends on the hash seed of its process. What was written by code of the app's own, in another
    shape than the value has, is left as it is.
    """
    if isinstance(value, RootModel):
        return in_order(value.root, data)
    if isinstance(data, list):
        items: list[Any] = data
        several = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping | BaseModel)
        parts: list[Any] = list(value) if several else []
        if len(parts) != len(items):
            return items
        items = [in_order(part, item) for part, item in zip(parts, items, strict=True)]
        if isinstance(value, AbstractSet):
            items.sort(key=lambda item: json.dumps(item, sort_keys=True))
        return items
    if isinstance(data, dict):
        written: dict[Any, Any] = data
        named = _named(value, written)
        return {key: in_order(named[key], item) if key in named else item for key, item in written.items()}
    return data


def _named(value: Any, data: Mapping[Any, Any]) -> dict[Any, Any]:
    """What the values of a JSON object were written from, by its keys."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields if name in data}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and len(value) == len(data):
        return dict(zip(data, value.values(), strict=True))
    return {}
