"""One bad row, lock, spec or payload is its own trouble: the worker and everybody else's jobs go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from pydantic import field_validator
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import Awa, Backoff, ConfigurationError, JobArgs, QueueConfig
from awa_sqla.maintenance import lanes, rescue
from awa_sqla.models.wakeups import channel
from awa_sqla.worker.dispatch import QueueLoop

# Connections that a test cuts are dropped by their drivers without a close.
pytestmark = pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")


class Work(JobArgs, max_attempts=2, backoff=Backoff(base=timedelta(0))):
    number: float = 0


class Zoned(JobArgs):
    zone: str = "UTC"

    @field_validator("zone")
    @classmethod
    def known(cls, value: str) -> str:
        ZoneInfo(value)
        return value


class Next(JobArgs):
    pass


async def nothing(ctx: Any) -> None:
    return None


def test_a_row_that_somebody_holds_keeps_no_other_outcome_waiting(stage):
    locked = asyncio.Event()

    async def handler(ctx: Any) -> None:
        if ctx.args.number == 0:
            await locked.wait()

    stage.app.queues["default"] = QueueConfig(concurrency=5)
    stage.app.task(Work)(handler)
    held, *_ = stage.enqueue(*[Work(number=n) for n in range(60)])

    async def hold(worker: Any) -> None:
        await stage.until(lambda: stage.jobs()[0].state == "running")
        with stage.sessions() as holder:
            holder.execute(text("SELECT 1 FROM awa.jobs_hot WHERE id = :id FOR UPDATE"), {"id": held})
            locked.set()
            await stage.until(lambda: stage.states().count("completed") == 59)
            assert stage.jobs()[0].state == "running"

    stage.play(during=hold)
    assert stage.states() == ["completed"] * 60


@pytest.mark.case(52)
def test_a_validator_that_raises_anything_fails_its_own_job(stage):
    stage.app.task(Zoned)(nothing)
    stage.enqueue(Zoned(), Zoned())
    stage.sql('UPDATE awa.jobs_hot SET args = \'{"zone": "Old/Zone"}\' WHERE id = (SELECT min(id) FROM awa.jobs_hot)')
    stage.play()
    bad, good = stage.jobs()
    assert (bad.state, bad.attempt, good.state) == ("failed", 1, "completed")
    assert "Old/Zone" in bad.errors[0]["error"]


def test_a_lost_connection_is_tried_again_whatever_retry_on_says(stage):
    def handler(ctx: Any) -> None:
        pid = ctx.session.scalar(text("SELECT pg_backend_pid()"))
        if ctx.attempt == 1:
            stage.sql("SELECT pg_terminate_backend(%s, 5000)", pid)
            if ctx.args.number:
                ctx.session.execute(text("SELECT 1"))

    stage.app.task(Work, transactional=True, retry_on=(KeyError,))(handler)
    stage.enqueue(Work(number=0), Work(number=1))
    stage.play()
    assert [(job.state, job.attempt) for job in stage.jobs()] == [("completed", 2)] * 2


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_row_that_cannot_be_written_anew_fails_where_it_is(stage, driver, quick):
    async def handler(ctx: Any) -> None:
        if ctx.args.number:
            raise ValueError

    stage.app.task(Work)(handler)
    stage.sql("INSERT INTO awa.jobs_hot (kind, args) VALUES ('work', '{\"number\": 1e400}')")
    stage.sql(
        "INSERT INTO awa.jobs_hot (kind, args, state, run_lease, heartbeat_at, attempt) "
        "VALUES ('work', '{\"number\": 1e400}', 'running', 1, now() - interval '1 h', 1), "
        "('work', '{}', 'running', 2, now() - interval '1 h', 1)"
    )
    stage.enqueue(Work())
    stage.play(url=stage.url.set(drivername=f"postgresql+{driver}"), **quick)
    assert stage.states() == ["failed", "failed", "completed", "completed"]


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_whatever_a_spec_raises_ends_neither_the_worker_nor_the_dispatch(stage, error):
    def spec(event: Any) -> Next:
        raise error

    stage.app.task(Work)(nothing)
    stage.app.on_completed(Work, name="spec")(spec)
    stage.enqueue(Work())
    stage.play(lambda: stage.obligations() and stage.obligations()[0].attempts == 1)
    assert stage.states() == ["completed"]
    assert error.__name__ in stage.obligations()[0].last_error


def test_a_payload_that_anybody_may_send_does_not_break_the_listener(stage):
    stage.app.task(Work)(nothing)

    async def shout(worker: Any) -> None:
        await stage.until(lambda: worker._listener.healthy)
        for payload in ("c:1", "c:x:y", "c:1:2:3", "c:99999999999999999999999:1", "", "\N{SNOWMAN}"):
            stage.sql(f"NOTIFY {channel('awa')}, '{payload}'")
        stage.enqueue(Work())
        await stage.until(stage.all_ended)
        assert worker._listener.healthy

    stage.play(during=shout)


# ------------------------------------------------------------------ sessions


@pytest.mark.parametrize("end", ["rollback", "close", "commit of the connection"])
@pytest.mark.parametrize("road", ["async", "def"])
def test_ending_the_transaction_of_ctx_session_is_no_success(stage, road, end):
    def act(session: Any) -> None:
        if end == "commit of the connection":
            session.connection().commit()
        else:
            getattr(session, end)()

    async def later(ctx: Any) -> None:
        await ctx.session.run_sync(act)

    def now(ctx: Any) -> None:
        act(ctx.session)

    stage.app.task(Work, transactional=True)(later if road == "async" else now)
    stage.enqueue(Work(), max_attempts=1)
    stage.play()
    (job,) = stage.jobs()
    assert job.state == "failed"
    assert "must not end the transaction of ctx.session" in job.errors[0]["error"]


@pytest.mark.parametrize("road", ["async", "def"])
def test_a_handler_that_finds_no_connection_has_not_begun_and_is_not_charged(stage, road, engine):
    runs: list[int] = []

    async def later(ctx: Any) -> None:
        runs.append(ctx.attempt)
        await asyncio.sleep(0.5)

    def now(ctx: Any) -> None:
        runs.append(ctx.attempt)
        time.sleep(0.5)

    small = create_engine(stage.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    async_small = create_async_engine(stage.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    stage.app.task(Work, transactional=True, retry_on=(KeyError,))(later if road == "async" else now)
    stage.enqueue(Work(), Work(), Work(), max_attempts=1)
    stage.app.queues["default"] = QueueConfig(concurrency=1)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        """Somebody else has the pool's only connection until the first job had to be put back for it."""
        taken, taken_too = small.connect(), await async_small.connect()

        async def give_back() -> None:
            await stage.until(lambda: "scheduled" in stage.states())
            taken.close()
            await taken_too.close()

        giving = asyncio.create_task(give_back())
        yield
        await giving

    stage.app.lifespan = lifespan

    async def dispose(worker: Any) -> None:
        await stage.until(stage.all_ended)
        await async_small.dispose()

    stage.play(
        session_factory=sessionmaker(small), async_session_factory=async_sessionmaker(async_small), during=dispose
    )
    small.dispose()
    assert [(job.state, job.attempt) for job in stage.jobs()] == [("completed", 1)] * 3
    assert runs == [1, 1, 1]


