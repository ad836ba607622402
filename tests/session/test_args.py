"""What a job carries: kinds, class keywords, and the form in which arguments are stored."""

import enum
import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr, ValidationError
from sqlalchemy.orm import Session

from awa_sqla import Backoff, InvalidJob, Job, JobArgs, enqueue
from awa_sqla.args import backoff_of, derive_kind
from awa_sqla.stored import decode, dump
from tests.app import Charge, Signup

# ------------------------------------------------------------------------------------------------------ kinds
GOLDEN = {
    "SendEmail": "send_email",
    "SMTPEmail": "smtp_email",
    "OAuthRefresh": "o_auth_refresh",
    "PDFRenderJob": "pdf_render_job",
    "ProcessV2Import": "process_v2_import",
    "ReconcileQ3Revenue": "reconcile_q3_revenue",
    "HTMLToPDF": "html_to_pdf",
    "IOError": "io_error",
}


@pytest.mark.parametrize(("name", "kind"), GOLDEN.items())
def test_the_kind_is_derived_from_the_name_of_the_class(name: str, kind: str) -> None:
    assert derive_kind(name) == kind


def test_a_class_may_say_its_kind() -> None:
    class Anything(JobArgs, kind="charge_card"):
        pass

    assert Anything.__awa__.kind == "charge_card"


def test_a_subclass_inherits_every_keyword_but_kind_and_abstract() -> None:
    class Billing(JobArgs, abstract=True, kind="base", queue="payments", priority=1, tags=("billing",)):
        pass

    class Refund(Billing):
        pass

    options = Refund.__awa__
    assert (options.kind, options.queue, options.priority, options.tags) == ("refund", "payments", 1, ("billing",))
    assert not options.abstract


def test_the_defaults_are_the_documented_ones() -> None:
    options = Signup.__awa__
    assert (options.queue, options.priority, options.max_attempts) == ("default", 2, 25)
    assert (options.deadline, options.tags, options.backoff) == (None, (), Backoff())


def test_keywords_never_clash_with_fields() -> None:
    class Move(JobArgs, queue="moves"):
        queue: str
        priority: str

    job = Job.of(Move(queue="theirs", priority="high"))
    assert (job.queue, job.args) == ("moves", {"queue": "theirs", "priority": "high"})


@pytest.mark.case(55)
@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"kind": ""}, "kind"),
        ({"kind": "  "}, "kind"),
        ({"kind": "k" * 201}, "kind"),
        ({"kind": "a\0b"}, "kind"),
        ({"queue": ""}, "queue"),
        ({"queue": "q" * 201}, "queue"),
        ({"priority": 0}, "priority"),
        ({"priority": 5}, "priority"),
        ({"priority": True}, "priority"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 1001}, "max_attempts"),
        ({"deadline": timedelta(0)}, "deadline"),
        ({"deadline": 30}, "deadline"),
        ({"tags": "billing"}, "tags"),
        ({"tags": ["t"] * 21}, "tags"),
        ({"tags": ["ok", 3]}, "tags[1]"),
        ({"backoff": timedelta(1)}, "backoff"),
    ],
)
def test_a_keyword_out_of_its_limits_is_refused_where_the_class_is_defined(
    keywords: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidJob) as caught:
        type("Wrong", (JobArgs,), {"__module__": __name__}, **keywords)
    assert caught.value.field == field


@pytest.mark.parametrize("length", [1, 200])
def test_names_may_have_up_to_200_characters(length: int) -> None:
    made = type("Fits", (JobArgs,), {"__module__": __name__}, kind="k" * length, queue="q" * length)
    assert made.__awa__.kind == "k" * length


def test_an_abstract_class_has_no_jobs() -> None:
    class Root(JobArgs, abstract=True):
        pass

    with pytest.raises(InvalidJob, match="Root is abstract"):
        Job.of(Root())


