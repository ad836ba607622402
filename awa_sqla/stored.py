"""The form in which arguments are stored: plain JSON that comes back as an equal object, or an error at once.

`dump` refuses what would not survive the round trip through `jsonb`, naming the field; `decode` reads a row, also
one of an older version of its class.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import NoneType
from typing import Any, cast
from uuid import UUID
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ValidationError

from awa_sqla import limits
from awa_sqla.args import A, JobArgs, concrete
from awa_sqla.errors import InvalidJob
from awa_sqla.stable import as_kept, in_order

Steps = tuple[int | str, ...]


def dump(args: JobArgs) -> dict[str, Any]:
    """The stored form of `args`: plain JSON that decodes to an equal object.

    Raises `InvalidJob`, and nothing else, with the path of the first value that would not survive: NaN and
    infinities, NUL and lone surrogates, naive datetimes, secrets (stored as stars), fields of a subclass, extra
    fields and private attributes (dropped), and whatever else comes back different.
    """
    if not isinstance(args, JobArgs):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJob("args", f"must be a JobArgs instance, not {type(args).__name__}")
    cls = concrete(type(args))
    if (text := _plain_text(args)) is not None:
        return cast("dict[str, Any]", json.loads(text))
    data: dict[str, Any] = _written(args)
    if not isinstance(data, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJob("args", f"would be stored as a {limits.type_name(data)}; a job's arguments are a JSON object")
    try:
        data = in_order(args, data)
        limits.json_value("args", data)
        _same("args", args, _read(cls, json.dumps(as_kept(data))))
    except InvalidJob:
        raise
    except ValidationError as exc:
        raise misfit(exc, "does not decode from its stored form", data) from exc
    except Exception as exc:  # a validator, an __eq__ or a descriptor of the app may raise anything
        raise InvalidJob("args", f"cannot be read back from their stored form: {_told(exc)}") from exc
    return data


def dump_text(args: JobArgs) -> str:
    """`dump()` as JSON text; arguments of nothing but text and whole numbers take a fifth of the time of others."""
    text = _plain_text(args)
    return json.dumps(dump(args), ensure_ascii=False, separators=(",", ":")) if text is None else text


def decode(cls: type[A], data: dict[str, Any], version: int | None = None) -> A:
    """The object that a stored row holds; fields this class does not know are ignored.

    `version` is the row's; None stands for the class's own. Raises pydantic's `ValidationError` when the row does
    not fit the class, `InvalidJob` when it is of a newer version or cannot be upcast.
    """
    if version is not None and version != cls.__awa__.version:
        return _read(cls, upcast(cls, copy.deepcopy(data), version))
    return _read(cls, json.dumps(data))


def decode_json(cls: type[A], text: str, version: int) -> A:
    """`decode()` from JSON text."""
    if version != cls.__awa__.version:
        return _read(cls, upcast(cls, json.loads(text), version))
    return _read(cls, text)


def upcast(cls: type[JobArgs], data: dict[str, Any], version: int) -> str:
    """The row's data as the present version of the class has it, as JSON."""
    known = cls.__awa__.version
    if version > known:
        raise InvalidJob(
            "args",
            f"were written by version {version} of {cls.__name__}, and this process has version {known}: upgrade it",
        )
    try:
        made: Any = cls.upcast(data, version)
        if isinstance(made, dict):
            return json.dumps(made)
    except Exception as exc:
        told = f"of a row of version {version} failed: {_told(exc)}"
        raise InvalidJob("args", f"{cls.__name__}.upcast() {told}") from exc
    raise InvalidJob("args", f"{cls.__name__}.upcast() returned a {limits.type_name(made)}, not a dict")


def misfit(exc: ValidationError, what: str, data: object = None) -> InvalidJob:
    """The error for arguments that do not validate, naming the first field; by `data`, when that is what was read."""
    first = exc.errors(include_url=False, include_input=False)[0]
    loc = first["loc"] if data is None or first["type"] == "missing" else tuple(_within(data, first["loc"]))
    return InvalidJob(_path("args", loc), f"{what}: {first['msg']}")


def _read(cls: type[A], text: str) -> A:
    """From JSON text: what a strict field refuses from Python objects (a date as text) is right there."""
    made: A = cls.__pydantic_validator__.validate_json(text, by_alias=False, by_name=True, extra="ignore")
    return made