def test_an_autocommit_engine_is_refused_at_the_start(stage, engine):
    stage.app.task(Work)(nothing)
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        stage.play(url=autocommit)
    with sessionmaker(autocommit)() as session, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        rescue(session, stale_after=timedelta(seconds=1))


@pytest.mark.parametrize("road", ["async", "def"])
def test_an_autocommit_session_runs_no_handler_whose_writes_it_could_not_discard(stage, road):
    ran: list[int] = []

    async def later(ctx: Any) -> None:
        ran.append(ctx.job.id)

    def now(ctx: Any) -> None:
        ran.append(ctx.job.id)

    stage.app.task(Work, transactional=True)(later if road == "async" else now)
    stage.app.queues["default"] = QueueConfig(concurrency=5)
    engine = create_engine(stage.url, isolation_level="AUTOCOMMIT")
    async_engine = create_async_engine(stage.url, isolation_level="AUTOCOMMIT")
    stage.enqueue(Work(), max_attempts=1)

    async def dispose(worker: Any) -> None:
        await stage.until(stage.all_ended)
        await async_engine.dispose()

    stage.play(
        session_factory=sessionmaker(engine), async_session_factory=async_sessionmaker(async_engine), during=dispose
    )
    engine.dispose()
    (job,) = stage.jobs()
    assert (job.state, ran) == ("failed", [])
    assert "AUTOCOMMIT" in job.errors[0]["error"]


