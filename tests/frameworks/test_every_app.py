"""One suite, told to every kind of session that applications use."""

from __future__ import annotations

from typing import Any

import pytest

from awa_sqla import FollowUpError, FollowUps, FollowUpsNotAttached, Hooks
from tests.app import Signup, Welcome
from tests.frameworks.apps import App
from tests.worlds import Database


@pytest.fixture
def attached(app: App, follow_ups: FollowUps, hooks: Hooks) -> App:
    """The application with follow-ups and hooks on its target."""
    follow_ups.attach(app.target)
    hooks.attach(app.target)
    return app


async def enqueued(app: App) -> None:
    """A committed job."""
    async with app.work() as session:
        await app.verb("enqueue", session, Signup())
        await app.commit(session)


async def completed(app: App, session: Any) -> Any:
    """The job claimed and completed, not yet committed."""
    [job] = await app.verb("claim", session, "default", limit=1)
    return await app.verb("complete", session, job, result="done")


async def test_a_job_commits_with_the_row_it_belongs_to(app: App, database: Database) -> None:
    async with app.work() as session:
        session.add(app.order(note="paid"))
        await app.verb("enqueue", session, Signup())
        await app.commit(session)
    assert database.value("SELECT note FROM app_order") == "paid"
    assert database.kinds() == ["signup"]


async def test_a_rolled_back_job_and_its_row_were_never_there(app: App, database: Database) -> None:
    async with app.work() as session:
        session.add(app.order(note="paid"))
        await app.verb("enqueue", session, Signup())
        await app.settle(session.flush())
        await app.rollback(session)
        await app.commit(session)
    assert database.rows("SELECT * FROM app_order") == []
    assert database.jobs() == []


async def test_work_that_ends_without_a_commit_leaves_nothing(app: App, database: Database) -> None:
    async with app.work() as session:
        session.add(app.order(note="paid"))
        await app.verb("enqueue", session, Signup())
        await app.settle(session.flush())
    assert database.rows("SELECT * FROM app_order") == []
    assert database.jobs() == []


async def test_a_completion_its_follow_up_and_its_row_are_one_commit(attached: App, database: Database) -> None:
    await enqueued(attached)
    async with attached.work() as session:
        session.add(attached.order(note="paid"))
        await completed(attached, session)
        assert [job.state for job in database.jobs()] == ["available"]
        await attached.commit(session)
    assert [(job.kind, job.state) for job in database.jobs()] == [("signup", "completed"), ("welcome", "available")]
    assert database.value("SELECT note FROM app_order") == "paid"


async def test_a_rolled_back_completion_leaves_neither_a_follow_up_nor_news_for_hooks(
    attached: App, database: Database, told: list[Any]
) -> None:
    await enqueued(attached)
    async with attached.work() as session:
        await completed(attached, session)
        await attached.settle(session.flush())
        await attached.rollback(session)
        await attached.commit(session)
    assert [(job.kind, job.state) for job in database.jobs()] == [("signup", "available")]
    assert told == []


async def test_hooks_are_told_once_after_the_commit(attached: App, told: list[Any]) -> None:
    await enqueued(attached)
    async with attached.work() as session:
        await completed(attached, session)
        await attached.settle(session.flush())
        assert told == []
        await attached.commit(session)
        await attached.commit(session)
    assert [event.result for event in told] == ["done"]


async def test_a_savepoint_confines_a_completion_and_its_follow_up(
    attached: App, database: Database, told: list[Any]
) -> None:
    await enqueued(attached)
    async with attached.work() as session:
        savepoint = await attached.settle(session.begin_nested())
        await completed(attached, session)
        await attached.settle(savepoint.rollback())
        await attached.commit(session)
    assert [(job.kind, job.state) for job in database.jobs()] == [("signup", "available")]
    assert told == []


async def test_a_spec_that_fails_stops_the_commit(attached: App, follow_ups: FollowUps, database: Database) -> None:
    @follow_ups.on_completed(Signup, name="broken")
    def broken(event: Any) -> Welcome:
        raise LookupError("no template")

    await enqueued(attached)
    async with attached.work() as session:
        session.add(attached.order(note="paid"))
        await completed(attached, session)
        with pytest.raises(FollowUpError, match="broken"):
            await attached.commit(session)
        await attached.rollback(session)
    assert [(job.kind, job.state) for job in database.jobs()] == [("signup", "available")]
    assert database.rows("SELECT * FROM app_order") == []


async def test_a_detached_application_is_told_that_its_follow_ups_are_missing(
    app: App, follow_ups: FollowUps, database: Database
) -> None:
    await enqueued(app)
    follow_ups.attach(app.target)
    follow_ups.detach(app.target)
    async with app.work() as session:
        [job] = await app.verb("claim", session, "default", limit=1)
        with pytest.raises(FollowUpsNotAttached):
            await app.verb("complete", session, job)
    assert database.kinds() == ["signup"]


async def test_follow_ups_are_attached_for_the_length_of_a_block(
    app: App, follow_ups: FollowUps, database: Database
) -> None:
    await enqueued(app)
    with follow_ups.attached(app.target):
        async with app.work() as session:
            await completed(app, session)
            await app.commit(session)
    assert database.kinds() == ["signup", "welcome"]
    async with app.work() as session:
        with pytest.raises(FollowUpsNotAttached):
            await app.verb("cancel", session, database.jobs()[1].id, reason="x")


async def test_a_job_is_cancelled_by_its_id(attached: App, database: Database) -> None:
    await enqueued(attached)
    async with attached.work() as session:
        await attached.verb("cancel", session, database.jobs()[0].id, reason="changed their mind")
        await attached.commit(session)
    assert [job.state for job in database.jobs()] == ["cancelled"]


async def test_the_tree_of_a_job_is_read_through_the_applications_session(attached: App, database: Database) -> None:
    await enqueued(attached)
    async with attached.work() as session:
        job = await completed(attached, session)
        await attached.settle(session.flush())
        records = await attached.verb("lineage", session, job)
        assert [(record.kind, record.stored_in) for record in records] == [("signup", "hot"), ("welcome", "hot")]
