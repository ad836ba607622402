"""Every lane at 100,000 finished jobs: on its indexes, and no more rows than its budget, whatever stands around."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from awa_sqla.maintenance import prune_jobs
from benchmarks.upkeep_lanes import LANES, Lane, fill, looked_at
from tests.databases import libpq_url

pytestmark = pytest.mark.beside

FINISHED = 100_000


@pytest.fixture(scope="module", params=["no statistics", "statistics", "an old snapshot"])
def engine(request: pytest.FixtureRequest, postgres_server: Any, postgresql_noproc: Any) -> Iterator[Engine]:
    """A filled database; with an old snapshot, a tenth of the finished jobs is gone and cannot be vacuumed."""
    name = "awa_test_upkeep"
    with postgres_server.janitor(name, postgresql_noproc.template_dbname):
        url = postgres_server.url(name)
        engine = create_engine(url)
        with psycopg.connect(libpq_url(url), autocommit=True) as admin, psycopg.connect(libpq_url(url)) as old:
            admin.execute("ALTER TABLE awa.jobs_hot SET (autovacuum_enabled = false)")
            fill(admin, FINISHED)
            if request.param != "no statistics":
                admin.execute("VACUUM ANALYZE")
            if request.param == "an old snapshot":
                old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                old.execute("SELECT count(*) FROM awa.schema_version")
                deleted(engine, FINISHED // 10)
            yield engine
        engine.dispose()


def deleted(engine: Engine, rows: int) -> None:
    while rows > 0:
        with Session(engine) as session, session.begin():
            rows -= prune_jobs(session)


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_a_pass_stays_on_its_indexes_and_within_its_budget(engine: Engine, lane: Lane) -> None:
    look = looked_at(engine, lane)
    assert look.scanned == set()
    counted = look.done if lane.name == "count finished jobs" else 0
    assert look.rows <= lane.reads * lane.limit + lane.fixed + counted
    assert look.done or lane.limit == 1


@pytest.mark.parametrize("lane", [lane for lane in LANES if lane.limit > 1], ids=lambda lane: lane.name)
def test_a_smaller_pass_reads_less(engine: Engine, lane: Lane) -> None:
    """The budget is what bounds a pass, not how little there is to do."""
    few, many = looked_at(engine, lane, lane.limit // 10), looked_at(engine, lane)
    assert few.rows < many.rows / 2 or few.rows <= lane.fixed
