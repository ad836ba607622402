"""Follow-ups: registering specs, calling them, and what may come out."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy.orm import Session

from awa_sqla import (
    Cancelled,
    Completed,
    ConfigurationError,
    DuplicateKind,
    EnqueueRequest,
    Exhausted,
    FollowUpError,
    FollowUps,
    InvalidJob,
    JobArgs,
    JobSnapshot,
    JobState,
    Outcome,
    Retried,
    cancel,
    complete,
    fail,
    retry_after,
)
from awa_sqla.session.naming import spec_name
from tests.app import Charge, NotifyOps, Signup, Welcome
from tests.session.steps import HOUR, again, due_again, running
from tests.worlds import Database, in_one_world


# ---------------------------------------------------------------------------------------------------- the events
def test_completed_carries_args_job_and_result(session: Session, follow_ups: FollowUps) -> None:
    seen: list[Completed[Signup]] = []
    follow_ups.on_completed(Signup, name="x")(lambda event: seen.append(event) or [])
    job = running(session, Signup(email="a"))
    complete(session, job, result={"n": 1})
    session.commit()
    [event] = seen
    assert event.args == Signup(email="a")
    assert event.result == {"n": 1}
    assert isinstance(event.job, JobSnapshot)
    assert (event.job.id, event.job.state, event.job.result) == (job.id, JobState.COMPLETED, {"n": 1})
    assert event.job.finalized_at is not None


def test_retried_carries_error_attempt_and_due_time(session: Session, follow_ups: FollowUps) -> None:
    seen: list[Retried[Charge]] = []
    follow_ups.on_retried(Charge, name="x")(lambda event: seen.append(event) or [])
    failed = fail(session, running(session, Charge(order_id=1)), ValueError("declined"))
    session.commit()
    [event] = seen
    assert (event.error, event.attempt, event.next_run_at) == ("declined", 1, failed.run_at)
    assert (event.job.state, event.job.run_at) == (JobState.RETRYABLE, event.next_run_at)
    assert event.job.errors[0]["error"] == "declined"


def test_retry_after_is_retried_too(session: Session, follow_ups: FollowUps) -> None:
    seen: list[Retried[Signup]] = []
    follow_ups.on_retried(Signup, name="x")(lambda event: seen.append(event) or [])
    retry_after(session, running(session), HOUR, error="busy")
    session.commit()
    assert [(event.error, event.attempt) for event in seen] == [("busy", 1)]


@pytest.mark.case(17)
@pytest.mark.parametrize("keeps", [True, False])
def test_exhausted_comes_once_at_the_end(
    session: Session, follow_ups: FollowUps, database: Database, keeps: bool
) -> None:
    seen: list[Any] = []
    follow_ups.on_retried(Signup, name="x")(lambda event: seen.append("retried") or [])
    follow_ups.on_exhausted(Signup, name="x")(
        lambda event: seen.append((event.error, event.attempt, event.job.state, len(event.job.errors))) or []
    )
    if keeps:
        database.keep_dead_letters("default")
    job = running(session, max_attempts=2)
    retry_after(session, job, timedelta(0), error="one")
    session.commit()
    fail(session, again(session, due_again(database, session, job.id)), "two")
    session.commit()
    assert seen == ["retried", ("two", 2, JobState.FAILED, 2)]


def test_cancelled_carries_the_reason(session: Session, follow_ups: FollowUps) -> None:
    seen: list[Cancelled[Signup]] = []
    follow_ups.on_cancelled(Signup, name="x")(lambda event: seen.append(event) or [])
    cancel(session, running(session), reason="enough")
    session.commit()
    assert [(event.reason, event.job.state) for event in seen] == [("enough", JobState.CANCELLED)]


def test_an_event_is_of_its_own_outcome_and_kind_alone(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    for on in (follow_ups.on_retried, follow_ups.on_exhausted, follow_ups.on_cancelled, follow_ups.on_rescued):
        on(Signup, name="x")(lambda event: Welcome())  # type: ignore[arg-type]
    follow_ups.on_completed(Charge, name="x")(lambda event: Welcome())
    complete(session, running(session))
    session.commit()
    assert database.kinds() == ["signup"]


def test_a_spec_that_does_not_look_at_the_args_cannot_fail_on_them(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_completed(Charge, name="x")(lambda event: NotifyOps(job_id=event.job.id))
    job = running(session, Charge(order_id=1))
    database.execute("UPDATE jobs_hot SET args = '{}'")
    complete(session, job)
    session.commit()
    assert database.kinds() == ["charge", "notify_ops"]


def test_args_that_do_not_decode_are_a_follow_up_error(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_completed(Charge, name="x")(lambda event: NotifyOps(job_id=event.args.order_id))
    job = running(session, Charge(order_id=1))
    database.execute("UPDATE jobs_hot SET args = '{}'")
    complete(session, job)
    with pytest.raises(FollowUpError) as caught:
        session.commit()
    assert isinstance(caught.value.__cause__, ValidationError)


def test_a_snapshot_makes_the_round_trip_through_json(session: Session, follow_ups: FollowUps) -> None:
    seen: list[Completed[Signup]] = []
    follow_ups.on_completed(Signup, name="x")(lambda event: seen.append(event) or [])
    complete(session, running(session, deadline=HOUR, tags=["a"], metadata={"x": [1]}), result=[1.5])
    session.commit()
    snapshot = seen[0].job
    assert JobSnapshot.from_json(snapshot.to_json()) == snapshot


# ------------------------------------------------------------------------------------------- what a spec may return
def generated(event: Completed[Signup]) -> Iterator[JobArgs | EnqueueRequest]:
    yield Welcome(email="one")
    yield EnqueueRequest(Welcome(email="two"))


SHAPES: dict[str, tuple[Any, list[str]]] = {
    "args": (lambda event: Welcome(email="one"), ["one"]),
    "request": (lambda event: EnqueueRequest(Welcome(email="one")), ["one"]),
    "list": (lambda event: [Welcome(email="one"), EnqueueRequest(Welcome(email="two"))], ["one", "two"]),
    "tuple": (lambda event: (Welcome(email="one"),), ["one"]),
    "generator": (generated, ["one", "two"]),
    "empty list": (lambda event: [], []),
    "empty generator": (lambda event: iter(()), []),
}


@pytest.mark.case(63)
@pytest.mark.parametrize(("spec", "emails"), SHAPES.values(), ids=list(SHAPES))
def test_a_spec_returns_one_or_several_or_none_on_purpose(
    session: Session, follow_ups: FollowUps, database: Database, spec: Any, emails: list[str]
) -> None:
    follow_ups.on_completed(Signup, name="x")(spec)
    job = running(session)
    complete(session, job)
    session.commit()
    assert [child.args["email"] for child in database.children(job.id)] == emails


def raising_late(event: Completed[Signup]) -> Iterator[JobArgs]:
    yield Welcome()
    raise KeyError("late")


NONSENSE: dict[str, tuple[Any, str]] = {
    "None": (lambda event: None, "a forgotten return?"),
    "text": (lambda event: "welcome", "returned a str"),
    "mapping": (lambda event: {"email": "x"}, "returned a dict"),
    "number": (lambda event: 5, "returned a int"),
    "class": (lambda event: Welcome, "not a JobArgs"),
    "something else in a list": (lambda event: [Welcome(), None], "returned a NoneType among its follow-ups"),
    "class in a list": (lambda event: [Welcome], "among its follow-ups"),
    "raises": (lambda event: 1 / 0, "raised ZeroDivisionError"),
    "raises late": (raising_late, "raised KeyError"),
    "args that cannot be stored": (lambda event: Welcome(email="\0"), "raised InvalidJob"),
    "wrong options": (lambda event: EnqueueRequest(Welcome(), priority=9), "raised InvalidJob"),
}


@in_one_world
@pytest.mark.case(63)
@pytest.mark.parametrize(("spec", "text"), NONSENSE.values(), ids=list(NONSENSE))
def test_nonsense_is_an_error_and_nothing_is_committed(
    session: Session, follow_ups: FollowUps, database: Database, spec: Any, text: str
) -> None:
    follow_ups.on_completed(Signup, name="before")(lambda event: Welcome())
    follow_ups.on_completed(Signup, name="x")(spec)
    complete(session, running(session))
    with pytest.raises(FollowUpError, match=r"spec 'x'") as caught:
        session.commit()
    assert text in str(caught.value)
    session.rollback()
    assert [(row.kind, row.state) for row in database.jobs()] == [("signup", "running")]


def test_a_follow_up_takes_its_own_defaults_and_never_its_parents(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_completed(Signup, name="x")(lambda event: Charge(order_id=1))
    job = running(session, queue="slow", priority=4, max_attempts=9, tags=["a"], metadata={"a": 1})
    complete(session, job)
    session.commit()
    [child] = database.children(job.id)
    assert (child.queue, child.priority, child.max_attempts, child.tags) == ("payments", 1, 3, ["billing"])
    assert (child.metadata, child.deadline_seconds, child.state) == ({}, 120.0, "available")


@pytest.mark.case(57)
def test_a_request_has_every_option_of_enqueue(session: Session, follow_ups: FollowUps, database: Database) -> None:
    when = datetime(2030, 1, 1, tzinfo=UTC)
    follow_ups.on_completed(Signup, name="x")(
        lambda event: [
            EnqueueRequest(
                Welcome(), queue="ops", priority=1, max_attempts=7, deadline=HOUR, tags=["t"], metadata={"m": 1}
            ),
            EnqueueRequest(Welcome(), run_at=when),
            EnqueueRequest(Welcome(), delay=HOUR),
        ]
    )
    job = running(session)
    complete(session, job)
    session.commit()
    now, later, delayed = database.children(job.id)
    assert (now.queue, now.priority, now.max_attempts, now.deadline_seconds) == ("ops", 1, 7, 3600.0)
    assert (now.tags, now.metadata, now.state) == (["t"], {"m": 1}, "available")
    assert (later.state, later.run_at) == ("scheduled", when)
    left = database.value("SELECT run_at - clock_timestamp() FROM jobs WHERE id = %s", delayed.id)
    assert timedelta(minutes=59) < left <= HOUR


# -------------------------------------------------------------------------------------------------------- order
def test_several_specs_run_in_the_order_of_registration(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    for email in ("b", "a", "c"):
        follow_ups.on_completed(Signup, name=email)(lambda event, email=email: Welcome(email=email))
    job = running(session)
    complete(session, job)
    session.commit()
    assert [child.args["email"] for child in database.children(job.id)] == ["b", "a", "c"]


def test_the_first_error_stops_all(session: Session, follow_ups: FollowUps) -> None:
    called: list[str] = []
    follow_ups.on_completed(Signup, name="a")(lambda event: called.append("a") or [])
    follow_ups.on_completed(Signup, name="b")(lambda event: 1 / 0)
    follow_ups.on_completed(Signup, name="c")(lambda event: called.append("c") or [])
    complete(session, running(session))
    with pytest.raises(FollowUpError):
        session.flush()
    assert called == ["a"]


def test_several_transitions_of_one_flush_bring_theirs_in_order(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_completed(Signup, name="x")(lambda event: Welcome(email=event.args.email))
    jobs = [running(session, Signup(email=email), queue=email) for email in ("z", "y", "x")]
    for job in jobs:
        complete(session, job)
    session.commit()
    assert [row.args["email"] for row in database.jobs() if row.parent_id] == ["z", "y", "x"]


# ------------------------------------------------------------------------------------------------------- lineage
def test_a_chain_knows_its_parent_and_its_root(session: Session, follow_ups: FollowUps, database: Database) -> None:
    follow_ups.on_completed(Signup, name="x")(lambda event: Welcome())
    follow_ups.on_cancelled(Welcome, name="x")(lambda event: EnqueueRequest(NotifyOps(job_id=1), delay=HOUR))
    root = running(session)
    complete(session, root)
    session.commit()
    [second] = database.children(root.id)
    cancel(session, second.id, reason="x")
    session.commit()
    [third] = database.children(second.id)
    assert [(row.parent_id, row.root_id, row.parent_outcome) for row in (second, third)] == [
        (root.id, root.id, "completed"),
        (second.id, root.id, "cancelled"),
    ]
    assert database.job(root.id).root_id is None


# ------------------------------------------------------------------------------------------------- registration
def module_level(event: Completed[Signup]) -> Welcome:
    return Welcome()


def test_the_name_of_a_spec_is_where_it_is_defined() -> None:
    follow_ups = FollowUps()
    follow_ups.on_completed(Signup)(module_level)
    [spec] = follow_ups.specs
    assert spec.name == f"{__name__}:module_level"
    assert (spec.kind, spec.outcome) == ("signup", Outcome.COMPLETED)


@pytest.mark.parametrize(
    ("file", "spec", "name"),
    [("/srv/jobs.py", None, "jobs"), (None, "shop.jobs", "shop.jobs"), (None, "shop.__main__", "shop")],
)
def test_main_is_named_as_other_processes_import_it(
    monkeypatch: pytest.MonkeyPatch, file: str | None, spec: str | None, name: str
) -> None:
    main = ModuleType("__main__")
    main.__file__ = file
    main.__spec__ = ModuleType("spec") if spec else None  # type: ignore[assignment]
    if spec:
        main.__spec__.name = spec  # type: ignore[union-attr]
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run() -> None: ...

    run.__module__, run.__qualname__ = "__main__", "run"
    assert spec_name(run) == f"{name}:run"


def test_a_decorated_function_stays_what_it_was() -> None:
    follow_ups = FollowUps()
    assert follow_ups.on_completed(Signup)(module_level) is module_level


def test_lambdas_and_local_functions_need_a_name() -> None:
    def local(event: Completed[Signup]) -> Welcome:
        return Welcome()

    follow_ups = FollowUps()
    for function in (local, lambda event: Welcome()):
        with pytest.raises(ConfigurationError, match=r"give it one with name='\.\.\.'"):
            follow_ups.on_completed(Signup)(function)
    assert follow_ups.specs == ()


@pytest.mark.parametrize("name", ["", " ", "x" * 201, 5])
def test_a_name_is_text_within_its_limits(name: Any) -> None:
    with pytest.raises(ConfigurationError):
        FollowUps().on_completed(Signup, name=name)(module_level)


def test_a_name_is_taken_once_for_each_outcome_of_a_kind() -> None:
    follow_ups = FollowUps()
    follow_ups.on_completed(Signup, name="x")(module_level)
    follow_ups.on_retried(Signup, name="x")(lambda event: [])
    follow_ups.on_completed(Welcome, name="x")(lambda event: [])
    with pytest.raises(ConfigurationError, match="two follow-up specs"):
        follow_ups.on_completed(Signup, name="x")(module_level)


def test_two_classes_of_one_kind_are_refused_at_registration() -> None:
    class Other(JobArgs, kind="signup"):
        pass

    follow_ups = FollowUps()
    follow_ups.on_completed(Signup, name="x")(module_level)
    with pytest.raises(DuplicateKind) as caught:
        follow_ups.on_retried(Other, name="y")(lambda event: [])
    assert caught.value.kind == "signup"
    assert len(follow_ups.specs) == 1


@pytest.mark.parametrize("wrong", [Signup(), "signup", JobArgs, int, None])
def test_specs_are_for_concrete_args_classes(wrong: Any) -> None:
    with pytest.raises(InvalidJob):
        FollowUps().on_completed(wrong, name="x")


def test_a_coroutine_function_is_no_spec() -> None:
    async def spec(event: Completed[Signup]) -> Welcome:
        return Welcome()

    with pytest.raises(ConfigurationError, match="pure function"):
        FollowUps().on_completed(Signup, name="x")(spec)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- include
def test_include_takes_over_what_another_registry_has(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    part = FollowUps()
    part.on_completed(Signup, name="theirs")(lambda event: Welcome(email="theirs"))
    follow_ups.on_completed(Signup, name="ours")(lambda event: Welcome(email="ours"))
    follow_ups.include(part)
    assert [spec.name for spec in follow_ups.specs] == ["ours", "theirs"]
    job = running(session)
    complete(session, job)
    session.commit()
    assert [child.args["email"] for child in database.children(job.id)] == ["ours", "theirs"]


def test_an_include_that_clashes_takes_nothing() -> None:
    class Other(JobArgs, kind="signup"):
        pass

    ours, names, kinds = FollowUps(), FollowUps(), FollowUps()
    ours.on_completed(Signup, name="x")(module_level)
    names.on_completed(Welcome, name="fine")(lambda event: [])
    names.on_completed(Signup, name="x")(module_level)
    kinds.on_completed(Other, name="y")(lambda event: [])
    with pytest.raises(ConfigurationError):
        ours.include(names)
    with pytest.raises(DuplicateKind):
        ours.include(kinds)
    assert [spec.name for spec in ours.specs] == ["x"]


def test_the_last_exhausted_event_type_checks_as_documented() -> None:
    assert {cls.outcome for cls in (Completed, Retried, Exhausted, Cancelled)} == {
        Outcome.COMPLETED,
        Outcome.RETRIED,
        Outcome.EXHAUSTED,
        Outcome.CANCELLED,
    }