# ---------------------------------------------------------------------------------------------------- backoff
@pytest.mark.case(51)
def test_the_default_backoff_doubles_from_two_seconds() -> None:
    for attempt in range(1, 10):
        wait = Backoff().delay(attempt).total_seconds()
        assert 2**attempt <= wait <= 2**attempt * 1.25


@given(st.integers(-5, 40_000), st.floats(1, 1e6), st.floats(0, 1))
def test_no_backoff_overflows_or_exceeds_its_maximum(attempt: int, factor: float, jitter: float) -> None:
    wait = Backoff(factor=factor, jitter=jitter).delay(attempt)
    assert timedelta(seconds=2) <= wait <= timedelta(days=1)


def test_a_factor_of_one_waits_the_same_every_time() -> None:
    same = Backoff(base=timedelta(seconds=7), factor=1, jitter=0)
    assert {same.delay(n) for n in (1, 2, 900)} == {timedelta(seconds=7)}


def test_a_base_of_zero_does_not_wait() -> None:
    assert Backoff(base=timedelta(0)).delay(30) == timedelta(0)


def test_a_base_above_the_maximum_waits_the_maximum() -> None:
    assert Backoff(base=timedelta(hours=2), max=timedelta(hours=1)).delay(1) == timedelta(hours=1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"base": 5}, "backoff.base"),
        ({"base": timedelta(seconds=-1)}, "backoff.base"),
        ({"max": timedelta(seconds=-1)}, "backoff.max"),
        ({"factor": 0.5}, "backoff.factor"),
        ({"factor": math.nan}, "backoff.factor"),
        ({"jitter": 1.5}, "backoff.jitter"),
    ],
)
def test_a_backoff_out_of_its_limits_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        Backoff(**options)
    assert caught.value.field == field


def test_the_backoff_of_a_kind_is_that_of_its_class() -> None:
    assert backoff_of("charge") == Charge.__awa__.backoff
    assert backoff_of("nobody has this kind") == Backoff()


# --------------------------------------------------------------------------------------------------- fidelity
class Colour(enum.StrEnum):
    RED = "red"


class Line(BaseModel):
    price: Decimal = Decimal("1.10")
    colours: frozenset[Colour] = frozenset({Colour.RED})


class FinerLine(Line):
    discount: int = 0


class Everything(JobArgs):
    number: int = 0
    ratio: float = 0.0
    text: str = ""
    flag: bool | None = None
    when: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    day: date = date(2026, 1, 1)
    wait: timedelta = timedelta(0)
    key: UUID = UUID(int=0)
    lines: tuple[Line, ...] = ()
    pair: tuple[int, str] = (0, "")
    counts: dict[str, int] = Field(default_factory=dict)
    either: int | str = 0


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
everything = st.builds(
    Everything,
    number=st.integers(-(10**40), 10**40),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    text=names,
    flag=st.none() | st.booleans(),
    when=st.datetimes(datetime(2000, 1, 1), timezones=st.timezones() | st.just(UTC), allow_imaginary=False),
    day=st.dates(),
    wait=st.timedeltas(timedelta(days=-999), timedelta(days=999)),
    key=st.uuids(),
    lines=st.lists(st.builds(Line, price=st.decimals(-1000, 1000, places=2)), max_size=2).map(tuple),
    pair=st.tuples(st.integers(-9, 9), names),
    counts=st.dictionaries(names, st.integers(-9, 9), max_size=3),
    either=st.integers(-9, 9) | names,
)


def in_utc(args: Everything) -> Everything:
    """To compare by: local times of two zones are unequal in the hour that a clock shows twice."""
    return args.model_copy(update={"when": args.when.astimezone(UTC)})


@given(everything)
def test_what_is_dumped_decodes_to_the_same(args: Everything) -> None:
    assert in_utc(decode(Everything, dump(args))) == in_utc(args)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(args=everything)
def test_what_is_stored_comes_back_the_same_over_every_driver(session: Session, args: Everything) -> None:
    job = enqueue(session, args)
    session.flush()
    session.refresh(job)
    assert in_utc(job.args_as(Everything)) == in_utc(args)
    session.rollback()


