"""The verbs of one attempt: what each writes, column by column."""

import traceback
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    DeadLetter,
    InvalidJob,
    Job,
    JobState,
    ScheduledJob,
    complete,
    fail,
    retry_after,
    set_progress,
    snooze,
)
from awa_sqla.session.table import ATTEMPT_COLUMNS
from awa_sqla.session.verbs import cancel_attempt, put_back
from tests.app import Charge, Order, Signup
from tests.session.steps import HOUR, MINUTE, again, due_again, running, wait_of
from tests.worlds import Database, World, in_one_world, in_two_worlds

ZERO = timedelta(0)


def changes(before: Any, after: Any) -> dict[str, Any]:
    """The columns that differ between two looks at a row."""
    was = before._asdict()
    return {name: value for name, value in after._asdict().items() if value != was[name]}


# ----------------------------------------------------------------------------------------------------- complete
def test_complete_ends_the_attempt_with_its_result(session: Session, database: Database) -> None:
    job = running(session, Charge(order_id=1))
    set_progress(session, job, 50)
    session.commit()
    before = database.job(job.id)
    done = complete(session, job, result={"charged": [100, None, "ü"]})
    assert done is job
    session.commit()
    after = database.job(job.id)
    assert after.finalized_at > before.attempted_at
    assert changes(before, after) == {
        "state": "completed",
        "result": {"charged": [100, None, "ü"]},
        "finalized_at": after.finalized_at,
        "heartbeat_at": None,
        "deadline_at": None,
        "progress": None,
    }
    assert (after.worker_id, after.attempted_at) == ("w1", before.attempted_at)


@pytest.mark.parametrize("result", [None, 0, "", False, [], {}, "text", 1.5, [{"a": [None]}]])
def test_any_json_is_a_result(session: Session, database: Database, result: Any) -> None:
    job = running(session)
    assert complete(session, job, result=result).result == result
    session.commit()
    assert database.job(job.id).result == result
    assert database.value("SELECT result IS NULL FROM jobs") is (result is None)


@in_one_world
@pytest.mark.parametrize(
    ("result", "field"),
    [
        pytest.param(float("nan"), "result", marks=pytest.mark.case(22)),
        pytest.param({"x": [float("inf")]}, "result.x[0]", marks=pytest.mark.case(22)),
        pytest.param({"x": "a\0"}, "result.x", marks=pytest.mark.case(21)),
        (object(), "result"),
        ({1: 2}, "result"),
        ("x" * (1 << 20), "result"),
    ],
)
def test_a_result_that_cannot_be_stored_is_refused_and_the_attempt_goes_on(
    session: Session, result: Any, field: str
) -> None:
    job = running(session)
    with pytest.raises(InvalidJob) as caught:
        complete(session, job, result=result)
    assert caught.value.field == field
    assert complete(session, job).state is JobState.COMPLETED


# --------------------------------------------------------------------------------------------------------- fail
@pytest.mark.case(57)
def test_a_failure_with_attempts_left_makes_the_job_retryable(session: Session, database: Database) -> None:
    job = running(session, Charge(order_id=1))
    set_progress(session, job, 50)
    session.commit()
    before = database.job(job.id)
    failed = fail(session, job, "card declined")
    assert isinstance(failed, ScheduledJob)
    session.commit()
    after = database.job(job.id)
    assert changes(before, after) == {
        "state": "retryable",
        "stored_in": "scheduled",
        "run_at": after.run_at,
        "finalized_at": after.finalized_at,
        "heartbeat_at": None,
        "deadline_at": None,
        "errors": [{"error": "card declined", "type": "error", "attempt": 1, "at": after.errors[0]["at"]}],
    }
    assert wait_of(after) == timedelta(seconds=5)  # Charge's own backoff, without jitter
    assert after.progress["percent"] == 50


def test_the_wait_grows_with_the_attempts(session: Session, database: Database) -> None:
    job = running(session, Charge(order_id=1), max_attempts=9)
    waits = []
    for _ in range(3):
        failed = fail(session, job, "no")
        session.commit()
        waits.append(wait_of(failed).total_seconds())
        job = again(session, due_again(database, session, job.id))
    assert waits == [5, 15, 45]


