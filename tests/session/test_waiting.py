"""`wait_for()`: what it returns and raises, what a look costs, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.util import await_only

from awa_sqla import (
    Attempt,
    FollowUps,
    InvalidJob,
    Job,
    JobArgs,
    JobFailed,
    JobNotFound,
    UnsupportedSession,
    cancel,
    complete,
    enqueue,
    fail,
    retry_after,
    wait_for,
    waiting,
)
from tests.app import Charge, Signup
from tests.session.steps import HOUR, MINUTE, again, available, due_again, running
from tests.worlds import PATIENCE, AsyncWorld, Database, World, in_async_worlds, in_one_world, in_sync_worlds

SECOND = timedelta(seconds=1)


class Clock:
    """The time and the pauses of waits: nothing takes long, and a test acts where a wait sleeps."""

    def __init__(self, world: World) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        #: What happens in the first pause, in the second, and so on.
        self.meanwhile: list[Callable[[], object]] = []
        self._held: Callable[[], int] = world.engine.pool.checkedout  # type: ignore[attr-defined]
        self._before: int | None = None

    def monotonic(self) -> float:
        if self._before is None:
            self._before = self._held()
        return self.now

    def sleep(self, seconds: float) -> None:
        assert self._held() == self._before, "a connection is held between two looks"
        self.now += seconds
        self.pauses.append(seconds)
        if len(self.pauses) <= len(self.meanwhile):
            self.meanwhile[len(self.pauses) - 1]()

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock(world: World, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(world)
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "asyncio", SimpleNamespace(sleep=clock.sleep_async))
    return clock


def wait(factory: Any, job_id: Any, **options: Any) -> Any:
    """The result, in a synchronous world and in an asynchronous one."""
    result: Any = wait_for(factory, job_id, **options)
    return await_only(result) if asyncio.iscoroutine(result) else result


@pytest.fixture
def look(world: World) -> Callable[..., Any]:
    """Wait with sessions of the world to which nobody has attached anything."""
    return lambda job_id, **options: wait(world.maker(), job_id, **options)


def finish(database: Database, job_id: int, result: str = "true") -> Callable[[], None]:
    """Complete the job as another process does."""
    statement = "UPDATE jobs_hot SET state = 'completed', result = %s, finalized_at = now() WHERE id = %s"
    return lambda: database.execute(statement, result, job_id)


def nothing() -> None:
    """A pause in which nothing happens."""


# ------------------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("result", [{"cents": 5}, [1, None], "text", 0, None])
def test_the_result_of_a_completed_job(look, session, clock, result):
    job = complete(session, running(session), result=result)
    session.commit()
    assert look(job.id) == result
    assert clock.pauses == []


def test_a_job_that_completes_while_it_is_waited_for(look, session, database, clock):
    job = available(session)
    clock.meanwhile = [nothing, nothing, finish(database, job.id, '{"n": 1}')]
    assert look(job.id) == {"n": 1}
    assert clock.pauses == [pytest.approx(pause) for pause in (0.02, 0.03, 0.045)]


def test_a_scheduled_job_and_one_between_two_attempts_have_not_ended(look, session, database, clock):
    job = running(session)
    fail(session, job, "the first attempt")
    session.commit()

    def second_attempt() -> None:
        due_again(database, session, job.id, look=False)
        database.execute("UPDATE jobs_hot SET state = 'running' WHERE id = %s", job.id)

    clock.meanwhile = [nothing, second_attempt, finish(database, job.id)]
    assert look(job.id) is True


def test_the_first_look_costs_one_statement_and_a_rollback(look, world, session, clock):
    job = complete(session, running(session))
    session.commit()
    job_id = job.id
    session.close()
    with world.noting("begin", "before_cursor_execute", "commit", "rollback") as seen:
        look(job_id)
    assert seen == ["begin", "before_cursor_execute", "rollback"]


# ------------------------------------------------------------------------------------------------------ failures
def test_a_failed_job_is_an_error_with_its_last_error(look, session, database):
    job = running(session, Charge(order_id=1), max_attempts=2)
    fail(session, job, "no network")
    session.commit()
    due_again(database, session, job.id)
    fail(session, again(session, job), ValueError("card expired"))
    session.commit()
    with pytest.raises(JobFailed, match=rf"job {job.id} failed: card expired") as caught:
        look(job.id)
    assert (caught.value.job_id, caught.value.error, caught.value.state) == (
        job.id,
        "card expired",
        "failed",
    )


def test_a_dead_letter_is_a_failed_job(look, world, session, database, clock):
    database.keep_dead_letters("payments")
    job = running(session, Charge(order_id=1))
    attempt = Attempt.of(job)
    clock.meanwhile = [lambda: world.meanwhile(lambda s: fail(s, attempt, "card gone", terminal=True)).result()]
    with pytest.raises(JobFailed) as caught:
        look(job.id)
    assert database.job(job.id).stored_in == "dead"
    assert caught.value.error == "card gone"


def test_a_cancelled_job_is_an_error_with_the_reason(look, session):
    job = enqueue(session, Signup(), delay=HOUR)
    session.commit()
    job_id = job.id
    cancel(session, job, reason="cancelled: by her")
    session.commit()
    with pytest.raises(JobFailed, match="was cancelled: cancelled: by her") as caught:
        look(job_id)
    assert (caught.value.error, caught.value.state) == ("cancelled: by her", "cancelled")


def test_a_failure_without_a_text_says_so(look, session):
    job = running(session, max_attempts=1)
    retry_after(session, job, MINUTE)
    session.commit()
    with pytest.raises(JobFailed, match="failed: no reason was given") as caught:
        look(job.id)
    assert caught.value.error == ""


# ----------------------------------------------------------------------------------------------------- deadlines
def test_a_wait_ends_with_its_time_and_its_last_look_is_then(look, session, clock):
    job = available(session)
    with pytest.raises(TimeoutError, match=rf"job {job.id} has not ended within 0:00:10: it was available"):
        look(job.id, timeout=10 * SECOND)
    assert sum(clock.pauses) == pytest.approx(10)
    assert max(clock.pauses) == 1
    assert clock.pauses[:-1] == sorted(clock.pauses[:-1])


def test_what_ends_in_the_last_pause_is_seen(look, session, database, clock):
    job = available(session)
    clock.meanwhile = [nothing, finish(database, job.id)]
    assert look(job.id, timeout=0.03 * SECOND) is True
    assert clock.pauses == [pytest.approx(0.02), pytest.approx(0.01)]


def test_a_clock_that_has_passed_the_deadline_still_gets_a_last_look(look, session, database, clock):
    job = available(session)

    def slow() -> None:
        clock.now += 60

    clock.meanwhile = [slow, finish(database, job.id)]
    assert look(job.id, timeout=SECOND) is True
    assert clock.pauses[-1] == 0


def test_half_a_minute_is_the_default(look, session, clock):
    job = available(session)
    with pytest.raises(TimeoutError):
        look(job.id)
    assert sum(clock.pauses) == pytest.approx(30)


# --------------------------------------------------------------------------------------------- jobs not to be had
def test_a_job_that_is_not_there_is_an_error_at_once(look, clock):
    with pytest.raises(JobNotFound, match=r"no job 4711: .*commit before you wait") as caught:
        look(4711)
    assert (caught.value.job_id, clock.pauses) == (4711, [])


def test_an_uncommitted_job_is_not_there(look, session, clock):
    job = enqueue(session, Signup())
    session.flush()
    with pytest.raises(JobNotFound, match="commit before you wait"):
        look(job.id)


def test_a_job_that_is_deleted_while_it_is_waited_for(look, session, database, clock):
    job = available(session)
    clock.meanwhile = [lambda: database.execute("DELETE FROM jobs_hot WHERE id = %s", job.id)]
    with pytest.raises(JobNotFound, match="removed while it was waited for"):
        look(job.id)


# ------------------------------------------------------------------------------------------------------- troubles
def cut(database: Database) -> None:
    """End all connections but the one that looks."""
    database.rows(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )


def test_a_lost_connection_is_waited_out(look, world, session, database, clock):
    job = available(session)
    job_id = job.id
    session.close()

    failed: list[bool] = []
    event.listen(world.engine, "handle_error", lambda context: failed.append(context.is_disconnect))
    clock.meanwhile = [lambda: cut(database), finish(database, job_id)]
    assert look(job_id) is True
    assert failed == [True]


def test_a_trouble_that_lasts_is_the_cause_of_the_timeout(world, clock):
    nowhere = type(world)(world.name, world.driver, world.url.set(port=1))
    try:
        with pytest.raises(TimeoutError, match="job 1 could not be looked at within 0:00:01") as caught:
            wait(nowhere.maker(), 1, timeout=SECOND)
    finally:
        nowhere.engine.dispose()
    assert isinstance(caught.value.__cause__, DBAPIError | OSError)
    assert sum(clock.pauses) == pytest.approx(1)


def test_a_trouble_that_is_over_is_no_cause(look, world, session, database, clock):
    job = available(session)
    job_id = job.id
    session.close()
    clock.meanwhile = [lambda: cut(database)]
    with pytest.raises(TimeoutError, match="it was available") as caught:
        look(job_id, timeout=SECOND)
    assert caught.value.__cause__ is None


def test_an_error_that_stays_is_raised_at_once(world, clock):
    maker = world.maker(bind=world.engine_with(schema_translate_map={"awa": "nowhere"}))
    with pytest.raises(ProgrammingError):
        wait(maker, 1)
    assert clock.pauses == []


# ------------------------------------------------------------------------------------------------------- sessions
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT"])
def test_every_isolation_level_sees_the_end(world, session, database, clock, isolation):
    job = available(session)
    clock.meanwhile = [finish(database, job.id)]
    assert wait(world.maker(bind=world.engine_with(isolation_level=isolation)), job.id) is True


def test_a_wait_writes_nothing(world, session, database, clock):
    job = available(session)
    clock.meanwhile = [finish(database, job.id)]
    assert wait(world.maker(bind=world.engine_with(postgresql_readonly=True)), job.id) is True


def test_sessions_that_do_not_begin_by_themselves(world, session, database, clock):
    job = available(session)
    clock.meanwhile = [finish(database, job.id)]
    assert wait(world.maker(autobegin=False), job.id) is True


@in_sync_worlds
def test_two_phase_sessions(world, session, database, clock):
    job = available(session)
    clock.meanwhile = [finish(database, job.id)]
    assert wait(world.maker(twophase=True), job.id) is True


def test_follow_ups_on_the_factory_are_not_asked(world, session, database, clock):
    asked = world.registry()
    asked.on_completed(Signup, name="never")(lambda event: pytest.fail("a wait is no transition"))
    for maker in (world.maker(asked), world.maker()):
        job = available(session)
        finish(database, job.id)()
        assert wait(maker, job.id) is True


def test_no_listener_for_commits_is_called(world, session, clock):
    job = complete(session, running(session))
    session.commit()
    maker = world.maker(FollowUps())
    place = maker.kw["sync_session_class"] if isinstance(maker, async_sessionmaker) else maker.class_
    event.listen(place, "before_commit", lambda session: pytest.fail("a wait does not commit"))
    wait(maker, job.id)


@pytest.mark.parametrize("mode", ["create_savepoint", "conditional_savepoint", "rollback_only"])
def test_a_factory_inside_the_callers_transaction(world, clock, mode):
    opened = world.engine.connect() if not isinstance(world, AsyncWorld) else await_only(world.async_engine.connect())
    raw = opened.sync_connection if isinstance(world, AsyncWorld) else opened
    outer = raw.begin()
    maker = world.maker(bind=opened, join_transaction_mode=mode)
    inner = world.from_maker(maker)
    job = enqueue(inner, Signup())
    inner.commit()
    with pytest.raises(TimeoutError):
        wait(maker, job.id, timeout=SECOND)
    assert outer.is_active
    assert raw.scalar(select(Job.state).where(Job.id == job.id)) == "available"
    outer.rollback()
    raw.close()


# ------------------------------------------------------------------------------------------------------ arguments
@in_one_world
@pytest.mark.parametrize(
    ("job_id", "options", "field"),
    [
        ("7", {}, "job_id"),
        (True, {}, "job_id"),
        (None, {}, "job_id"),
        (0, {}, "job_id"),
        (2**63, {}, "job_id"),
        (1, {"timeout": 30}, "timeout"),
        (1, {"timeout": timedelta(0)}, "timeout"),
        (1, {"timeout": -SECOND}, "timeout"),
        (1, {"timeout": None}, "timeout"),
    ],
)
def test_a_wrong_argument_is_named(world, job_id, options, field):
    for factory in (world.maker(), async_sessionmaker()):
        with pytest.raises(InvalidJob) as caught:
            wait_for(factory, job_id, **options)
        assert caught.value.field == field


@in_one_world
def test_only_factories_are_taken(world, session):
    for wrong in (session, scoped_session(world.maker()), world.engine, AsyncSession(), Session, str(world.url), None):
        with pytest.raises(UnsupportedSession, match="takes a sessionmaker or an async_sessionmaker, not "):
            wait_for(wrong, 1)


@in_one_world
def test_sessions_of_other_threads_come_from_their_factory(world, session):
    job = complete(session, running(session), result=5)
    session.commit()
    assert wait_for(scoped_session(sessionmaker(world.engine)).session_factory, job.id) == 5


# --------------------------------------------------------------------------------------------------- asynchronous
@pytest.fixture
def no_leavings(world: World) -> Iterator[None]:
    """What a connection that was cut off by a cancellation leaves behind is this test's, not the next one's."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def stored(maker: async_sessionmaker[AsyncSession], args: JobArgs) -> int:
    """The id of a committed job."""
    async with maker.begin() as session:
        job = enqueue(session, args)
        await session.flush()
        return job.id


