"""What `docs/how-to/run-after-a-group.md` says of two that end together: as it stands there, between two workers."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import Job, JobRecord, QueueConfig
from tests.docs.test_examples import BLOCK, ROOT

PAGE = ROOT / "docs" / "how-to" / "run-after-a-group.md"
PATIENCE = 60
ROUNDS = 50


@pytest.fixture
def page(engine: Engine, db_url_str: str) -> Iterator[Any]:
    """The page's module, up to its first report."""
    page = sys.modules["docs_example"] = ModuleType("docs_example")
    vars(page).update(engine=engine, DATABASE_URL=db_url_str)
    match = BLOCK.search(PAGE.read_text("utf-8"))
    assert match is not None
    try:
        exec(
            compile(match[1].partition("\nwith SessionLocal.begin()")[0], str(PAGE), "exec", dont_inherit=True),
            vars(page),
        )
        yield page
    finally:
        del sys.modules["docs_example"]
        vars(page)["awa"].follow_ups._specs.clear()


def begun(page: Any, *groups: list[str]) -> list[int]:
    """Reports with these chapters; their ids."""
    with page.SessionLocal.begin() as session:
        return [page.begin_report(session, titles).id for titles in groups]


def published(page: Any) -> dict[int, int]:
    """How many jobs each report has that publish it."""
    report = JobRecord.args["report_id"].as_integer()
    with page.SessionLocal() as session:
        rows = select(report, func.count()).where(JobRecord.kind == "publish").group_by(report)
        return {row[0]: row[1] for row in session.execute(rows)}


def work(page: Any, **options: Any) -> None:
    """Two workers that run one job at a time, until no job is left."""
    page.awa.queues["default"] = QueueConfig(concurrency=1)
    live = select(func.count()).where(JobRecord.state.not_in(["completed", "failed", "cancelled"]))

    def are_left() -> int | None:
        with page.SessionLocal() as session:
            return session.scalar(live)

    async def main() -> None:
        one, two = (page.awa.worker(page.DATABASE_URL, **options) for _ in range(2))
        async with asyncio.timeout(PATIENCE), one, two:
            while await asyncio.to_thread(are_left):  # noqa: ASYNC110 - what is waited for happens in the database
                await asyncio.sleep(0.05)

    asyncio.run(main())


def together(page: Any) -> None:
    """Two chapters of one title are written at the same moment, by as many workers; if one fails, it is alone then."""
    meetings: dict[str, threading.Barrier] = defaultdict(lambda: threading.Barrier(2))
    came: dict[str, Iterator[int]] = defaultdict(count)

    def compose(title: str) -> str:
        if next(came[title]) < 2:
            meetings[title].wait(PATIENCE)
        return title

    page.compose = compose


def at_once(page: Any, name: str, error: str) -> None:
    """The function of the page fails each time that it is called for something new, after it has done its work."""
    failed: set[Any] = set()
    real: Callable[..., Any] = getattr(page, name)

    def wrapped(*arguments: Any) -> Any:
        found = real(*arguments)
        if arguments[-1] not in failed:
            failed.add(arguments[-1])
            raise ValueError(error)
        return found

    setattr(page, name, wrapped)


@pytest.mark.case(23)
@pytest.mark.beside
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_of_two_that_end_together_one_is_the_last(page: Any, engine: Engine, isolation: str) -> None:
    before = published(page)
    together(page)
    ids = begun(page, *([str(number)] * 2 for number in range(ROUNDS)))
    work(page, session_factory=sessionmaker(engine.execution_options(isolation_level=isolation)))
    assert published(page) == before | dict.fromkeys(ids, 1)
    if isolation == "REPEATABLE READ":  # PostgreSQL has refused the second of two, which then was tried again
        with page.SessionLocal() as session:
            again = select(func.count()).where(JobRecord.kind == "write_chapter", JobRecord.attempt > 1)
            assert session.scalar(again)


@pytest.mark.case(23)
@pytest.mark.parametrize("where", ["compose", "end"])
def test_one_that_fails_and_succeeds_then_counts_once(page: Any, where: str) -> None:
    """Also when it fails after it has counted."""
    before = published(page)
    at_once(page, where, "not yet")
    [report_id] = begun(page, ["Birds", "Bees"])
    work(page)
    assert published(page) == before | {report_id: 1}
    with page.SessionLocal() as session:
        chapters = session.scalars(select(Job).where(Job.kind == "write_chapter").order_by(Job.id.desc()).limit(2))
        assert [(job.state, job.attempt) for job in chapters] == [("completed", 2)] * 2


@pytest.mark.case(23)
def test_a_group_of_none_is_done_at_once(page: Any) -> None:
    [report_id] = begun(page, [])
    assert published(page)[report_id] == 1


@pytest.mark.case(23)
def test_one_that_ends_twice_counts_once(page: Any) -> None:
    """It has failed for good, was counted, and an operator has retried it."""
    [report_id] = begun(page, ["Ants", "Wasps"])

    def end(session: Session, title: str) -> None:
        page.end(session, session.scalar(select(page.Chapter.id).filter_by(report_id=report_id, title=title)))

    for title, times in (("Ants", 0), ("Ants", 0), ("Wasps", 1), ("Wasps", 1)):
        with page.SessionLocal.begin() as session:
            end(session, title)
        assert published(page).get(report_id, 0) == times
