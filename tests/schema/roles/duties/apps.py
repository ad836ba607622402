"""What applications do in transactions of their own: a producer, an ingress, and somebody who only looks."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import (
    CallbackPolicy,
    CallbackToken,
    DefaultAction,
    EnqueueRequest,
    Job,
    JobArgs,
    JobRecord,
    JobState,
    ScheduledJob,
    Unique,
    UniqueConflict,
    admin,
    cancel,
    claim,
    complete,
    complete_external,
    enqueue,
    enqueue_many,
    fail_external,
    heartbeat_callback,
    park,
    register_callback,
    resolve_callback,
    resume_external,
    retry_external,
    wait_for,
)
from awa_sqla.models import CronSchedule, metadata
from awa_sqla.models.base import ViewBase
from awa_sqla.web.callbacks import router
from tests.schema.roles.duties.given import (
    HOUR,
    Buried,
    Keyed,
    Plain,
    bury,
    follow_ups,
    given,
    owed,
)
from tests.schema.roles.least import Place


def enqueues(place: Place, role: str, driver: str = "psycopg") -> None:
    """One by one: now and later, with arguments that are bound late, unique ones and their duplicates."""

    def work(session: Session) -> None:
        enqueue(session, Plain())
        enqueue(session, Plain(), delay=HOUR, priority=1, tags=["t"], metadata={"m": 1})
        enqueue(session, lambda: Plain(number=1))
        first = enqueue(session, Keyed())
        session.flush()
        twin = enqueue(session, Keyed(), on_conflict="skip")
        session.flush()
        assert twin.duplicate_of == first.id
        enqueue(session, Keyed())
        with pytest.raises(UniqueConflict):
            session.flush()
        enqueue(session, Keyed(number=1), delay=HOUR)

    place.run(role, work, driver)
    assert place.sql("SELECT count(*), count(unique_key) FROM {awa}.jobs") == [(5, 2)]


def enqueues_many(place: Place, role: str, driver: str = "psycopg") -> None:
    """By COPY: few that are unique, and so many that a savepoint is worth it."""

    def work(session: Session) -> None:
        few = enqueue_many(session, [Keyed(number=n // 2) for n in range(4)], on_conflict="skip")
        assert [job_id is None for job_id in few] == [False, True, False, True]
        request = EnqueueRequest(Plain(), delay=HOUR)
        assert len(enqueue_many(session, [*(Plain(number=n) for n in range(1000)), request])) == 1001

    place.run(role, work, driver)
    assert place.sql("SELECT count(*) FROM {awa}.jobs") == [(1003,)]


def cancels(place: Place, role: str, driver: str = "psycopg") -> None:
    """Jobs that wait, run and are scheduled; unique ones give their keys back, and follow-ups are owed."""
    owed(place, "cancelled")
    plain, keyed = given(place, Plain(), Keyed())
    plain_later, keyed_later = given(
        place, EnqueueRequest(Plain(), delay=HOUR), EnqueueRequest(Keyed(number=1), delay=HOUR)
    )
    place.run("owner", lambda session: claim(session, "default", limit=1))

    def work(session: Session) -> None:
        for job_id in (plain, keyed, plain_later, keyed_later):
            assert cancel(session, job_id, reason="no more") is not None
            session.flush()

    place.run(role, work, driver)
    assert place.sql("SELECT count(*) FROM {awa}.jobs WHERE state = 'cancelled'") == [(4,)]
    assert place.sql("SELECT count(*) FROM {awa}.job_unique_claims") == [(0,)]
    assert place.sql("SELECT job_id FROM {awa}.follow_up_obligations ORDER BY 1") == [(plain,), (plain_later,)]


def reads(place: Place, role: str) -> None:
    """Jobs wherever they are, and the result of one that has ended."""
    (ended,) = given(place, Plain())
    (later,) = given(place, EnqueueRequest(Plain(), delay=HOUR))
    place.run("owner", lambda session: complete(session, claim(session, "default", limit=1)[0], result={"a": 1}))

    def work(session: Session) -> None:
        assert session.get_one(Job, ended).result == {"a": 1}
        assert session.get_one(ScheduledJob, later).kind == "plain"
        assert len(session.scalars(select(JobRecord)).all()) == 2

    place.run(role, work)
    assert wait_for(sessionmaker(place.engine(role)), ended) == {"a": 1}


# ---------------------------------------------------------------------------------------------------- callback
def parked(place: Place, *jobs: JobArgs | EnqueueRequest, policy: CallbackPolicy | None = None) -> list[CallbackToken]:
    """The tokens of jobs that wait for their callbacks."""
    given(place, *jobs)

    def work(session: Session) -> list[CallbackToken]:
        tokens = []
        for job in claim(session, "default", limit=9) + claim(session, "buried", limit=9):
            tokens.append(register_callback(session, job, timeout=HOUR, policy=policy))
            park(session, job, tokens[-1])
        return tokens

    found: list[CallbackToken] = place.run("owner", work)
    return found


def resolves(place: Place, role: str, driver: str = "psycopg") -> None:
    """Every answer that there is, in the app's own transaction, also of unique jobs and dead letters."""
    bury(place)
    owed(place, "completed", "keyed")
    grave = EnqueueRequest(Buried(), unique=Unique())
    back = EnqueueRequest(Plain(number=5), unique=Unique(states=[JobState.AVAILABLE]))
    tokens = parked(place, *(Plain(number=n) for n in range(3)), Keyed(), back, grave)
    (decided,) = parked(place, Plain(number=6), policy=CallbackPolicy(on_complete="payload.ok"))

    def work(session: Session) -> None:
        complete_external(session, tokens[0].id, {"a": 1})
        fail_external(session, tokens[1].id, "no")
        heartbeat_callback(session, tokens[2].id, timeout=HOUR)
        retry_external(session, tokens[2].id)
        complete_external(session, tokens[3].id)
        retry_external(session, tokens[4].id)
        fail_external(session, tokens[5].id, "no")
        resolve_callback(session, decided.id, {"ok": True}, default=DefaultAction.FAIL)

    place.run(role, work, driver, follow_ups())
    assert place.sql("SELECT state, count(*) FROM {awa}.jobs GROUP BY 1 ORDER BY 1") == [
        ("available", 4),
        ("completed", 3),
        ("failed", 2),
        ("scheduled", 2),
    ]
    assert place.sql("SELECT dlq_reason FROM {awa}.dlq_entries") == [("callback_failed",)]


