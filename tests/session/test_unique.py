"""Unique jobs: keys, conflicts in the unit of work, and claims that never lie."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from sqlalchemy import event, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from awa_sqla import (
    LIVE_STATES,
    ConfigurationError,
    EnqueueRequest,
    FollowUpError,
    FollowUps,
    InvalidJob,
    Job,
    JobArgs,
    JobState,
    ScheduledJob,
    Unique,
    UniqueConflict,
    cancel,
    claim,
    complete,
    complete_many,
    enqueue,
    enqueue_many,
    enqueue_unique,
    fail,
    retry_after,
    snooze,
)
from awa_sqla.maintenance import promote, rescue
from tests.app import Order, Signup
from tests.session.steps import HOUR, MINUTE
from tests.worlds import Database, World, in_one_world, in_sync_worlds, in_two_worlds


class Report(JobArgs, unique=Unique()):
    day: int
    parts: list[int] = Field(default_factory=list)


class Pending(JobArgs, unique=Unique(states={JobState.SCHEDULED, JobState.AVAILABLE, JobState.RETRYABLE})):
    """While one runs, the next may wait."""

    day: int


class Ready(JobArgs, unique=Unique(states={JobState.AVAILABLE})):
    day: int


class Forever(JobArgs, unique=Unique(states=set(JobState))):
    day: int


CLAIMS = "SELECT job_id FROM job_unique_claims ORDER BY job_id"
#: A claim without a row that has its key, in one of its unique states; or a row in one without its claim.
LIES = """
    SELECT claim.job_id, job.id FROM job_unique_claims claim
    FULL JOIN (SELECT * FROM jobs WHERE unique_key IS NOT NULL AND in_unique_state(state, unique_states)) job
    ON claim.job_id = job.id AND claim.unique_key = job.unique_key
    WHERE claim.job_id IS NULL OR job.id IS NULL
