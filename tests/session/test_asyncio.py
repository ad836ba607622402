"""`awa_sqla.asyncio`: the same verbs, awaited, over every kind of AsyncSession."""

import asyncio
import inspect
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import awa_sqla
from awa_sqla import Attempt, CallbackToken, CompletedBatch, DefaultAction, Job, JobState, Unique, UnsupportedSession
from awa_sqla import asyncio as verbs
from tests.app import Signup, Welcome
from tests.session.steps import MINUTE
from tests.worlds import AsyncWorld, Database, in_async_worlds, in_one_world

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "cancel_callback": ((Attempt(1, 1),), {}),
    "complete_external": ((UUID(int=1),), {}),
    "fail_external": ((UUID(int=1), "no"), {}),
    "heartbeat_callback": ((UUID(int=1),), {"timeout": MINUTE}),
    "park": ((Attempt(1, 1), CallbackToken(UUID(int=1), datetime.now(UTC))), {}),
    "register_callback": ((Attempt(1, 1),), {}),
    "retry_external": ((UUID(int=1),), {}),
    "resume_external": ((UUID(int=1),), {}),
    "resolve_callback": ((UUID(int=1),), {"default": DefaultAction.IGNORE}),
    "cancel": ((1,), {"reason": "x"}),
    "claim": (("default",), {"limit": 1}),
    "complete": ((Attempt(1, 1),), {}),
    "complete_many": (([],), {}),
    "enqueue_many": (([],), {}),
    "enqueue_unique": ((Signup(),), {"unique": Unique()}),
    "fail": ((Attempt(1, 1), "no"), {}),
    "lineage": ((1,), {}),
    "retry_after": ((Attempt(1, 1), MINUTE), {}),
    "set_progress": ((Attempt(1, 1), 5), {}),
    "snooze": ((Attempt(1, 1), MINUTE), {}),
}


async def claimed(session: AsyncSession, **options: Any) -> Job:
    """A running job of a committed transaction."""
    awa_sqla.enqueue(session, Signup(), **options)
    await session.flush()
    [job] = await verbs.claim(session, options.get("queue", "default"), limit=1)
    await session.commit()
    return job


# ------------------------------------------------------------------------------------------------------ the names
def test_every_verb_has_its_twin() -> None:
    assert set(CALLS) | {"enqueue"} == set(verbs.__all__)
    assert verbs.enqueue is awa_sqla.enqueue


@pytest.mark.parametrize("name", CALLS)
def test_a_twin_takes_the_same_arguments(name: str) -> None:
    sync, twin = (inspect.signature(getattr(module, name)) for module in (awa_sqla, verbs))
    assert [(p.name, p.kind, p.default) for p in twin.parameters.values()] == [
        (p.name, p.kind, p.default) for p in sync.parameters.values()
    ]
    assert inspect.iscoroutinefunction(getattr(verbs, name))


# -------------------------------------------------------------------------------------------------------- the road
@in_async_worlds
async def test_every_verb_works_awaited(world: AsyncWorld, database: Database) -> None:
    session = world.maker(world.follow_ups, expire_on_commit=False)()
    done = await verbs.complete(session, await claimed(session), result=1)
    failed = await verbs.fail(session, await claimed(session, queue="b"), "no", terminal=True)
    retried = await verbs.retry_after(session, await claimed(session, queue="c"), MINUTE, error="busy")
    snoozed = await verbs.snooze(session, await claimed(session, queue="d"), MINUTE)
    cancelled = await verbs.cancel(session, await claimed(session, queue="e"), reason="enough")
    progressed = await verbs.set_progress(session, await claimed(session, queue="f"), 5, message="m")
    job = await claimed(session, queue="g")
    batch = await verbs.complete_many(session, [job])
    await session.commit()
    await session.close()
    assert batch == CompletedBatch([job.id], [])
    assert cancelled is not None
    assert [database.job(row.id).state for row in (done, failed, retried, snoozed, cancelled, progressed)] == [
        "completed",
        "failed",
        "retryable",
        "scheduled",
        "cancelled",
        "running",
    ]


@in_async_worlds
async def test_what_is_returned_needs_no_more_io(world: AsyncWorld) -> None:
    session = world.maker(world.follow_ups, expire_on_commit=False)()
    row = await verbs.complete(session, await claimed(session), result=1)
    assert (row.kind, row.state, row.result, row.meta) == ("signup", JobState.COMPLETED, 1, {})
    await session.commit()
    assert (row.kind, row.state, row.result, row.meta) == ("signup", JobState.COMPLETED, 1, {})
    await session.close()


@in_async_worlds
async def test_follow_ups_come_in_an_async_session(world: AsyncWorld, database: Database) -> None:
    world.follow_ups.on_completed(Signup, name="x")(lambda event: Welcome())
    async with world.maker(world.follow_ups)() as session:
        await verbs.complete(session, await claimed(session))
        await session.commit()
    assert database.kinds() == ["signup", "welcome"]


