"""The floor for anything built on SQLAlchemy: a mapped job added to a session; many jobs and the claim loop in Core.

`AppOnly` is the same session with the app's row alone: what the user pays without any queue.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import (
    ARRAY,
    BigInteger,
    Identity,
    Index,
    SmallInteger,
    Text,
    bindparam,
    func,
    insert,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column

from benchmarks.adapters.app import Base, User, connected, engine
from benchmarks.adapters.common import Adapter, Handler, Payload, Send, SendMany, setting, told_to_stop


class Job(Base):
    """The narrowest mapped job."""

    __tablename__ = "jobs"
    __table_args__ = (Index("jobs_ready", "id", postgresql_where=text("state = 0")),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    state: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    kind: Mapped[str] = mapped_column(Text)
    args: Mapped[dict[str, Any]] = mapped_column(JSONB)
    attempted_at: Mapped[datetime | None]
    done_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


NOTIFY = select(func.pg_notify("jobs", ""))
BATCH = setting("BENCH_BATCH", 500)

_ready = (
    select(Job.id).where(text("state = 0")).order_by(Job.id).limit(BATCH).with_for_update(skip_locked=True).cte("ready")
)
_table: Any = Job.__table__
# One statement over one array: faster than a list of rows, through the mapper or in Core.
ADD_MANY = insert(_table).from_select(
    ["kind", "args"],
    select(literal("send_email"), func.unnest(bindparam("args", type_=ARRAY(Text))).cast(JSONB)),
)
CLAIM = (
    update(_table)
    .values(state=1, attempted_at=func.now())
    .where(_table.c.id == _ready.c.id)
    .returning(_table.c.id, _table.c.args)
)
COMPLETE = (
    update(_table)
    .values(state=2, done_at=func.now())
    .where(_table.c.id == func.any(bindparam("ids", type_=ARRAY(BigInteger))))
)


class SQLAlchemyFloor(Adapter):
    """Session.add and a flush, many in one Core statement; one connection, batches of 500."""

    distributions = ("sqlalchemy", "psycopg")
    preload = ("sqlalchemy.orm", "psycopg")
    remaining = "SELECT count(*) FROM jobs WHERE state IN (0, 1)"
    kept = "SELECT count(*) FROM jobs WHERE state = 2"

    def setup(self, dsn: str) -> None:
        Base.metadata.create_all(engine(dsn))

    @contextmanager
    def enqueue_one(self, dsn: str) -> Iterator[Send]:
        own = engine(dsn)

        def send(item: Payload) -> None:
            with Session(own) as session, session.begin():
                session.add(Job(kind="send_email", args=item))
                session.flush()
                session.execute(NOTIFY)

        yield send
        own.dispose()

    @contextmanager
    def enqueue_many(self, dsn: str) -> Iterator[SendMany]:
        own = connected(dsn)

        def send(items: list[Payload]) -> None:
            with Session(own) as session, session.begin():
                session.execute(ADD_MANY, {"args": [json.dumps(item) for item in items]})
                session.execute(NOTIFY)

        yield send
        own.dispose()

    @contextmanager
    def enqueue_in_session(self, dsn: str) -> Iterator[Send]:
        own = engine(dsn)

        def send(item: Payload) -> None:
            with Session(own) as session, session.begin():
                session.add_all([User(email=item["email"]), Job(kind="send_email", args=item)])
                session.flush()
                session.execute(NOTIFY)

        yield send
        own.dispose()

    def drain(self, dsn: str, handler: Handler) -> None:
        told = told_to_stop()
        own = engine(dsn).execution_options(isolation_level="AUTOCOMMIT")
        with own.connect() as work, psycopg.connect(dsn, autocommit=True) as listener:
            listener.execute("LISTEN jobs")
            while not told:
                rows = work.execute(CLAIM).all()
                if not rows:
                    list(listener.notifies(timeout=0.5, stop_after=1))
                    continue
                for _, args in rows:
                    handler(args["user_id"])
                work.execute(COMPLETE, {"ids": [row[0] for row in rows]})


class AppOnly(Adapter):
    """No queue at all."""

    distributions = ("sqlalchemy",)

    @contextmanager
    def enqueue_in_session(self, dsn: str) -> Iterator[Send]:
        own = engine(dsn)

        def send(item: Payload) -> None:
            with Session(own) as session, session.begin():
                session.add(User(email=item["email"]))

        yield send
        own.dispose()
