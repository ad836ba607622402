"""The life of a worker: start, waking, liveness, trouble with the database, and the ways to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from awa_sqla import Awa, ConfigurationError, JobArgs, QueueConfig, RateLimit, SchemaVersionError, Worker, cancel
from awa_sqla.maintenance import lanes
from awa_sqla.schema import create_all, migrate

ROOT = Path(__file__).parents[2]

# Connections that a test cuts are dropped by their drivers without a close.
pytestmark = pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")


class Work(JobArgs):
    text: str = ""


class Next(JobArgs):
    pass


async def nothing(ctx: Any) -> None:
    return None


# ----------------------------------------------------------------- start


def test_a_worker_says_who_it_is_and_what_it_serves(stage):
    stage.app.queues["email"] = QueueConfig(concurrency=3, deadline=timedelta(seconds=9), dead_letters=True)
    stage.app.task(Work)(nothing)
    stage.app.on_completed(Work, name="spec")(lambda event: [])
    seen: list[Any] = []

    async def look(worker: Any) -> None:
        seen.extend(stage.sql("SELECT * FROM awa.runtime_instances"))

    worker = stage.play(during=look)
    (instance,) = seen
    assert (instance.id, instance.role, instance.pid) == (worker.id, "worker", os.getpid())
    assert (instance.queues, instance.kinds) == (["default", "email"], ["work"])
    assert (instance.stopping_at, instance.concurrency, instance.running) == (None, 53, 0)
    assert stage.sql("SELECT * FROM awa.runtime_instances") == []
    declared = {row.queue: row for row in stage.sql("SELECT * FROM awa.queue_meta")}
    assert (declared["email"].declared_concurrency, declared["email"].declared_deadline_seconds) == (3, 9)
    assert (declared["email"].declared_dead_letters, declared["default"].declared_dead_letters) == (True, False)
    assert [tuple(row)[:3] for row in stage.sql("SELECT * FROM awa.follow_up_specs")] == [("work", "completed", "spec")]


def test_processes_that_ended_without_a_word_are_forgotten_after_a_day(stage):
    for name, hours in (("killed", 25), ("quiet", 23)):
        stage.sql(
            "INSERT INTO awa.runtime_instances (id, role, hostname, pid, version, last_seen) "
            "VALUES (%s, 'worker', 'h', 1, '1', now() - make_interval(hours => %s))",
            name,
            hours,
        )
    stage.app.task(Work)(nothing)
    stage.play()
    assert [row.id for row in stage.sql("SELECT id FROM awa.runtime_instances")] == ["quiet"]


def test_declaring_keeps_what_operators_have_overridden(stage):
    stage.app.task(Work)(nothing)
    stage.sql("INSERT INTO awa.queue_meta (queue, override_dead_letters, paused_at) VALUES ('default', true, now())")
    stage.play(lambda: True)
    (row,) = stage.sql("SELECT * FROM awa.queue_meta")
    assert (row.override_dead_letters, row.declared_dead_letters, row.paused_at is None) == (True, False, False)


def test_a_process_that_stands_still_in_its_start_keeps_no_other_from_starting(stage):
    stage.app.queues["slow"] = QueueConfig(rate_limit=RateLimit(0.1), deadline=timedelta(seconds=0.1))
    stage.app.task(Work)(nothing)
    stage.play(lambda: True)
    stage.enqueue(Work())
    with stage.sessions() as frozen:
        frozen.execute(text("SELECT * FROM awa.queue_meta FOR UPDATE"))
        stage.play()
    assert stage.states() == ["completed"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "psycopg2"])
def test_any_url_of_postgresql_will_do(stage, driver):
    stage.app.task(Work)(nothing)
    stage.enqueue(Work())
    stage.play(url=stage.url.set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False))
    assert stage.states() == ["completed"]


def test_an_engine_will_do_and_is_left_open(stage, engine):
    stage.app.queues["default"] = QueueConfig(concurrency=2)
    stage.app.task(Work, transactional=True)(lambda ctx: ctx.session.scalar(text("SELECT 41 + 1")))
    stage.enqueue(Work())
    stage.play(url=engine)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT result FROM awa.jobs_hot")) == 42


def test_another_schema_is_served_through_the_engines_translation(empty_db_url, stage):
    engine = create_engine(empty_db_url, execution_options={"schema_translate_map": {"awa": "other"}})
    with engine.begin() as connection:
        create_all(connection, "other")
    stage.app.task(Work)(nothing)
    stage.sessions.configure(bind=engine)
    stage.enqueue(Work())

    def done() -> bool:
        with engine.connect() as connection:
            return connection.scalar(text("SELECT state FROM other.jobs_hot")) == "completed"

    stage.play(done, url=engine)
    engine.dispose()


def test_a_schema_that_is_behind_is_refused_at_the_start(empty_db_url, stage):
    stage.app.task(Work)(nothing)
    with pytest.raises(SchemaVersionError, match="migrations"):
        stage.play(lambda: True, url=empty_db_url)


def test_a_newer_schema_is_served(fresh_db_url, stage):
    """Migrations come before the code: the workers that run meanwhile go on, and may be started anew."""
    engine = create_engine(fresh_db_url)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO awa.schema_version (version) VALUES (99)"))
    stage.app.task(Work)(nothing)
    stage.sessions.configure(bind=engine)
    stage.enqueue(Work())

    def done() -> bool:
        with engine.connect() as connection:
            return connection.scalar(text("SELECT state FROM awa.jobs_hot")) == "completed"

    stage.play(done, url=engine)
    engine.dispose()


def test_a_newer_schema_is_refused_by_a_migration_and_changes_nothing(fresh_db_url):
    engine = create_engine(fresh_db_url)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO awa.schema_version (version) VALUES (99)"))
        with pytest.raises(SchemaVersionError, match="newer than this package"):
            migrate(connection)
    engine.dispose()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heartbeat": timedelta(seconds=31)}, "more than a third"),
        ({"queues": ["nosuch"]}, "nosuch"),
        ({"claim_batch": 0}, "claim_batch"),
        ({"stale_after": 5}, "timedelta"),
    ],
)
def test_options_that_cannot_work_are_refused(stage, options, says):
    stage.app.task(Work)(nothing)
    with pytest.raises(ValueError, match=says):
        stage.app.worker(stage.url, **options)


def test_a_worker_without_queue_or_database_is_refused(stage):
    with pytest.raises(ConfigurationError, match="no queue to serve"):
        Awa().worker(stage.url)
    stage.app.task(Work)(nothing)
    with pytest.raises(ConfigurationError, match="no database"):
        stage.app.worker()
    with pytest.raises(ConfigurationError, match="PostgreSQL"):
        stage.app.worker("sqlite://")


# ---------------------------------------------------------------- waking


@pytest.mark.parametrize("notify", [True, False])
def test_work_is_found_with_and_without_notifications(stage, notify):
    stage.app.task(Work)(nothing)

    async def later(worker: Any) -> None:
        await asyncio.sleep(0.3)
        stage.enqueue(Work())

    stage.play(lambda: stage.states() == ["completed"], during=later, notify=notify)


def test_a_notification_wakes_at_once(stage):
    started: list[float] = []

    async def handler(ctx: Any) -> None:
        started.append(time.monotonic())

    stage.app.task(Work)(handler)
    waits: list[float] = []

    async def later(worker: Any) -> None:
        await stage.until(lambda: worker._listener.healthy)
        for _ in range(5):
            started.clear()
            stage.enqueue(Work())
            sent = time.monotonic()
            await stage.until(lambda: started)
            waits.append(started[0] - sent)

    stage.play(during=later)
    assert min(waits) < 0.5  # polling alone would take up to 2 s, each time


@pytest.mark.case(64)
def test_a_job_that_is_soon_due_does_not_wait_for_the_full_sleep(stage):
    stage.app.task(Work)(nothing)

    async def later(worker: Any) -> None:
        stage.enqueue(Work(), delay=timedelta(seconds=1))

    stage.play(lambda: stage.states() == ["completed"], during=later)
    (job,) = stage.jobs()
    assert timedelta(0) <= job.attempted_at - job.run_at < timedelta(seconds=2.5)


def test_paused_queues_wait_and_capacity_is_kept(stage):
    running: list[str] = []
    most: list[int] = []

    async def handler(ctx: Any) -> None:
        running.append(ctx.args.text)
        most.append(len(running))
        await asyncio.sleep(0.02)
        running.remove(ctx.args.text)

    stage.app.queues["default"] = QueueConfig(concurrency=3)
    stage.app.queues["paused"] = QueueConfig()
    stage.app.task(Work)(handler)
    stage.sql("INSERT INTO awa.queue_meta (queue, paused_at) VALUES ('paused', now())")
    stage.enqueue(*[Work(text=str(n)) for n in range(20)])
    stage.enqueue(Work(text="paused"), queue="paused")
    stage.play(lambda: stage.states().count("completed") == 20)
    assert max(most) == 3
    assert stage.states().count("available") == 1


def test_urgent_jobs_run_first(stage):
    order: list[str] = []

    async def handler(ctx: Any) -> None:
        order.append(ctx.args.text)

    stage.app.queues["default"] = QueueConfig(concurrency=1)
    stage.app.task(Work)(handler)
    for priority in (3, 1, 4, 2):
        stage.enqueue(Work(text=str(priority)), priority=priority)
    stage.play()
    assert order == ["1", "2", "3", "4"]


# -------------------------------------------------------------- liveness


@pytest.mark.case(27)
def test_a_handler_that_blocks_the_loop_is_not_taken_for_dead(stage, quick):
    runs: list[int] = []

    async def handler(ctx: Any) -> None:
        runs.append(ctx.attempt)
        threading.Event().wait(2.5)  # blocks the event loop on purpose

    stage.app.task(Work)(handler)
    stage.enqueue(Work())
    other = Awa()
    other.task(Work)(handler)

    async def rival(worker: Any) -> None:
        rescuer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RESCUER, stage.url.render_as_string(hide_password=False), stdout=subprocess.PIPE
        )
        rescued, _ = await rescuer.communicate()
        assert rescued.strip() == b"[]"

    stage.play(during=rival, **quick)
    assert (runs, stage.states()) == ([1], ["completed"])


RESCUER = """
import sys, time
from datetime import timedelta
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from awa_sqla.maintenance import rescue
engine, found = create_engine(sys.argv[1]), []
for _ in range(20):
    with Session(engine) as session, session.begin():
        found += rescue(session, stale_after=timedelta(seconds=1))
    time.sleep(0.1)
