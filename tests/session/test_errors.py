"""Errors carry scalars, survive pickling, and end with the next step."""

import pickle

import pytest

import awa_sqla
from awa_sqla import (
    AwaError,
    CallbackNotFound,
    CallbackRefused,
    ConfigurationError,
    DuplicateKind,
    FollowUpError,
    FollowUpsNotAttached,
    InvalidJob,
    InvalidState,
    JobFailed,
    JobNotFound,
    Outcome,
    SchemaLocked,
    SchemaVersionError,
    StaleJobError,
    TerminalError,
    UniqueConflict,
    UnknownKind,
    UnmanagedWriteError,
    UnsupportedSession,
    errors,
)

SAMPLES: list[tuple[Exception, str]] = [
    (InvalidJob("args.x[2]", "is naive"), "args.x[2]: is naive"),
    (UnsupportedSession("takes a Session"), "takes a Session"),
    (StaleJobError(7, 3, "running", 4), "it is running (lease 4)"),
    (StaleJobError(7, 3), "it has left the table of live jobs"),
    (JobNotFound(7), "no job 7"),
    (JobNotFound(7, "commit before you wait"), "no job 7: commit before you wait"),
    (JobFailed(7, "the card is gone"), "job 7 failed: the card is gone. All attempts are in its `errors`"),
    (JobFailed(7, "not needed", "cancelled"), "job 7 was cancelled: not needed"),
    (FollowUpError("app:welcome", 7, "signup", Outcome.COMPLETED, "raised KeyError"), "roll back, mend the spec"),
    (FollowUpsNotAttached("complete", "Session"), "follow_ups.attach(your_sessionmaker)"),
    (UnmanagedWriteError("jobs_hot", "cancel()"), "use cancel() instead"),
    (DuplicateKind("signup", "a.Signup", "b.Signup"), 'class Signup(JobArgs, kind="...")'),
    (UnknownKind("send_emial", "send_email"), "did you mean 'send_email'?"),
    (UniqueConflict(7, b"0123456789abcdef", "signup"), 'on_conflict="skip"'),
    (CallbackNotFound("5f0c"), "Answer the sender with 404"),
    (CallbackRefused("too old"), "callback refused: too old"),
    (UnknownKind("nothing"), "is not registered"),
    (InvalidState(7, "running", "retry"), "job 7 is running: retry does not apply"),
    (SchemaVersionError(0, 1), "run your migrations"),
    (SchemaVersionError(9, 1), "upgrade awa-sqla"),
    (SchemaLocked("awa", 60, ("process 7 (report, idle in transaction, for 00:01:00)",)), "try again"),
    (ConfigurationError("two binds"), "two binds"),
    (TerminalError("card gone"), "card gone"),
]


@pytest.mark.parametrize(("error", "text"), SAMPLES, ids=lambda value: type(value).__name__)
def test_an_error_says_what_to_do_next(error: Exception, text: str) -> None:
    assert text in str(error)


@pytest.mark.parametrize("error", [error for error, _ in SAMPLES], ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_every_error_of_the_package_has_a_sample_here() -> None:
    named = {getattr(errors, name) for name in errors.__all__}
    assert named - {type(error) for error, _ in SAMPLES} == {AwaError}


def test_every_error_is_public() -> None:
    assert set(errors.__all__) <= set(awa_sqla.__all__)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(InvalidJob, ValueError), (UnsupportedSession, TypeError), (JobNotFound, LookupError)],
)
def test_errors_are_also_the_builtin_they_resemble(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, AwaError)


def test_what_handlers_raise_is_no_error_of_ours() -> None:
    assert not issubclass(TerminalError, AwaError)
