"""Arguments come back from PostgreSQL as equal objects, or are refused where they are enqueued.

Every type that pydantic writes as JSON is tried, with what fits it and with what was smuggled past its validation. The
round trip is a real one: through `jsonb`, to the ORM's road (data) and to the worker's (text).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg
import pydantic
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    AliasChoices,
    AnyUrl,
    Base64Bytes,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    HttpUrl,
    Json,
    PlainSerializer,
    PositiveInt,
    PrivateAttr,
    RootModel,
    SecretBytes,
    SecretStr,
    SerializeAsAny,
    StringConstraints,
    ValidationError,
    WrapSerializer,
    computed_field,
    create_model,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)
from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session
from typing_extensions import TypedDict

from awa_sqla import InvalidJob, Job, JobArgs, enqueue, enqueue_many, stable, stored
from awa_sqla.requests import EnqueueRequest
from awa_sqla.stored import decode, decode_json, dump, dump_text, is_plain
from tests.databases import Server, libpq_url

T = TypeVar("T")


def examples(number: int) -> settings:
    """The same examples in every run."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],  # a failure shows its one value; to shrink the list takes minutes
        suppress_health_check=checks,
    )


# ------------------------------------------------------------------------------------------------------- equality
def picture(value: Any) -> Any:
    """What two equal values share, and unequal ones do not; datetimes are instants."""
    if isinstance(value, BaseModel):
        held = {name: getattr(value, name) for name in type(value).model_fields}
        held |= (value.__pydantic_extra__ or {}) | (value.__pydantic_private__ or {})
        return type(value), picture(held)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), picture({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, datetime):
        offset = value.utcoffset()
        return "instant", offset is None, value.replace(tzinfo=None) - datetime.min - (offset or timedelta(0))
    if isinstance(value, dict):
        return "dict", frozenset((picture(key), picture(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return "set", frozenset(map(picture, value))
    for kind in (list, tuple, deque):
        if isinstance(value, kind):
            return kind, tuple(map(picture, value))
    return bytes(value) if isinstance(value, bytearray) else value


class Keeper:
    """PostgreSQL, as what keeps JSON."""

    def __init__(self, connection: psycopg.Connection[tuple[str]]) -> None:
        self._connection = connection

    def kept(self, texts: list[str]) -> list[str]:
        """Each of the texts as `jsonb` gives it back, in one statement."""
        query = "SELECT line::jsonb::text FROM unnest(%s::text[]) WITH ORDINALITY AS given (line, place) ORDER BY place"
        return [kept for (kept,) in self._connection.execute(query, [texts])]

    def check(self, many: Iterable[JobArgs]) -> int:
        """Refused with a path, or back as an equal object, on both roads; how many came back."""
        accepted = [(args, text) for args in many if (text := written(args)) is not None]
        for (args, text), back in zip(accepted, self.kept([text for _, text in accepted]), strict=True):
            cls = type(args)
            assert json.dumps(json.loads(back)) == json.dumps(stable.as_kept(json.loads(text)))
            for again in (decode_json(cls, back, 1), decode(cls, json.loads(back))):
                assert picture(again) == picture(args), (args, back)
                if isinstance(getattr(args, "value", None), OrderedDict) and isinstance(again.value, OrderedDict):
                    assert again.value == args.value
        return len(accepted)


@pytest.fixture(scope="module")
def keeper(postgres_server: Server) -> Iterator[Keeper]:
    """No table is needed: casts are enough."""
    url = postgres_server.url(postgres_server.maintenance_dbname)
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        yield Keeper(connection)


def written(args: JobArgs) -> str | None:
    """The text of the arguments, or None when they are refused; all roads must agree."""
    roads = [dump_text, dump, *([the_long_way] if is_plain(type(args)) else [])]
    found = [outcome(road, args) for road in roads]
    if isinstance(found[0], InvalidJob):
        for refused in found:
            assert isinstance(refused, InvalidJob)
            assert re.match(r"args(\W|$)", refused.field)
            assert refused.field.encode()
        return None
    text = found[0]
    assert isinstance(text, str)
    for data in found[1:]:
        assert json.dumps(data) == json.dumps(json.loads(text))
    return text


def outcome(road: Callable[[JobArgs], Any], args: JobArgs) -> Any:
    try:
        return road(args)
    except InvalidJob as refused:
        return refused


def the_long_way(args: JobArgs) -> dict[str, Any]:
    """`dump()` without the short cut of plain classes."""
    stored._plain[type(args)] = False
    try:
        return dump(args)
    finally:
        del stored._plain[type(args)]


# ---------------------------------------------------------------------------------------------------------- types
class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Mixed(enum.Enum):
    TEXT = "text"
    NUMBER = 1
    RATIO = 1e16
    NOTHING = None
    PAIR = (1, 2)


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Shape(TypedDict, total=False):
    sides: int
    name: str


@dataclasses.dataclass
class Place:
    name: str
    seen: datetime | None = None
    note: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    at: Point
    tags: frozenset[str] = frozenset()


@pydantic.dataclasses.dataclass(frozen=True)
class Checked:
    number: PositiveInt = 1
    when: date | None = None


@dataclasses.dataclass
class FinerPlace(Place):
    floor: int = 0


@dataclasses.dataclass(eq=False)
class Unequal:
    number: int = 0


class Line(BaseModel):
    price: Decimal = Decimal("1.10")
    colours: frozenset[Colour] = frozenset()
    at: datetime | None = None


class FinerLine(Line):
    discount: int = 0


class Frozen(BaseModel, frozen=True):
    name: str
    at: datetime | None = None


class Box(BaseModel, Generic[T]):
    item: T
    more: list[T] = []


class Cat(BaseModel):
    pet: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    pet: Literal["dog"] = "dog"
    name: str | None = None


class Numbers(RootModel[list[int | float]]):
    pass


class Tree(BaseModel):
    label: str
    kids: list[Tree] = []


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    known: int = 0


class Lax(BaseModel):
    model_config = ConfigDict(extra="ignore", validate_assignment=True)
    known: int = 0


class Renamed(BaseModel):
    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)
    order_id: int = Field(0, alias="orderId")
    to: str = Field("", validation_alias=AliasChoices("receiver", "recipient"), serialization_alias="TO")
    by: int = Field(0, alias="to")


class Timing(BaseModel):
    model_config = ConfigDict(ser_json_timedelta="float", ser_json_bytes="base64", val_json_bytes="base64")
    wait: timedelta = timedelta(0)
    raw: bytes = b""


class Unlimited(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    ratio: float = 0


class Constants(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    ratio: float = 0


class Values(BaseModel):
    model_config = ConfigDict(use_enum_values=True)
    colour: Colour = Colour.RED
    mixed: Mixed = Mixed.TEXT


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    day: date = date(2026, 1, 1)
    key: UUID = UUID(int=0)
    pair: tuple[int, float] = (0, 0.0)
    colours: set[Colour] = set()
    raw: bytes = b""
    wait: timedelta = timedelta(0)
    amount: Decimal = Decimal(0)


class Area(BaseModel):
    side: int = 1

    @computed_field
    def area(self) -> float:
        return math.nan if self.side == 0 else self.side**2

    @cached_property
    def dear(self) -> object:
        return object()


class Private(BaseModel):
    name: str = ""
    _seen: int = PrivateAttr(0)


class Hidden(BaseModel):
    shown: int = 0
    hidden: int = Field(0, exclude=True)
    made: list[int] = Field(default_factory=list, exclude=True)


class Rounding(BaseModel):
    ratio: float = 0

    @field_serializer("ratio")
    def rounded(self, value: float) -> float:
        return round(value, 1)


class Upper(BaseModel):
    text: str = ""

    @field_validator("text")
    @classmethod
    def raised(cls, value: str) -> str:
        return value.upper()


class Packed(BaseModel):
    left: int = 0
    right: int = 0

    @model_serializer
    def pack(self) -> str:
        return f"{self.left}:{self.right}"

    @model_validator(mode="before")
    @classmethod
    def unpack(cls, data: Any) -> Any:
        return dict(zip(("left", "right"), data.split(":"), strict=True)) if isinstance(data, str) else data


class First(BaseModel):
    """What it is depends on the order of the keys."""

    order: list[str] = []

    @model_serializer
    def spread(self) -> dict[str, int]:
        return dict.fromkeys(self.order, 1)

    @model_validator(mode="before")
    @classmethod
    def gather(cls, data: dict[str, Any]) -> dict[str, Any]:
        return data if "order" in data else {"order": list(data)}


NAUGHTY = ["", "\0", "a\0b", "\\u0000", "\ud800", "\udfff\ud800", "é", "\u2028", "\U0001f600", "1", "1e16", "null", '"']
text = st.text(max_size=6) | st.text(st.characters(codec=None, categories=None), max_size=4) | st.sampled_from(NAUGHTY)
good = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
integers = (
    st.integers() | st.integers(-(10**60), 10**60) | st.sampled_from([2**63, -(2**64), 10**3999, 10**4000, 10**4200])
)
EDGES = [1e15, 1e16, 123e20, 1e22, 1e23, 1e308, -1.7976931348623157e308, 5e-324, 1e-320, 1e-7, 1e-5, -0.0, 0.1, 2.0**53]
digits = st.integers(0, 9)
floats = st.floats() | st.sampled_from(EDGES)
finite = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(EDGES)
offsets = st.builds(lambda seconds: timezone(timedelta(seconds=seconds)), st.integers(-86399, 86399) | st.just(7200))
NEW_YORK = ZoneInfo("America/New_York")
moments = st.one_of(
    st.datetimes(timezones=st.timezones() | st.just(UTC) | offsets),
    st.datetimes(),
    st.builds(
        lambda minute, fold: datetime(2025, 11, 2, 1, minute, fold=fold, tzinfo=NEW_YORK),
        st.integers(0, 59),
        st.integers(0, 1),
    ),
    st.sampled_from([datetime.min, datetime.max]).flatmap(
        lambda m: st.builds(m.replace, tzinfo=st.just(UTC) | offsets | st.just(NEW_YORK))
    ),
)
plain_decimals = st.decimals(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [Decimal(number) for number in ("-0", "1E+400", "1.10", "1E-400", "0E+5")]
)
decimals = plain_decimals | st.sampled_from([Decimal("NaN"), Decimal("Infinity")])
times = st.times() | st.times(timezones=offsets | st.just(UTC) | st.just(NEW_YORK))
spans = st.timedeltas() | st.sampled_from([timedelta.min, timedelta.max, timedelta(microseconds=-1)])
anything = st.recursive(
    st.none() | st.booleans() | integers | floats | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
lines = st.builds(Line, price=plain_decimals, colours=st.frozensets(st.sampled_from(Colour)), at=st.none() | moments)
patterns = st.sampled_from([re.compile("a+"), re.compile("a", re.IGNORECASE), re.compile("\0")])


def listed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(inner, max_size=3)


def keyed(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, int]]:
    return st.dictionaries(keys, st.integers(0, 9), max_size=4)


def with_seen(seen: int) -> Private:
    made = Private(name="n")
    made._seen = seen
    return made


def with_cache(side: int) -> Area:
    made = Area(side=side)
    assert made.dear
    return made


#: Every kind of field: what its type is, and values that may fit it.
FIELDS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": (int, integers),
    "float": (float, floats),
    "bool": (bool, st.booleans()),
    "str": (str, text),
    "bytes": (bytes, st.binary(max_size=4) | good.map(str.encode)),
    "Base64Bytes": (Base64Bytes, st.sampled_from([b"", b"AAD/", b"eA=="])),
    "Decimal": (Decimal, decimals),
    "Fraction": (Fraction, st.fractions()),
    "complex": (complex, st.complex_numbers()),
    "date": (date, st.dates()),
    "time": (time, times),
    "datetime": (datetime, moments),
    "timedelta": (timedelta, spans),
    "UUID": (UUID, st.uuids()),
    "StrEnum": (Colour, st.sampled_from(Colour)),
    "IntEnum": (Size, st.sampled_from(Size)),
    "mixed Enum": (Mixed, st.sampled_from(Mixed)),
    "IntFlag": (Rights, st.sampled_from([*Rights, Rights.READ | Rights.WRITE, Rights(0)])),
    "Literal": (Literal["a", 1, True, b"x", Colour.RED] | None, st.sampled_from(["a", 1, True, None, b"x", *Colour])),
    "Optional": (int | None, st.none() | integers),
    "int or str": (int | str, integers | text),
    "str or int": (str | int, integers | text),
    "int or float": (int | float, integers | floats),
    "float or int or bool": (float | int | bool, integers | floats | st.booleans()),
    "date or datetime or str": (date | datetime | str, st.dates() | moments | good | (st.dates() | moments).map(str)),
    "Decimal or float or str": (Decimal | float | str, decimals | floats | good | finite.map(str)),
    "UUID or str": (UUID | str, st.uuids() | good | st.uuids().map(str)),
    "bytes or str": (bytes | str, st.binary(max_size=3) | good),
    "time or timedelta": (time | timedelta, times | spans),
    "list or set": (list[int] | set[int], listed(st.integers(0, 3)) | st.sets(st.integers(0, 3))),
    "union of models": (Line | Cat | Dog, lines | st.builds(Cat) | st.builds(Dog)),
    "left to right": (Annotated[int | str, Field(union_mode="left_to_right")], digits | digits.map(str)),
    "discriminated": (Annotated[Cat | Dog, Field(discriminator="pet")], st.builds(Cat) | st.builds(Dog)),
    "Discriminator": (
        Annotated[
            Annotated[Cat, pydantic.Tag("cat")] | Annotated[Dog, pydantic.Tag("dog")],
            Discriminator(lambda v: v.get("pet") if isinstance(v, dict) else v.pet),
        ],
        st.builds(Cat) | st.builds(Dog),
    ),
    "list": (list[float], listed(floats)),
    "bare list": (list, listed(anything)),
    "tuple": (tuple[int, str], st.tuples(integers, text)),
    "long tuple": (tuple[datetime, ...], listed(moments).map(tuple)),
    "NamedTuple": (Point, st.builds(Point, x=st.integers(), y=finite)),
    "set": (set[int], st.sets(st.integers(), max_size=3)),
    "set of datetimes": (set[datetime], st.sets(moments, max_size=3)),
    "frozenset": (frozenset[str], st.frozensets(text, max_size=3)),
    "set of models": (set[Frozen], st.sets(st.builds(Frozen, name=good, at=st.none() | moments), max_size=2)),
    "deque": (deque[datetime], listed(moments).map(deque)),
    "Sequence": (Sequence[int], listed(st.integers()) | listed(st.integers()).map(tuple)),
    "Iterable": (Iterable[int], listed(st.integers())),
    "Mapping": (Mapping[str, int], keyed(good)),
    "dict": (dict[str, int], keyed(text)),
    "dict of int": (dict[int, int], keyed(integers)),
    "dict of UUID": (dict[UUID, int], keyed(st.uuids())),
    "dict of date": (dict[date, int], keyed(st.dates())),
    "dict of datetime": (dict[datetime, int], keyed(moments)),
    "dict of timedelta": (dict[timedelta, int], keyed(spans)),
    "dict of Enum": (dict[Mixed, int], keyed(st.sampled_from(Mixed))),
    "dict of StrEnum": (dict[Colour, int], keyed(st.sampled_from(Colour))),
    "dict of float": (dict[float, int], keyed(floats)),
    "dict of Decimal": (dict[Decimal, int], keyed(st.decimals(allow_nan=False))),
    "dict of bool": (dict[bool, int], keyed(st.booleans())),
    "dict of tuple": (dict[tuple[int, int], int], keyed(st.tuples(st.integers(0, 9), st.integers(0, 9)))),
    "dict of None": (dict[str | None, int], keyed(st.none() | good)),
    "dict of int or str": (dict[int | str, int], keyed(st.integers(0, 9) | good | st.integers(0, 9).map(str))),
    "dict of bytes": (dict[bytes, int], keyed(st.binary(max_size=3))),
    "OrderedDict": (OrderedDict[str, int], keyed(good).map(OrderedDict)),
    "defaultdict": (defaultdict[str, int], keyed(good)),
    "Counter": (Counter[str], keyed(good).map(Counter)),
    "TypedDict": (Shape, st.fixed_dictionaries({}, optional={"sides": integers, "name": text})),
    "dataclass": (Place, st.builds(Place, name=text, seen=st.none() | moments, note=good)),
    "dataclass with slots": (Spot, st.builds(Spot, at=st.builds(Point, x=st.integers()), tags=st.frozensets(text))),
    "pydantic dataclass": (Checked, st.builds(Checked, when=st.none() | st.dates())),
    "dataclass without ==": (Unequal, st.builds(Unequal)),
    "dataclass, subclass": (Place, st.builds(FinerPlace, name=good, floor=st.integers(0, 1))),
    "model": (Line, lines),
    "model, subclass": (Line, lines | st.builds(FinerLine)),
    "SerializeAsAny": (SerializeAsAny[Line], lines | st.builds(FinerLine)),
    "generic model": (Box[datetime], st.builds(Box[datetime], item=moments, more=listed(moments))),
    "generic model of floats": (Box[float], st.builds(Box[float], item=finite, more=listed(finite))),
    "bare generic model": (Box, st.builds(Box, item=anything)),
    "recursive model": (Tree, st.builds(Tree, label=good, kids=listed(st.builds(Tree, label=text)))),
    "RootModel": (Numbers, listed(st.integers() | finite).map(Numbers)),
    "extra allowed": (Open, st.builds(Open) | st.builds(Open, known=integers, extra=st.integers())),
    "extra ignored": (Lax, st.builds(Lax, known=integers, extra=st.integers())),
    "aliases": (Renamed, st.builds(Renamed, order_id=st.integers(), receiver=good, by=st.integers())),
    "other forms": (Timing, st.builds(Timing, wait=spans, raw=st.binary(max_size=4))),
    "NaN as text": (Unlimited, st.builds(Unlimited, ratio=floats)),
    "NaN as itself": (Constants, st.builds(Constants, ratio=floats)),
    "values of enums": (Values, st.builds(Values, colour=st.sampled_from(Colour), mixed=st.sampled_from(Mixed))),
    "strict": (
        Strict,
        st.builds(
            Strict,
            day=st.dates(),
            key=st.uuids(),
            pair=st.tuples(st.integers(), finite),
            colours=st.sets(st.sampled_from(Colour)),
            raw=st.binary(max_size=3),
            wait=spans,
            amount=plain_decimals,
        ),
    ),
    "computed field": (Area, st.builds(Area, side=st.integers(0, 3)) | st.integers(0, 3).map(with_cache)),
    "private attribute": (Private, st.builds(Private) | st.integers(0, 1).map(with_seen)),
    "excluded fields": (Hidden, st.builds(Hidden, hidden=st.integers(0, 1), made=listed(st.integers(0, 1)))),
    "lossy serializer": (Rounding, st.builds(Rounding, ratio=finite)),
    "lossy validator": (Upper, st.builds(Upper, text=good)),
    "serializer of the model": (Packed, st.builds(Packed, left=st.integers(), right=st.integers())),
    "order of keys": (First, st.builds(First, order=st.lists(good, max_size=4, unique=True))),
    "before validator": (Annotated[int, BeforeValidator(lambda v: int(v) + 1)], st.integers()),
    "after validator": (Annotated[str, AfterValidator(str.strip)], good),
    "datetime out of text": (Annotated[str, AfterValidator(datetime.fromisoformat)], moments.map(datetime.isoformat)),
    "plain serializer": (Annotated[int, PlainSerializer(str)], st.integers()),
    "serializer to NaN": (Annotated[int | None, PlainSerializer(lambda _: math.nan)], st.none()),
    "wrap serializer": (Annotated[float, WrapSerializer(lambda v, handler: handler(v) * 2)], finite),
    "serializer that raises": (Annotated[int, PlainSerializer(lambda v: 1 // v)], st.integers(0, 2)),
    "validator that raises": (Annotated[int, AfterValidator({0: 0, 1: 2}.__getitem__)], st.integers(0, 1)),
    "constrained int": (Annotated[int, Field(ge=0, multiple_of=3)], st.integers()),
    "constrained str": (Annotated[str, StringConstraints(strip_whitespace=True, to_lower=True, max_length=4)], good),
    "constrained list": (Annotated[list[int], Field(min_length=1)], listed(st.integers())),
    "strict int": (Annotated[int, Field(strict=True)], integers),
    "ByteSize": (ByteSize, st.integers(0, 2**60)),
    "AnyUrl": (AnyUrl, st.sampled_from(["https://example.org/é?q=1#x", "postgresql://u:p@h/d"])),
    "HttpUrl": (HttpUrl, st.sampled_from(["https://example.org", "http://x.org:80/ä"])),
    "IPv4Address": (IPv4Address, st.ip_addresses(v=4)),
    "IPv6Address": (IPv6Address, st.ip_addresses(v=6)),
    "IPv4Network": (IPv4Network, st.just(IPv4Network("10.0.0.0/8"))),
    "Path": (Path, good.map(Path) | st.just(Path("a\udcff"))),
    "PurePosixPath": (PurePosixPath, good.map(PurePosixPath)),
    "Pattern": (re.Pattern[str], patterns),
    "ZoneInfo": (ZoneInfo, st.sampled_from([UTC, ZoneInfo("UTC"), NEW_YORK])),
    "Json": (Json[list[float]], listed(finite).map(json.dumps)),
    "Json of anything": (Json[Any], anything.map(json.dumps)),
    "SecretStr": (SecretStr, st.just("s")),
    "SecretBytes": (SecretBytes, st.just(b"s")),
    "type": (type[Line], st.just(FinerLine)),
    "Callable": (Callable[[], Any], st.just(print)),
    "Any": (Any, anything),
    "object": (object, anything),
}  # fmt: skip


def args_class(annotation: Any) -> type[JobArgs]:
    """A kind with one field of that type."""
    return create_model("OneField", __base__=JobArgs, value=(annotation, ...))


CLASSES = {name: args_class(annotation) for name, (annotation, _) in FIELDS.items()}

#: Of these, nothing comes back: secrets are stored as stars, iterators are read once, subclasses lose their fields.
REFUSED = {"before validator", "Callable", "Iterable", "SecretBytes", "SecretStr", "dataclass, subclass", "type"}


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_of_any_type_comes_back_equal_or_is_refused(keeper: Keeper, name: str) -> None:
    cls, strategy = CLASSES[name], FIELDS[name][1]
    accepted = 0

    @examples(12)
    @given(st.lists(strategy, min_size=1, max_size=12))
    def holds(values: list[Any]) -> None:
        nonlocal accepted
        accepted += keeper.check(built(cls, values))

    holds()
    assert bool(accepted) is (name not in REFUSED)


def built(cls: type[JobArgs], values: Iterable[Any]) -> Iterator[JobArgs]:
    """The arguments that validate."""
    for value in values:
        try:
            yield cls(value=value)
        except (ValidationError, KeyError):
            continue


# ------------------------------------------------------------------------------------------------------- smuggling
class Text_(str):
    __slots__ = ()


class Number(int):
    def __str__(self) -> str:
        return "a number"


class Ratio(float):
    def __repr__(self) -> str:
        return "Ratio(1.0)"


class Hostile:
    """Raises whatever is asked of it."""

    def __eq__(self, other: object) -> bool:
        raise LookupError("no ==")

    def __hash__(self) -> int:
        raise LookupError("no hash")

    def __repr__(self) -> str:
        raise LookupError("no repr")

    def __bool__(self) -> bool:
        raise LookupError("no bool")


class HostileText(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise LookupError("no ==")

    __ne__ = __eq__
    __hash__ = str.__hash__


class Agreeable(int):
    """Says that it is equal to anything."""


def nested(depth: int, kind: type) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def around() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def odd() -> list[Any]:
    """What has no business in a field; made anew where it can be read once."""
    return [*ODD, iter([1]), (i for i in range(2))]


ODD: list[Any] = [
    *(True, False, None, 0, 1, -1, 2**63, 10**3999, 10**4000, 10**4300, 10**5000),
    *(0.0, -0.0, 1.0, 1.5, 1e16, 1e19, 1e22, 1e23, 1e300, 5e-324, math.nan, math.inf),
    *("", "a", "1", "true", "\0", "\ud800", "\\u0000", "2026-01-01", "9" * 4001, "x" * 5000),
    *(Text_("a"), Number(1), Ratio(1.0), Colour.RED, Size.SMALL, Mixed.PAIR, Mixed.RATIO, Rights(3)),
    *(b"a", b"\xff", bytearray(b"a"), memoryview(b"a"), Decimal(1), Decimal("sNaN"), Decimal("1E+400")),
    *(Fraction(1), Fraction(1, 3), 1 + 0j, date(2026, 1, 1), datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC)),
    *(time(1), time(1, tzinfo=NEW_YORK), timedelta(1), timedelta.max, UUID(int=1), Path("a"), re.compile("a")),
    *(datetime.min.replace(tzinfo=NEW_YORK), datetime.max.replace(tzinfo=NEW_YORK)),
    *([], [1], ["a"], [True], [1.0], [None], ["\0"], (), (1,), ("a",), {1}, {"a"}, frozenset({1}), deque([1])),
    *({}, {"a": 1}, {1: 1}, {"a": True}, {"\0": 1}, {"\ud800": 1}, {1: 1, "1": 2}, {b"a": 1}, {None: 1}, {(1, 2): 3}),
    *({True: 1}, {math.nan: 1}, {1.0: 1}, {UUID(int=1): 1}, {datetime(2026, 1, 1): 1}, {Hostile: 1}),
    *(OrderedDict(bb=1, a=2), OrderedDict(a=1), defaultdict(int, a=1), Counter("aab")),
    types.MappingProxyType({"a": 1}),
    *(Point(1), Point(1, math.nan), Place("a"), Place(1), FinerPlace("a"), Spot(Point(1)), Unequal()),
    *(Line(), FinerLine(), Line.model_construct(price=1.5), Line.model_construct(at="soon")),
    Open(extra=datetime(1, 1, 1)),
    *(Box(item=1), Box[int](item=1), Box[float](item=1), with_seen(3), with_cache(1), Hidden(hidden=3), Lax()),
    *(Cat(), Dog.model_construct(pet="cat"), Numbers([1]), Tree(label="a", kids=[Tree(label="b")]), Area(side=0)),
    *(Line.model_copy(Line(), update={"colour": 1}), object.__new__(Line), object.__new__(Spot)),
    *(SecretStr("s"), SecretBytes(b"s"), IPv4Address(1), object(), Hostile(), HostileText("a"), int, Line, print, ...),
    *(range(2), ValueError("x"), NotImplemented, types, pytest, lambda: None),
    *(nested(100, list), nested(197, list), nested(210, dict), nested(5000, list), around()),
    *([Hostile()], [HostileText("a")], {"a": [HostileText("b")]}, [datetime(2026, 1, 1)], [[math.nan]], [{1, "1"}]),
    *(json.loads("[" * 300 + "]" * 300), [10**4000], {"a": 10**4299}, [Colour.RED, 1e23], {"a": Size.LARGE}),
]  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_what_was_smuggled_past_validation_comes_back_equal_or_is_refused(keeper: Keeper, name: str) -> None:
    keeper.check(CLASSES[name].model_construct(value=value) for value in odd())


PLAIN: dict[str, Any] = {
    "int": int,
    "str": str,
    "bool": bool,
    "None": None,
    "int or None": int | None,
    "str or None": str | None,
    "int or str": int | str,
    "str or bool": str | bool,
    "literals": Literal["a", 1, True] | None,
    "list": list[int],
    "list of unions": list[int | str | None],
    "dict": dict[str, int],
    "dict of lists": dict[str, list[bool]],
    "limits": Annotated[int, Field(ge=0)],
    "strict": Annotated[str, Field(strict=True)],
    "strip": Annotated[str, StringConstraints(strip_whitespace=True)],
    "left to right": Annotated[int | str, Field(union_mode="left_to_right")],
    "nested": dict[str, dict[str, list[list[str | int]]] | None],
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_short_cut_of_plain_classes_knows_what_the_long_way_knows(keeper: Keeper, name: str) -> None:
    cls = args_class(PLAIN[name])
    assert is_plain(cls)
    keeper.check(cls.model_construct(value=value) for value in odd())
    keeper.check(cls.model_construct(value=[value]) for value in odd())
    keeper.check(cls.model_construct(value={"a": value}) for value in odd())

    @examples(8)
    @given(st.lists(anything, max_size=12))
    def holds(values: list[Any]) -> None:
        keeper.check(cls.model_construct(value=value) for value in values)
        keeper.check(built(cls, values))

    holds()


def plain_no_more() -> Iterator[type[JobArgs]]:
    """Classes of text and whole numbers, for which equality does not tell all."""

    class Validated(JobArgs):
        value: int

        @field_validator("value")
        @classmethod
        def same(cls, value: int) -> int:
            return value

    class Checked(JobArgs):
        value: int

        @model_validator(mode="after")
        def same(self) -> Any:
            return self

    class Serialized(JobArgs):
        value: int

        @field_serializer("value")
        def written(self, value: int) -> str:
            return str(value)

    class Whole(JobArgs):
        value: int

        @model_serializer
        def written(self) -> dict[str, int]:
            return {"value": self.value}

    class Computed(JobArgs):
        value: int

        @computed_field
        def double(self) -> float:
            return self.value * 2.0

    class Seen(JobArgs):
        value: int
        _seen: int = 0

    class After(JobArgs):
        value: int

        def model_post_init(self, context: Any) -> None:
            pass

    class Made(JobArgs):
        value: int

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)

    class Extra(JobArgs):
        model_config = ConfigDict(extra="allow")
        value: int

    class Inner(JobArgs):
        value: Lax

    class Recursive(JobArgs):
        value: list[Recursive]

    class Abstract(JobArgs, abstract=True):
        value: int

    yield from (Validated, Checked, Serialized, Whole, Computed, Seen, After, Made, Extra, Inner, Recursive, Abstract)
    annotations = [
        *(float, Any, bytes, list, dict, Colour, list[float], dict[int, int], dict[str, float], set[int], SecretStr),
        *(Literal[Colour.RED], Literal[b"x"], int | float, list[int | None] | Decimal, str | Line, tuple[int, str]),
        *(Annotated[int, PlainSerializer(str)], Annotated[int, AfterValidator(abs)], list[list[list[float]]]),
        *(list[Annotated[str, AfterValidator(str.upper)]], dict[Annotated[str, BeforeValidator(str)], int]),
    ]  # fmt: skip
    yield from map(args_class, annotations)


def test_only_text_and_whole_numbers_are_plain() -> None:
    assert [cls.model_fields["value"] for cls in plain_no_more() if is_plain(cls)] == []


# ------------------------------------------------------------------------------------------------------- refusals
class AllOpen(JobArgs):
    model_config = ConfigDict(extra="allow")
    known: int = 0


class Cached(JobArgs):
    name: str = ""
    _seen: int = 0

    @cached_property
    def length(self) -> int:
        return len(self.name)

    def seen(self, number: int) -> Cached:
        self._seen = number
        return self


class Counted(JobArgs):
    side: int = 1

    @computed_field
    def area(self) -> float:
        return math.nan


class Listed(JobArgs):
    @model_serializer
    def written(self) -> list[int]:
        return []


class Broken(JobArgs):
    numbers: dict[str, list[Annotated[int, PlainSerializer(lambda number: 1 // number)]]]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise LookupError("no words")


def unspeakable(number: int) -> int:
    raise Unspeakable


class Validated(JobArgs):
    number: Annotated[int, AfterValidator(unspeakable)]


class Missing(JobArgs):
    later: Nowhere  # type: ignore[name-defined] # noqa: F821


class Base(JobArgs, abstract=True):
    number: int = 0


class Several(JobArgs):
    value: Any = None
    line: Line | None = None
    place: Place | None = None
    either: tuple[int | date, ...] = ()
    pets: tuple[Annotated[Cat | Dog, Field(discriminator="pet")], ...] = ()
    tagged: dict[str, Box[datetime]] | None = None
    opening: time | None = None
    ordered: OrderedDict[str, int] | None = None
    days: frozenset[datetime] = frozenset()
    at: dict[datetime, int] | None = None
    queue: deque[Place] | None = None
    hidden: int = Field(0, exclude=True)
    renamed: Renamed | None = None
    cache: Open | None = None


NAIVE = datetime(2026, 1, 1)
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "no args at all": (lambda: 1, "args"),
    "a model that is no args": (Line, "args"),
    "an abstract class": (Base, "args"),
    "a class that is not complete": (lambda: Missing.model_construct(later=1), "args.later"),
    "arguments that are no object": (Listed, "args"),
    "a serializer that raises": (lambda: Broken(numbers={"a": [1], "b": [1, 2, 0, 3]}), "args.numbers.b[2]"),
    "a validator that raises what has no words": (lambda: Validated.model_construct(number=1), "args"),
    "a field that was never set": (lambda: object.__new__(Several), "args"),
    "bytes that are no text": (lambda: Several(value={"a": [b"a", b"\xff"]}), "args.value.a[1]"),
    "what JSON does not have": (lambda: Several(value=[{}, {"x": object()}]), "args.value[1].x"),
    "a lone surrogate in a key": (lambda: Several(value={"\ud800": 1}), r"args.value.\ud800"),
    "itself": (lambda: Several(value=around()), "args.value" + 19 * "[0]"),
    "more depth than readers of JSON take": (lambda: Several(value=nested(230, dict)), "args"),
    "more depth than anything takes": (lambda: Several(value=nested(100_000, list)), "args.value" + 19 * "[0]"),
    "an extra field": (lambda: AllOpen(more=1), "args.more"),
    "an extra field, deep": (lambda: Several(cache=Open(more=1)), "args.cache.more"),
    "a field by a wrong name": (lambda: Several().model_copy(update={"valeu": 1}), "args.valeu"),
    "a private attribute": (lambda: Cached().seen(3), "args._seen"),
    "a naive datetime in a dataclass": (lambda: Several(place=Place("a", NAIVE)), "args.place.seen"),
    "a naive datetime in a set": (lambda: Several(days={NAIVE}), "args.days"),
    "a naive datetime as a key": (lambda: Several(at={NAIVE: 1}), f"args.at.{NAIVE}"),
    "a naive datetime in a deque": (lambda: Several(queue=[Place("a"), Place("b", NAIVE)]), "args.queue[1].seen"),
    "a naive datetime in a generic model": (lambda: Several(tagged={"a": {"item": NAIVE}}), "args.tagged.a.item"),
    "a time whose offset depends on the day": (lambda: Several(opening=time(9, tzinfo=NEW_YORK)), "args.opening"),
    "a dataclass of a subclass": (lambda: Several(place=FinerPlace("a")), "args.place"),
    "an order that jsonb does not keep": (lambda: Several(ordered=OrderedDict(bb=1, a=1)), "args.ordered"),
    "an excluded field": (lambda: Several(hidden=1), "args.hidden"),
    "no member of the union": (lambda: Several.model_construct(either=(1, "soon")), "args.either[1]"),
    "no tagged member": (lambda: Several.model_construct(pets=(Cat(), {"pet": "dog", "name": 1})), "args.pets[1]"),
    "a renamed field": (lambda: Several(renamed=Renamed.model_construct(order_id="x")), "args.renamed.order_id"),
    "a float that jsonb rounds": (lambda: Several(value={"a": [1e22, 1e23]}), "args.value.a[1]"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refusal_names_the_path_of_the_value(what: str) -> None:
    make, path = REFUSALS[what]
    for act in (dump, dump_text):
        with pytest.raises(InvalidJob) as caught:
            act(make())
        assert caught.value.field == path
        assert caught.value.reason.encode()


def test_nothing_but_the_fields_is_stored() -> None:
    assert dump(Counted(side=2)) == {"side": 2}
    cached = Cached(name="ada")
    assert cached.length == 3
    assert dump(cached) == {"name": "ada"}


def test_ordered_dicts_in_the_order_of_jsonb_are_accepted() -> None:
    assert dump(Several(ordered=OrderedDict(a=1, bb=1)))["ordered"] == {"a": 1, "bb": 1}


@examples(12)
@given(st.lists(st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | finite | good,
    lambda inner: st.lists(inner) | st.dictionaries(good, inner),
), max_size=12))  # fmt: skip
def test_what_jsonb_makes_of_json_is_foreseen(keeper: Keeper, values: list[Any]) -> None:
    expected = [json.dumps(stable.as_kept(value)) for value in values]
    assert [json.dumps(json.loads(kept)) for kept in keeper.kept([json.dumps(value) for value in values])] == expected


# ---------------------------------------------------------------------------------------------------------- roads
SOME = ["Any", "float", "datetime", "dataclass", "OrderedDict", "str", "dict of datetime", "model", "Decimal"]


def test_every_road_and_driver_brings_the_same_object(session: Session) -> None:
    one = st.sampled_from(SOME).flatmap(lambda name: st.tuples(st.just(CLASSES[name]), FIELDS[name][1]))

    @examples(5)
    @given(st.lists(one, min_size=10, max_size=20))
    def holds(values: list[tuple[type[JobArgs], Any]]) -> None:
        many = [args for cls, value in values for args in built(cls, [value]) if written(args) is not None]
        jobs = [enqueue(session, args) for args in many]
        session.flush()
        ids = [job.id for job in jobs] + enqueue_many(session, [EnqueueRequest(args) for args in many])
        session.expunge_all()
        texts = session.scalars(select(cast(Job.args, Text)).where(Job.id.in_(ids)).order_by(Job.id)).all()
        stored_jobs = session.scalars(select(Job).where(Job.id.in_(ids)).order_by(Job.id)).all()
        for job, text, args in zip(stored_jobs, texts, many * 2, strict=True):
            cls = type(args)
            assert picture(job.args_as(cls)) == picture(decode_json(cls, text, 1)) == picture(args)
        session.rollback()

    holds()
