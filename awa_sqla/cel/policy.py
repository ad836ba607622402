"""`CallbackPolicy`, and what comes of a callback that is resolved by it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any

from awa_sqla import limits
from awa_sqla.cel.evaluator import EVALUATOR, UnansweredError
from awa_sqla.errors import InvalidJob
from awa_sqla.models.job import DeadLetter, Job

#: Characters of an expression, and bytes of a payload, as JSON, that a policy is asked about.
EXPRESSION_CHARACTERS = 2_000
PAYLOAD_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackPolicy:
    """What the payload of a callback means to the job, as CEL expressions over the one variable `payload`.

    Asked in this order: `filter` (false: the callback is ignored), `on_fail` (true: the job fails), `on_complete`
    (true: it completes); else what `resolve_callback(default=...)` says. `transform` makes the result of a completed
    job from the payload. An expression that fails, or is no bool where one is asked for, decides nothing.
    """

    filter: str | None = None
    on_complete: str | None = None
    on_fail: str | None = None
    transform: str | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to ask."""
        return any(getattr(self, field.name) is not None for field in fields(self))


class DefaultAction(StrEnum):
    """What becomes of a callback that no expression decides."""

    COMPLETE = "complete"
    FAIL = "fail"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Resolution:
    """What came of a callback.

    `outcome` is "completed", "failed" or "ignored"; `job` the row as it is now, the caller's session's and fully
    loaded; `payload` what became the result, or came in; `reason` why it failed or was ignored, None if neither.
    """

    outcome: str
    job: Job | DeadLetter
    payload: Any
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a policy says of a payload: the action, why, by which expression, and the payload it leaves."""

    action: DefaultAction
    payload: Any
    reason: str | None = None
    expression: str | None = None


def checked_policy(policy: object) -> dict[str, str | None]:
    """The columns of a policy. Raises `InvalidJob` naming the expression, `ConfigurationError` without the extra."""
    if policy is None:
        policy = CallbackPolicy()
    if not isinstance(policy, CallbackPolicy):
        raise InvalidJob("policy", f"must be a CallbackPolicy, not {limits.type_name(policy)}")
    expressions: dict[str, str | None] = asdict(policy)
    for name, expression in expressions.items():
        if expression is not None:
            _checked(f"policy.{name}", limits.text(f"policy.{name}", expression, longest=EXPRESSION_CHARACTERS))
    return expressions


@lru_cache(maxsize=1024)
def _checked(field: str, expression: str) -> None:
    try:
        wrong = EVALUATOR.ask({"check": expression})
    except UnansweredError:
        wrong = "cannot be parsed"
    if wrong is not None:
        raise InvalidJob(field, f"is no CEL expression over `payload`: {wrong}")


def judge(policy: CallbackPolicy, payload: Any, default: DefaultAction) -> Verdict:
    """What becomes of a callback. Blocks for at most two seconds, in another process; no database.

    Raises `InvalidJob` for a payload that is too large to be asked about, or takes too long.
    """
    completes = default is DefaultAction.COMPLETE
    found: dict[str, Any] = {"says": "complete" if completes else "default", "payload": payload}
    if policy:
        size = len(json.dumps(payload, ensure_ascii=False).encode())
        if size > PAYLOAD_BYTES:
            raise InvalidJob("payload", f"takes {size} bytes as JSON, a policy is asked about at most {PAYLOAD_BYTES}")
        try:
            found = EVALUATOR.ask({"policy": asdict(policy), "payload": payload, "completes": completes})
        except UnansweredError:
            raise InvalidJob("payload", "takes the callback's policy too long, or too much memory") from None
    return _verdict(found, policy, payload, default)


def _verdict(found: dict[str, Any], policy: CallbackPolicy, payload: Any, default: DefaultAction) -> Verdict:
    match found["says"], default:
        case "ignore", _:
            return Verdict(DefaultAction.IGNORE, payload, "filter expression returned false", policy.filter)
        case "fail", _:
            reason = "callback failed: on_fail expression matched"
            return Verdict(DefaultAction.FAIL, payload, reason, policy.on_fail)
        case "complete", _:
            return Verdict(DefaultAction.COMPLETE, found["payload"])
        case _, DefaultAction.FAIL:
            return Verdict(DefaultAction.FAIL, payload, "callback failed: default action")
        case _:
            some = "no expression matched" if policy else "no expressions configured"
            return Verdict(DefaultAction.IGNORE, payload, f"{some}, default is ignore")