"""


def holders(database: Database) -> list[int]:
    """The jobs that hold a key, and nothing is untrue about them."""
    assert database.rows(LIES) == []
    return [row.job_id for row in database.rows(CLAIMS)]


# -------------------------------------------------------------------------------------------------------- keys
GOLDEN: list[tuple[str, str | None, dict[str, Any], int | None, str]] = [
    ("send_email", None, {"subject": "hi", "to": "a@example.org"}, None, "51d4ce70f09466e1bac5e24274a9f3d9"),
    ("send_email", "email", {"to": "a@example.org", "subject": "hi"}, None, "618692609d3fe46bcf780b240fa1d3e2"),
    (
        "report",
        None,
        {"day": 20421, "parts": [1, 2, 3], "nested": {"b": True, "a": None}},
        None,
        "fcb1033de66e806d0a373dda02607a6d",
    ),
    ("report", None, {}, None, "bc12436254af4020cb0232fdf4a5916e"),
    ("report", None, {"x": 1}, 7, "1622e006a83f7822902c6083f7624cad"),
]


@pytest.mark.case(48)
@pytest.mark.parametrize(("kind", "queue", "args", "bucket", "key"), GOLDEN)
def test_keys_are_those_of_awa(kind: str, queue: str | None, args: Any, bucket: int | None, key: str) -> None:
    period = None if bucket is None else MINUTE
    unique = Unique(by_queue=queue is not None, period=period)
    now = None if bucket is None else bucket * 60 + 59.999
    assert unique.key(kind, queue or "other", args, now=now).hex() == key


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.case(48)
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=5), st.randoms())
def test_the_order_of_keys_does_not_matter_and_everything_else_does(args: dict[str, Any], random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = list(value.items())
            random.shuffle(items)
            return {key: shuffled(item) for key, item in items}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    key = Unique().key("kind", "queue", args)
    assert Unique().key("kind", "queue", shuffled(args)) == key
    for other in ({**args, "new": 1}, {"args": args}, {}):
        assert (Unique().key("kind", "queue", other) == key) is (json.dumps(other) == json.dumps(args))


@pytest.mark.case(48)
def test_numbers_are_told_apart_as_they_are_written() -> None:
    keys = {Unique().key("k", "q", {"n": n}) for n in (1, 1.0, "1", True, None)}
    assert len(keys) == 5


@pytest.mark.case(48)
def test_another_process_makes_the_same_key() -> None:
    code = (
        "from awa_sqla import Unique; print(Unique(by_queue=True).key("
        "'k', 'q', {'b': {'y': [1, 2], 'x': 'ö'}, 'a': 0.1}).hex())"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert made == {Unique(by_queue=True).key("k", "q", {"a": 0.1, "b": {"x": "ö", "y": [1, 2]}}).hex() + "\n"}


def test_a_period_cuts_time_into_buckets() -> None:
    hourly = Unique(period=HOUR)
    keys = [hourly.key("k", "q", {}, now=now) for now in (0, 3599.999999, 3600, 7199, -1)]
    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert len(set(keys)) == 3
    odd = Unique(period=timedelta(microseconds=1_500_000))
    assert odd.key("k", "q", {}, now=1.4) == odd.key("k", "q", {}, now=0)
    assert odd.key("k", "q", {}, now=1.5) != odd.key("k", "q", {}, now=0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"by_args": 1}, "unique.by_args"),
        ({"by_queue": "payments"}, "unique.by_queue"),
        ({"period": 60}, "unique.period"),
        ({"period": timedelta(0)}, "unique.period"),
        ({"states": []}, "unique.states"),
        ({"states": "available"}, "unique.states"),
        ({"states": 5}, "unique.states"),
        ({"states": ["availible"]}, "unique.states"),
        ({"states": [JobState.RUNNING]}, "unique.states"),
        ({"states": [JobState.AVAILABLE, JobState.COMPLETED]}, "unique.states"),
        ({"states": [JobState.AVAILABLE, JobState.RUNNING, JobState.CANCELLED]}, "unique.states"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        Unique(**options)
    assert caught.value.field == field


def test_states_may_be_any_iterable_and_come_as_values() -> None:
    given = Unique(states=(name for name in ("scheduled", "available")))  # type: ignore[misc]
    assert given == Unique(states=[JobState.AVAILABLE, JobState.SCHEDULED])
    assert given.mask == 0b11
    assert Unique().mask == sum(state.bit for state in LIVE_STATES) == 0b1001_0111


def test_the_states_of_awa_are_accepted() -> None:
    assert Unique(states=["scheduled", "available", "running", "completed", "retryable"]).mask == 0b0001_1111  # type: ignore[list-item]


@pytest.mark.parametrize("unique", [True, {"by_args": True}, Unique])
def test_unique_must_be_a_unique(unique: Any) -> None:
    with pytest.raises(InvalidJob, match="unique: must be a Unique"):
        EnqueueRequest(Signup(), unique=unique)
    with pytest.raises(InvalidJob, match="unique: must be a Unique"):
        type("Bad", (JobArgs,), {}, unique=unique)


@in_one_world
@pytest.mark.parametrize("policy", ["ignore", None, True])
def test_on_conflict_must_be_one_of_two(session: Session, policy: Any) -> None:
    calls: list[Callable[[], Any]] = [lambda: enqueue_many(session, [Report(day=1)], on_conflict=policy)]
    if policy is not None:
        calls.append(lambda: enqueue(session, Report(day=1), on_conflict=policy))
    for call in calls:
        with pytest.raises(InvalidJob, match="on_conflict"):
            call()
    assert not session.new


# -------------------------------------------------------------------------------------------- in one transaction
def test_a_unique_job_holds_its_key(session: Session, database: Database) -> None:
    job = enqueue(session, Report(day=1))
    assert job.id is None
    session.commit()
    stored = database.job(job.id)
    assert bytes(stored.unique_key) == Unique().key("report", "default", {"day": 1, "parts": []})
    assert (stored.unique_states, job.duplicate_of) == (Unique().mask, None)
    assert holders(database) == [job.id]


def test_one_statement_claims_all_keys_of_a_flush(world: World, session: Session, database: Database) -> None:
    for day in range(5):
        enqueue(session, Report(day=day))
    enqueue(session, Signup())
    session.connection()
    with world.counting() as sent:
        session.flush()
    assert [statement[:10] for statement in sent] == ["SELECT uni", "INSERT INT", "INSERT INT"]
    with world.counting() as sent:
        enqueue(session, Signup())
        session.flush()
    assert len(sent) == 1
    session.commit()
    assert len(holders(database)) == 5


@pytest.mark.case(4)
def test_a_duplicate_raises_once_out_of_the_flush_and_costs_nobody_else(session: Session, database: Database) -> None:
    first = enqueue(session, Report(day=1))
    session.flush()
    holder, key = first.id, first.unique_key
    session.commit()
    session.add(Order(note="mine"))
    duplicate = enqueue(session, Report(day=1))
    other = enqueue(session, Report(day=2))
    with pytest.raises(UniqueConflict) as caught:
        session.commit()
    assert (caught.value.existing_id, caught.value.kind, caught.value.unique_key) == (holder, "report", key)
    assert duplicate not in session
    assert other in session.new
    session.commit()
    assert database.value("SELECT note FROM app_order") == "mine"
    assert database.kinds() == ["report", "report"]
    assert sorted(holders(database)) == sorted([first.id, other.id])


@pytest.mark.case(46)
def test_a_duplicate_may_be_skipped(session: Session, other: Session, database: Database) -> None:
    first = enqueue(session, Report(day=1))
    session.commit()
    for one in (session, other):
        one.add(Order(note="mine"))
        job = enqueue(one, Report(day=1), on_conflict="skip")
        one.flush()
        assert (job.duplicate_of, job in one, job.id) == (first.id, False, None)
        assert not one.new
        assert not one.dirty
        one.commit()
    assert holders(database) == [first.id]
    assert len(database.rows("SELECT * FROM app_order")) == 2


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_of_two_twins_in_one_flush_the_first_stays(session: Session, database: Database, policy: Any) -> None:
    first = enqueue(session, Report(day=1))
    second = enqueue(session, Report(day=1), on_conflict=policy)
    if policy == "raise":
        with pytest.raises(UniqueConflict) as caught:
            session.flush()
        session.commit()
        assert caught.value.existing_id == first.id
    else:
        session.commit()
        assert second.duplicate_of == first.id
    assert holders(database) == [first.id]


def test_several_duplicates_raise_once(session: Session, database: Database) -> None:
    for day in (1, 2, 1, 2, 2):
        enqueue(session, Report(day=day))
    with pytest.raises(UniqueConflict):
        session.flush()
    session.commit()
    assert len(holders(database)) == 2


def test_an_earlier_flush_of_the_same_transaction_counts(session: Session, database: Database) -> None:
    first = enqueue(session, Report(day=1))
    session.flush()
    second = enqueue(session, Report(day=1), on_conflict="skip")
    session.commit()
    assert second.duplicate_of == first.id
    assert holders(database) == [first.id]


def test_what_is_unique_may_differ_from_job_to_job(session: Session, database: Database) -> None:
    enqueue(session, Signup())
    enqueue(session, Signup(), unique=Unique())
    enqueue(session, Signup(), unique=Unique(by_queue=True))
    enqueue(session, Signup(), unique=Unique(by_queue=True), queue="other")
    enqueue(session, Signup(), unique=Unique(period=HOUR))
    enqueue(session, Signup(email="b@example.org"), unique=Unique())
    only_kind = enqueue(session, Signup(), unique=Unique(by_args=False))
    session.commit()
    assert len(holders(database)) == 6
    twin = enqueue(session, Signup(email="else@example.org"), unique=Unique(by_args=False), on_conflict="skip")
    session.commit()
    assert twin.duplicate_of == only_kind.id


def test_a_scheduled_job_is_unique_too(session: Session, database: Database) -> None:
    first = enqueue(session, Report(day=1), delay=HOUR)
    session.commit()
    second = enqueue(session, Report(day=1), run_at=datetime.now(UTC), on_conflict="skip")
    session.commit()
    assert isinstance(second, ScheduledJob)
    assert second.duplicate_of == first.id
    assert holders(database) == [first.id]


def test_a_duplicate_draws_no_id(session: Session, database: Database) -> None:
    enqueue(session, Report(day=1))
    session.commit()
    before = database.value("SELECT last_value FROM jobs_id_seq")
    for _ in range(3):
        enqueue(session, Report(day=1), on_conflict="skip")
        session.commit()
    assert database.value("SELECT last_value FROM jobs_id_seq") == before


def test_a_rolled_back_savepoint_lets_the_key_go(session: Session, database: Database) -> None:
    savepoint = session.begin_nested()
    lost = enqueue(session, Report(day=1))
    session.flush()
    savepoint.rollback()
    kept = enqueue(session, Report(day=1))
    session.commit()
    assert holders(database) == [kept.id]
    assert lost not in session


def test_a_conflict_in_a_savepoint_is_of_that_savepoint(session: Session, database: Database) -> None:
    first = enqueue(session, Report(day=1))
    savepoint = session.begin_nested()
    session.add(Order(note="inner"))
    enqueue(session, Report(day=1))
    with pytest.raises(UniqueConflict):
        savepoint.commit()
    savepoint.rollback()
    session.add(Order(note="outer"))
    session.commit()
    assert database.value("SELECT note FROM app_order") == "outer"
    assert holders(database) == [first.id]


def test_a_conflict_does_not_part_a_transition_from_its_follow_up(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_completed(Signup, name="report")(lambda event: Signup(email="follow@example.org"))
    enqueue(session, Report(day=1))
    enqueue(session, Signup(), queue="work")
    session.commit()
    [job] = claim(session, "work", limit=1)
    complete(session, job)
    enqueue(session, Report(day=1))
    with pytest.raises(UniqueConflict):
        session.commit()
    session.commit()
    assert database.job(job.id).state == "completed"
    assert len(database.children(job.id)) == 1


def test_a_listener_that_enqueues_in_a_flush_is_told_at_the_call(session: Session, database: Database) -> None:
    first = enqueue(session, Report(day=1))
    session.commit()
    told: list[Any] = []

    def enqueue_more(session: Session, context: Any, instances: Any) -> None:
        if told:
            return
        told.append(enqueue(session, Report(day=1), on_conflict="skip"))
        told.append(enqueue(session, Report(day=2)))
        with pytest.raises(UniqueConflict):
            enqueue(session, Report(day=1))

    event.listen(session, "before_flush", enqueue_more)
    session.add(Order(note="mine"))
    session.commit()
    assert told[0].duplicate_of == first.id
    assert sorted(holders(database)) == sorted([first.id, told[1].id])


@pytest.mark.parametrize("when", ["before_flush", "after_flush"])
def test_a_listener_that_takes_a_job_out_again_leaves_no_claim(session: Session, database: Database, when: str) -> None:
    session.add(Order(note="mine"))
    job = enqueue(session, Report(day=1)) if when == "before_flush" else None

    def drop(session: Session, context: Any, *instances: Any) -> None:
        session.expunge(job or enqueue(session, Report(day=1)))

    event.listen(session, when, drop, once=True)
    session.commit()
    assert database.jobs() == []
    assert holders(database) == []
    enqueue(session, Report(day=1))
    session.commit()
    assert len(holders(database)) == 1


def test_a_flush_that_is_vetoed_leaves_no_claim(session: Session, database: Database) -> None:
    job = enqueue(session, Report(day=1))

    def veto(*_: Any) -> None:
        raise RuntimeError("not now")

    event.listen(session, "before_flush", veto, once=True)
    with pytest.raises(RuntimeError):
        session.flush()
    session.expunge(job)
    session.commit()
    assert holders(database) == []
    session.add(job)
    session.commit()
    assert holders(database) == [job.id]


@in_sync_worlds
@pytest.mark.case(61)
def test_two_phase_commit(world: World, database: Database) -> None:
    session = world.session(twophase=True)
    job = enqueue(session, Report(day=1))
    session.prepare()
    session.commit()
    duplicate = enqueue(session, Report(day=1), on_conflict="skip")
    enqueue(session, Report(day=2))
    session.prepare()
    session.rollback()
    assert duplicate.duplicate_of == job.id
    assert holders(database) == [job.id]


def test_plain_jobs_only_by_job_of() -> None:
    with pytest.raises(ConfigurationError, match="use enqueue"):
        Job.of(Report(day=1))
    with pytest.raises(ConfigurationError, match="binds them late"):
        Job.of(lambda: Report(day=1))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- two transactions
@pytest.mark.case(3)
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("road", ["flush", "enqueue_unique", "enqueue_many"])
def test_a_twin_that_is_not_committed_is_waited_for(
    world: World, session: Session, database: Database, end: str, road: str
) -> None:
    def late(session: Session) -> tuple[int | None, int | None]:
        """(the new job's id, the holder's id)"""
        if road == "flush":
            job = enqueue(session, Report(day=1), on_conflict="skip")
            session.flush()
            return job.id if job in session else None, job.duplicate_of
        if road == "enqueue_unique":
            found = enqueue_unique(session, Report(day=1))
            return (found.id, None) if found.created else (None, found.id)
        [made] = enqueue_many(session, [Report(day=1)], on_conflict="skip")
        return made, None

    first = enqueue(session, Report(day=1))
    session.flush()
    first_id = first.id
    meanwhile = world.meanwhile(late)
    database.wait_until_one_is_blocked()
    getattr(session, end)()
    made, holder = meanwhile.result()
    if end == "commit":
        assert made is None
        assert holder in ((first_id,) if road != "enqueue_many" else (None,))
        assert holders(database) == [first_id]
    else:
        assert holders(database) == [made]
        assert holder is None


def test_a_twin_that_is_not_committed_and_ends_at_once_is_no_twin(
    world: World, session: Session, database: Database
) -> None:
    enqueue(session, Report(day=1))
    session.flush()
    meanwhile = world.meanwhile(lambda session: enqueue_unique(session, Report(day=1)))
    database.wait_until_one_is_blocked()
    [job] = claim(session, "default", limit=1)
    complete(session, job)
    session.commit()
    found = meanwhile.result()
    assert found.created
    assert holders(database) == [found.id]


def test_a_holder_that_is_being_finished_is_one_until_then(world: World, session: Session, database: Database) -> None:
    enqueue(session, Report(day=1))
    session.commit()
    [job] = claim(session, "default", limit=1)
    session.commit()
    complete(session, job)
    session.flush()
    found = world.meanwhile(lambda session: enqueue_unique(session, Report(day=1))).result()
    assert (found.created, found.id) == (False, job.id)
    session.commit()
    assert holders(database) == []


def test_opposite_orders_in_one_flush_do_not_deadlock(world: World, session: Session, database: Database) -> None:
    def backwards(session: Session) -> list[int | None]:
        jobs = [enqueue(session, Report(day=day), on_conflict="skip") for day in range(9, -1, -1)]
        session.flush()
        return [job.duplicate_of for job in jobs]

    for day in range(10):
        enqueue(session, Report(day=day))
    session.flush()
    meanwhile = world.meanwhile(backwards)
    database.wait_until_one_is_blocked()
    session.commit()
    assert None not in meanwhile.result()
    assert len(holders(database)) == 10


@in_one_world
@pytest.mark.slow
def test_many_that_race_for_few_keys(world: World, database: Database) -> None:
    def one(session: Session) -> int:
        made = 0
        for day in range(20):
            made += enqueue_unique(session, Report(day=day % 5)).created
        many = enqueue_many(session, [Report(day=day) for day in (9, 8, 7, 6, 5)], on_conflict="skip")
        return made + sum(job is not None for job in many)

    made = [each.result() for each in [world.meanwhile(one) for _ in range(8)]]
    assert sum(made) == 10
    assert len(holders(database)) == len(database.jobs()) == 10


# ------------------------------------------------------------------------------------------------- enqueue_unique
def test_enqueue_unique_says_what_it_found(session: Session, database: Database) -> None:
    made = enqueue_unique(session, Report(day=1), priority=1, tags=["x"])
    again = enqueue_unique(session, Report(day=1))
    assert (made.created, made.job is not None and made.job.id, again) == (
        True,
        made.id,
        type(made)(made.id, created=False, job=None),
    )
    session.commit()
    assert (database.job(made.id).priority, database.job(made.id).tags) == (1, ["x"])
    later = enqueue_unique(session, Signup(), unique=Unique(), delay=HOUR)
    assert isinstance(later.job, ScheduledJob)
    session.commit()
    assert sorted(holders(database)) == sorted([made.id, later.id])


@in_one_world
@pytest.mark.parametrize(
    ("args", "options", "field"),
    [
        (Signup(), {}, "unique"),
        (Report(day=1), {"unique": "yes"}, "unique"),
        (Report(day=1), {"priority": 9}, "priority"),
        (lambda: Report(day=1), {}, "args"),
    ],
)
def test_enqueue_unique_refuses(session: Session, args: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        enqueue_unique(session, args, **options)
    assert caught.value.field == field
    assert not session.new


def test_enqueue_unique_leaves_nothing_when_others_conflict(session: Session, database: Database) -> None:
    enqueue(session, Report(day=1))
    session.commit()
    enqueue(session, Report(day=1))
    with pytest.raises(UniqueConflict):
        enqueue_unique(session, Report(day=2))
    assert not session.new
    session.commit()
    assert len(database.jobs()) == 1


# ------------------------------------------------------------------------------------------------------ follow-ups
def test_a_follow_up_that_is_a_duplicate_is_left_out(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_completed(Signup, name="report")(lambda event: [Report(day=1), Report(day=2)])
    first = enqueue(session, Report(day=1))
    for n in range(2):
        enqueue(session, Signup(email=f"{n}@example.org"), queue="work")
    session.commit()
    for job in claim(session, "work", limit=2):
        complete(session, job)
        session.flush()
        session.flush()
    session.commit()
    session.commit()
    assert len(holders(database)) == 2
    assert first.id in holders(database)
    assert [job.state for job in database.jobs()].count("completed") == 2


def test_a_follow_up_that_must_not_be_a_duplicate_keeps_the_transition_from_committing(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_completed(Signup, name="report")(lambda event: EnqueueRequest(Report(day=1), on_conflict="raise"))
    first = enqueue(session, Report(day=1))
    enqueue(session, Signup(), queue="work")
    session.flush()
    holder = first.id
    session.commit()
    [job] = claim(session, "work", limit=1)
    job_id = complete(session, job).id
    for _ in range(2):
        with pytest.raises(FollowUpError) as caught:
            session.commit()
        conflict = caught.value.__cause__
        assert isinstance(conflict, UniqueConflict)
        assert (conflict.existing_id, caught.value.spec, caught.value.job_id) == (holder, "report", job_id)
        assert caught.value.kind == "signup"
    session.rollback()
    assert database.job(job_id).state == "available"


# ------------------------------------------------------------------------------------------------ the life of a claim
def _running(session: Session, args: JobArgs, **options: Any) -> Job:
    enqueue(session, args, **options)
    session.commit()
    [job] = claim(session, "default", limit=1)
    session.commit()
    return job


ENDS: dict[str, Callable[[Session, Job], Any]] = {
    "complete": complete,
    "complete_many": lambda session, job: complete_many(session, [job]),
    "fail": lambda session, job: fail(session, job, "no"),
    "fail for good": lambda session, job: fail(session, job, "no", terminal=True),
    "retry_after": lambda session, job: retry_after(session, job, HOUR),
    "snooze": lambda session, job: snooze(session, job, HOUR),
    "cancel": lambda session, job: cancel(session, job, reason="enough"),
}


@in_two_worlds
@pytest.mark.parametrize("args_class", [Report, Pending, Ready, Forever])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("dead_letters", [False, True])
def test_a_claim_is_there_in_the_unique_states_and_in_no_others(
    session: Session, database: Database, args_class: Any, end: str, dead_letters: bool
) -> None:
    if dead_letters:
        database.keep_dead_letters("default")
    job = _running(session, args_class(day=1))
    mask = args_class.__awa__.unique.mask
    for act in (lambda: None, lambda: ENDS[end](session, job), lambda: _due(database, session)):
        act()
        session.commit()
        row = database.job(job.id)
        assert holders(database) == ([job.id] if mask & JobState(row.state).bit else [])


def _due(database: Database, session: Session) -> None:
    database.execute("UPDATE scheduled_jobs SET run_at = now() - interval '1 s'")
    promote(session)


@in_two_worlds
@pytest.mark.parametrize("max_attempts", [1, 2])
def test_a_rescue_keeps_the_claims_true(session: Session, database: Database, max_attempts: int) -> None:
    for args_class in (Report, Pending, Forever):
        enqueue(session, args_class(day=1), max_attempts=max_attempts)
    session.commit()
    claim(session, "default", limit=3)
    session.commit()
    database.execute("UPDATE jobs_hot SET heartbeat_at = now() - interval '1 hour'")
    assert len(rescue(session, stale_after=MINUTE)) == 3
    session.commit()
    assert len(holders(database)) == {1: 1, 2: 3}[max_attempts]


@in_two_worlds
@pytest.mark.case(19)
def test_while_one_runs_the_next_may_wait_if_running_is_no_unique_state(session: Session, database: Database) -> None:
    job = _running(session, Pending(day=1))
    waiting = enqueue(session, Pending(day=1))
    session.commit()
    assert database.job(job.id).state == "running"
    assert holders(database) == [waiting.id]


@in_two_worlds
@pytest.mark.case(19)
def test_a_running_job_is_never_touched_by_its_duplicate(session: Session, database: Database) -> None:
    job = _running(session, Report(day=1))
    before = database.job(job.id)
    duplicate = enqueue(session, Report(day=1), on_conflict="skip")
    session.commit()
    assert duplicate.duplicate_of == job.id
    assert database.job(job.id) == before


BACK = {name: end for name, end in ENDS.items() if name in ("fail", "retry_after", "snooze")}


@in_two_worlds
@pytest.mark.parametrize("end", BACK)
@pytest.mark.case(5)
def test_a_person_who_brings_a_job_back_is_told_of_its_twin(session: Session, database: Database, end: str) -> None:
    job = _running(session, Pending(day=1))
    twin = enqueue(session, Pending(day=1))
    session.commit()
    before = database.job(job.id)
    session.add(Order(note="mine"))
    with pytest.raises(UniqueConflict) as caught:
        BACK[end](session, job)
    assert caught.value.existing_id == twin.id
    session.commit()
    assert database.job(job.id) == before
    assert database.value("SELECT note FROM app_order") == "mine"
    assert holders(database) == [twin.id]
    complete(session, job)
    session.commit()


@in_two_worlds
@pytest.mark.parametrize("end", BACK)
def test_a_job_that_comes_back_alone_has_its_key_again(session: Session, database: Database, end: str) -> None:
    job = _running(session, Pending(day=1))
    BACK[end](session, job)
    twin = enqueue(session, Pending(day=1), on_conflict="skip")
    session.commit()
    assert twin.duplicate_of == job.id
    assert holders(database) == [job.id]


@in_two_worlds
@pytest.mark.case(5)
def test_a_sweep_cancels_what_has_become_a_duplicate(
    session: Session, follow_ups: FollowUps, database: Database
) -> None:
    follow_ups.on_cancelled(Pending, name="told")(lambda event: Signup(email=event.reason))
    job = _running(session, Pending(day=1))
    twin = enqueue(session, Pending(day=1))
    alone = enqueue(session, Pending(day=2))
    session.commit()
    [running] = claim(session, "default", limit=1)
    assert running.id == twin.id
    [also] = claim(session, "default", limit=1)
    assert also.id == alone.id
    session.commit()
    third = enqueue(session, Pending(day=1))
    session.commit()
    database.execute("UPDATE jobs_hot SET heartbeat_at = now() - interval '1 hour' WHERE state = 'running'")
    assert len(rescue(session, stale_after=MINUTE)) == 3
    session.commit()
    for loser in (job, twin):
        row = database.job(loser.id)
        assert (row.state, row.errors[-1]["error"]) == ("cancelled", f"cancelled: duplicate of job {third.id}")
    assert database.job(alone.id).state == "retryable"
    assert sorted(holders(database)) == sorted([alone.id, third.id])
    owed = database.obligations()
    assert {(row.job_id, row.outcome, row.spec) for row in owed} == {
        (job.id, "cancelled", "told"),
        (twin.id, "cancelled", "told"),
    }


@in_two_worlds
@pytest.mark.case(5)
def test_promotion_decides_between_twins_and_lets_a_lone_job_pass(session: Session, database: Database) -> None:
    first = enqueue(session, Ready(day=1), run_at=datetime(2020, 1, 1, tzinfo=UTC))
    second = enqueue(session, Ready(day=1), run_at=datetime(2020, 1, 2, tzinfo=UTC))
    lone = enqueue(session, Ready(day=2), run_at=datetime(2020, 1, 3, tzinfo=UTC))
    plain = enqueue(session, Signup(), run_at=datetime(2020, 1, 4, tzinfo=UTC))
    session.flush()
    first_id, second_id, lone_id, plain_id = (job.id for job in (first, second, lone, plain))
    session.commit()
    assert holders(database) == []
    done = promote(session)
    session.commit()
    assert (done.jobs, done.queues) == (3, frozenset({"default"}))
    assert {job.id: job.state for job in database.jobs()} == {
        first_id: "available",
        second_id: "cancelled",
        lone_id: "available",
        plain_id: "available",
    }
    assert database.job(second_id).errors[0]["error"] == f"cancelled: duplicate of job {first_id}"
    assert holders(database) == [first_id, lone_id]


@in_two_worlds
def test_promotion_does_not_wait_for_a_claim_that_is_not_committed(
    world: World, session: Session, database: Database
) -> None:
    later = enqueue(session, Ready(day=1), run_at=datetime(2020, 1, 1, tzinfo=UTC))
    session.flush()
    later_id = later.id
    session.commit()
    enqueue(session, Ready(day=1))
    session.flush()
    assert world.meanwhile(promote).result().jobs == 0
    session.rollback()
    assert world.meanwhile(promote).result().jobs == 1
    assert holders(database) == [later_id]


# ----------------------------------------------------------------------------------------------------- plain SQL
def _key(n: int) -> bytes:
    return n.to_bytes(16, "big")


INSERT = "INSERT INTO {} (id, kind, state, run_at, unique_key, unique_states) VALUES (%s, 'k', %s, now(), %s, %s)"


@in_one_world
@pytest.mark.case(5)
def test_claims_follow_whatever_plain_sql_does(session: Session, database: Database) -> None:
    mask = Unique().mask
    database.execute(INSERT.format("jobs_hot"), 1, "available", _key(1), mask)
    database.execute(INSERT.format("scheduled_jobs"), 2, "scheduled", _key(2), mask)
    database.execute(INSERT.format("jobs_hot"), 3, "completed", _key(1), mask)
    assert holders(database) == [1, 2]
    for statement, left in (
        ("UPDATE jobs_hot SET state = 'running' WHERE id = 1", [1, 2]),
        ("UPDATE jobs_hot SET unique_key = '\\x99' WHERE id = 1", [1, 2]),
        ("UPDATE jobs_hot SET state = 'failed' WHERE id = 1", [2]),
        ("UPDATE jobs_hot SET state = 'available' WHERE id = 1", [1, 2]),
        ("UPDATE jobs_hot SET unique_states = NULL WHERE id = 1", [2]),
        (f"UPDATE jobs_hot SET unique_states = {mask} WHERE id = 1", [1, 2]),
        ("UPDATE jobs_hot SET unique_key = NULL WHERE id = 1", [2]),
        ("UPDATE scheduled_jobs SET id = 20", [20]),
        ("DELETE FROM scheduled_jobs", []),
        ("INSERT INTO job_unique_claims VALUES ('\\x77', 999)", []),
    ):
        database.execute(statement)
        assert holders(database) == left, statement
    database.execute(INSERT.format("jobs_hot"), 4, "available", _key(1), mask)
    database.execute("TRUNCATE scheduled_jobs")
    assert holders(database) == [4]
    database.execute("TRUNCATE jobs_hot")
    assert holders(database) == []


@in_one_world
def test_a_second_holder_by_plain_sql_is_a_unique_violation(session: Session, database: Database) -> None:
    mask = Unique().mask
    database.execute(INSERT.format("jobs_hot"), 1, "available", _key(1), mask)
    with pytest.raises(IntegrityError, match="job 2 would be a duplicate of job 1"):
        session.connection().execute(
            text(
                "INSERT INTO awa.scheduled_jobs (id, kind, run_at, unique_key, unique_states) "
                "VALUES (2, 'k', now(), :key, :mask)"
            ),
            {"key": _key(1), "mask": mask},
        )
    session.rollback()
    assert holders(database) == [1]


@in_one_world
def test_a_row_that_moves_by_one_statement_keeps_its_claim(session: Session, database: Database) -> None:
    job = enqueue(session, Report(day=1), delay=MINUTE)
    session.flush()
    job_id = job.id
    session.commit()
    before = database.rows("SELECT xmin::text AS written, * FROM job_unique_claims")
    database.execute("UPDATE scheduled_jobs SET run_at = now()")
    promote(session)
    session.commit()
    assert database.job(job_id).state == "available"
    assert database.rows("SELECT xmin::text AS written, * FROM job_unique_claims") == before


@in_one_world
def test_a_raw_row_with_a_key_goes_through_the_same_flush(session: Session, database: Database) -> None:
    row = Job(kind="k", unique_key=_key(1), unique_states=Unique().mask)
    session.add(row)
    session.commit()
    session.add(Job(kind="k", unique_key=_key(1), unique_states=Unique().mask))
    with pytest.raises(UniqueConflict):
        session.commit()
    session.commit()
    assert holders(database) == [row.id]
    assert session.scalars(select(Job.id)).all() == [row.id]


class Tagged(JobArgs, unique=Unique()):
    words: frozenset[str]
    pairs: dict[str, set[int]] = Field(default_factory=dict)
    nested: list[set[str]] = Field(default_factory=list)


@pytest.mark.case(48)
@pytest.mark.beside
def test_a_set_is_stored_in_order_whatever_the_hash_seed() -> None:
    code = (
        "from tests.session.test_unique import Tagged; from awa_sqla.stored import dump; import json\n"
        "words = frozenset(['b', 'a', 'd', 'c'])\n"
        "print(json.dumps(dump(Tagged(words=words, pairs={'x': {3, 1, 2}}, nested=[set(words), {'z'}]))))"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    words = ["a", "b", "c", "d"]
    assert [json.loads(text) for text in made] == [
        {"words": words, "pairs": {"x": [1, 2, 3]}, "nested": [words, ["z"]]}
    ]
