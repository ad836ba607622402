"""The three rescues: whose each row is, how long a worker may be silent, and that none keeps another from its work."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from awa_sqla import (
    Attempt,
    Backoff,
    FollowUps,
    JobArgs,
    JobState,
    Unique,
    claim,
    enqueue_many,
    park,
    register_callback,
)
from awa_sqla.maintenance import rescue, rescue_callbacks, rescue_overdue, rescue_stale
from tests.app import NotifyOps, Signup
from tests.maintenance.lateness import EXPIRED, LANES, OVERDUE, SILENT, TAKES, Lane, in_each_lane, late_by, runs, waits
from tests.session.steps import HOUR, MINUTE, due_again
from tests.worlds import Database, in_one_world, in_two_worlds


def error(database: Database, held: Attempt) -> str | None:
    """What the job's last attempt ended with."""
    errors = database.job(held.id).errors
    return errors[-1]["error"] if errors else None


# ---------------------------------------------------------------------------------------------------- whose it is
_STALE, _SLOW, _UNCALLED = "heartbeat stale: worker presumed dead", "hard deadline exceeded", "callback timed out"


@in_two_worlds
def test_each_row_is_one_lanes(session: Session, database: Database) -> None:
    rows = {
        "runs": (runs(session, database), None, None),
        "silent": (runs(session, database, SILENT), rescue_stale, _STALE),
        "overdue": (runs(session, database, OVERDUE), rescue_overdue, _SLOW),
        "silent and overdue": (runs(session, database, f"{SILENT}, {OVERDUE}"), rescue_stale, _STALE),
        "waits": (waits(session, database), None, None),
        "expired": (waits(session, database, EXPIRED), rescue_callbacks, _UNCALLED),
        "attended": (waits(session, database, attended=True), None, None),
        "attended, silent": (waits(session, database, SILENT, attended=True), rescue_stale, _STALE),
        "attended, expired": (waits(session, database, EXPIRED, attended=True), rescue_callbacks, _UNCALLED),
        "attended, both": (waits(session, database, f"{SILENT}, {EXPIRED}", attended=True), rescue_stale, _STALE),
    }
    taken: dict[Attempt, Lane] = {}
    for lane in reversed(LANES):  # what is stale as well is left to `rescue_stale`, though that comes last
        for held in lane(session, stale_after=MINUTE):
            assert held not in taken
            taken[held] = lane
    session.commit()
    assert {name: taken.get(held) for name, (held, _, _) in rows.items()} == {
        name: lane for name, (_, lane, _) in rows.items()
    }
    assert {name: error(database, held) for name, (held, _, _) in rows.items()} == {
        name: said for name, (_, _, said) in rows.items()
    }


@in_one_world
def test_one_pass_of_all_three_takes_the_same(session: Session, database: Database) -> None:
    held = {lane: TAKES[lane](session, database) for lane in LANES}
    assert rescue(session, stale_after=MINUTE) == [held[lane] for lane in LANES]
    assert rescue(session, stale_after=MINUTE) == []


@in_each_lane
@in_one_world
@pytest.mark.case(24)
def test_every_lane_ends_a_job_that_has_no_attempt_left(
    session: Session, database: Database, follow_ups: FollowUps, lane: Lane
) -> None:
    """A dead letter with its reason, and both outcomes owed; nothing of it when the pass does not commit."""
    follow_ups.on_rescued(Signup, name="r")(lambda event: NotifyOps(job_id=event.job.id))
    follow_ups.on_exhausted(Signup, name="e")(lambda event: NotifyOps(job_id=event.job.id))
    database.keep_dead_letters("default")
    held = TAKES[lane](session, database, max_attempts=1)
    before = database.job(held.id)
    assert lane(session, stale_after=MINUTE) == [held]
    session.rollback()
    assert database.job(held.id) == before
    assert database.obligations() == []
    assert lane(session, stale_after=MINUTE) == [held]
    session.commit()
    row = database.job(held.id)
    assert (row.state, row.stored_in, row.run_lease) == ("failed", "dead", held.run_lease)
    letter, reason = {
        rescue_stale: ("heartbeat_stale", "stale_heartbeat"),
        rescue_overdue: ("deadline_exceeded", "deadline_exceeded"),
        rescue_callbacks: ("callback_timeout", "expired_callback"),
    }[lane]
    assert database.value("SELECT dlq_reason FROM dlq_entries") == letter
    owed = {(one.job_id, one.outcome, one.context.get("reason")) for one in database.obligations()}
    assert owed == {(held.id, "rescued", reason), (held.id, "exhausted", None)}
    assert database.children(held.id) == []