def resumes(place: Place, role: str) -> None:
    """The answer for a handler that waits."""
    given(place, Plain())

    def waits(session: Session) -> CallbackToken:
        (job,) = claim(session, "default", limit=1)
        return register_callback(session, job, timeout=HOUR)

    token = place.run("owner", waits)
    place.run(role, lambda session: resume_external(session, token.id, {"a": 1}))
    assert place.sql("SELECT callback_answer->'payload' FROM {awa}.jobs_hot") == [({"a": 1},)]


def receives(place: Place, role: str, driver: str = "psycopg") -> None:
    """The ingress: a callback, the same once more, and an old receipt that it sweeps."""
    (token,) = parked(place, Plain())
    place.sql("INSERT INTO {awa}.callback_receipts VALUES ('', gen_random_uuid(), 'fail', '{}', '2001-01-01')")
    registry = follow_ups()
    mode, _, name = driver.rpartition(" ")

    async def send() -> list[int]:
        made: Any = (
            async_sessionmaker(place.async_engine(role, name), class_=AsyncSession)
            if mode
            else sessionmaker(place.engine(role, name))
        )
        registry.attach(made)
        transport = httpx.ASGITransport(router(made, allow_unsigned=True))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            answers = [await client.post(f"/{token.id}/complete", json={"payload": 1}) for _ in range(2)]
        return [answer.status_code for answer in answers]

    assert asyncio.run(send()) == [200, 200]
    assert place.sql("SELECT count(*) FROM {awa}.callback_receipts") == [(1,)]
    assert place.sql("SELECT count(*) FROM {awa}.jobs WHERE kind = 'note'") == [(1,)]


# ------------------------------------------------------------------------------------------------------ viewer
def looks(place: Place, role: str, driver: str = "psycopg") -> None:
    """Every table and view."""

    def work(session: Session) -> None:
        for found in (metadata, ViewBase.metadata):
            for table in found.tables.values():
                session.execute(select(table)).all()
        session.scalars(select(JobRecord)).all()
        assert [schedule.name for schedule in admin.list_schedules(session)] == ["each"]

    place.run("owner", lambda session: session.add(CronSchedule(name="each", cron_expr="* * * * *")))
    place.run(role, work, driver)
