"""Our session event listeners: where staged transitions become rows.

They sit on a session class (put there by `attach()`) or on one session (put there by the first verb or
`enqueue()`), never on `Session` itself. What each does:

* `before_flush` computes the follow-ups of everything staged and adds their rows, so that they go out in the
  same flush, and claims the keys of unique jobs; it comes first, so an app's own listeners see our rows in
  `session.new`;
* `before_commit` binds the arguments of late-bound jobs, then computes follow-ups when there was nothing to flush,
  adds again what was expunged, and looks at the outer transactions too: a savepoint may have been opened over
  something expunged, and still be open;
* `after_flush_postexec` lets settled transitions go, and takes up what a later listener staged;
* `after_commit` of a savepoint hands the rest to its parent;
* `do_orm_execute` refuses statements that would bypass all this.
"""

from __future__ import annotations

from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.orm import ORMExecuteState, Session

from awa_sqla.errors import ConfigurationError
from awa_sqla.session import drain, guards, happenings, late, ledger, rows, target, unique

_installed: WeakSet[type[Session] | Session] = WeakSet()


def installed(session: Session) -> bool:
    """Whether our listeners hear this session."""
    return session in _installed or any(cls in _installed for cls in type(session).__mro__)


def install(where: Session | type[Session], caller: str = "attach") -> None:
    """Put our listeners on a session or a session class, once.

    Raises `ConfigurationError` when a session first meets us inside an event of its own: its listeners could no
    longer hear that flush or commit.
    """
    if isinstance(where, Session):
        if installed(where):
            return
        if ledger.in_event(where):
            raise ConfigurationError(
                f"{caller}() was called inside a flush or commit of a session that awa_sqla does not know yet: call "
                "follow_ups.attach(your_sessionmaker) once at start, before any session is used"
            )
    elif any(cls in _installed for cls in where.__mro__):
        return
    event.listen(where, "before_flush", _before_flush, insert=True)
    event.listen(where, "before_commit", _before_commit)
    event.listen(where, "after_flush", _sql_sent, insert=True)
    event.listen(where, "after_flush_postexec", _after_flush)
    event.listen(where, "after_commit", _after_commit)
    event.listen(where, "do_orm_execute", _before_statement, insert=True)
    _installed.add(where)


def _refuse_while_sending(session: Session) -> None:
    if ledger.is_sending(session):
        raise ConfigurationError(
            "the iterable of enqueue_many() must not write through the same session: add your rows before the call, or "
            "pass a list"
        )


def _before_statement(state: ORMExecuteState) -> None:
    if not state.is_select and not state.execution_options.get(guards.MANAGED):
        _refuse_while_sending(state.session)
    guards.refuse_statements(state)


def _before_flush(session: Session, flush_context: object, instances: object) -> None:  # noqa: ARG001
    _refuse_while_sending(session)
    ledger.flush_begins(session)
    drain.drain(session)
    guards.refuse_writes(session)
    if guards.holds_ours(session):
        target.require_transaction(session)
        rows.set_due_times(session)
        unique.settle_flush(session)


def _before_commit(session: Session) -> None:
    _refuse_while_sending(session)
    late.bind_all(session)
    drain.drain(session, outer=True)


def _sql_sent(session: Session, flush_context: object) -> None:  # noqa: ARG001
    ledger.sql_is_sent(session)


def _after_flush(session: Session, flush_context: object) -> None:  # noqa: ARG001
    ledger.flush_is_over(session)
    found = ledger.current(session)
    if found is not None:
        done = {entry for entry in found.staged if ledger.settled(session, entry)}
        for entry in done:
            rows.expire_record(session, entry.snapshot.id)
        found.staged[:] = [entry for entry in found.staged if entry not in done]
        drain.drain(session)


def _after_commit(session: Session) -> None:
    ledger.hand_over(session)
    happenings.committed(session)


def pending(session: Session) -> bool:
    """Whether unflushed rows or staged transitions of ours are in this session."""
    found = ledger.current(session)
    return guards.holds_ours(session) or (found is not None and bool(found.staged))
