"""The process that evaluates: one JSON object a line in, one out. Ends with its parent.

Run as a file, with the directory of the CEL package as its argument; imports nothing of this package.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import Any

#: Bytes of address space; beyond that the process ends.
MEMORY = 1 << 30
#: Seconds for one answer, longer than the parent waits: after that the process ends, if the parent cannot see to it.
ALARM = 5

#: The functions of CEL that the package has. Another name would be an error of every single evaluation.
FUNCTIONS = frozenset(
    (
        "bytes",
        "contains",
        "double",
        "duration",
        "dyn",
        "endsWith",
        "getDate",
        "getDayOfMonth",
        "getDayOfWeek",
        "getDayOfYear",
        "getFullYear",
        "getHours",
        "getMilliseconds",
        "getMinutes",
        "getMonth",
        "getSeconds",
        "int",
        "matches",
        "max",
        "min",
        "size",
        "startsWith",
        "string",
        "timestamp",
        "type",
        "uint",
    )
)


def main() -> None:
    """Answer until there is nothing more to answer."""
    # A terminal and a service manager signal the whole group, and the parent may end what it has begun: an interrupt
    # in the middle of an expression would be one that fails, and so decides nothing.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.path.append(sys.argv[1])
    import cel  # noqa: PLC0415 - found by the argument

    _limit_memory()
    for line in sys.stdin.buffer:
        _set_alarm(ALARM)
        asked: dict[str, Any] = json.loads(line)
        answer = _check(cel, asked["check"]) if "check" in asked else _judge(cel, **asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        _set_alarm(0)


def _set_alarm(seconds: int) -> None:
    if hasattr(signal, "alarm"):  # not on every platform
        signal.alarm(seconds)  # unhandled, it ends the process, whatever that is doing


def _limit_memory() -> None:
    try:
        import resource  # noqa: PLC0415 - not on every platform
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)  # nobody may raise it
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _check(cel: Any, expression: str) -> str | None:
    """What is wrong with an expression, if anything is."""
    try:
        references = cel.compile(expression).references()
    except BaseException as exc:  # noqa: BLE001 - a panic of the parser is no Exception
        return str(exc).partition("\n")[0][:300] or "cannot be parsed"
    unknown = [name for name in references["functions"] if name[0].isalpha() and name not in FUNCTIONS]
    if unknown:
        return f"unknown function {unknown[0]}()"
    # Names that a macro binds are listed too: those that it does not bind fail on any payload, and so on this.
    for name in references["variables"]:
        if name != "payload" and not _bound(expression, name):
            return f"unknown variable {name!r}: there is only `payload`"
    return None


def _bound(expression: str, name: str) -> bool:
    macro = r"\.\s*(?:all|exists|exists_one|existsOne|map|filter)\s*\(\s*"
    return re.search(macro + re.escape(name) + r"\s*,", expression) is not None


def _judge(cel: Any, policy: dict[str, str | None], payload: Any, *, completes: bool) -> dict[str, Any]:
    """The verdict: the first of filter, on_fail and on_complete that decides. One that fails decides nothing.

    `completes` says that the job completes when nothing has decided.
    """

    def says(name: str) -> bool | None:
        expression = policy[name]
        found = None if expression is None else _value(cel, expression, payload)
        return found if isinstance(found, bool) else None

    if says("filter") is False:
        return {"says": "ignore"}
    if says("on_fail"):
        return {"says": "fail"}
    complete = says("on_complete")
    if not complete and not completes:
        return {"says": "default"}
    return {"says": "complete", "payload": _transformed(cel, policy["transform"], payload)}


def _transformed(cel: Any, expression: str | None, payload: Any) -> Any:
    """The result of the job; when that is no JSON, the payload as it came."""
    if expression is None:
        return payload
    try:
        return json.loads(json.dumps(_raw(cel, expression, payload), allow_nan=False))
    except BaseException:  # noqa: BLE001 - a panic of the library is no Exception
        return payload


def _value(cel: Any, expression: str, payload: Any) -> Any:
    try:
        return _raw(cel, expression, payload)
    except BaseException:  # noqa: BLE001 - a panic of the library is no Exception
        return None


def _raw(cel: Any, expression: str, payload: Any) -> Any:
    return cel.compile(expression).execute({"payload": payload})


if __name__ == "__main__":
    main()
