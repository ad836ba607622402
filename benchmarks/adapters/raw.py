"""The floor: psycopg by hand on one narrow table with one partial index. No library can be faster than this."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.adapters.common import Adapter, Handler, Payload, Send, SendMany, setting, told_to_stop

TABLE = """
CREATE TABLE jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    state smallint NOT NULL DEFAULT 0,  -- 0 ready, 1 running, 2 done
    kind text NOT NULL,
    args jsonb NOT NULL,
    attempted_at timestamptz,
    done_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX jobs_ready ON jobs (id) WHERE state = 0;
"""
# One round trip for the row and the wake-up.
ENQUEUE = """
WITH added AS (INSERT INTO jobs (kind, args) VALUES ('send_email', %s)) SELECT pg_notify('jobs', '')
"""
CLAIM = """
WITH ready AS (SELECT id FROM jobs WHERE state = 0 ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)
UPDATE jobs SET state = 1, attempted_at = now() FROM ready WHERE jobs.id = ready.id RETURNING jobs.id, jobs.args
"""
COMPLETE = "UPDATE jobs SET state = 2, done_at = now() WHERE id = ANY(%s)"
BATCH = setting("BENCH_BATCH", 500)


class Raw(Adapter):
    """One sync connection, batches of 500, two commits for each."""

    distributions = ("psycopg",)
    preload = ("psycopg",)
    remaining = "SELECT count(*) FROM jobs WHERE state IN (0, 1)"
    kept = "SELECT count(*) FROM jobs WHERE state = 2"

    def setup(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(TABLE)

    @contextmanager
    def enqueue_one(self, dsn: str) -> Iterator[Send]:
        with psycopg.connect(dsn, autocommit=True) as connection:
            yield lambda item: connection.execute(ENQUEUE, (json.dumps(item),), prepare=True)

    @contextmanager
    def enqueue_many(self, dsn: str) -> Iterator[SendMany]:
        def send(items: list[Payload]) -> None:
            with connection.transaction(), connection.cursor() as cursor:
                with cursor.copy("COPY jobs (kind, args) FROM STDIN") as copy:
                    for item in items:
                        copy.write_row(("send_email", json.dumps(item)))
                cursor.execute("NOTIFY jobs")

        with psycopg.connect(dsn, autocommit=True) as connection:
            yield send

    @contextmanager
    def enqueue_in_session(self, dsn: str) -> Iterator[Send]:
        from sqlalchemy import text
        from sqlalchemy.orm import Session

        from benchmarks.adapters.app import User, engine

        own = engine(dsn)
        statement = text(ENQUEUE.replace("%s", "CAST(:args AS jsonb)"))

        def send(item: Payload) -> None:
            with Session(own) as session, session.begin():
                session.add(User(email=item["email"]))
                session.flush()
                session.execute(statement, {"args": json.dumps(item)})

        yield send
        own.dispose()

    def drain(self, dsn: str, handler: Handler) -> None:
        told = told_to_stop()
        with psycopg.connect(dsn, autocommit=True) as work, psycopg.connect(dsn, autocommit=True) as listener:
            listener.execute("LISTEN jobs")
            while not told:
                rows = work.execute(CLAIM, (BATCH,), prepare=True).fetchall()
                if not rows:
                    list(listener.notifies(timeout=0.5, stop_after=1))
                    continue
                for _, args in rows:
                    handler(args["user_id"])
                work.execute(COMPLETE, ([row[0] for row in rows],), prepare=True)
