"""Records that nobody needs any more: they go in batches, and what is in use stays."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from awa_sqla.maintenance import prune_records
from awa_sqla.maintenance.prune import Pruned
from awa_sqla.models import CallbackReceipt
from tests.worlds import Database, in_one_world


def records(database: Database, **age: timedelta) -> None:
    """A record of each kind for each age."""
    for name, old in age.items():
        database.execute(
            "INSERT INTO audit_log (at, source, verb, target) VALUES (clock_timestamp() - %s, 'cli', 'v', %s)",
            old,
            name,
        )
        database.execute(
            "INSERT INTO runtime_instances (id, role, hostname, pid, version, last_seen) "
            "VALUES (%s, 'worker', 'h', 1, '1', clock_timestamp() - %s)",
            name,
            old,
        )
        database.execute(
            "INSERT INTO callback_receipts (request, callback_id, action, created_at) "
            "VALUES (%s, gen_random_uuid(), 'complete', clock_timestamp() - %s)",
            name.encode(),
            old,
        )
        database.execute(
            "INSERT INTO follow_up_specs (kind, outcome, name, last_seen) "
            "VALUES ('k', 'completed', %s, clock_timestamp() - %s), ('k', 'failed', %s, clock_timestamp() - %s)",
            *(name, old, name, old),
        )
        database.execute(
            "INSERT INTO leaders (name, holder, expires_at) VALUES (%s, 'h', clock_timestamp() - %s)", name, old
        )


def test_records_go_when_nobody_needs_them(session: Session, database: Database) -> None:
    days = (0.95, 1.05, 29, 31, 89, 91)
    records(database, **{f"d{n}": timedelta(days=day) for n, day in enumerate(days)})
    database.execute(
        "INSERT INTO cron_jobs (name, cron_expr, last_seen, updated_at) VALUES ('c', '* * * * *', '2001-01-01', "
        "'2001-01-01')"
    )
    assert prune_records(session) == Pruned(
        audit_log=1, runtime_instances=5, callback_receipts=5, follow_up_specs=6, leaders=5
    )
    session.commit()
    for table, left_over in (
        ("audit_log", 5),
        ("runtime_instances", 1),
        ("callback_receipts", 1),
        ("follow_up_specs", 6),
        ("leaders", 1),
        ("cron_jobs", 1),
    ):
        assert database.value(f"SELECT count(*) FROM {table}") == left_over, table
    assert sum(prune_records(session)) == 0


@in_one_world
def test_records_go_in_batches_the_oldest_first_and_around_what_is_held(
    session: Session, other: Session, database: Database
) -> None:
    records(database, **{f"d{n}": timedelta(days=400 - n) for n in reversed(range(5))})
    other.execute(select(CallbackReceipt).where(CallbackReceipt.request == b"d0").with_for_update())
    assert prune_records(session, limit=2) == Pruned(2, 2, 2, 2, 2)
    session.commit()
    assert database.value("SELECT string_agg(target, ' ' ORDER BY target) FROM audit_log") == "d2 d3 d4"
    receipts = database.rows("SELECT request FROM callback_receipts ORDER BY 1")
    assert [bytes(row.request) for row in receipts] == [b"d0", b"d3", b"d4"]


@in_one_world
def test_a_process_that_is_heard_of_again_stays(session: Session, other: Session, database: Database) -> None:
    records(database, old=timedelta(days=2))
    other.execute(text("UPDATE awa.runtime_instances SET last_seen = clock_timestamp()"))
    assert prune_records(session).runtime_instances == 0
    other.commit()
    assert prune_records(session).runtime_instances == 0