@in_each_lane
@in_one_world
@pytest.mark.case(24)
def test_a_job_whose_every_attempt_is_lost_ends(session: Session, database: Database, lane: Lane) -> None:
    held, waited = TAKES[lane](session, database, max_attempts=3), []
    for _ in range(2):
        assert lane(session, stale_after=MINUTE, backoff=lambda kind: Backoff(base=MINUTE, factor=2, jitter=0)) == [
            held
        ]
        session.commit()
        row = database.job(held.id)
        waited.append(round((row.run_at - row.finalized_at).total_seconds()))
        due_again(database, session, held.id, look=False)
        [job] = claim(session, "default", limit=1)
        if lane is rescue_callbacks:
            park(session, job, register_callback(session, job, timeout=HOUR))
        session.commit()
        late = {rescue_stale: SILENT, rescue_overdue: OVERDUE, rescue_callbacks: EXPIRED}[lane]
        held = late_by(database, Attempt(held.id, job.run_lease), late)
    assert lane(session, stale_after=MINUTE) == [held]
    session.commit()
    row = database.job(held.id)
    assert (row.state, row.attempt, [entry["attempt"] for entry in row.errors]) == ("failed", 3, [1, 2, 3])
    assert waited == [60, 120]


@in_one_world
def test_the_lane_says_how_jobs_of_a_kind_wait(session: Session, database: Database) -> None:
    held = runs(session, database, SILENT)
    asked: list[str] = []

    def backoff(kind: str) -> Backoff:
        asked.append(kind)
        return Backoff(base=timedelta(hours=5), factor=1, jitter=0)

    rescue_stale(session, stale_after=MINUTE, backoff=backoff)
    session.commit()
    row = database.job(held.id)
    assert (asked, round((row.run_at - row.finalized_at) / HOUR)) == (["signup"], 5)


# -------------------------------------------------------------------------------------------- how long it may be silent
def worker(database: Database, patience: str, name: str = "w1") -> None:
    """The row of a worker with this `stale_after`."""
    database.execute(
        "INSERT INTO runtime_instances (id, role, hostname, pid, version, stale_after_seconds) "
        f"VALUES ('{name}', 'worker', 'host', 1, '1', {patience})"
    )


def silent_for(database: Database, held: Attempt, time: str) -> None:
    database.execute(f"UPDATE jobs_hot SET heartbeat_at = now() - interval '{time}' WHERE id = {held.id}")


@pytest.mark.case(28)
@pytest.mark.parametrize("attended", [False, True])
@in_two_worlds
def test_a_worker_that_asks_for_more_patience_has_it(session: Session, database: Database, attended: bool) -> None:
    """The leader's own setting is a minute; this worker's is an hour."""
    worker(database, "3600")
    held = waits(session, database, attended=True) if attended else runs(session, database)
    silent_for(database, held, "59 min")
    assert rescue(session, stale_after=MINUTE) == []
    silent_for(database, held, "61 min")
    assert rescue_stale(session, stale_after=MINUTE) == [held]


@pytest.mark.case(28)
@in_one_world
def test_while_it_has_it_other_lanes_take_the_row(session: Session, database: Database) -> None:
    worker(database, "3600")
    slow = runs(session, database, OVERDUE)
    uncalled = waits(session, database, EXPIRED, attended=True)
    database.execute("UPDATE jobs_hot SET heartbeat_at = now() - interval '10 min'")
    assert rescue_stale(session, stale_after=MINUTE) == []
    assert rescue_overdue(session, stale_after=MINUTE) == [slow]
    assert rescue_callbacks(session, stale_after=MINUTE) == [uncalled]


@pytest.mark.parametrize("patience", ["1", "0", "NULL", None])
@in_one_world
def test_no_worker_has_less_than_is_given(session: Session, database: Database, patience: str | None) -> None:
    """Nor one that asks for nothing, or that is not there any more."""
    if patience is not None:
        worker(database, patience)
    worker(database, "3600", name="w2")  # which is another's
    held = runs(session, database)
    silent_for(database, held, "50 s")
    assert rescue(session, stale_after=MINUTE) == []
    silent_for(database, held, "70 s")
    assert rescue(session, stale_after=MINUTE) == [held]


@pytest.mark.parametrize("patience", ["1e300", "'infinity'", "'NaN'", "86400.0 * 999999999"])
@in_one_world
def test_a_worker_of_infinite_patience_keeps_its_jobs_and_nobody_elses(
    session: Session, database: Database, patience: str
) -> None:
    worker(database, patience)
    kept, lost = runs(session, database, SILENT), runs(session, database, SILENT)
    database.execute(f"UPDATE jobs_hot SET worker_id = 'w2' WHERE id = {lost.id}")
    assert rescue(session, stale_after=MINUTE) == [lost]
    database.execute(f"UPDATE jobs_hot SET heartbeat_at = now() - interval '50 years' WHERE id = {kept.id}")
    assert rescue(session, stale_after=MINUTE) == []


