"""`enqueue_many()`: the rules of `enqueue()`, at the speed of COPY."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from awa_sqla import (
    ConfigurationError,
    EnqueueRequest,
    InvalidJob,
    Job,
    JobArgs,
    ScheduledJob,
    Unique,
    UniqueConflict,
    enqueue,
    enqueue_many,
)
from awa_sqla.models.wakeups import queue_payload
from awa_sqla.schema import create_all
from awa_sqla.session import bulk
from awa_sqla.session.lineage import Parent, run_under
from tests.app import Charge, Order, Signup
from tests.session.steps import HOUR
from tests.session.test_unique import Ready, Report, holders
from tests.worlds import Database, World, in_one_world, in_sync_worlds, in_two_worlds

PAST = datetime(2020, 1, 1, 12, 30, 0, 123456, UTC)
HOSTILE = "tab\there, line\nbreak\r, back\\slash, \\N, \"quote\", 'single', {brace}, ünï, \U0001f600, \\x41, NULL"


class Wide(JobArgs, queue="wide", version=3):
    """Fields for which only the long way is right."""

    when: datetime
    ratio: float = 0.5


#: Every option, alone and together; what the two roads make of each must not differ.
REQUESTS: dict[str, EnqueueRequest] = {
    "plain": EnqueueRequest(Signup()),
    "class defaults": EnqueueRequest(Charge(order_id=7)),
    "long way": EnqueueRequest(Wide(when=PAST)),
    "queue": EnqueueRequest(Signup(), queue="q"),
    "priority": EnqueueRequest(Signup(), priority=4),
    "max_attempts": EnqueueRequest(Signup(), max_attempts=1),
    "run_at": EnqueueRequest(Signup(), run_at=PAST),
    "deadline": EnqueueRequest(Signup(), deadline=timedelta(milliseconds=1500)),
    "tags": EnqueueRequest(Signup(), tags=["a", HOSTILE[:200], '"', "\\", ",", "NULL", " a "]),
    "no tags": EnqueueRequest(Charge(order_id=7), tags=[]),
    "metadata": EnqueueRequest(Signup(), metadata={"a": [1, 2.5, None, True], HOSTILE: {HOSTILE: HOSTILE}}),
    "hostile text": EnqueueRequest(Signup(email=HOSTILE), queue="\\N \t\n"),
    "all": EnqueueRequest(
        Charge(order_id=7),
        queue=HOSTILE[:200],
        priority=3,
        max_attempts=1000,
        run_at=PAST,
        deadline=HOUR,
        tags=["x"],
        metadata={},
        unique=Unique(by_queue=True),
    ),
    "unique": EnqueueRequest(Signup(), unique=Unique()),
    "unique class": EnqueueRequest(Report(day=1)),
    "unique later": EnqueueRequest(Ready(day=1), run_at=PAST),
}


def test_both_roads_make_the_same_rows(session: Session, database: Database) -> None:
    options = [name for name in EnqueueRequest.__dataclass_fields__ if name != "args"]
    for request in REQUESTS.values():
        enqueue(session, request.args, **{n: v for n in options if (v := getattr(request, n)) is not None})
        session.commit()
        [one] = database.jobs()
        database.execute("DELETE FROM jobs_hot; DELETE FROM scheduled_jobs")
        [job_id] = enqueue_many(session, [request])
        session.commit()
        [two] = database.jobs()
        now_at = {"id", "created_at"} | ({"run_at"} if request.run_at is None else set())
        differ = {name for name in one._fields if getattr(one, name) != getattr(two, name)}
        assert differ == now_at
        assert two.id == job_id
        database.execute("DELETE FROM jobs_hot; DELETE FROM scheduled_jobs")


def test_ids_come_in_the_order_of_the_input(session: Session, database: Database) -> None:
    jobs = [
        Signup(email=f"{n}@example.org") if n % 3 else EnqueueRequest(Signup(email=f"{n}@example.org"), run_at=PAST)
        for n in range(50)
    ]
    ids = enqueue_many(session, iter(jobs))
    session.commit()
    stored = {job.id: job for job in database.jobs()}
    assert [stored[job_id].args["email"] for job_id in ids] == [f"{n}@example.org" for n in range(50)]
    assert [stored[job_id].stored_in for job_id in ids[:4]] == ["scheduled", "hot", "hot", "scheduled"]


def test_ids_that_somebody_draws_from_in_between(world: World, session: Session, database: Database) -> None:
    database.execute("ALTER SEQUENCE jobs_id_seq INCREMENT BY 3")
    try:
        ids = enqueue_many(session, [Signup(email=f"{n}@example.org") for n in range(5)])
        session.commit()
    finally:
        database.execute("ALTER SEQUENCE jobs_id_seq INCREMENT BY 1")
    assert [job.id for job in database.jobs()] == ids
    assert {second - first for first, second in itertools.pairwise(ids)} == {3}  # type: ignore[operator]


def test_nothing_is_there_before_the_commit_and_nothing_after_a_rollback(session: Session, database: Database) -> None:
    with database.listening() as listener:
        session.add(Order(note="mine"))
        enqueue_many(session, [Signup(), EnqueueRequest(Signup(), delay=HOUR)])
        assert (database.jobs(), listener.heard()) == ([], [])
        session.rollback()
        assert (database.jobs(), listener.heard()) == ([], [])
        savepoint = session.begin_nested()
        enqueue_many(session, [Signup(), Report(day=1)])
        savepoint.rollback()
        enqueue_many(session, [Signup(), Signup(), EnqueueRequest(Signup(), queue="b")])
        session.commit()
        assert sorted(listener.heard()) == sorted({queue_payload("default"), queue_payload("b")})
    assert len(database.jobs()) == 3
    assert holders(database) == []


def test_a_delay_counts_by_the_clock_of_the_database(session: Session, database: Database) -> None:
    session.connection()
    enqueue_many(session, [EnqueueRequest(Signup(), delay=HOUR)])
    session.commit()
    assert database.value(
        "SELECT run_at BETWEEN created_at + interval '59 min 59 s' AND created_at + interval '1 h' FROM scheduled_jobs"
    )


def test_no_jobs_are_no_statement(world: World, session: Session) -> None:
    with world.counting() as sent:
        assert enqueue_many(session, []) == []
    assert sent == []


def test_what_it_costs(world: World, session: Session) -> None:
    session.connection()
    for jobs, statements in (([Signup()] * 3, 1), ([Report(day=1), Signup()], 2)):
        with world.counting() as sent:
            enqueue_many(session, jobs)
        assert len(sent) == statements, sent


def test_children_of_a_handler_know_their_parent(session: Session, database: Database) -> None:
    run_under(Parent(5, 3))
    try:
        enqueue_many(session, [Signup(), EnqueueRequest(Signup(), delay=HOUR)])
    finally:
        run_under(None)  # type: ignore[arg-type]
    session.commit()
    assert [(job.parent_id, job.root_id, job.parent_outcome) for job in database.jobs()] == [(5, 3, None)] * 2


def test_the_objects_can_be_had_by_their_ids(session: Session) -> None:
    now, later = enqueue_many(session, [Signup(), EnqueueRequest(Signup(), delay=HOUR)])
    assert session.get_one(Job, now).args_as(Signup) == Signup()
    assert session.get_one(ScheduledJob, later).state == "scheduled"


# ----------------------------------------------------------------------------------------------------- duplicates
@pytest.mark.case(4)
def test_duplicates_may_be_left_out(session: Session, database: Database) -> None:
    first = enqueue(session, Report(day=1))
    session.commit()
    session.add(Order(note="mine"))
    jobs = [Report(day=2), Report(day=1), Report(day=3), Report(day=2), Signup()]
    two, one, three, again, plain = enqueue_many(session, jobs, on_conflict="skip")
    session.commit()
    assert (one, again) == (None, None)
    assert [job.id for job in database.jobs()] == [first.id, two, three, plain]
    assert holders(database) == [first.id, two, three]
    assert database.value("SELECT note FROM app_order") == "mine"


@pytest.mark.case(4)
@pytest.mark.parametrize("twin", ["stored", "in the list"])
def test_a_duplicate_keeps_all_out_and_the_transaction_usable(session: Session, database: Database, twin: str) -> None:
    first = enqueue(session, Report(day=1))
    session.flush()
    holder = first.id
    session.add(Order(note="mine"))
    jobs = [Signup(), Report(day=2), Report(day=1 if twin == "stored" else 2)]
    with pytest.raises(UniqueConflict) as caught:
        enqueue_many(session, jobs)
    assert caught.value.kind == "report"
    if twin == "stored":
        assert caught.value.existing_id == holder
    session.commit()
    assert [job.id for job in database.jobs()] == [holder]
    assert holders(database) == [holder]
    assert database.value("SELECT note FROM app_order") == "mine"


def test_a_request_may_have_a_policy_of_its_own(session: Session, database: Database) -> None:
    enqueue_many(session, [Report(day=1)])
    strict = EnqueueRequest(Report(day=1), on_conflict="raise")
    lenient = EnqueueRequest(Report(day=1), on_conflict="skip")
    assert enqueue_many(session, [lenient, Signup()])[0] is None
    with pytest.raises(UniqueConflict):
        enqueue_many(session, [lenient, strict], on_conflict="skip")
    session.commit()
    assert len(database.jobs()) == 2


def test_pending_twins_of_the_session_come_first(session: Session, database: Database) -> None:
    pending = enqueue(session, Report(day=1))
    assert enqueue_many(session, [Report(day=1)], on_conflict="skip") == [None]
    session.commit()
    assert holders(database) == [pending.id]


def test_a_job_whose_first_state_is_not_unique_takes_no_key_yet(session: Session, database: Database) -> None:
    ids = enqueue_many(session, [EnqueueRequest(Ready(day=1), delay=HOUR)] * 2)
    session.commit()
    assert None not in ids
    assert holders(database) == []


# -------------------------------------------------------------------------------------------------------- refusals
@in_one_world
@pytest.mark.parametrize(
    ("jobs", "field"),
    [
        (None, "jobs"),
        (5, "jobs"),
        ("text", "jobs"),
        (Signup(), "jobs"),
        ([Signup(), None], "jobs[1].args"),
        ([Signup], "jobs[0].args"),
        ([lambda: Signup(email="x")], "jobs[0].args"),
        ([JobArgs()], "jobs[0].args"),
        ([Signup(), Signup(email="\x00")], "jobs[1].args.email"),
        ([Signup(), Signup(email="\ud800")], "jobs[1].args.email"),
        ([Wide(when=PAST, ratio=float("nan"))], "jobs[0].args.ratio"),
        ([Wide(when=datetime(2020, 1, 1))], "jobs[0].args.when"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_sent(
    world: World, session: Session, jobs: Any, field: str
) -> None:
    session.connection()
    with world.counting() as sent, pytest.raises(InvalidJob) as caught:
        enqueue_many(session, jobs)
    assert caught.value.field == field
    assert sent == []


def test_what_only_looks_like_a_nul_is_stored(session: Session, database: Database) -> None:
    enqueue_many(session, [Signup(email=r"\u0000")])
    session.commit()
    assert database.jobs()[0].args == {"email": r"\u0000"}


def test_an_iterator_that_raises_sends_nothing(session: Session, database: Database) -> None:
    def jobs() -> Any:
        yield Signup()
        raise RuntimeError("source gone")

    with pytest.raises(RuntimeError, match="source gone"):
        enqueue_many(session, jobs())
    session.commit()
    assert database.jobs() == []


def test_in_autocommit_nothing_is_sent(world: World, database: Database) -> None:
    session = world.session(bind=world.engine_with(isolation_level="AUTOCOMMIT"))
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        enqueue_many(session, [Signup()])
    assert database.jobs() == []


def test_an_error_of_the_server_is_one_of_sqlalchemy(world: World, session: Session, database: Database) -> None:
    session.connection().exec_driver_sql("SET LOCAL lock_timeout = '100ms'")
    blocker = database.another()
    with blocker._connection.transaction():
        blocker.execute("LOCK TABLE jobs_hot IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(DBAPIError) as caught:
            enqueue_many(session, [Signup()])
    assert "lock timeout" in str(caught.value)
    session.rollback()
    enqueue_many(session, [Signup()])
    session.commit()
    blocker.close()
    assert len(database.jobs()) == 1


@in_one_world
def test_arguments_do_not_show_in_an_error_of_the_server(session: Session, database: Database) -> None:
    database.execute("ALTER TABLE jobs_hot ADD CONSTRAINT c CHECK (args->>'email' <> 'S3CRET')")
    with pytest.raises(DBAPIError) as caught:
        enqueue_many(session, [Signup(email="S3CRET")])
    assert caught.value.params is None
    assert isinstance(caught.value, DBAPIError)
    assert not isinstance(caught.value, OperationalError)


@in_sync_worlds
def test_two_phase_commit(world: World, database: Database) -> None:
    session = world.session(twophase=True)
    enqueue_many(session, [Signup(), Report(day=1)])
    session.prepare()
    session.commit()
    assert len(database.jobs()) == 2


def test_another_schema(world: World, database: Database) -> None:
    session = world.session(bind=world.engine_with(schema_translate_map={"awa": "Other-Queue"}))
    create_all(session.connection(), "Other-Queue")
    ids = enqueue_many(session, [Signup(), Report(day=1)])
    assert session.scalars(text('SELECT id FROM "Other-Queue".jobs_hot ORDER BY id')).all() == ids
    session.rollback()


# ------------------------------------------------------------------------------------------------------ in chunks
@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Two jobs are many, and three are sent at once."""
    monkeypatch.setattr(bulk, "MANY", 2)
    monkeypatch.setattr(bulk, "CHUNK", 3)
    return 3