# ------------------------------------------------------------------------------------------------------- writing
def _written(args: JobArgs, include: Any = None) -> Any:
    """As pydantic writes it. `round_trip` keeps `Json` fields readable and leaves out what is computed from others."""
    try:
        write = type(args).__pydantic_serializer__.to_python
        return write(args, mode="json", include=include, by_alias=False, round_trip=True, warnings=False)
    except Exception as exc:
        path = "args" if include else _path("args", _culprit(args, args))
        raise InvalidJob(path, f"cannot be written as JSON: {_told(exc)}") from exc


def _culprit(args: JobArgs, value: Any, steps: Steps = ()) -> Steps:
    """Where the value is that cannot be written: halves are left out until one is found. Costs only the refused."""
    parts = _parts(value)
    keys = list(parts)
    while len(keys) > 1:
        half = keys[: len(keys) // 2]
        keys = keys[len(half) :] if _is_writable(args, steps, half) else half
    # None of the parts: its own serializer, or a key. And values that hold each other have no end.
    if not keys or len(steps) == 20 or _is_writable(args, steps, keys):
        return steps
    return _culprit(args, parts[keys[0]], (*steps, keys[0]))


def _is_writable(args: JobArgs, steps: Steps, keys: list[Any]) -> bool:
    include: Any = set(keys)
    for step in reversed(steps):
        include = {step: include}
    with suppress(InvalidJob):
        _written(args, include)
        return True
    return False


def _parts(value: Any) -> dict[Any, Any]:
    """What pydantic can be told to leave out of a value, by name or number."""
    if (names := _field_names(value)) is not None:
        return {name: getattr(value, name, None) for name in names}
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    return dict(enumerate(cast("list[Any]", value))) if isinstance(value, list | tuple) else {}


def _path(root: str, loc: Iterable[int | str]) -> str:
    told = root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return told.encode(errors="backslashreplace").decode()


def _within(data: Any, loc: Steps) -> Iterator[int | str]:
    """The part of an error's location that is in the data: what follows names a member of a union or a validator."""
    with suppress(LookupError, TypeError):
        for part in loc:
            data = data[part]
            yield part


def _told(exc: Exception) -> str:
    with suppress(Exception):  # it may be the app's
        return f"{type(exc).__name__}: {exc}"
    return type(exc).__name__


# ---------------------------------------------------------------------------------------------------- comparison
_SIMPLE = frozenset({int, str, bool, float, bytes, NoneType, Decimal, UUID, date, timedelta})


def _same(path: str, value: Any, again: Any) -> None:
    """Raise `InvalidJob` at the first place where the decoded value differs from the given one."""
    if type(value) in _SIMPLE and value == again:
        return
    if isinstance(value, datetime | time):
        _refuse_naive(path, value)
        value, again = _instant(value), _instant(again)
    if type(value) is not type(again) and value != again:
        raise InvalidJob(path, f"is a {type(value).__name__} and would come back as a {type(again).__name__}")
    if (names := _field_names(value)) is not None:
        if type(value) is not type(again):
            raise InvalidJob(path, f"is a {type(value).__name__} and would lose the fields of its own")
        for name in names:
            _same(f"{path}.{name}", getattr(value, name), getattr(again, name))
        _same_beside(path, value, again)
    elif isinstance(value, dict) and isinstance(again, dict):
        _same_dict(path, cast("dict[str, Any]", value), cast("dict[str, Any]", again))
    elif isinstance(value, list | tuple | deque) and isinstance(again, list | tuple | deque):
        _same_list(path, list(cast("list[Any]", value)), list(cast("list[Any]", again)))
    elif isinstance(value, set | frozenset) and isinstance(again, set | frozenset):
        _same_set(path, cast("set[Any]", value), cast("set[Any]", again))
    elif value != again:
        raise InvalidJob(path, f"is a {limits.type_name(value)} that would come back different")


def _refuse_naive(path: str, value: datetime | time) -> None:
    if value.utcoffset() is None and isinstance(value, datetime):
        raise InvalidJob(path, "is a naive datetime: say which time zone it is in")
    if value.utcoffset() is None and value.tzinfo is not None:
        raise InvalidJob(path, f"would lose its zone: {value.tzinfo} has no offset for a time without a date")


def _same_list(path: str, value: list[Any], again: list[Any]) -> None:
    if len(value) != len(again):
        raise InvalidJob(path, "would come back with another length")
    for i, item in enumerate(value):
        _same(f"{path}[{i}]", item, again[i])


def _same_set(path: str, value: set[Any], again: set[Any]) -> None:
    for item in value:
        _same(path, item, item)  # refuses what is refused anywhere
    if len(value) != len(again) or set(map(_instant, value)) != set(map(_instant, again)):
        raise InvalidJob(path, f"is a {limits.type_name(value)} that would come back different")


def _same_dict(path: str, value: dict[Any, Any], again: dict[Any, Any]) -> None:
    for key in value:
        _same(f"{path}.{key}", key, key)
    keys, decoded = ({_instant(key): key for key in one} for one in (value, again))
    if keys.keys() != decoded.keys() or len(keys) != len(value):
        raise InvalidJob(path, "has keys that would come back different")
    if isinstance(value, OrderedDict) and isinstance(again, OrderedDict) and list(keys) != list(decoded):
        raise InvalidJob(path, "would come back in another order")
    for found, key in keys.items():
        _same(f"{path}.{key}", value[key], again[decoded[found]])


def _same_beside(path: str, value: Any, again: Any) -> None:
    """Refuse what a model or dataclass holds beside its fields, unless decoding makes it too."""
    decoded = _beside(again)
    for name, item in _beside(value).items():
        if name not in decoded or item != decoded[name]:
            raise InvalidJob(f"{path}.{name}", "is not stored with the fields and would be lost; declare it as one")


def _beside(value: Any) -> dict[str, Any]:
    """Extra fields, private attributes and others; a cached property is none: the class knows how to make it."""
    names = _field_names(value) or ()
    held: dict[str, Any] = getattr(value, "__dict__", {})
    found = {name: item for name, item in held.items() if name not in names and not hasattr(value.__class__, name)}
    if isinstance(value, BaseModel):
        found |= (value.__pydantic_extra__ or {}) | (value.__pydantic_private__ or {})
    return found


def _field_names(value: Any) -> list[str] | None:
    """The fields of a model or of a dataclass."""
    if isinstance(value, BaseModel):
        return list(type(value).model_fields)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value)]
    return None