print(found)
"""


@pytest.mark.case(44)
def test_no_transaction_is_open_while_a_handler_runs(stage):
    seen: list[list[Any]] = []

    async def handler(ctx: Any) -> None:
        await asyncio.sleep(0.5)
        seen.append(
            stage.sql("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'")
        )

    stage.app.task(Work)(handler)
    stage.enqueue(Work())
    stage.play(maintenance=False)  # which has transactions of its own
    assert seen == [[]]


def test_a_lost_lease_tells_the_handler(stage, quick):
    told: list[str] = []

    def handler(ctx: Any) -> None:
        if ctx.attempt == 1:
            stage.sql("UPDATE awa.jobs_hot SET run_lease = nextval('awa.run_lease_seq') WHERE id = %s", ctx.job.id)
            while not ctx.is_cancelled():
                threading.Event().wait(0.01)
            told.append(ctx.cancel_reason)

    stage.app.task(Work)(handler)
    stage.enqueue(Work())
    stage.play(lambda: told and stage.states() == ["completed"], **quick)
    assert told == ["the lease was lost"]
    assert stage.jobs()[0].errors[0]["error"].startswith("heartbeat stale")


@pytest.mark.case(29)
@pytest.mark.slow
def test_a_killed_workers_jobs_are_done_by_the_next_one(stage, quick, tmp_path):
    (job_id,) = stage.enqueue(Work())
    marker = tmp_path / "started"
    process = _spawn(stage, f"import pathlib, time; pathlib.Path({str(marker)!r}).touch(); time.sleep(60)")
    _until(marker.exists)
    process.kill()
    process.wait()
    stage.app.task(Work)(nothing)
    stage.play(**quick)
    (job,) = stage.jobs()
    assert (job.id, job.state, job.attempt, len(job.errors)) == (job_id, "completed", 2, 1)


def test_idle_lanes_only_look(stage, monkeypatch, request):
    monkeypatch.setattr(lanes, "PROMOTION", 0.1)
    sent: list[str] = []
    in_transaction: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement)
        if not getattr(conn.connection.dbapi_connection, "autocommit", True):
            in_transaction.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    request.addfinalizer(lambda: event.remove(Engine, "before_cursor_execute", note))
    stage.app.task(Work)(nothing)
    stage.app.on_completed(Work, name="spec")(lambda event: [])

    def looks(table: str) -> list[str]:
        return [statement for statement in sent if f"FROM awa.{table}" in statement]

    stage.play(lambda: len(looks("scheduled_jobs")) > 5 and len(looks("follow_up_obligations")) > 2)
    assert len(set(looks("scheduled_jobs"))) == len(set(looks("follow_up_obligations"))) == 1
    assert not any(word in one for one in looks("scheduled_jobs") for word in ("DELETE", "FOR UPDATE"))
    assert "FOR UPDATE" not in looks("follow_up_obligations")[0]
    assert not any("scheduled_jobs" in one or "follow_up_obligations" in one for one in in_transaction)


# ------------------------------------------------------------- trouble


def test_a_heartbeat_that_fails_is_tried_again_at_once(stage):
    """Its connection may be long gone; a whole interval more would bring living attempts near to being rescued."""
    stage.app.task(Work)(nothing)

    async def during(worker: Any) -> None:
        (before,) = stage.sql("SELECT last_seen FROM awa.runtime_instances")
        stage.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid()"
        )
        worker._heart.soon()
        await stage.until(
            lambda: stage.sql("SELECT last_seen FROM awa.runtime_instances")[0].last_seen > before.last_seen
        )

    stage.play(during=during, notify=False, heartbeat=timedelta(minutes=10), stale_after=timedelta(hours=1))


def test_a_stop_does_not_cut_a_claim_that_may_have_been_committed(stage):
    ran: set[int] = set()

    async def handler(ctx: Any) -> None:
        ran.add(ctx.job.id)

    stage.app.queues["default"] = QueueConfig(concurrency=5)
    stage.app.task(Work)(handler)
    stage.enqueue(*[Work() for _ in range(400)])
    for pause in range(8):

        async def a_moment(worker: Any, pause: int = pause) -> None:
            await asyncio.sleep(0.01 * pause)

        stage.play(lambda: True, during=a_moment)
        assert "running" not in stage.states()
    assert {job.id for job in stage.jobs() if job.state == "completed"} == ran


def test_a_cancellation_before_the_first_step_of_a_handler_loses_no_slot(stage):
    async def handler(ctx: Any) -> None:
        raise AssertionError("was asked to stop before it began")

    stage.app.task(Work)(handler)
    stage.enqueue(Work())
    begin = Worker._begin

    def begin_and_stop(worker: Worker, claimed: Any) -> None:
        begin(worker, claimed)
        (run,) = worker._flight
        with stage.sessions.begin() as session:
            cancel(session, claimed.attempt.id, reason="at once")
        run.stop("the job was cancelled")

    Worker._begin = begin_and_stop  # type: ignore[method-assign]
    try:
        worker = stage.play()
    finally:
        Worker._begin = begin  # type: ignore[method-assign]
    assert (stage.states(), worker.finished, worker.abandoned) == (["cancelled"], 1, 0)


def test_options_that_only_asyncpg_knows_do_not_stop_the_heart(stage, quick):
    async def handler(ctx: Any) -> None:
        await asyncio.sleep(2.5)

    stage.app.task(Work)(handler)
    stage.enqueue(Work())
    url = stage.url.set(drivername="postgresql+asyncpg", query={"prepared_statement_cache_size": "0"})
    stage.play(url=url, **quick)
    assert [(job.state, job.attempt) for job in stage.jobs()] == [("completed", 1)]


def test_a_heart_that_cannot_reach_the_database_is_noticed_before_the_first_claim(stage):
    stage.app.task(Work)(nothing)
    stage.enqueue(Work())
    given = create_async_engine(stage.url.set(password="wrong"), connect_args={"password": stage.url.password})
    with pytest.raises(ConfigurationError, match="use connections of their own"):
        stage.play(url=given)
    assert stage.states() == ["available"]


@pytest.mark.slow
def test_lost_connections_lose_nothing_and_double_nothing(stage, quick):
    runs: list[str] = []

    async def handler(ctx: Any) -> None:
        runs.append(ctx.args.text)
        await asyncio.sleep(0.01)

    stage.app.queues["default"] = QueueConfig(concurrency=10)
    stage.app.task(Work)(handler)
    stage.app.on_completed(Work, name="next")(lambda event: Next())
    stage.enqueue(*[Work(text=str(n)) for n in range(300)])

    async def cut(worker: Any) -> None:
        for _ in range(6):
            await asyncio.sleep(0.3)
            stage.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    stage.play(lambda: stage.states("work") == ["completed"] * 300, during=cut, **quick)
    parents = [job.parent_id for job in stage.jobs("next")]
    assert sorted(parents) == sorted(job.id for job in stage.jobs("work"))
    assert set(runs) == {str(n) for n in range(300)}


# ---------------------------------------------------------------- stopping


@pytest.mark.case(30)
def test_stopping_lets_running_jobs_end_and_claims_no_more(stage):
    reached = threading.Event()

    async def handler(ctx: Any) -> None:
        reached.set()
        await asyncio.sleep(0.5)

    stage.app.queues["default"] = QueueConfig(concurrency=1)
    stage.app.task(Work)(handler)
    stage.enqueue(*[Work() for _ in range(5)])

    async def soon(worker: Any) -> None:
        await stage.until(reached.is_set)

    stage.play(lambda: True, during=soon)
    rows = stage.jobs()
    assert [row.state for row in rows] == ["completed"] + ["available"] * 4
    assert [row.attempt for row in rows] == [1, 0, 0, 0, 0]


def test_a_worker_lives_once(stage):
    stage.app.task(Work)(nothing)

    async def twice() -> None:
        worker = stage.app.worker(stage.url)
        async with worker:
            with pytest.raises(ConfigurationError, match="lives once"):
                await worker.__aenter__()
        with pytest.raises(ConfigurationError, match="lives once"):
            await worker.__aenter__()

    asyncio.run(twice())
    assert not [thread for thread in threading.enumerate() if thread.name == "awa_sqla heartbeat"]


def test_services_that_take_their_time_to_end_do_so_together(stage):
    """As those do whose query is not answered: their driver waits ten seconds."""
    stage.app.task(Work)(nothing)
    ended: list[float] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.5)
            ended.append(time.monotonic())

    async def during(worker: Any) -> None:
        for _ in range(20):
            worker._spawn(slow)
        await asyncio.sleep(0)

    stage.play(lambda: True, during=during)
    assert len(ended) == 20
    assert ended[-1] - ended[0] < 5


@pytest.mark.case(30)
def test_after_grace_a_task_is_interrupted_and_its_attempt_not_charged(stage):
    reached = threading.Event()

    async def handler(ctx: Any) -> None:
        reached.set()
        await asyncio.sleep(60)

    stage.app.task(Work)(handler)
    stage.enqueue(Work())

    async def soon(worker: Any) -> None:
        await stage.until(reached.is_set)

    worker = stage.play(lambda: True, during=soon, grace=timedelta(seconds=0.1))
    (job,) = stage.jobs()
    assert (job.state, job.attempt, job.errors, worker.abandoned) == ("scheduled", 0, [], 0)


def test_a_thread_that_does_not_end_is_abandoned_and_its_late_outcome_is_void(stage):
    reached, go = threading.Event(), threading.Event()

    def handler(ctx: Any) -> None:
        reached.set()
        go.wait(3)

    stage.app.task(Work)(handler)
    stage.enqueue(Work())

    async def soon(worker: Any) -> None:
        await stage.until(reached.is_set)

    worker = stage.play(lambda: True, during=soon, grace=timedelta(seconds=0.1))
    go.set()
    (job,) = stage.jobs()
    assert (job.state, job.attempt, worker.abandoned) == ("scheduled", 0, 1)


@pytest.mark.slow
def test_sigterm_ends_a_worker_process_with_status_0(stage, tmp_path):
    marker = tmp_path / "started"
    stage.enqueue(Work())
    process = _spawn(stage, f"import pathlib, time; pathlib.Path({str(marker)!r}).touch(); time.sleep(0.5)")
    _until(marker.exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert stage.states() == ["completed"]


APP = """
from awa_sqla import Awa, JobArgs
class Work(JobArgs):
    text: str = ""
