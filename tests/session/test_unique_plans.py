"""The claims on unique keys find their rows by index, also on a connection that has known the tables empty."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from awa_sqla import cancel, claim, complete_many, enqueue, enqueue_many
from tests.session.test_unique import Report, holders
from tests.worlds import Database

BURST = 1000
SCANS = text("SELECT relname, seq_scan FROM pg_stat_xact_user_tables WHERE schemaname = 'awa' AND seq_scan > 20")


@pytest.mark.slow
def test_plans_from_when_the_tables_were_empty_do_no_harm(session: Session, database: Database) -> None:
    database.execute("VACUUM ANALYZE jobs_hot, scheduled_jobs, dlq_entries, job_unique_claims")
    session.connection()
    for day in range(10):  # by the sixth time, plans are kept
        job = enqueue(session, Report(day=-1 - day))
        session.flush()
        session.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
        session.execute(text("SET CONSTRAINTS ALL DEFERRED"))
        cancel(session, job, reason="made plans")
    assert None not in enqueue_many(session, [Report(day=day) for day in range(BURST)])
    session.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
    for day in range(BURST, BURST + 50):
        enqueue(session, Report(day=day))
        session.flush()
    assert set(enqueue_many(session, [Report(day=day) for day in range(BURST)], on_conflict="skip")) == {None}
    complete_many(session, claim(session, "default", limit=BURST + 50))
    assert session.execute(SCANS).all() == []
    session.commit()
    assert holders(database) == []
