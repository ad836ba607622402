"""`awa-sqla worker --schema`: a worker of our tables in a schema of another name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import URL, NullPool, create_engine, text
from sqlalchemy.orm import Session

from awa_sqla import JobArgs, enqueue
from awa_sqla.schema import create_all

APP = """
from sqlalchemy import text

from awa_sqla import Awa, JobArgs, JobContext


class Bill(JobArgs):
    how: str


awa = Awa()


@awa.task(Bill, transactional=True)
def bill(ctx: JobContext[Bill]) -> None:
    ctx.session.execute(text("INSERT INTO bills (job) VALUES (:job)"), {"job": ctx.job.id})
"""


class Bill(JobArgs):
    how: str


@pytest.mark.beside
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_worker_serves_another_schema(tmp_path: Path, empty_db_url: URL, driver: str) -> None:
    (tmp_path / "bills.py").write_text(APP)
    options = {"schema_translate_map": {"awa": "billing"}}
    engine = create_engine(empty_db_url, poolclass=NullPool, execution_options=options)
    with engine.begin() as connection:
        create_all(connection, "billing")
        connection.execute(text("CREATE TABLE bills (job bigint)"))
    with Session(engine) as session, session.begin():
        for _ in range(30):
            enqueue(session, Bill(how="now"))
    url = empty_db_url.set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
    process = subprocess.Popen(
        [sys.executable, "-m", "awa_sqla", "-d", url, "-A", "bills:awa", "worker", "--schema", "billing"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        with engine.connect() as connection:
            while connection.scalar(text("SELECT count(*) FROM bills")) != 30:
                connection.rollback()
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    finally:
        process.kill()
        process.communicate()