def test_a_claim_whose_answer_was_lost_is_found_again(stage, monkeypatch):
    lost: list[int] = []
    claim = QueueLoop._claim

    async def answer_lost(self: QueueLoop, limit: int) -> Any:
        claimed = await claim(self, limit)
        if claimed and not lost:
            lost.extend(one.attempt.id for one in claimed)
            raise OperationalError("COMMIT", {}, Exception("the answer was lost"))
        return claimed

    monkeypatch.setattr(QueueLoop, "_claim", answer_lost)
    stage.app.task(Work)(nothing)
    ids = stage.enqueue(*[Work() for _ in range(5)], max_attempts=1)
    stage.play()
    assert sorted(lost) == ids
    assert [(job.state, job.attempt) for job in stage.jobs()] == [("completed", 1)] * 5


def test_many_dead_attempts_are_rescued_one_batch_after_the_other(stage, monkeypatch):
    monkeypatch.setattr(lanes, "RESCUES", 2)
    stage.app.task(Next)(nothing)
    stage.enqueue(*[Work() for _ in range(9)])
    stage.sql(
        "UPDATE awa.jobs_hot SET state = 'running', attempt = 1, run_lease = nextval('awa.run_lease_seq'), "
        "heartbeat_at = clock_timestamp() - interval '1 hour'"
    )
    # Of two looks for dead attempts, the second comes after half a minute.
    stage.play(lambda: "running" not in stage.states())
    assert all(job.errors[0]["type"] == "rescue" for job in stage.jobs())


@pytest.mark.beside
def test_an_attempt_that_dies_later_is_rescued_where_the_leader_looks_seldom(stage):
    """A silent worker is dead after three seconds: the leader renews its lease once a second, which is no gap in its
    contact with the database.
    """
    stage.app.task(Next)(nothing)
    stage.enqueue(Work())
    stage.sql(
        "UPDATE awa.jobs_hot SET state = 'running', attempt = 1, run_lease = nextval('awa.run_lease_seq'), "
        "heartbeat_at = clock_timestamp()"
    )
    patience = timedelta(seconds=3)
    stage.play(lambda: "running" not in stage.states(), heartbeat=patience / 3, stale_after=patience)
    assert stage.jobs()[0].errors[0]["type"] == "rescue"


def test_a_job_that_ends_while_a_lost_claim_is_looked_for_is_not_run_again(stage, monkeypatch):
    runs: list[float] = []
    asked, lost = asyncio.Event(), asyncio.Event()
    claim, ours = QueueLoop._claim, QueueLoop._ours

    async def answer_lost(self: QueueLoop, limit: int) -> Any:
        claimed = await claim(self, limit)
        if any(one.args_json == '{"number": 2.0}' for one in claimed) and not lost.is_set():
            lost.set()
            raise OperationalError("COMMIT", {}, Exception("the answer was lost"))
        return claimed

    async def ends_meanwhile(self: QueueLoop) -> Any:
        found = await ours(self)
        asked.set()
        await stage.until(lambda: stage.states()[0] == "completed")
        await asyncio.sleep(0.2)  # until that is acknowledged
        return found

    async def handler(ctx: Any) -> None:
        runs.append(ctx.args.number)
        if ctx.args.number == 1:
            await asked.wait()

    async def another(worker: Any) -> None:
        await stage.until(lambda: stage.states() == ["running"])
        stage.enqueue(Work(number=2))

    monkeypatch.setattr(QueueLoop, "_claim", answer_lost)
    monkeypatch.setattr(QueueLoop, "_ours", ends_meanwhile)
    stage.app.task(Work)(handler)
    stage.enqueue(Work(number=1))
    stage.play(during=another)
    assert lost.is_set()
    assert sorted(runs) == [1, 2]
    assert [(job.state, job.attempt) for job in stage.jobs()] == [("completed", 1)] * 2


def test_a_drain_that_is_cancelled_leaves_no_heart_behind(stage):
    async def handler(ctx: Any) -> None:
        await asyncio.sleep(60)

    stage.app.task(Work)(handler)
    stage.enqueue(Work())

    async def main() -> None:
        async with stage.app.worker(stage.url):
            await stage.until(lambda: stage.states() == ["running"])

    async def run() -> None:
        task = asyncio.create_task(main())
        await stage.until(lambda: stage.states() == ["running"])
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert [thread.name for thread in threading.enumerate() if "heartbeat" in thread.name] == []


# ------------------------------------------------------------------- settings


