"""`attach()`: which sessions a registry holds for, and what an unattached one is told."""

import gc
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from awa_sqla import (
    ConfigurationError,
    FollowUps,
    FollowUpsNotAttached,
    Job,
    cancel,
    claim,
    complete,
    complete_many,
    enqueue,
    fail,
    retry_after,
    set_progress,
    snooze,
)
from tests.app import Order, Signup, Welcome
from tests.session.steps import MINUTE, running
from tests.worlds import Database, SyncWorld, World, in_one_world


@pytest.fixture
def registry(world: World) -> FollowUps:
    """A registry with a spec, attached nowhere yet."""
    made = world.registry()
    made.on_completed(Signup, name="welcome")(lambda event: Welcome(email=event.args.email))
    return made


# ------------------------------------------------------------------------------------------------------- targets
def sync_targets(world: World) -> dict[str, tuple[Any, Any]]:
    """For each kind of target: (the target, what makes a session of it)."""
    engine = world.engine

    class Own(Session):
        pass

    maker, based = sessionmaker(engine), sessionmaker(engine, class_=Own)
    single = Session(engine)
    scoped = scoped_session(sessionmaker(engine))
    return {
        "sessionmaker": (maker, maker),
        "Session subclass": (Own, based),
        "Session": (single, lambda: single),
        "scoped_session": (scoped, scoped),
    }


def async_targets(world: Any) -> dict[str, tuple[Any, Any]]:
    engine = world.async_engine

    class Own(Session):
        pass

    class OwnAsync(AsyncSession):
        sync_session_class = Own

    plain, based = async_sessionmaker(engine), async_sessionmaker(engine, sync_session_class=Own)
    through = async_sessionmaker(engine, sync_session_class=sessionmaker(class_=Own))  # type: ignore[arg-type]
    classed = async_sessionmaker(engine, class_=OwnAsync)
    single = AsyncSession(engine)
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
    return {
        "async_sessionmaker": (plain, plain),
        "async_sessionmaker of an own class": (based, based),
        "async_sessionmaker over a sessionmaker": (through, through),
        "async_sessionmaker of an AsyncSession subclass": (classed, classed),
        "Session subclass": (Own, based),
        "AsyncSession": (single, lambda: single),
        "async_scoped_session": (scoped, scoped),
    }


@pytest.fixture
def targets(world: World) -> dict[str, tuple[Any, Any]]:
    return sync_targets(world) if isinstance(world, SyncWorld) else async_targets(world)


@pytest.mark.case(10)
def test_a_follow_up_comes_in_the_sessions_of_every_kind_of_target(
    world: World, registry: FollowUps, targets: dict[str, tuple[Any, Any]], database: Database
) -> None:
    for name, (target, make) in targets.items():
        registry.attach(target)
        session = world.from_maker(make)
        job = running(session, queue=name)
        complete(session, job)
        session.commit()
        assert [child.kind for child in database.children(job.id)] == ["welcome"], name
        registry.detach(target)
        session.close()


def test_attaching_twice_changes_nothing(
    world: World, registry: FollowUps, targets: dict[str, tuple[Any, Any]], database: Database
) -> None:
    for name, (target, make) in targets.items():
        registry.attach(target)
        registry.attach(target)
        session = world.from_maker(make)
        job = running(session, queue=name)
        complete(session, job)
        session.commit()
        assert len(database.children(job.id)) == 1, name
        registry.detach(target)
        with pytest.raises(FollowUpsNotAttached):
            complete(session, job)
        session.close()


@in_one_world
def test_a_class_and_a_maker_of_it_do_not_double_the_work(world: World, registry: FollowUps) -> None:
    class Own(Session):
        pass

    maker = sessionmaker(world.engine, class_=Own)
    single = world.from_maker(maker)
    for target in (Own, maker):
        registry.attach(target)
    enqueue(single, Signup(), delay=MINUTE)
    with world.counting() as sent:
        single.commit()
    clocks = [statement for statement in sent if statement.startswith("SELECT clock_timestamp")]
    assert len(clocks) == 1


@pytest.mark.parametrize(
    "wrong", [Session, AsyncSession, None, "SessionLocal", object(), scoped_session(lambda: None), Order, Job]
)
def test_what_is_no_target_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="attach"):
        FollowUps().attach(wrong)


@in_one_world
def test_a_second_registry_on_a_target_is_refused_and_told_of_include(
    world: World, registry: FollowUps, targets: dict[str, tuple[Any, Any]]
) -> None:
    for target, _ in targets.values():
        registry.attach(target)
        with pytest.raises(ConfigurationError, match=r"include\(other\)"):
            world.registry().attach(target)
        registry.detach(target)
        other = world.registry()
        other.attach(target)
        other.detach(target)


def test_detaching_what_was_never_attached_is_nothing(targets: dict[str, tuple[Any, Any]]) -> None:
    for target, _ in targets.values():
        FollowUps().detach(target)


def test_another_registrys_detach_changes_nothing(world: World, registry: FollowUps, database: Database) -> None:
    session = world.from_maker(world.maker(registry))
    FollowUps().detach(session)
    complete(session, running(session))
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_attached_holds_for_the_length_of_the_block(world: World, registry: FollowUps, database: Database) -> None:
    session = world.bare_session()
    with registry.attached(session) as entered:
        assert entered is registry
        complete(session, running(session))
        session.commit()
    assert database.kinds() == ["signup", "welcome"]
    with pytest.raises(FollowUpsNotAttached):
        cancel(session, 1, reason="x")


