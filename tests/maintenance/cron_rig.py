"""Jobs and rows for the tests of periodic schedules."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import (
    Awa,
    Job,
    JobArgs,
    Unique,
)
from awa_sqla.maintenance.schedules import Stored, schedules, sync
from awa_sqla.models import CronSchedule

MINUTE = timedelta(minutes=1)


class Report(JobArgs):
    format: str = "pdf"


class Once(JobArgs, unique=Unique(), queue="once", priority=1, max_attempts=7, tags=("t",)):
    number: int = 0


class Tick(JobArgs):
    number: int


def a_report() -> Report:
    return Report()


def once() -> Once:
    return Once()


async def coroutine() -> JobArgs:
    return Report()


def write(maker: sessionmaker[Session], awa: Awa) -> None:
    with maker.begin() as session:
        assert sync(session, awa.schedules.values()) == frozenset()


def since(maker: sessionmaker[Session], name: str, ago: timedelta) -> None:
    """Let a schedule count from a while ago."""
    with maker.begin() as session:
        session.execute(
            update(CronSchedule)
            .where(CronSchedule.name == name)
            .values(counts_from=func.clock_timestamp() - ago, last_enqueued_at=None)
        )


def change(maker: sessionmaker[Session], name: str, **values: Any) -> None:
    with maker.begin() as session:
        session.execute(update(CronSchedule).where(CronSchedule.name == name).values(**values))


def row(maker: sessionmaker[Session], name: str) -> CronSchedule:
    with maker() as session:
        return session.get_one(CronSchedule, name)


def stored(maker: sessionmaker[Session], name: str) -> Stored:
    with maker() as session:
        return next(row for row in schedules(session)[1] if row.name == name)


def jobs(maker: sessionmaker[Session]) -> list[Job]:
    with maker() as session:
        return list(session.scalars(select(Job).order_by(Job.id)))


def times(maker: sessionmaker[Session]) -> list[str]:
    return [job.meta["cron_fire_time"] for job in jobs(maker)]