def mixture(count: int) -> Iterator[JobArgs | EnqueueRequest]:
    """Jobs of all sorts, none of them unique."""
    for n in range(count):
        args = Signup(email=f"{n}@example.org")
        yield (
            EnqueueRequest(args, delay=HOUR) if n % 3 == 2 else EnqueueRequest(args, priority=1) if n % 5 == 4 else args
        )


@pytest.mark.parametrize("count", range(1, 11))
def test_chunks_are_seamless(session: Session, database: Database, chunks: int, count: int) -> None:
    ids = enqueue_many(session, mixture(count))
    assert database.jobs() == []
    session.commit()
    stored = {job.id: job for job in database.jobs()}
    assert len(stored) == len(ids) == count
    assert [stored[job_id].args["email"] for job_id in ids] == [f"{n}@example.org" for n in range(count)]
    assert {n % 3 == 2 for n, job_id in enumerate(ids) if stored[job_id].stored_in == "scheduled"} <= {True}


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("end", ["invalid", "raises", "interrupt", "duplicate"])
def test_all_or_nothing_wherever_it_goes_wrong(
    session: Session, database: Database, chunks: int, at: int, end: str
) -> None:
    first = enqueue(session, Report(day=1))
    session.flush()
    holder = first.id

    def jobs() -> Iterator[JobArgs | EnqueueRequest]:
        yield from mixture(at)
        yield {
            "invalid": lambda: Signup(email="\x00"),
            "raises": lambda: 1 / 0,
            "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
            "duplicate": lambda: Report(day=1),
        }[end]()  # type: ignore[misc]
        yield from mixture(5)

    session.add(Order(note="mine"))
    errors = {
        "invalid": InvalidJob,
        "raises": ZeroDivisionError,
        "interrupt": KeyboardInterrupt,
        "duplicate": UniqueConflict,
    }
    with pytest.raises(errors[end]) as caught:
        enqueue_many(session, jobs())
    if end == "invalid":
        assert caught.value.field == f"jobs[{at}].args.email"  # type: ignore[attr-defined]
    if end == "duplicate":
        assert caught.value.existing_id == holder  # type: ignore[attr-defined]
    [fresh] = enqueue_many(session, [Report(day=2)])
    session.commit()
    assert [job.id for job in database.jobs()] == [holder, fresh]
    assert holders(database) == [holder, fresh]
    assert database.value("SELECT note FROM app_order") == "mine"