def test_the_registry_of_one_session_comes_before_that_of_its_class(
    world: World, registry: FollowUps, database: Database
) -> None:
    session = world.session()
    registry.attach(session)
    complete(session, running(session))
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


def test_an_empty_registry_on_one_session_silences_that_of_its_class(
    world: World, registry: FollowUps, database: Database
) -> None:
    session = world.from_maker(world.maker(registry))
    world.registry().attach(session)
    complete(session, running(session))
    session.commit()
    assert database.kinds() == ["signup"]


def test_sessions_of_another_maker_are_not_reached(
    world: World, registry: FollowUps, session: Session, database: Database
) -> None:
    registry.attach(world.maker())
    complete(session, running(session))
    session.commit()
    assert database.kinds() == ["signup"]


def test_a_spec_registered_after_the_attach_counts(session: Session, follow_ups: FollowUps, database: Database) -> None:
    job = running(session)
    follow_ups.on_completed(Signup, name="late")(lambda event: Welcome())
    complete(session, job)
    session.commit()
    assert database.kinds() == ["signup", "welcome"]


# -------------------------------------------------------------------------------------------------- not attached
TRANSITIONS = {
    "complete": complete,
    "fail": lambda session, job: fail(session, job, "no"),
    "retry_after": lambda session, job: retry_after(session, job, MINUTE),
    "cancel": lambda session, job: cancel(session, job.held_attempt.id, reason="x"),
    "complete_many": lambda session, job: complete_many(session, [job]),
}


@pytest.fixture
def unattached(world: World) -> Session:
    """A session without a registry, in a process that has follow-ups somewhere."""
    gc.collect()
    return world.bare_session()


@pytest.mark.case(10)
@pytest.mark.parametrize("verb", TRANSITIONS)
def test_a_transition_that_would_lose_its_follow_ups_is_refused_before_any_statement(
    world: World, registry: FollowUps, session: Session, unattached: Session, verb: str
) -> None:
    job = running(session)
    registry.attach(session)
    with world.counting() as sent, pytest.raises(FollowUpsNotAttached) as caught:
        TRANSITIONS[verb](unattached, job)
    assert caught.value.verb == verb
    assert sent == []


def test_verbs_without_an_outcome_need_no_registry(
    registry: FollowUps, session: Session, unattached: Session, database: Database
) -> None:
    registry.attach(session)
    enqueue(unattached, Signup())
    unattached.flush()
    [job] = claim(unattached, "default", limit=1)
    set_progress(unattached, job, 5)
    snooze(unattached, job, MINUTE)
    unattached.commit()
    assert [row.state for row in database.jobs()] == ["scheduled"]


def test_without_any_follow_ups_in_the_process_no_registry_is_needed(unattached: Session, database: Database) -> None:
    complete(unattached, running(unattached))
    unattached.commit()
    assert [row.state for row in database.jobs()] == ["completed"]


def test_a_registry_without_specs_says_none_here_on_purpose(
    registry: FollowUps, session: Session, other: Session, database: Database
) -> None:
    registry.attach(other)
    complete(session, running(session))
    session.commit()
    assert database.kinds() == ["signup"]


def test_a_registry_that_was_attached_nowhere_does_not_count(unattached: Session, database: Database) -> None:
    idle = FollowUps()
    idle.on_completed(Signup, name="x")(lambda event: Welcome())
    complete(unattached, running(unattached))
    unattached.commit()
    assert database.kinds() == ["signup"]


# --------------------------------------------------------------------------------------- first use inside an event
@pytest.mark.parametrize("name", ["before_flush", "after_flush"])
@pytest.mark.parametrize("act", ["enqueue", "complete"])
def test_a_session_that_first_meets_us_inside_its_flush_is_told_to_attach(
    world: World, database: Database, name: str, act: str
) -> None:
    job = running(world.session())
    session = world.bare_session()
    session.add(Order(note="x"))

    def first_use(session: Session, *_: Any) -> None:
        with world.counting() as sent, pytest.raises(ConfigurationError, match="attach"):
            enqueue(session, Signup()) if act == "enqueue" else complete(session, job)
        assert sent == []

    event.listen(session, name, first_use)
    session.commit()
    assert [row.state for row in database.jobs()] == ["running"]


def test_an_attached_session_may_be_used_first_inside_its_flush(
    world: World, session: Session, database: Database
) -> None:
    event.listen(session, "before_flush", lambda s, *_: enqueue(s, Signup(), delay=MINUTE))
    session.add(Order(note="x"))
    session.commit()
    assert database.kinds() == ["signup"]


@pytest.mark.parametrize("name", ["before_commit", "after_begin"])
def test_a_session_that_first_meets_us_inside_its_commit_is_told_to_attach(world: World, name: str) -> None:
    session = world.bare_session()
    session.add(Order(note="x"))
    told: list[str] = []

    def first_use(session: Session, *_: Any) -> None:
        with pytest.raises(ConfigurationError) as caught:
            enqueue(session, Signup())
        told.append(str(caught.value))

    event.listen(session, name, first_use)
    session.commit()
    assert "attach" in told[0]
