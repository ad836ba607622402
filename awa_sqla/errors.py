"""Every error of the package, and nothing else.

```
AwaError
├── InvalidJob(ValueError)          arguments, options and limits
├── UnsupportedSession(TypeError)   a verb was given something that is not its kind of session
├── StaleJobError                   the attempt has ended; the caller's transaction stays usable
├── JobNotFound(LookupError)        no job of that id in any table
├── CallbackNotFound(LookupError)   nobody waits for this callback any more
├── CallbackRefused                 a callback's request is not signed as it must be, or the app refuses it
├── UniqueConflict                  a unique job has a twin; the caller's transaction stays usable
├── FollowUpError                   a follow-up spec raised or returned nonsense; nothing is committed
├── FollowUpsNotAttached            a transition in a session that would lose its follow-ups
├── UnmanagedWriteError             a job row was written by something other than a verb
├── DuplicateKind                   two args classes of one kind in one registry
├── UnknownKind                     a kind that no registered class has
├── JobFailed                       the job that was waited for has failed or was cancelled
├── InvalidState                    the verb does not apply to a job in this state
├── SchemaVersionError              the database and the package disagree about the schema
├── SchemaLocked                    others hold the tables that a change of the schema needs; nothing was changed
└── ConfigurationError(ValueError)  the set-up is wrong: engine, target, listener, name
TerminalError(Exception)            raised by handlers: fail this job now, do not retry
```

Errors carry scalars, never mapped objects, so that they survive pickling and can be logged after a
rollback. Each message ends with the next step.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AwaError",
    "CallbackNotFound",
    "CallbackRefused",
    "ConfigurationError",
    "DuplicateKind",
    "FollowUpError",
    "FollowUpsNotAttached",
    "InvalidJob",
    "InvalidState",
    "JobFailed",
    "JobNotFound",
    "SchemaLocked",
    "SchemaVersionError",
    "StaleJobError",
    "TerminalError",
    "UniqueConflict",
    "UnknownKind",
    "UnmanagedWriteError",
    "UnsupportedSession",
]


class AwaError(Exception):
    """Root of every error this package raises."""


class InvalidJob(AwaError, ValueError):
    """An argument, option or limit is wrong; nothing was sent to the database.

    `field` is the path of the offending value (`"priority"`, `"args.order.lines[2].price"`), `reason`
    says what is wrong with it.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class UnsupportedSession(AwaError, TypeError):
    """The first argument is not a session this function works on."""


class StaleJobError(AwaError):
    """The attempt has ended: the job is no longer running under the lease that was presented.

    `state` and `found_lease` tell how the row stands now (None, None when it has left the table). The
    caller's transaction stays usable, no follow-up and no hook fires. Let the error propagate unless
    you roll back yourself: what you wrote for this attempt must not be committed.
    """

    def __init__(self, job_id: int, run_lease: int, state: str | None = None, found_lease: int | None = None):
        super().__init__(job_id, run_lease, state, found_lease)
        self.job_id = job_id
        self.run_lease = run_lease
        self.state = state
        self.found_lease = found_lease

    def __str__(self) -> str:
        now = "it has left the table of live jobs"
        if self.state is not None:
            now = f"it is {self.state} (lease {self.found_lease})"
        return (
            f"job {self.job_id} is not running under lease {self.run_lease}: {now}. "
            "The attempt has ended; roll back what was written for it."
        )


class JobNotFound(AwaError, LookupError):
    """No table holds a job of this id: it never existed, was rolled back, or retention removed it."""

    def __init__(self, job_id: int, hint: str = "") -> None:
        super().__init__(job_id, hint)
        self.job_id = job_id
        self.hint = hint

    def __str__(self) -> str:
        return f"no job {self.job_id}: {self.hint or 'it never existed, was rolled back, or retention has removed it'}"


class CallbackNotFound(AwaError, LookupError):
    """No job waits for this callback: it is unknown, used up, withdrawn, or its attempt has ended.

    Nothing was changed, and the caller's transaction stays usable.
    """

    def __init__(self, callback_id: Any) -> None:
        super().__init__(str(callback_id))
        self.callback_id = str(callback_id)

    def __str__(self) -> str:
        return (
            f"no job waits for callback {self.callback_id}: it is unknown, resolved already, or its attempt has ended. "
            "Answer the sender with 404; sending it again cannot help"
        )


