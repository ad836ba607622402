"""Checks of single values: each returns the value in its stored form or raises `InvalidJob` naming the field.

Used wherever a value enters the package, so that a limit is written once and a wrong value is refused
before any SQL. The database checks the same limits again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from awa_sqla.errors import InvalidJob

NAME_LENGTH = 200
TAGS = 20
ATTEMPTS = 1000
VERSIONS = 32767
PRIORITIES = range(1, 5)
RESULT_BYTES = 1 << 20
PROGRESS_BYTES = 1 << 16
ERROR_CHARACTERS = 1 << 16
TRACEBACK_CHARACTERS = 1 << 15
ERRORS_HEAD, ERRORS_TAIL = 5, 45

#: Python itself reads and writes no decimal number above 4300 digits.
LARGEST = 10**4000

#: Longer than any plan: keeps `now() + delay` inside PostgreSQL's timestamps.
LONGEST = timedelta(days=365 * 1000)


#: Due times that every driver can read in every time zone.
EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


def type_name(value: Any) -> str:
    """How an error names what it was given."""
    return type(value).__name__


def text(field: str, value: object, *, longest: int = NAME_LENGTH) -> str:
    """A name: text that is not blank, at most `longest` characters, storable in PostgreSQL."""
    if not isinstance(value, str):
        raise InvalidJob(field, f"must be text, not {type(value).__name__}")
    if not value.strip():
        raise InvalidJob(field, "must not be empty")
    if len(value) > longest:
        raise InvalidJob(field, f"has {len(value)} characters, at most {longest} are allowed")
    storable(field, value)
    return str.__str__(value)  # of an enumeration that is text, its text


def storable(field: str, value: str) -> None:
    """Refuse what PostgreSQL cannot store in `text` and `jsonb`: NUL and lone surrogates."""
    if "\x00" in value:
        raise InvalidJob(field, r"contains a NUL character (\x00), which PostgreSQL cannot store")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidJob(field, "contains a lone surrogate, which is no Unicode text") from None


def cleaned(value: str, longest: int = ERROR_CHARACTERS) -> str:
    """Error text as it can be stored: without NUL and surrogates, cut in the middle to `longest`."""
    value = value.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
    if len(value) > longest:
        half = (longest - 30) // 2
        value = f"{value[:half]} … {len(value) - 2 * half} characters cut … {value[-half:]}"
    return value


def integer(field: str, value: object, lowest: int, highest: int) -> int:
    """A whole number from `lowest` to `highest`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidJob(field, f"must be a whole number, not {type(value).__name__}")
    if not lowest <= value <= highest:
        raise InvalidJob(field, f"must be from {lowest} to {highest}, not {value}")
    return int(value)


def priority(value: object) -> int:
    """1 (most urgent) to 4."""
    return integer("priority", value, PRIORITIES[0], PRIORITIES[-1])


def duration(field: str, value: object, *, zero: bool = False) -> timedelta:
    """A positive `timedelta`; with `zero`, none at all is allowed too."""
    if not isinstance(value, timedelta):
        raise InvalidJob(field, f"must be a datetime.timedelta, not {type(value).__name__}")
    if value < timedelta(0) or (not zero and not value):
        raise InvalidJob(field, f"must be {'zero or ' if zero else ''}longer than zero, not {value}")
    if value > LONGEST:
        raise InvalidJob(field, f"must not exceed {LONGEST.days} days")
    return value


def moment(field: str, value: object) -> datetime:
    """An aware `datetime` that every driver can read back."""
    if not isinstance(value, datetime):
        raise InvalidJob(field, f"must be a datetime.datetime, not {type(value).__name__}")
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidJob(field, "is naive: say which time zone, for instance datetime.now(timezone.utc)")
    if not EARLIEST <= value <= LATEST:
        raise InvalidJob(field, f"must lie between {EARLIEST:%Y} and {LATEST:%Y}, not {value}")
    return value


def tags(value: object) -> tuple[str, ...]:
    """At most 20 tags, each a name."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidJob("tags", "must be a sequence of text")
    found = tuple(text(f"tags[{i}]", tag) for i, tag in enumerate(cast("Iterable[object]", value)))
    if len(found) > TAGS:
        raise InvalidJob("tags", f"has {len(found)} tags, at most {TAGS} are allowed")
    return found


def metadata(value: object) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, Mapping):
        raise InvalidJob("metadata", f"must be a mapping, not {type(value).__name__}")
    plain: dict[str, Any] = dict(cast("Mapping[str, Any]", value))
    json_value("metadata", plain)
    return plain


def json_value(path: str, value: object) -> None:
    """Refuse what `jsonb` cannot hold, or would hold as something else, naming the path of the value."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if abs(value) >= LARGEST:
            raise InvalidJob(path, "has more digits than readers of JSON take")
        return
    if isinstance(value, str):
        storable(path, value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidJob(path, f"is {value}, which JSON does not have")
    elif isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            if not isinstance(key, str):
                raise InvalidJob(path, f"has the key {key!r}; JSON keys are text")
            storable(f"{path}.{key!r}", key)
            json_value(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(cast("list[object]", value)):
            json_value(f"{path}[{i}]", item)
    else:
        raise InvalidJob(path, f"is a {type(value).__name__}, which is not JSON")