@in_async_worlds
async def test_a_stale_attempt_raises_and_the_session_goes_on(world: AsyncWorld, database: Database) -> None:
    async with world.maker(world.follow_ups, expire_on_commit=False)() as session:
        job = await claimed(session)
        database.move_on(job.id)
        with pytest.raises(awa_sqla.StaleJobError) as caught:
            await verbs.complete(session, job)
        assert (caught.value.job_id, caught.value.state) == (job.id, "running")
        awa_sqla.enqueue(session, Welcome())
        await session.commit()
    assert database.kinds() == ["signup", "welcome"]


@in_async_worlds
async def test_a_repr_and_an_attempt_need_no_io_after_a_rollback(world: AsyncWorld) -> None:
    async with world.maker(world.follow_ups)() as session:
        job = await claimed(session)
        await session.rollback()
        session.expire_all()
        assert repr(job) == f"<Job {Attempt.of(job).id}>"


@in_async_worlds
async def test_an_async_scoped_session_will_do(world: AsyncWorld, database: Database) -> None:
    scoped = async_scoped_session(world.maker(world.follow_ups), scopefunc=asyncio.current_task)
    awa_sqla.enqueue(scoped, Signup())
    await scoped.flush()
    [job] = await verbs.claim(scoped, "default", limit=1)
    await verbs.complete(scoped, job)
    await scoped.commit()
    await scoped.remove()
    assert [row.state for row in database.jobs()] == ["completed"]


@pytest.mark.case(32)
@in_async_worlds
async def test_a_session_per_task_keeps_the_tasks_apart(world: AsyncWorld, database: Database) -> None:
    maker = world.maker(world.follow_ups)

    async def one(n: int) -> None:
        async with maker.begin() as session:
            awa_sqla.enqueue(session, Signup(email=str(n)))
            await session.flush()
            if n == 3:
                raise ZeroDivisionError

    results = await asyncio.gather(*(one(n) for n in range(10)), return_exceptions=True)
    assert [type(result) for result in results if result] == [ZeroDivisionError]
    assert sorted(row.args["email"] for row in database.jobs()) == [str(n) for n in range(10) if n != 3]


@pytest.mark.case(32)
@in_async_worlds
async def test_one_session_shared_by_tasks_is_one_clear_error_or_none(world: AsyncWorld, database: Database) -> None:
    async with world.maker(world.follow_ups)() as session:

        async def one() -> None:
            awa_sqla.enqueue(session, Signup())
            await session.flush()

        results = await asyncio.gather(*(one() for _ in range(5)), return_exceptions=True)
        errors = [result for result in results if result is not None]
        if errors:
            assert all(isinstance(error, InvalidRequestError) for error in errors)
            await session.rollback()
        else:
            await session.commit()
    assert len(database.jobs()) == (0 if errors else 5)


# ---------------------------------------------------------------------------------------------- the wrong session
@pytest.mark.parametrize("name", CALLS)
def test_a_sync_session_is_sent_to_the_sync_verb(name: str) -> None:
    args, options = CALLS[name]
    for wrong in (Session(), scoped_session(sessionmaker())):
        with pytest.raises(UnsupportedSession, match=rf"use `awa_sqla\.{name}\(") as caught:
            asyncio.run(getattr(verbs, name)(wrong, *args, **options))
        assert type(wrong).__name__ in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_an_async_session_is_sent_to_the_awaited_verb(name: str) -> None:
    args, options = CALLS[name]
    for wrong in (AsyncSession(), async_scoped_session(async_sessionmaker(), scopefunc=lambda: 1)):
        with pytest.raises(UnsupportedSession, match=rf"use `await awa_sqla\.asyncio\.{name}\(") as caught:
            getattr(awa_sqla, name)(wrong, *args, **options)
        assert type(wrong).__name__ in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong", [None, "session", Session, AsyncSession, object()])
def test_what_is_no_session_is_refused_and_named(name: str, wrong: Any) -> None:
    args, options = CALLS[name]
    with pytest.raises(UnsupportedSession):
        getattr(awa_sqla, name)(wrong, *args, **options)
    with pytest.raises(UnsupportedSession):
        asyncio.run(getattr(verbs, name)(wrong, *args, **options))


@in_one_world
def test_a_scoped_session_will_do(world: Any, database: Database) -> None:
    scoped = scoped_session(world.maker(world.follow_ups))
    awa_sqla.enqueue(scoped, Signup())
    scoped.flush()
    [job] = awa_sqla.claim(scoped, "default", limit=1)
    awa_sqla.complete(scoped, job)
    scoped.commit()
    scoped.remove()
    assert [row.state for row in database.jobs()] == ["completed"]