@pytest.mark.case(60)
def test_the_last_attempt_fails_for_good(session: Session, database: Database) -> None:
    job = running(session, max_attempts=1)
    before = database.job(job.id)
    failed = fail(session, job, "gone")
    assert failed is job
    session.commit()
    after = database.job(job.id)
    assert changes(before, after) == {
        "state": "failed",
        "finalized_at": after.finalized_at,
        "heartbeat_at": None,
        "errors": after.errors,
    }
    assert [entry["error"] for entry in after.errors] == ["gone"]


def test_a_terminal_failure_spends_no_attempts(session: Session, database: Database) -> None:
    job = running(session)
    fail(session, job, "never again", terminal=True)
    session.commit()
    row = database.job(job.id)
    assert (row.state, row.stored_in, row.attempt) == ("failed", "hot", 1)
    assert row.errors[0]["terminal"] is True


@pytest.mark.parametrize(
    ("override", "declared", "kept"),
    [(None, None, False), (None, True, True), (None, False, False), (False, True, False), (True, False, True)],
)
def test_the_queue_says_whether_dead_letters_are_kept(
    session: Session, database: Database, override: bool | None, declared: bool | None, kept: bool
) -> None:
    database.execute(
        "INSERT INTO queue_meta (queue, override_dead_letters, declared_dead_letters) VALUES ('default', %s, %s)",
        override,
        declared,
    )
    job = running(session, max_attempts=1)
    row = fail(session, job, "gone")
    session.commit()
    assert isinstance(row, DeadLetter) is kept
    assert database.job(job.id).stored_in == ("dead" if kept else "hot")


@pytest.mark.case(49)
@pytest.mark.parametrize(("terminal", "reason"), [(True, "terminal_error"), (False, "max_attempts_exhausted")])
def test_a_dead_letter_keeps_everything_and_its_reason(
    session: Session, database: Database, terminal: bool, reason: str
) -> None:
    database.keep_dead_letters("payments")
    job = running(session, Charge(order_id=1), max_attempts=1 if not terminal else 5, metadata={"a": 1})
    before = database.job(job.id)
    letter = fail(session, job, "gone", terminal=terminal)
    session.commit()
    after = database.job(job.id)
    assert changes(before, after) == {
        "state": "failed",
        "stored_in": "dead",
        "finalized_at": after.finalized_at,
        "heartbeat_at": None,
        "deadline_at": None,
        "errors": after.errors,
    }
    [dead] = database.rows("SELECT * FROM dlq_entries")
    assert (dead.dlq_reason, dead.original_run_lease) == (reason, before.run_lease)
    assert dead.dlq_at == after.finalized_at
    assert isinstance(letter, DeadLetter)


@in_one_world
@pytest.mark.parametrize("wrong", [None, 5, ValueError, {"error": "x"}])
def test_an_error_is_text_or_an_exception(session: Session, wrong: Any) -> None:
    job = running(session)
    with pytest.raises(InvalidJob) as caught:
        fail(session, job, wrong)
    assert caught.value.field == "error"


# -------------------------------------------------------------------------------------------------- retry_after
def test_retry_after_waits_as_long_as_it_was_told(session: Session, database: Database) -> None:
    job = running(session)
    retried = retry_after(session, job, HOUR, error="rate limited")
    assert isinstance(retried, ScheduledJob)
    session.commit()
    row = database.job(job.id)
    assert (row.state, row.attempt, wait_of(row)) == ("retryable", 1, HOUR)
    [entry] = row.errors
    assert (entry["error"], entry["retry_after"], entry["attempt"]) == ("rate limited", 3600.0, 1)


@pytest.mark.case(17)
@pytest.mark.parametrize("keeps", [True, False])
def test_retry_after_is_a_failed_attempt_and_exhausts(session: Session, database: Database, keeps: bool) -> None:
    if keeps:
        database.keep_dead_letters("default")
    job = running(session, max_attempts=2)
    assert isinstance(retry_after(session, job, ZERO), ScheduledJob)
    session.commit()
    job = again(session, due_again(database, session, job.id))
    last = retry_after(session, job, ZERO)
    session.commit()
    row = database.job(job.id)
    assert isinstance(last, DeadLetter if keeps else Job)
    assert (row.state, row.attempt, len(row.errors)) == ("failed", 2, 2)