def backends(database: Database) -> int:
    """How many other connections do something."""
    return database.value(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend' AND state <> 'idle'"
    )


@in_async_worlds
async def test_a_wait_that_is_cancelled_in_a_pause_leaves_nothing(world, database):
    maker = world.maker()
    job_id = await stored(maker, Signup())
    ended = asyncio.Event()
    event.listen(world.engine, "checkin", lambda *_: ended.set())
    task = asyncio.create_task(wait_for(maker, job_id))
    await ended.wait()
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert (world.engine.pool.checkedout(), backends(database)) == (0, 0)
    assert database.job(job_id).state == "available"


@in_async_worlds
async def test_a_wait_that_is_cancelled_in_a_look_leaves_nothing(world, database, no_leavings):
    maker = world.maker()
    job_id = await stored(maker, Signup())
    blocker = database.another()
    blocker.execute("BEGIN")
    blocker.execute("LOCK TABLE jobs_hot IN ACCESS EXCLUSIVE MODE")
    task = asyncio.create_task(wait_for(maker, job_id))
    await asyncio.to_thread(database.wait_until_one_is_blocked)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    blocker.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert world.engine.pool.checkedout() == 0
    async with asyncio.timeout(PATIENCE):
        while backends(database):  # noqa: ASYNC110 - the server has been told, and rolls back
            await asyncio.sleep(0.005)
    finish(database, job_id)()
    assert await wait_for(maker, job_id) is True


@in_async_worlds
async def test_fifty_waits_share_one_connection(world, database):
    engine = create_async_engine(world.url, pool_size=1, max_overflow=0)
    try:
        maker = async_sessionmaker(engine)
        ids = [await stored(maker, Signup()) for _ in range(50)]
        waits = asyncio.gather(*(wait_for(maker, job_id, timeout=100 * SECOND) for job_id in ids))
        for job_id in reversed(ids):
            finish(database, job_id, str(job_id))()
            await asyncio.sleep(0)
        assert await waits == ids
    finally:
        await engine.dispose()


@in_async_worlds
async def test_the_clock_of_a_wait_starts_when_it_is_awaited(world, database):
    maker = world.maker()
    job_id = await stored(maker, Signup())
    later = wait_for(maker, job_id, timeout=timedelta(microseconds=1))
    finish(database, job_id)()
    assert await later is True