class CallbackRefused(AwaError):
    """A request for a callback is not accepted: by its signature, or by the app's own `before` or `after`.

    `reason` says why, for our own log; of a signature it is "missing", "malformed", "wrong", "too old" or "in the
    future". Nothing was changed.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"callback refused: {self.reason}"


class UniqueConflict(AwaError):
    """Another job holds the unique key: this one would be its duplicate.

    `existing_id` is the holder, `unique_key` the 16 bytes, `kind` the kind of both. The duplicate is no longer in the
    session; the caller's transaction and everything else in it stay usable. Out of `enqueue_many()`, `position` says
    which job it is, and `existing_id` is None when its twin is in the same list: no job of the list was added.
    """

    def __init__(self, existing_id: int | None, unique_key: bytes, kind: str, position: str = "") -> None:
        super().__init__(existing_id, unique_key, kind, position)
        self.existing_id = existing_id
        self.unique_key = unique_key
        self.kind = kind
        self.position = position

    def __str__(self) -> str:
        where = f"{self.position}: " if self.position else ""
        twin = "twice in the list" if self.existing_id is None else f"already, as job {self.existing_id}"
        return (
            f"{where}a job of kind {self.kind!r} with unique key {self.unique_key.hex()} is there {twin}. "
            'Pass on_conflict="skip" to go on without a second one'
        )


class FollowUpError(AwaError):
    """A follow-up spec failed; the transaction that holds its transition cannot be committed.

    The user's exception is the `__cause__`. Roll back (or roll back the savepoint that holds the
    transition); until then every flush and commit raises this again.
    """

    def __init__(self, spec: str, job_id: int, kind: str, outcome: Any, detail: str = "raised") -> None:
        super().__init__(spec, job_id, kind, outcome, detail)
        self.spec = spec
        self.job_id = job_id
        self.kind = kind
        self.outcome = outcome
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"follow-up spec {self.spec!r} {self.detail} for job {self.job_id} ({self.kind}, {self.outcome}); "
            "transition and follow-up commit together, so roll back, mend the spec and try again"
        )


class FollowUpsNotAttached(AwaError):
    """This session has no follow-ups, although the process has registered some."""

    def __init__(self, verb: str, session_class: str) -> None:
        super().__init__(verb, session_class)
        self.verb = verb
        self.session_class = session_class

    def __str__(self) -> str:
        return (
            f"{self.verb}() on a {self.session_class} that has no follow-ups attached would lose them: call "
            "follow_ups.attach(your_sessionmaker) once, or attach an empty FollowUps() to say 'none here'"
        )


class UnmanagedWriteError(AwaError):
    """A job row was about to be written by something other than a verb of this package."""

    def __init__(self, table: str, verb: str, detail: str = "") -> None:
        super().__init__(table, verb, detail)
        self.table = table
        self.verb = verb
        self.detail = detail

    def __str__(self) -> str:
        what = self.detail or "rows of this table change only through the verbs of awa_sqla"
        return f"{self.table}: {what}; use {self.verb} instead"


class DuplicateKind(AwaError):
    """Two args classes of one kind in one registry."""

    def __init__(self, kind: str, first: str, second: str) -> None:
        super().__init__(kind, first, second)
        self.kind = kind
        self.first = first
        self.second = second

    def __str__(self) -> str:
        return (
            f"kind {self.kind!r} is already {self.first}, and {self.second} wants it too: "
            f'give one of them its own name, class {self.second.rpartition(".")[2]}(JobArgs, kind="...")'
        )


class UnknownKind(AwaError):
    """A kind that no registered args class has."""

    def __init__(self, kind: str, suggestion: str | None = None) -> None:
        super().__init__(kind, suggestion)
        self.kind = kind
        self.suggestion = suggestion

    def __str__(self) -> str:
        hint = f"; did you mean {self.suggestion!r}?" if self.suggestion else ""
        return f"kind {self.kind!r} is not registered{hint}"


class JobFailed(AwaError):
    """The job that `wait_for()` waited for has ended without a result.

    `error` is the text of its last error, or the reason of its cancellation; `state` is "failed" or "cancelled".
    """

    def __init__(self, job_id: int, error: str, state: str = "failed") -> None:
        super().__init__(job_id, error, state)
        self.job_id = job_id
        self.error = error
        self.state = state

    def __str__(self) -> str:
        how = "was cancelled" if self.state == "cancelled" else "failed"
        return f"job {self.job_id} {how}: {self.error or 'no reason was given'}. All attempts are in its `errors`"


class InvalidState(AwaError):
    """The verb does not apply to a job in this state."""

    def __init__(self, job_id: int, state: str, verb: str) -> None:
        super().__init__(job_id, state, verb)
        self.job_id = job_id
        self.state = state
        self.verb = verb

    def __str__(self) -> str:
        return f"job {self.job_id} is {self.state}: {self.verb} does not apply"


class SchemaVersionError(AwaError):
    """The schema in the database is not the one that is needed here."""

    def __init__(self, found: int, expected: int, schema: str = "awa", hint: str = "") -> None:
        super().__init__(found, expected, schema, hint)
        self.found = found
        self.expected = expected
        self.schema = schema
        self.hint = hint

    def __str__(self) -> str:
        if self.hint:
            step = self.hint
        elif self.found > self.expected:
            step = "the database is newer than this package: upgrade awa-sqla"
        else:
            step = "run your migrations (op.awa_migrate) or `awa-sqla migrate`"
        return f"schema {self.schema!r} is at version {self.found}, {self.expected} is needed: {step}"


class SchemaLocked(AwaError):
    """The tables could not be locked in time for a change of the schema. Nothing was changed.

    `holders` says in a line each who has locks on them.
    """

    def __init__(self, schema: str, seconds: float, holders: tuple[str, ...] = ()) -> None:
        super().__init__(schema, seconds, holders)
        self.schema = schema
        self.seconds = seconds
        self.holders = holders

    def __str__(self) -> str:
        by = "; ".join(self.holders) or "somebody who has let go meanwhile"
        return (
            f"schema {self.schema!r}: its tables could not be locked for {self.seconds:g} s, and nothing was changed. "
            f"They are held by {by}. Let these transactions end, or end them "
            "with pg_terminate_backend(process), and try again"
        )


class ConfigurationError(AwaError, ValueError):
    """Engine, session, target or name is set up in a way that would break a promise."""


class TerminalError(Exception):
    """Raise it in a handler to fail the job at once: no retry, whatever attempts are left."""
