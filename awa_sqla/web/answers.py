"""Every answer of the ingress: what went well, and the table of what may not.

An answer says nothing that the sender has not said itself: no SQL, no exception of the app, no other job.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from awa_sqla import limits

logger = logging.getLogger("awa_sqla.web")

#: What a sender should wait before it tries again, in seconds.
RETRY_AFTER = "5"

_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class Problem:
    """One way for a request to fail: its status, its code and what it says."""

    status: int
    code: str
    message: str
    headers: tuple[tuple[str, str], ...] = ()


_PROBLEMS = (
    Problem(400, "bad_callback_id", "the path has no UUID where the callback's id belongs"),
    Problem(400, "bad_json", "the body is no JSON text that can be stored"),
    Problem(401, "unauthorized", "the request is not signed as it must be", (("WWW-Authenticate", "AwaSignature"),)),
    Problem(404, "not_found", "there is nothing here"),
    Problem(404, "unknown_callback", "no job waits for this callback"),
    Problem(405, "method_not_allowed", "the path does not take this method"),
    Problem(408, "too_slow", "the body did not come in time", (("Connection", "close"),)),
    Problem(409, "already_resolved", "another request has resolved this callback"),
    Problem(409, "unique_conflict", "a job of the same unique key is there already"),
    Problem(413, "too_large", "the body is too large", (("Connection", "close"),)),
    Problem(422, "invalid_body", "the body has not the right shape"),
    Problem(422, "refused", "the application refuses the request"),
    Problem(500, "follow_up_failed", "a follow-up of the job failed, so nothing was changed; send the request again"),
    Problem(500, "internal", "the request could not be handled, and nothing was changed"),
    Problem(503, "unavailable", "the database is not available now", (("Retry-After", RETRY_AFTER),)),
)
PROBLEMS = {problem.code: problem for problem in _PROBLEMS}


class Refusal(Exception):
    """Ends a request with a problem of the table; `message` says it closer."""

    def __init__(self, code: str, message: str | None = None) -> None:
        super().__init__(code)
        self.problem = PROBLEMS[code]
        self.message = self.problem.message if message is None else limits.cleaned(message, _MESSAGE)

    def response(self, headers: dict[str, str] | None = None) -> JSONResponse:
        """As JSON; `headers` beside the problem's own."""
        return JSONResponse(
            {"error": {"code": self.problem.code, "message": self.message}},
            self.problem.status,
            dict(self.problem.headers) | (headers or {}),
        )


def done(answer: dict[str, Any]) -> JSONResponse:
    """200."""
    return JSONResponse(answer)