def test_a_time_in_the_hour_that_a_clock_shows_twice_is_accepted() -> None:
    args = Everything(when=datetime(2025, 11, 2, 1, 30, fold=1, tzinfo=ZoneInfo("America/New_York")))
    assert decode(Everything, dump(args)).when.astimezone(UTC) == datetime(2025, 11, 2, 6, 30, tzinfo=UTC)


class Loose(JobArgs):
    value: Any = None
    line: Line | None = None
    lines: tuple[Line, ...] = ()
    at: datetime | None = None
    secret: SecretStr | None = None
    ratio: float = 0.0
    note: str = Field(default="", exclude=True)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        pytest.param({"value": "a\0b"}, "args.value", id="NUL", marks=pytest.mark.case(21)),
        pytest.param({"value": {"x": ["a\0"]}}, "args.value.x[0]", id="nested NUL", marks=pytest.mark.case(21)),
        pytest.param({"value": {"a\0": 1}}, "args.value.'a\\x00'", id="NUL in a key", marks=pytest.mark.case(21)),
        pytest.param({"value": "\ud800"}, "args.value", id="lone surrogate"),
        pytest.param({"ratio": math.nan}, "args.ratio", id="NaN", marks=pytest.mark.case(22)),
        pytest.param({"value": {"x": {"y": math.inf}}}, "args.value.x.y", id="inf", marks=pytest.mark.case(22)),
        pytest.param({"at": datetime(2026, 1, 1)}, "args.at", id="naive datetime"),
        pytest.param({"value": datetime(2026, 1, 1, tzinfo=UTC)}, "args.value", id="datetime in Any"),
        pytest.param({"value": (1, 2)}, "args.value", id="tuple in Any"),
        pytest.param({"value": {1: 2}}, "args.value", id="key that is no text"),
        pytest.param({"secret": SecretStr("S3CRET")}, "args.secret", id="secret", marks=pytest.mark.case(54)),
        pytest.param({"line": FinerLine(discount=3)}, "args.line", id="subclass"),
        pytest.param({"lines": (Line(), FinerLine())}, "args.lines[1]", id="subclass in a list"),
        pytest.param({"note": "kept out of the dump"}, "args.note", id="excluded field"),
        pytest.param({"value": b"\xff"}, "args.value", id="bytes that are no text"),
        pytest.param({"value": object()}, "args.value", id="no JSON at all"),
        pytest.param({"value": 10**5000}, "args.value", id="more digits than JSON readers take"),
    ],
)
def test_what_would_not_survive_the_round_trip_is_refused_with_its_path(args: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        dump(Loose(**args))
    assert caught.value.field == field


@pytest.mark.case(54)
def test_a_refused_secret_is_not_in_the_message() -> None:
    with pytest.raises(InvalidJob) as caught:
        dump(Loose(secret=SecretStr("S3CRET")))
    assert "S3CRET" not in repr(caught.value)


def test_args_forbid_unknown_fields_when_they_are_built() -> None:
    with pytest.raises(ValidationError):
        Signup(email="ada@example.org", emial="typo")  # type: ignore[call-arg]


def test_args_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Signup().email = "other"  # type: ignore[misc]


def test_decoding_ignores_fields_that_a_newer_version_wrote() -> None:
    assert decode(Signup, {"email": "x@example.org", "since": 2}) == Signup(email="x@example.org")


def test_a_row_that_does_not_fit_the_class_is_a_validation_error() -> None:
    with pytest.raises(ValidationError):
        decode(Charge, {"cents": 1})


def test_aliases_are_for_the_app_and_not_for_the_stored_form() -> None:
    class Renamed(JobArgs):
        order_id: int = Field(alias="orderId")

    assert dump(Renamed(orderId=7)) == {"order_id": 7}
    assert decode(Renamed, {"order_id": 7}) == Renamed(orderId=7)