@in_one_world
@pytest.mark.parametrize("verb", [retry_after, snooze])
@pytest.mark.parametrize("delay", [5, None, timedelta(seconds=-1), timedelta(days=400_000)])
def test_a_delay_is_a_timedelta_that_is_not_negative(session: Session, verb: Any, delay: Any) -> None:
    job = running(session)
    with pytest.raises(InvalidJob) as caught:
        verb(session, job, delay)
    assert caught.value.field == "delay"


# ------------------------------------------------------------------------------------------------------- snooze
def test_a_snooze_is_neither_an_attempt_nor_an_error(session: Session, database: Database) -> None:
    job = running(session, Charge(order_id=1))
    set_progress(session, job, 50)
    session.commit()
    before = database.job(job.id)
    snoozed = snooze(session, job, HOUR)
    assert isinstance(snoozed, ScheduledJob)
    session.commit()
    after = database.job(job.id)
    assert changes(before, after) == {
        "state": "scheduled",
        "stored_in": "scheduled",
        "run_at": after.run_at,
        "attempt": 0,
        "snoozes": 1,
        "heartbeat_at": None,
        "deadline_at": None,
    }
    left = database.value("SELECT run_at - clock_timestamp() FROM jobs")
    assert timedelta(minutes=59) < left <= HOUR


@pytest.mark.case(18)
def test_snoozes_leave_the_attempts_and_the_backoff_alone(session: Session, database: Database) -> None:
    job = running(session, Charge(order_id=1))
    for _ in range(20):
        snoozed = snooze(session, job, ZERO)
        session.commit()
        job = again(session, due_again(database, session, snoozed.id))
    failed = fail(session, job, "at last")
    session.commit()
    assert (failed.attempt, failed.max_attempts, failed.snoozes) == (1, 3, 20)
    assert wait_of(failed) == timedelta(seconds=5)


def test_putting_back_counts_nothing(session: Session, database: Database) -> None:
    job = running(session)
    returned = put_back(session, job, MINUTE)
    session.commit()
    row = database.job(returned.id)
    assert (row.state, row.attempt, row.snoozes, row.errors) == ("scheduled", 0, 0, [])


# ------------------------------------------------------------------------------------------------- set_progress
def test_progress_is_written_and_merged(session: Session, database: Database) -> None:
    job = running(session)
    set_progress(session, job, 10, message="reading", metadata={"a": 1, "deep": {"x": 1}})
    set_progress(session, job, metadata={"b": [2], "deep": {"y": 2}})
    row = set_progress(session, job, 20.5)
    assert row is job
    session.commit()
    stored = database.job(job.id)
    assert stored.progress == {
        "percent": 20.5,
        "message": "reading",
        "metadata": {"a": 1, "b": [2], "deep": {"y": 2}},
    }
    assert stored.state == "running"


def test_progress_alone_makes_no_outcome(world: World, session: Session) -> None:
    job = running(session)
    with world.counting() as sent:
        set_progress(session, job, 1)
        session.commit()
    assert len(sent) == 1


def test_progress_survives_to_the_next_attempt(session: Session, database: Database) -> None:
    job = running(session)
    set_progress(session, job, 40)
    fail(session, job, "no")
    session.commit()
    job = again(session, due_again(database, session, job.id))
    assert job.progress == {"percent": 40, "message": None, "metadata": {}}


@in_one_world
@pytest.mark.parametrize(
    ("percent", "options", "field"),
    [
        (-1, {}, "percent"),
        (101, {}, "percent"),
        (float("nan"), {}, "percent"),
        (True, {}, "percent"),
        ("50", {}, "percent"),
        (None, {"message": 5}, "message"),
        (None, {"message": "\0"}, "message"),
        (None, {"message": "x" * (1 << 16)}, "message"),
        (None, {"metadata": [1]}, "metadata"),
        (None, {"metadata": {"x": float("nan")}}, "metadata.x"),
        (None, {"metadata": {"x": "x" * (1 << 16)}}, "metadata"),
    ],
)
def test_wrong_progress_is_refused_and_named(
    session: Session, percent: Any, options: dict[str, Any], field: str
) -> None:
    job = running(session)
    with pytest.raises(InvalidJob) as caught:
        set_progress(session, job, percent, **options)
    assert caught.value.field == field


