"""`resolve_callback()`: what a callback means is said by the policy it was registered with.

The policy is read first, and asked without a lock: it belongs to the callback's id for good, and of several that
resolve one callback the guard of the verbs lets one win.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from awa_sqla.cel.policy import CallbackPolicy, DefaultAction, Resolution, Verdict, judge
from awa_sqla.errors import InvalidJob
from awa_sqla.models.job import Job
from awa_sqla.session import callback_statements as statements
from awa_sqla.session.callbacks import called, complete_external, fail_called, found_by
from awa_sqla.session.results import checked_result
from awa_sqla.session.steps import entered
from awa_sqla.session.target import SyncSession, jobs_bind


def resolve_callback(
    session: SyncSession,
    callback_id: UUID | str,
    payload: Any = None,
    /,
    *,
    default: DefaultAction,
    run_lease: int | None = None,
) -> Resolution:
    """Complete or fail a job by its callback, or ignore the callback, as the policy of `register_callback()` says.

    `payload` is JSON data; a policy is asked about at most 256 KiB of it, for at most two seconds, in a process of its
    own. What no expression decides, `default` does. Follow-ups come with the next flush. One statement, and those of
    `complete_external` or `fail_external`.

    Raises like those two; `InvalidJob` also for a default, and for a payload that is too much for the policy: the
    callback stays as it was. `ConfigurationError` where the extra `[cel]` is missing. (DESIGN 4)
    """
    policy, job, checked = read_policy(session, callback_id, payload, default=default, run_lease=run_lease)
    verdict = judge(policy, checked, default)
    return resolve_as(session, job, verdict, callback_id=callback_id, run_lease=run_lease)


def read_policy(
    session: SyncSession, callback_id: UUID | str, payload: Any, *, default: DefaultAction, run_lease: int | None
) -> tuple[CallbackPolicy, Job, Any]:
    """The policy of a callback, its job, and the payload, checked."""
    if not isinstance(default, DefaultAction):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJob("default", "must be DefaultAction.COMPLETE, DefaultAction.FAIL or DefaultAction.IGNORE")
    checked = checked_result(payload, field="payload")
    target = entered(session, "resolve_callback", transition=True)
    parameters = called(callback_id, run_lease)
    where = {"bind": jobs_bind(target)}
    row: Job = found_by(parameters, target.scalars(statements.READ, parameters, bind_arguments=where).one_or_none())
    policy = CallbackPolicy(
        filter=row.callback_filter,
        on_complete=row.callback_on_complete,
        on_fail=row.callback_on_fail,
        transform=row.callback_transform,
    )
    return policy, row, checked


def resolve_as(
    session: SyncSession, job: Job, verdict: Verdict, *, callback_id: UUID | str, run_lease: int | None
) -> Resolution:
    """Do what the verdict says."""
    match verdict.action:
        case DefaultAction.COMPLETE:
            done = complete_external(session, callback_id, verdict.payload, run_lease=run_lease)
            return Resolution("completed", done, verdict.payload)
        case DefaultAction.FAIL:
            entry = {"error": verdict.reason, "type": "callback"}
            if verdict.expression is not None:
                entry["expression"] = verdict.expression
            target = entered(session, "resolve_callback", transition=True)
            failed = fail_called(target, called(callback_id, run_lease), entry)
            return Resolution("failed", failed, verdict.payload, verdict.reason)
        case DefaultAction.IGNORE:
            return Resolution("ignored", job, verdict.payload, verdict.reason)
