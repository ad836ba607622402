"""Which session a caller means, and whether our promises can hold in it."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, Table, func, select, table, true, update
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from awa_sqla.errors import ConfigurationError, UnsupportedSession
from awa_sqla.models.base import SCHEMA, AwaBase, ViewBase
from awa_sqla.models.job import Job
from awa_sqla.models.wakeups import SWITCH
from awa_sqla.session.hints import explain_refusals

SyncSession = Session | scoped_session[Any]
AnyAsyncSession = AsyncSession | async_scoped_session[Any]


def sync_session(session: Any, verb: str) -> Session:
    """The `Session` behind a sync verb's first argument."""
    if isinstance(session, Session):
        return session
    if isinstance(session, scoped_session):
        return sync_session(_current(session), verb)
    if isinstance(session, AsyncSession | async_scoped_session):
        raise UnsupportedSession(
            f"{verb}() takes a Session; for {_named(session)} use `await awa_sqla.asyncio.{verb}(...)`"
        )
    raise UnsupportedSession(f"{verb}() takes a Session, a subclass of it or a scoped_session, not {_named(session)}")


def async_session(session: Any, verb: str) -> AsyncSession:
    """The `AsyncSession` behind an async verb's first argument."""
    if isinstance(session, AsyncSession):
        return session
    if isinstance(session, async_scoped_session):
        return async_session(_current(session), verb)
    if isinstance(session, Session | scoped_session):
        raise UnsupportedSession(
            f"awa_sqla.asyncio.{verb}() takes an AsyncSession; for {_named(session)} use `awa_sqla.{verb}(...)`"
        )
    raise UnsupportedSession(
        f"{verb}() takes an AsyncSession, a subclass of it or an async_scoped_session, not {_named(session)}"
    )


def any_session(session: Any, verb: str) -> Session:
    """The `Session` behind either kind, for functions that do no I/O."""
    if isinstance(session, AsyncSession | async_scoped_session):
        return async_session(session, verb).sync_session
    return sync_session(session, verb)


def _current(scoped: Any) -> object:
    return scoped()


def _named(thing: Any) -> str:
    if isinstance(thing, Engine | Connection):
        return f"{type(thing).__name__} (make a Session(bind=...) of it)"
    return f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__


def schema_of(session: Session) -> str:
    """The schema our tables have in this session's database."""
    return schema_in(jobs_bind(session))


#: Where jobs are written. The statement is for sessions whose `get_bind()` sends reads to a replica.
_JOBS: dict[str, Any] = {"mapper": Job.__mapper__, "clause": update(Job)}
#: A write to a table that nobody has named in `binds`.
_ANYTHING = update(table("anything"))
_OURS = (AwaBase.metadata, ViewBase.metadata)


def jobs_bind(session: Session) -> Engine | Connection:
    """The engine or connection to which this session sends what it writes to our tables."""
    return session.get_bind(**_JOBS)


def jobs_connection(session: Session) -> Connection:
    """The connection of this session's transaction on which our tables are written."""
    return session.connection(bind_arguments=_JOBS)


def _binds_of_other_rows(session: Session) -> list[Engine | Connection]:
    """Where this session sends the rows that are not ours: its default, or what `binds` names."""
    try:
        return [session.get_bind(clause=_ANYTHING)]
    except UnboundExecutionError:
        pass
    # Public since SQLAlchemy 2.1.
    named: dict[Any, Any] = getattr(session, "binds", None) or getattr(session, "_Session__binds", {})
    return [bind for key, bind in named.items() if not _is_ours(key)]


def _is_ours(key: object) -> bool:
    if isinstance(key, Table):
        return key.metadata in _OURS
    return isinstance(key, type) and issubclass(key, AwaBase)


def schema_in(bind: Engine | Connection) -> str:
    """The schema our tables have for this engine or connection: its `schema_translate_map` decides."""
    translated: dict[str | None, str | None] = bind.get_execution_options().get("schema_translate_map") or {}
    return translated.get(SCHEMA) or SCHEMA


def require_transaction(session: Session) -> None:
    """Refuse sessions in which transition and follow-up could not commit together.

    In AUTOCOMMIT mode every statement is durable at once; with a bind of their own, our tables would be in
    another transaction than the caller's rows.
    """
    bind, others = jobs_bind(session), _binds_of_other_rows(session)
    if others and not any(other is bind for other in others):
        raise ConfigurationError(
            f"this session sends the job tables to {bind!r} and its other rows to {others[0]!r}: two "
            "transactions, so nothing would commit together. Keep the jobs in the database of the rows they belong to"
        )
    connection = jobs_connection(session)
    explain_refusals(connection.engine)
    refuse_autocommit(connection)
    _refuse_foreign_savepoint(session, connection)
    if session.twophase:
        _silence(session)


def _refuse_foreign_savepoint(session: Session, connection: Connection) -> None:
    """Refuse a savepoint that was opened on the connection behind the session's back.

    Rolling it back would take rows away that the session believes flushed: a transition without its follow-up, or a
    follow-up without its transition.
    """
    boundary = session.get_nested_transaction() or session.get_transaction()
    known: dict[Any, Any] = getattr(boundary, "_connections", {})
    if connection in known:
        innermost = connection.get_nested_transaction() or connection.get_transaction()
        if innermost is not known[connection][1]:
            raise ConfigurationError(
                "a savepoint was opened on this session's connection behind its back (connection.begin_nested()): "
                "rolling it back would part transitions from their follow-ups. Use session.begin_nested()"
            )


def _silence(session: Session) -> None:
    """PostgreSQL refuses PREPARE TRANSACTION after a NOTIFY, so two-phase sessions send no wake-ups.

    Said once for each transaction: a savepoint inherits it, and its rollback takes back only what it said itself.
    """
    transaction = session.get_nested_transaction() or session.get_transaction()
    while transaction is not None:
        if transaction in _silent:
            return
        transaction = transaction.parent
    boundary = session.get_nested_transaction() or session.get_transaction()
    jobs_connection(session).execute(_SILENCE)
    if boundary is not None:
        _silent.add(boundary)


_silent: WeakSet[SessionTransaction] = WeakSet()
_SILENCE = select(func.set_config(SWITCH, "off", true()))


def refuse_autocommit(connection: Connection) -> None:
    """Refuse a connection on which every statement is durable at once."""
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise ConfigurationError(
            "this session's connection is in AUTOCOMMIT mode, where every statement is durable at once and "
            "nothing can be rolled back: use an engine (or connection) with a transactional isolation level"
        )