# ---------------------------------------------------------------------------------------- what all of them share
VERBS = {
    "complete": complete,
    "fail": lambda session, job: fail(session, job, "no"),
    "retry_after": lambda session, job: retry_after(session, job, MINUTE),
    "snooze": lambda session, job: snooze(session, job, MINUTE),
    "set_progress": lambda session, job: set_progress(session, job, 5),
    "put_back": lambda session, job: put_back(session, job, MINUTE),
    "cancel_attempt": lambda session, job: cancel_attempt(session, job, "enough"),
}
every_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=list(VERBS))
ending_verb = pytest.mark.parametrize(
    "verb",
    [act for name, act in VERBS.items() if name != "set_progress"],
    ids=[v for v in VERBS if v != "set_progress"],
)


@in_two_worlds
@ending_verb
def test_every_exit_from_running_clears_what_belongs_to_the_attempt(
    session: Session, database: Database, verb: Any
) -> None:
    job = running(session, Charge(order_id=1))
    database.execute(
        "UPDATE jobs_hot SET callback_id = gen_random_uuid(), callback_timeout_at = now(), callback_filter = 'x', "
        "callback_on_complete = 'x', callback_on_fail = 'x', callback_transform = 'x', attended_at = now(), "
        "callback_answer = '{}'"
    )
    assert None not in [getattr(database.job(job.id), name) for name in ATTEMPT_COLUMNS]
    verb(session, job)
    session.commit()
    assert {getattr(database.job(job.id), name) for name in ATTEMPT_COLUMNS} == {None}


@in_two_worlds
@every_verb
def test_what_is_returned_is_fully_loaded(world: World, session: Session, verb: Any) -> None:
    job = running(session)
    row = verb(session, job)
    with world.counting() as sent:
        for column in type(row).__mapper__.column_attrs:
            getattr(row, column.key)
    assert sent == []


@every_verb
def test_an_attempt_will_do_in_place_of_the_job(world: World, other: Session, verb: Any) -> None:
    job = running(world.session())
    row = verb(other, Attempt.of(job))
    assert row in other
    other.commit()


@in_two_worlds
@every_verb
def test_a_job_of_another_session_will_do(world: World, session: Session, other: Session, verb: Any) -> None:
    job = running(session)
    row = verb(other, job)
    assert row is not job
    assert row in other
    assert job in session
    other.commit()


@in_two_worlds
@every_verb
@pytest.mark.parametrize("expired", [True, False])
def test_a_detached_job_will_do(world: World, other: Session, verb: Any, expired: bool) -> None:
    session = world.session(expire_on_commit=expired)
    job = running(session)
    session.close()
    assert verb(other, job) in other
    other.commit()


@in_two_worlds
@every_verb
def test_the_apps_rows_are_flushed_before_it(session: Session, verb: Any) -> None:
    job = running(session)
    session.add(Order(note="first"))
    verb(session, job)
    assert session.scalar(text("SELECT note FROM app_order")) == "first"
    session.rollback()


@in_one_world
@every_verb
@pytest.mark.parametrize("wrong", [None, 7, "7", object(), Signup()])
def test_what_is_no_attempt_is_refused(session: Session, verb: Any, wrong: Any) -> None:
    with pytest.raises(InvalidJob) as caught:
        verb(session, wrong)
    assert caught.value.field == "job"


@in_one_world
@every_verb
@pytest.mark.case(12)
def test_a_refused_argument_leaves_the_callers_rows_alone(session: Session, database: Database, verb: Any) -> None:
    session.add(Order(note="kept"))
    with pytest.raises(InvalidJob):
        verb(session, None)
    session.commit()
    assert database.value("SELECT note FROM app_order") == "kept"


# -------------------------------------------------------------------------------------------------- error entries
def entry_of(session: Session, database: Database, error: Any) -> Any:
    """The entry that failing with `error` leaves."""
    job = running(session)
    fail(session, job, error)
    session.commit()
    return database.job(job.id).errors[-1]


def raised(error: BaseException) -> BaseException:
    """The same error with a traceback."""
    password = "S3CRET-local"
    try:
        raise error
    except BaseException as exc:
        assert password
        return exc


def test_an_exception_leaves_its_text_type_and_frames(session: Session, database: Database) -> None:
    entry = entry_of(session, database, raised(ValueError("bad card")))
    assert set(entry) == {"error", "type", "attempt", "at", "traceback"}
    assert (entry["error"], entry["type"]) == ("bad card", "ValueError")
    assert "in raised" in entry["traceback"]