@pytest.mark.parametrize("given", [OSError, "OSError", ("OSError",), (OSError(),)])
@pytest.mark.parametrize("option", ["retry_on", "discard_on"])
def test_what_are_no_exception_classes_is_said_at_registration(option, given):
    with pytest.raises(ConfigurationError, match=f"{option} must be a tuple of exception classes"):
        Awa().task(Work, **{option: given})(nothing)


def test_an_async_handler_behind_a_sync_wrapper_is_named(stage):
    stage.app.task(Work)(lambda ctx: nothing(ctx))  # noqa: PLW0108 - it is not the coroutine function itself
    stage.enqueue(Work(), max_attempts=1)
    stage.play()
    assert "is a coroutine" in stage.jobs()[0].errors[0]["error"]


def test_a_listen_url_may_be_written_as_sqlalchemy_does(stage):
    stage.app.task(Work)(nothing)

    async def healthy(worker: Any) -> None:
        await stage.until(lambda: worker._listener.healthy)

    stage.play(lambda: True, during=healthy, listen_url=stage.url.render_as_string(hide_password=False))


@pytest.mark.parametrize("url", ["nonsense", "", "postgresql+pg8000://u:p@h/d", "mysql://u:p@h/d"])
def test_what_is_no_url_of_ours_is_said_so(url):
    app = Awa()
    app.task(Work)(nothing)
    with pytest.raises(ConfigurationError):
        app.worker(url)


def test_what_is_no_url_is_said_without_its_password():
    app = Awa()
    app.task(Work)(nothing)
    with pytest.raises(ConfigurationError, match=r"^'host/shop' is no database URL") as refused:
        app.worker("postgresql//ada:p@ss@host/shop")
    assert "ss@" not in str(refused.value)


def test_run_worker_needs_the_main_thread(stage):
    stage.app.task(Work)(nothing)
    said: list[BaseException] = []

    def elsewhere() -> None:
        try:
            stage.app.run_worker(stage.url)
        except ConfigurationError as exc:
            said.append(exc)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "async with awa.worker" in str(said[0])


# ----------------------------------------------------------- public bug reports


@pytest.mark.case(31)
def test_cancelled_handlers_leave_no_connection_and_no_lock_behind(stage):
    small = create_async_engine(stage.url, pool_size=3, max_overflow=0)

    async def handler(ctx: Any) -> None:
        await ctx.session.execute(text("SELECT pg_sleep(30)"))

    stage.app.queues["default"] = QueueConfig(concurrency=3)
    stage.app.task(Work, transactional=True)(handler)
    stage.enqueue(*[Work() for _ in range(9)], max_attempts=1, deadline=timedelta(seconds=0.3))

    async def afterwards(worker: Any) -> None:
        await stage.until(stage.all_ended)
        assert small.pool.checkedout() == 0  # type: ignore[attr-defined]
        await small.dispose()

    stage.play(async_session_factory=async_sessionmaker(small), during=afterwards, maintenance=False)
    assert [job.errors[0]["error"] for job in stage.jobs()] == ["hard deadline exceeded"] * 9
    held = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
    assert stage.sql(held) == []


@pytest.mark.case(59)
def test_a_clean_up_error_does_not_replace_the_handlers_own(stage, engine):
    class Brittle(Session):
        def close(self) -> None:
            super().close()
            raise RuntimeError("B, while closing")

    def handler(ctx: Any) -> None:
        raise ValueError("A, from the handler")

    stage.app.task(Work, transactional=True)(handler)
    stage.enqueue(Work(), max_attempts=1)
    stage.app.queues["default"] = QueueConfig(concurrency=2)
    stage.play(session_factory=sessionmaker(engine, class_=Brittle))
    (job,) = stage.jobs()
    assert job.errors[0]["error"] == "A, from the handler"


@pytest.mark.case(62)
def test_a_server_that_is_read_only_for_a_while_costs_no_attempt(stage, quick):
    stage.app.task(Work)(nothing)
    database = stage.sql("SELECT quote_ident(current_database()) AS db")[0].db

    async def read_only(worker: Any) -> None:
        stage.sql(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
        end = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        stage.sql(end)
        stage.sql("INSERT INTO awa.jobs_hot (kind) VALUES ('work')")
        await asyncio.sleep(1.5)
        assert [job.attempt for job in stage.jobs()] == [0]
        stage.sql(f"ALTER DATABASE {database} RESET default_transaction_read_only")
        stage.sql(end)

    stage.play(lambda: stage.states() == ["completed"], during=read_only, **quick)
    assert [job.attempt for job in stage.jobs()] == [1]
