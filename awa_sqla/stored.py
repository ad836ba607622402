"""The form in which arguments are stored: plain JSON that comes back as an equal object, or an error at once.

`dump` refuses what would not survive the round trip through `jsonb`, naming the field; `decode` reads a row, also
one of an older version of its class.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from awa_sqla import limits
from awa_sqla.args import A, JobArgs, concrete
from awa_sqla.errors import InvalidJob

M = TypeVar("M", bound=BaseModel)


def dump(args: JobArgs) -> dict[str, Any]:
    """The stored form of `args`: plain JSON that decodes to an equal object.

    Raises `InvalidJob` with the path of the first value that would not survive: NaN and infinities, NUL
    and lone surrogates, naive datetimes, secrets (stored as stars), fields of a subclass (dropped), and
    whatever else comes back different.
    """
    if not isinstance(args, JobArgs):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJob("args", f"must be a JobArgs instance, not {type(args).__name__}")
    cls = concrete(type(args))
    try:
        data = args.model_dump(mode="json", by_alias=False, warnings="none")
    except (PydanticSerializationError, ValueError, TypeError) as exc:
        raise InvalidJob("args", f"cannot be written as JSON: {exc}") from exc
    limits.json_value("args", data)
    try:
        again = _read(cls, json.dumps(_as_kept(data)))
    except ValidationError as exc:
        raise misfit(exc, "does not decode from its stored form") from exc
    _same("args", args, again)
    return data


def dump_text(args: JobArgs) -> str:
    """`dump()` as JSON text; arguments of nothing but text and whole numbers take a fifth of its time."""
    if is_plain(type(args)):
        try:
            text = args.__pydantic_serializer__.to_json(args, by_alias=False, warnings="none").decode()
            # The escape in quotes too: what only looks like a NUL goes the long way, and passes there.
            if r"\u0000" not in text and _read(type(args), text) == args:
                return text
        except (PydanticSerializationError, ValueError, TypeError):
            pass  # the long way finds the words for it
    return json.dumps(dump(args), ensure_ascii=False, separators=(",", ":"))


def decode(cls: type[A], data: dict[str, Any], version: int | None = None) -> A:
    """The object that a stored row holds; fields this class does not know are ignored.

    `version` is the row's; None stands for the class's own. Raises pydantic's `ValidationError` when the row does
    not fit the class, `InvalidJob` when it is of a newer version or cannot be upcast.
    """
    if version is not None and version != cls.__awa__.version:
        data = upcast(cls, copy.deepcopy(data), version)
    return _read(cls, json.dumps(data))


def decode_json(cls: type[A], text: str, version: int) -> A:
    """`decode()` from JSON text."""
    if version != cls.__awa__.version:
        return _read(cls, json.dumps(upcast(cls, json.loads(text), version)))
    return _read(cls, text)


def upcast(cls: type[JobArgs], data: dict[str, Any], version: int) -> dict[str, Any]:
    """The row's data as the present version of the class has it."""
    known = cls.__awa__.version
    if version > known:
        raise InvalidJob(
            "args",
            f"were written by version {version} of {cls.__name__}, and this process has version {known}: upgrade it",
        )
    try:
        made: object = cls.upcast(data, version)
    except Exception as exc:
        told = f"{type(exc).__name__}: {exc}"
        raise InvalidJob("args", f"{cls.__name__}.upcast() of a row of version {version} raised {told}") from exc
    if not isinstance(made, dict):
        raise InvalidJob("args", f"{cls.__name__}.upcast() returned a {limits.type_name(made)}, not a dict")
    return made


def misfit(exc: ValidationError, what: str) -> InvalidJob:
    """The error for arguments that do not validate, naming the first field."""
    first = exc.errors(include_url=False, include_input=False)[0]
    return InvalidJob(_path("args", first["loc"]), f"{what}: {first['msg']}")


def _read(cls: type[M], text: str) -> M:
    """From JSON text: what a strict field refuses from Python objects (a date as text) is right there."""
    return cls.model_validate_json(text, by_alias=False, by_name=True, extra="ignore")


def _as_kept(value: Any) -> Any:
    """JSON data as `jsonb` gives it back: it writes numbers without an exponent, so large ones lose their fraction."""
    if isinstance(value, float):
        exact = Decimal(repr(value))
        return int(exact) if exact == exact.to_integral_value() and "e" in repr(value) else value
    if isinstance(value, dict):
        return {key: _as_kept(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_kept(item) for item in value]
    return value


def _path(root: str, loc: Iterable[int | str]) -> str:
    return root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)


def _same(path: str, value: object, again: object) -> None:
    """Raise `InvalidJob` at the first place where the decoded value differs from the given one."""
    if isinstance(value, datetime) and value.tzinfo is None:
        raise InvalidJob(path, "is a naive datetime: say which time zone it is in")
    if isinstance(value, datetime) and isinstance(again, datetime) and value != again:
        # In UTC: in the hour that a clock shows twice, a local time equals none of another zone.
        value, again = value.astimezone(UTC), again.astimezone(UTC)
    if type(value) is not type(again) and value != again:
        raise InvalidJob(path, f"is a {type(value).__name__} and would come back as a {type(again).__name__}")
    if isinstance(value, BaseModel):
        if type(value) is not type(again):
            raise InvalidJob(path, f"is a {type(value).__name__} and would lose the fields of its own")
        for name in type(value).model_fields:
            _same(f"{path}.{name}", getattr(value, name), getattr(again, name))
    elif isinstance(value, dict) and isinstance(again, dict):
        if value.keys() != again.keys():  # pyright: ignore[reportUnknownMemberType]
            raise InvalidJob(path, "has keys that would come back different")
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            _same(f"{path}.{key}", item, again[key])  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, list | tuple) and isinstance(again, list | tuple):
        if len(value) != len(again):  # pyright: ignore[reportUnknownArgumentType]
            raise InvalidJob(path, "would come back with another length")
        for i, pair in enumerate(zip(value, again, strict=True)):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            _same(f"{path}[{i}]", *pair)  # pyright: ignore[reportUnknownArgumentType]
    elif value != again:
        raise InvalidJob(path, f"is a {limits.type_name(value)} that would come back different")


# ------------------------------------------------------------------------------------------------ plain classes
_plain: WeakKeyDictionary[type[JobArgs], bool] = WeakKeyDictionary()


def is_plain(cls: type[JobArgs]) -> bool:
    """Whether every field is made of text, whole numbers, booleans and None: then equality tells that they survive."""
    found = _plain.get(cls)
    if found is None:
        found = cls.model_config.get("extra") == "forbid" and all(
            _is_plain(field.annotation) for field in cls.model_fields.values()
        )
        _plain[cls] = found
    return found


def _is_plain(annotation: Any) -> bool:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is None:
        return annotation in (int, str, bool, NoneType)
    if origin is Literal:
        return all(type(part) in (int, str, bool, NoneType) for part in parts)
    if origin is dict:
        return parts[0] is str and _is_plain(parts[1])
    return origin in (list, Union, UnionType) and all(map(_is_plain, parts))