def _instant(value: Any) -> Any:
    """Datetimes in UTC: in the hour that a clock shows twice, a local time equals none of another zone."""
    if isinstance(value, datetime) and value.utcoffset() is not None:
        with suppress(OverflowError):
            return value.astimezone(UTC)
    return value


# ------------------------------------------------------------------------------------------------ plain classes
_plain: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
_ENDLESS = re.compile(rb"[0-9]{4001}")  # what `limits.LARGEST` refuses


def _plain_text(args: JobArgs) -> str | None:
    """The stored form of arguments of a plain class; None when the long way has to tell what is wrong with them."""
    cls = type(args)
    if not is_plain(cls):
        return None
    try:
        write = cls.__pydantic_serializer__.to_json
        text = write(args, by_alias=False, warnings=False)
        # The escape in quotes too: what only looks like a NUL goes the long way, and passes there.
        if rb"\u0000" in text or (len(text) > 4000 and _ENDLESS.search(text)):
            return None
        again = cls.__pydantic_validator__.validate_json(text, by_alias=False, by_name=True)
        # Written again, a float in the place of a whole number is one: `jsonb` would round 71259046502246408.0.
        same = again.__dict__ == args.__dict__ and write(again, by_alias=False, warnings=False) == text
        return text.decode() if same else None
    except Exception:  # noqa: BLE001 - a subclass of str, say, with methods of its own
        return None


def is_plain(cls: type) -> bool:
    """Whether every field, by the schema that pydantic runs, is nothing but text, whole numbers, booleans and None."""
    if (found := _plain.get(cls)) is None:
        found = _plain[cls] = _is_plain_class(cls)
    return found


def _is_plain_class(cls: type) -> bool:
    model: dict[str, Any] = getattr(cls, "__pydantic_core_schema__", {})
    if not issubclass(cls, JobArgs) or cls.__awa__.abstract or not isinstance(model, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        return False
    if model["type"] != "model" or model["custom_init"] or model.keys() & {"serialization", "post_init"}:
        return False
    fields = model["schema"]
    return (
        model["config"].get("extra_fields_behavior") == "forbid"
        and fields["type"] == "model-fields"
        and not fields.get("computed_fields")
        and all(_is_plain(field["schema"]) for field in fields["fields"].values())
    )


def _is_plain(schema: Any) -> bool:
    if schema is None or "serialization" in schema:
        return False
    match schema["type"]:
        case "int" | "str" | "bool" | "none":
            return True
        case "literal":
            return all(type(part) in (int, str, bool, NoneType) for part in schema["expected"])
        case "dict":
            key = schema.get("keys_schema", {"type": "any"})
            return key["type"] == "str" and _is_plain(key) and _is_plain(schema.get("values_schema"))
        case "union":
            return all(isinstance(choice, dict) and _is_plain(choice) for choice in schema["choices"])
        case "list" | "nullable" | "default":
            return _is_plain(schema.get("items_schema") or schema.get("schema"))
        case _:
            return False