def test_the_time_of_an_entry_is_rfc_3339_in_utc_by_the_databases_clock(session: Session, database: Database) -> None:
    session.execute(text("SET TIME ZONE 'Asia/Kathmandu'"))
    at = entry_of(session, database, "no")["at"]
    assert at.endswith("Z")
    assert database.value("SELECT abs(extract(epoch from clock_timestamp() - %s::timestamptz)) < 60", at)


@in_one_world
def test_the_type_of_an_exception_is_named_in_full(session: Session, database: Database) -> None:
    assert entry_of(session, database, InvalidJob("x", "y"))["type"] == "awa_sqla.errors.InvalidJob"


@pytest.mark.case(54)
def test_a_traceback_holds_no_locals(session: Session, database: Database) -> None:
    assert "S3CRET-local" not in str(entry_of(session, database, raised(ValueError("x"))))


@pytest.mark.case(54)
def test_a_database_error_is_stored_without_its_parameters(session: Session, database: Database) -> None:
    parameters = {"secret": "S3CRET"}  # not in the statement, whose source a traceback shows
    with pytest.raises(IntegrityError) as caught, session.begin_nested():
        session.execute(text("INSERT INTO app_order (id, note) VALUES (1, :secret), (1, :secret)"), parameters)
    stored = str(entry_of(session, database, caught.value))
    assert "duplicate key" in stored
    assert "INSERT INTO app_order" in stored
    assert "S3CRET" not in stored
    assert "DETAIL" not in stored


@pytest.mark.case(21)
def test_an_error_that_cannot_be_stored_is_cleaned(session: Session, database: Database) -> None:
    entry = entry_of(session, database, ValueError("bad\0text \ud800"))
    assert entry["error"] == "bad\N{REPLACEMENT CHARACTER}text ?"


@in_one_world
def test_an_exception_without_text_is_named(session: Session, database: Database) -> None:
    assert entry_of(session, database, TimeoutError())["error"] == "TimeoutError"


@in_one_world
def test_an_exception_whose_text_fails_is_named(session: Session, database: Database) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert "could not be made" in entry_of(session, database, Broken())["error"]


@in_one_world
def test_a_keyboard_interrupt_is_an_error_like_any_other(session: Session, database: Database) -> None:
    assert entry_of(session, database, KeyboardInterrupt())["type"] == "KeyboardInterrupt"


@in_one_world
def test_long_texts_are_cut_in_the_middle(session: Session, database: Database) -> None:
    error = raised(ValueError("begin" + "x" * 200_000 + "end"))
    stored = entry_of(session, database, error)["error"]
    assert len(stored) <= 1 << 16
    assert stored.startswith("begin")
    assert stored.endswith("end")


@in_one_world
def test_long_tracebacks_are_cut(session: Session, database: Database) -> None:
    def deep(n: int) -> None:
        exec(
            compile("\n" * n + f"if {n} < 400: deep(n + 1)\nelse: 1 / 0", f"file{n}" * 20, "exec"),
            {"deep": deep, "n": n},
        )

    with pytest.raises(ZeroDivisionError) as caught:
        deep(0)
    assert len("".join(traceback.format_exception(caught.value))) > 1 << 15
    assert len(entry_of(session, database, caught.value)["traceback"]) <= 1 << 15


def test_the_first_5_and_the_last_45_errors_are_kept_with_a_count_between(session: Session, database: Database) -> None:
    job = running(session, max_attempts=1000)
    database.execute(
        "UPDATE jobs_hot SET errors = (SELECT array_agg(jsonb_build_object('error', n::text)) "
        "FROM generate_series(1, 49) n)"
    )
    for number in (50, 51, 52, 53):
        fail(session, job, str(number))
        session.commit()
        kept = database.job(job.id).errors
        assert len(kept) == 50
        assert [entry["error"] for entry in kept[:5]] == ["1", "2", "3", "4", "5"]
        assert [entry["error"] for entry in kept[5:]] == [str(n) for n in range(number - 44, number + 1)]
        assert [entry["dropped"] for entry in kept if "dropped" in entry] == ([number - 50] if number > 50 else [])
        job = again(session, due_again(database, session, job.id))