@pytest.mark.parametrize("at", [0, 2, 3, 7])
def test_from_the_first_unique_job_on_all_keys_are_claimed_at_once(
    world: World, session: Session, database: Database, chunks: int, at: int
) -> None:
    jobs = [*mixture(at), *(Report(day=day) for day in range(9)), *mixture(4), Report(day=3)]
    with world.counting() as sent:
        *ids, last = enqueue_many(session, jobs, on_conflict="skip")
    assert sum("claim_keys" in statement for statement in sent) == 1
    session.commit()
    assert last is None
    assert [job.id for job in database.jobs()] == sorted(ids)  # type: ignore[type-var]
    assert len(holders(database)) == 9


def test_a_savepoint_of_the_session_stays_where_it_was(session: Session, database: Database, chunks: int) -> None:
    savepoint = session.begin_nested()
    enqueue_many(session, mixture(7))
    savepoint.rollback()
    with session.begin_nested():
        kept = enqueue_many(session, mixture(7))
    session.commit()
    assert [job.id for job in database.jobs()] == kept


@in_one_world
def test_a_connection_that_is_gone_says_so(session: Session, database: Database, chunks: int) -> None:
    pid = session.connection().exec_driver_sql("SELECT pg_backend_pid()").scalar()

    def jobs() -> Iterator[JobArgs | EnqueueRequest]:
        yield from mixture(7)
        database.rows("SELECT pg_terminate_backend(%s, 5000)", pid)
        yield from mixture(7)

    with pytest.raises(DBAPIError):
        enqueue_many(session, jobs())
    session.rollback()
    enqueue_many(session, mixture(7))
    session.commit()
    assert len(database.jobs()) == 7


@in_two_worlds
@pytest.mark.slow
@pytest.mark.beside
@pytest.mark.parametrize("unique", [False, True])
def test_more_than_a_statement_has_parameters_for(session: Session, database: Database, unique: bool) -> None:
    def jobs() -> Iterator[JobArgs]:
        return (Report(day=n) if unique else Signup(email=str(n)) for n in range(70_000))

    ids = enqueue_many(session, jobs(), on_conflict="skip")
    assert None not in ids
    session.commit()
    assert database.value("SELECT count(*) FROM job_unique_claims") == (70_000 if unique else 0)
    again = enqueue_many(session, jobs(), on_conflict="skip")
    session.rollback()
    assert (set(again) == {None}) is unique
