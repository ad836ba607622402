"""The OpenAPI 3.1 document of the ingress, made from what the code itself reads: bodies and the table of problems."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from awa_sqla.signing import ACTIONS, SIGNATURE, TIMESTAMP
from awa_sqla.web.answers import PROBLEMS
from awa_sqla.web.bodies import BODIES

_SUMMARIES = {
    "complete": "Complete the job; the payload is its result.",
    "fail": "Fail the job for good.",
    "heartbeat": "Ask for more time.",
    "resume": "Let the handler that waits go on, with the payload.",
}
_REF = "#/components/schemas/{model}"
_ERROR = {"$ref": "#/components/schemas/Error"}


def document(*, mounted_at: str = "", signed: bool = True) -> dict[str, Any]:
    """The document for a router at the path `mounted_at`; without `signed`, it asks for no signature."""
    _, schemas = models_json_schema([(body, "validation") for body in set(BODIES.values())], ref_template=_REF)
    components: dict[str, Any] = {"schemas": schemas["$defs"] | _ANSWERS}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Callbacks",
            "version": "1",
            "description": "Answers for background jobs that wait for the outside world.",
        },
        "servers": [{"url": mounted_at or "/"}],
        "paths": {f"/{{callback_id}}/{action}": {"post": _operation(action, signed=signed)} for action in ACTIONS},
        "components": components,
    }
    if signed:
        components["securitySchemes"] = {
            "timestamp": {"type": "apiKey", "in": "header", "name": TIMESTAMP, "description": "Unix seconds."},
            "signature": {
                "type": "apiKey",
                "in": "header",
                "name": SIGNATURE,
                "description": "v1= and the hexadecimal BLAKE3, keyed with the shared secret, of "
                '"{timestamp}\\n{callback_id}\\n{action}\\n" followed by the body.',
            },
        }
        found["security"] = [{"timestamp": [], "signature": []}]
    return found


def _operation(action: str, *, signed: bool) -> dict[str, Any]:
    body = BODIES[action]
    return {
        "operationId": action,
        "summary": _SUMMARIES[action],
        "parameters": [
            {
                "name": "callback_id",
                "in": "path",
                "required": True,
                "description": "The token's id.",
                "schema": {"type": "string", "format": "uuid"},
            }
        ],
        "requestBody": {
            "required": any(field.is_required() for field in body.model_fields.values()),
            "content": {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}},
        },
        "responses": {"200": _response("Done, now or when the same request came first.", "Answer")}
        | _problems(signed=signed),
    }


def _problems(*, signed: bool) -> dict[str, Any]:
    """The problems by status, with the codes of each."""
    found: dict[str, Any] = {}
    for problem in PROBLEMS.values():
        if problem.status == 401 and not signed:
            continue
        entry = found.setdefault(str(problem.status), _response("", "Error"))
        entry["description"] += f"{'; ' if entry['description'] else ''}`{problem.code}`: {problem.message}"
        for name, _ in problem.headers:
            if name == "Retry-After":
                entry["headers"] = {name: {"description": "Seconds.", "schema": {"type": "integer"}}}
    return found


def _response(description: str, model: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": _REF.format(model=model)}}},
    }


_ANSWERS: dict[str, Any] = {
    "Answer": {
        "type": "object",
        "properties": {"id": {"type": "integer", "description": "The job's id."}, "state": {"type": "string"}},
        "required": ["id", "state"],
        "additionalProperties": False,
    },
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "enum": sorted(PROBLEMS)},
                    "message": {"type": "string"},
                },
                "required": ["code", "message"],
                "additionalProperties": False,
            }
        },
        "required": ["error"],
        "additionalProperties": False,
    },
}