@pytest.mark.case(28)
@in_one_world
def test_of_many_that_beat_none_is_taken_however_long_they_run(session: Session, database: Database) -> None:
    """600 that are healthy, half of them by their own worker's patience, and a dead one behind them."""
    worker(database, "3600", name="patient")
    enqueue_many(session, [Signup()] * 600)
    session.commit()
    for worker_id in ("patient", "w1"):
        claim(session, "default", limit=300, worker_id=worker_id)
        session.commit()
    dead = runs(session, database, SILENT)
    database.execute("UPDATE jobs_hot SET attempted_at = now() - interval '9 days'")
    database.execute("UPDATE jobs_hot SET heartbeat_at = now() - interval '10 min' WHERE worker_id = 'patient'")
    for limit in (1, 500):
        assert rescue(session, stale_after=MINUTE, limit=limit) == ([dead] if limit == 1 else [])
    session.commit()
    assert database.value("SELECT count(*) FROM jobs_hot WHERE state = 'running' AND errors = '{}'") == 600


# ------------------------------------------------------------------------------------------- none keeps another from it
@in_one_world
def test_every_lane_has_a_limit_of_its_own(session: Session, database: Database) -> None:
    held = {lane: [TAKES[lane](session, database) for _ in range(3)] for lane in LANES}
    left = waits(session, database, SILENT, attended=True)
    first = rescue(session, stale_after=MINUTE, limit=1)
    assert first == [left] + [held[lane][0] for lane in LANES]
    assert rescue(session, stale_after=MINUTE, limit=2) == [attempt for lane in LANES for attempt in held[lane][1:]]


class Once(JobArgs, unique=Unique(states={JobState.RETRYABLE})):
    """Coming back it claims its key."""


@in_one_world
def test_what_must_stay_as_it_is_keeps_no_other_lane_from_its_work(
    session: Session, other: Session, database: Database
) -> None:
    """An open transaction has the key: this row has to wait for it, and takes up all of its lane's limit."""
    stuck = runs(session, database, SILENT, args=Once())
    key = database.value("SELECT unique_key FROM jobs WHERE id = %s", stuck.id)
    slow, uncalled = runs(session, database, OVERDUE), waits(session, database, EXPIRED)
    other.execute(
        text(
            "INSERT INTO awa.scheduled_jobs (kind, run_at, state, unique_key, unique_states) "
            "VALUES ('once', now(), 'retryable', :key, 16)"
        ),
        {"key": key},
    )
    assert rescue(session, stale_after=MINUTE, limit=1) == [slow, uncalled]
    session.commit()
    assert database.job(stuck.id).state == "running"
    other.rollback()
    assert rescue(session, stale_after=MINUTE, limit=1) == [stuck]


@in_each_lane
@in_two_worlds
def test_a_row_that_cannot_be_written_anew_fails_in_place_and_the_others_are_rescued(
    session: Session, database: Database, follow_ups: FollowUps, lane: Lane
) -> None:
    """It holds a number that Python cannot; what follows on it is owed all the same."""
    follow_ups.on_exhausted(Signup, name="e")(lambda event: NotifyOps(job_id=event.job.id))
    before, bad, after = (TAKES[lane](session, database) for _ in range(3))
    number = "jsonb_build_object('number', 10::numeric ^ 400 + 0.5)"
    database.execute(f"UPDATE jobs_hot SET metadata = {number} WHERE id = {bad.id}")
    assert set(lane(session, stale_after=MINUTE)) == {before, bad, after}
    session.commit()
    assert [database.value("SELECT state FROM jobs WHERE id = %s", held.id) for held in (before, bad, after)] == [
        "retryable",
        "failed",
        "retryable",
    ]


@in_each_lane
@in_one_world
def test_rows_are_locked_in_the_order_of_the_statement(session: Session, database: Database, lane: Lane) -> None:
    """By id, and waits by how late they are: wherever the rows lie in the table."""
    held = [TAKES[lane](session, database) for _ in range(5)]
    for attempt in held[3::-2] + held[4::-2]:  # each update moves a row to the end of the table
        database.execute("UPDATE jobs_hot SET metadata = '{\"moved\": true}' WHERE id = %s", attempt.id)
    if lane is rescue_callbacks:
        late = "callback_timeout_at = now() - make_interval(mins => %s)"
        for minutes, attempt in enumerate(held):
            database.execute(f"UPDATE jobs_hot SET {late} WHERE id = {attempt.id}", minutes)
        held.reverse()
    assert lane(session, stale_after=MINUTE) == held
