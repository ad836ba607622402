"""What a job carries: `JobArgs` classes and their kinds; `stored` has the form in which they are stored.

A job's arguments are a pydantic model:

    class SendEmail(JobArgs, queue="email", max_attempts=5):
        to: str
        subject: str

The class keywords are the defaults of every job of this kind. The kind, `send_email` here, is derived
from the class's name unless `kind=` gives one; it is the job's identity in the database, so it survives
moving the class. Instances are frozen and forbid unknown fields; decoding a stored row ignores unknown
fields, so that a process of the previous version can read the rows of the next one.

Nothing here knows the database.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict

from awa_sqla import limits, unique
from awa_sqla.errors import InvalidJob
from awa_sqla.unique import Unique

A = TypeVar("A", bound="JobArgs")

DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a failed job waits: `base * factor ** (attempt - 1)`, plus up to `jitter`, at most `max`.

    The default waits 2, 4, 8, ... seconds, up to 25 % longer at random, never above 24 hours. With
    `factor=1` every wait is the same. No attempt number overflows.
    """

    base: timedelta = timedelta(seconds=2)
    factor: float = 2
    max: timedelta = DAY
    jitter: float = 0.25

    def __post_init__(self) -> None:
        limits.duration("backoff.base", self.base, zero=True)
        limits.duration("backoff.max", self.max, zero=True)
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise InvalidJob("backoff.factor", f"must be at least 1, not {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise InvalidJob("backoff.jitter", f"must be from 0 to 1, not {self.jitter}")

    def delay(self, attempt: int) -> timedelta:
        """The wait after attempt number `attempt` (1 is the first)."""
        base, longest = self.base.total_seconds(), self.max.total_seconds()
        if base <= 0:
            return timedelta(0)
        growth = max(attempt - 1, 0) * math.log(self.factor)
        seconds = longest if growth >= math.log(max(longest / base, 1)) else base * math.exp(growth)
        seconds *= 1 + self.jitter * random.random()  # noqa: S311 - spreads retries, keeps no secret
        return timedelta(seconds=min(seconds, longest))


@dataclass(frozen=True, slots=True)
class KindOptions:
    """The class keywords of a `JobArgs` class: its kind and the defaults of its jobs."""

    kind: str
    queue: str = "default"
    priority: int = 2
    max_attempts: int = 25
    deadline: timedelta | None = None
    tags: tuple[str, ...] = ()
    backoff: Backoff = field(default_factory=Backoff)
    unique: Unique | None = None
    version: int = 1
    abstract: bool = False

    def __post_init__(self) -> None:
        checked = {
            "kind": limits.text("kind", self.kind),
            "queue": limits.text("queue", self.queue),
            "priority": limits.priority(self.priority),
            "max_attempts": limits.integer("max_attempts", self.max_attempts, 1, limits.ATTEMPTS),
            "version": limits.integer("version", self.version, 1, limits.VERSIONS),
            "tags": limits.tags(self.tags),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.deadline is not None:
            limits.duration("deadline", self.deadline)
        if not isinstance(self.backoff, Backoff):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidJob("backoff", f"must be a Backoff, not {type(self.backoff).__name__}")
        unique.checked(self.unique)


def derive_kind(name: str) -> str:
    """The kind of a class: `SendEmail` is `send_email`, `HTMLToPDF` is `html_to_pdf`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


class JobArgs(BaseModel):
    """Base of all job arguments. Subclass it; the class keywords are the defaults of the kind.

    Keywords: `kind` (text, at most 200 characters; default: derived from the class's name), `queue`
    ("default"), `priority` (1 most urgent to 4; 2), `max_attempts` (1 to 1000; 25), `deadline` (longest
    run of one attempt, a timedelta; None), `tags` (at most 20), `unique` (a `Unique`; None), `backoff` (a
    `Backoff`), `version` (of the fields, from 1; see `upcast`), `abstract` (a base class without a kind of its
    own). A subclass inherits all of them but `kind` and `abstract`. They are kept in `cls.__awa__` and never
    clash with fields.

    Raises `InvalidJob`, when the class is defined, for a keyword out of its limits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    __awa__: ClassVar[KindOptions] = KindOptions("job_args", abstract=True)

    def __init_subclass__(
        cls,
        *,
        kind: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        deadline: timedelta | None = None,
        tags: Iterable[str] | None = None,
        unique: Unique | None = None,
        backoff: Backoff | None = None,
        version: int | None = None,
        abstract: bool = False,
        **kwargs: Any,
    ) -> None:
        try:
            super().__init_subclass__(**kwargs)
        except TypeError:
            unknown = ", ".join(kwargs)
            known = "kind, queue, priority, max_attempts, deadline, tags, unique, backoff, version, abstract"
            raise TypeError(f"{cls.__name__}: unknown class keyword {unknown}; there are {known}") from None
        given = {
            "queue": queue,
            "priority": priority,
            "max_attempts": max_attempts,
            "deadline": deadline,
            "tags": tags,
            "unique": unique,
            "backoff": backoff,
            "version": version,
        }
        cls.__awa__ = replace(
            cls.__awa__,
            kind=derive_kind(cls.__name__) if kind is None else kind,
            abstract=abstract,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        if not abstract:
            _classes.setdefault(cls.__awa__.kind, cls)

    @classmethod
    def upcast(cls, data: dict[str, Any], version: int) -> dict[str, Any]:  # noqa: ARG003 - for the subclasses
        """Override it to read rows that were written by an older `version` of this class.

        `data` is the stored JSON object, the caller's to change; what is returned is validated as a row of the
        present version. Called for older rows only. A job whose row does not fit afterwards fails at once.
        """
        return data


_classes: WeakValueDictionary[str, type[JobArgs]] = WeakValueDictionary()


def backoff_of(kind: str) -> Backoff:
    """The backoff of the first living class of this kind in this process, else the default."""
    known = _classes.get(kind)
    return known.__awa__.backoff if known else Backoff()


def concrete(args_class: object) -> type[JobArgs]:
    """`args_class` when jobs can have it, else `InvalidJob`."""
    if not (isinstance(args_class, type) and issubclass(args_class, JobArgs)):
        raise InvalidJob("args", f"must be a JobArgs class, not {args_class!r}")
    if args_class.__awa__.abstract:
        raise InvalidJob("args", f"{args_class.__name__} is abstract and has no kind; subclass it")
    return args_class
