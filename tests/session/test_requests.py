"""Options of one job, and the limits that every road shares."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from awa_sqla import EnqueueRequest, InvalidJob, Job, JobArgs, enqueue
from tests.app import Charge, Signup
from tests.worlds import World, in_one_world

NAIVE = datetime(2026, 1, 1)
AWARE = NAIVE.replace(tzinfo=UTC)

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"queue": ""}, "queue"),
    ({"queue": " \t"}, "queue"),
    ({"queue": 5}, "queue"),
    ({"queue": "q" * 201}, "queue"),
    ({"queue": "a\0b"}, "queue"),
    ({"priority": 0}, "priority"),
    ({"priority": 5}, "priority"),
    ({"priority": 2.0}, "priority"),
    ({"max_attempts": 0}, "max_attempts"),
    ({"max_attempts": 1001}, "max_attempts"),
    ({"run_at": NAIVE}, "run_at"),
    ({"run_at": "2026-01-01"}, "run_at"),
    ({"run_at": AWARE, "delay": timedelta(1)}, "delay"),
    ({"delay": timedelta(0)}, "delay"),
    ({"delay": timedelta(seconds=-1)}, "delay"),
    ({"delay": 60}, "delay"),
    ({"delay": timedelta(days=999_999_999)}, "delay"),
    ({"deadline": timedelta(0)}, "deadline"),
    ({"deadline": 60}, "deadline"),
    ({"tags": "billing"}, "tags"),
    ({"tags": 3}, "tags"),
    ({"tags": [""]}, "tags[0]"),
    ({"tags": ["ok", None]}, "tags[1]"),
    ({"tags": [str(n) for n in range(21)]}, "tags"),
    ({"metadata": [1]}, "metadata"),
    ({"metadata": {"x": float("nan")}}, "metadata.x"),
    ({"metadata": {"x": {"y": "\0"}}}, "metadata.x.y"),
    ({"metadata": {"x": object()}}, "metadata.x"),
    ({"metadata": {3: "x"}}, "metadata"),
]


@pytest.mark.case(55)
@pytest.mark.parametrize(("options", "field"), WRONG)
def test_a_wrong_option_is_refused_and_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        EnqueueRequest(Signup(), **options)
    assert caught.value.field == field


@pytest.mark.parametrize("args", [None, {"email": "x"}, Signup, "signup"])
def test_args_that_are_no_instance_of_job_args_are_refused(args: Any) -> None:
    with pytest.raises(InvalidJob) as caught:
        EnqueueRequest(args)
    assert caught.value.field == "args"


def test_what_is_not_given_takes_the_default_of_its_class() -> None:
    columns = EnqueueRequest(Charge(order_id=1)).columns()
    assert columns == {
        "args": {"order_id": 1, "cents": 100},
        "kind": "charge",
        "queue": "payments",
        "priority": 1,
        "max_attempts": 3,
        "tags": ["billing"],
        "deadline_seconds": 120.0,
    }


def test_what_is_given_comes_before_the_default_of_its_class() -> None:
    request = EnqueueRequest(
        Charge(order_id=1),
        queue="slow",
        priority=4,
        max_attempts=9,
        deadline=timedelta(seconds=7),
        tags=[],
        metadata={"a": 1},
    )
    columns = request.columns()
    del columns["args"], columns["kind"]
    assert columns == {
        "queue": "slow",
        "priority": 4,
        "max_attempts": 9,
        "deadline_seconds": 7.0,
        "meta": {"a": 1},
    }


def test_job_of_takes_the_options_of_enqueue_for_plain_jobs() -> None:
    job = Job.of(Signup(), queue="slow", priority=4, max_attempts=9, tags=["x"], metadata={"a": 1})
    assert (job.kind, job.queue, job.priority, job.max_attempts) == ("signup", "slow", 4, 9)
    assert (job.tags, job.meta) == (["x"], {"a": 1})


@in_one_world
def test_the_database_holds_the_limits_too(world: World) -> None:
    from sqlalchemy.exc import IntegrityError

    for wrong in ({"priority": 9}, {"queue": ""}, {"max_attempts": 0}, {"tags": ["t"] * 21}):
        session = world.session()
        session.add(Job(**{"kind": "signup", "args": {}, **wrong}))
        with pytest.raises(IntegrityError):
            session.flush()
        session.rollback()


@in_one_world
@pytest.mark.case(12)
def test_a_refused_enqueue_leaves_the_transaction_as_it_was(world: World, database: Any) -> None:
    session = world.session()
    enqueue(session, Signup())
    for options, _ in WRONG:
        with pytest.raises(InvalidJob):
            enqueue(session, Signup(), **options)

    class Any_(JobArgs, kind="any"):
        value: Any

    with pytest.raises(InvalidJob):
        enqueue(session, Any_(value="\0"))
    session.commit()
    assert database.kinds() == ["signup"]


@pytest.mark.parametrize("when", [datetime.min, datetime.max, datetime(1969, 12, 31)], ids=str)
def test_a_due_time_that_not_every_driver_can_read_is_refused(when):
    with pytest.raises(InvalidJob, match="run_at: must lie between 1970 and 9000"):
        EnqueueRequest(Signup(), run_at=when.replace(tzinfo=UTC))