awa = Awa()
@awa.task(Work)
def work(ctx):
    {body}
"""


#: Dead soon, and it never leads.
QUICK = """
import sys
from datetime import timedelta
quick = {"heartbeat": timedelta(seconds=0.2), "stale_after": timedelta(seconds=1)}
sys.exit(awa.run_worker(sys.argv[1], maintenance=False, **quick))
"""


def _spawn(stage: Any, body: str) -> subprocess.Popen[bytes]:
    program = APP.format(body=body) + QUICK
    return subprocess.Popen([sys.executable, "-c", program, stage.url.render_as_string(hide_password=False)], cwd=ROOT)


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def test_the_database_decides_what_time_it_is(stage, monkeypatch):
    class Fast(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2100, 1, 1, tzinfo=UTC)

    monkeypatch.setattr("datetime.datetime", Fast)
    monkeypatch.setattr(time, "time", lambda: 4_102_444_800.0)
    stage.app.task(Work)(nothing)
    stage.enqueue(Work(), delay=timedelta(hours=1))
    stage.enqueue(Work())
    stage.play(lambda: "completed" in stage.states())
    assert sorted(stage.states()) == ["completed", "scheduled"]


def test_a_url_is_made_of_many_spellings():
    app = Awa()
    app.task(Work)(nothing)
    worker = app.worker("postgres://u:p@h/db")
    assert worker._engines.url == make_url("postgresql+psycopg://u:p@h/db")
