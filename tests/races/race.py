"""One race: two transactions on two connections, and the comparison with the reference.

The first transaction runs in the test's own thread (and its event loop, in an asynchronous world), the second in a
`Rival`'s.  Nothing here waits for time to pass: the second one is followed until PostgreSQL says that a lock holds it
up, or until it has finished.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from sqlalchemy import select
from sqlalchemy import text as sql
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from awa_sqla import Attempt, FollowUps
from awa_sqla.session.events import EVENTS
from tests.app import NotifyOps, Order, Signup
from tests.races.cells import Cell
from tests.races.matrix import RULES, Answer
from tests.races.queries import COMMITTED, HELD_UP
from tests.races.starts import STARTS, Job
from tests.races.verbs import RACERS, Scene, Told, new_token, told
from tests.worlds import PATIENCE, AsyncWorld, Database, World

T = TypeVar("T")

QUEUES = {False: "race", True: "race-kept"}


class Rival:
    """The second transaction's thread, with a way of its own to the database."""

    def __init__(self, world: World, **options: Any) -> None:
        self._world = world.twin() if isinstance(world, AsyncWorld) else world
        self._maker = self._world.maker(world.follow_ups, **options)
        self._pool = ThreadPoolExecutor(1, "rival")
        self._executed, self._go = threading.Event(), threading.Event()
        self._pid: int | None = None

    def do(self, act: Callable[[Session], Any]) -> Any:
        """Do something in a session of the rival's thread, committed when it returns."""
        return self.begin(act).result(PATIENCE)

    def begin(self, act: Callable[[Session], T]) -> Future[T]:
        """The same, without waiting for it."""
        return self._pool.submit(self._world.call, self._whole, act)

    def start(self, act: Callable[[Session], T], *, flushed: bool) -> Future[T]:
        """Run an operation; commit it when `let_go()` says so."""
        self._executed.clear()
        self._go.clear()
        self._pid = None
        return self._pool.submit(self._world.call, self._whole, lambda session: self._operate(session, act, flushed))

    def is_held_up(self, database: Database) -> bool:
        """Follow the operation until it has finished (False), or waits for another transaction's lock (True)."""
        deadline = time.monotonic() + PATIENCE
        while not self._executed.wait(0.004):  # most have finished by then, and need no look
            if self._pid and database.value(HELD_UP, self._pid):
                return True
            if time.monotonic() > deadline:
                raise TimeoutError("the second transaction neither ends nor waits for a lock")
        return False

    def finish(self) -> None:
        """Follow the operation until it has finished, whatever it waits for meanwhile."""
        if not self._executed.wait(PATIENCE):
            raise TimeoutError("the second transaction does not give up")

    def let_go(self) -> None:
        """Let the operation's transaction commit."""
        self._go.set()

    def close(self) -> None:
        """End the thread."""
        self._go.set()
        if isinstance(self._world, AsyncWorld):
            self._pool.submit(self._world.close).result(PATIENCE)
        self._pool.shutdown()

    def _whole(self, act: Callable[[Session], Any]) -> Any:
        session = opened(self._maker)
        try:
            found = act(session)
            session.commit()
        finally:
            session.close()
            self._executed.set()
        return found

    def _operate(self, session: Session, act: Callable[[Session], T], flushed: bool) -> T:
        self._pid = session.connection().scalar(sql("SELECT pg_backend_pid()"))
        answer = act(session)
        go_on_with(session, "second", flushed=flushed)
        self._executed.set()
        if not self._go.wait(PATIENCE):
            raise TimeoutError("the first transaction does not end")
        return answer


def opened(maker: Any) -> Session:
    """A session of any maker, by its synchronous face."""
    made = maker()
    return made.sync_session if isinstance(made, AsyncSession) else made


def go_on_with(session: Session, note: str, *, flushed: bool) -> None:
    """The caller's transaction is usable: it reads, and writes a row of the application's own."""
    assert session.connection().scalar(select(1)) == 1
    session.add(Order(note=note))
    if flushed:
        session.flush()


def follow_all(follow_ups: FollowUps) -> None:
    """Each of the six outcomes brings one child."""
    for outcome in EVENTS:
        on: Any = getattr(follow_ups, f"on_{outcome.value}")
        on(Signup, name=outcome.value)(lambda event: NotifyOps(job_id=event.job.id))


# ------------------------------------------------------------------------------------------------------ the stage
class Stage:
    """The database of the races: one job at a time."""

    def __init__(self, database: Database, follow_ups: FollowUps) -> None:
        self.database = database
        self.follow_ups = follow_ups
        database.keep_dead_letters(QUEUES[True])

    def clear(self) -> None:
        """No job, and nothing that a job leaves behind."""
        self.database.execute(
            "DELETE FROM jobs_hot; DELETE FROM scheduled_jobs; DELETE FROM dlq_entries; "
            "DELETE FROM follow_up_obligations; DELETE FROM job_unique_claims; DELETE FROM app_order"
        )

    def set(self, start: Job) -> Scene:
        """Nothing but one job, brought here by plain SQL, under a lease that the racers hold."""
        self.clear()
        queue = QUEUES[start.keeps_dead_letters]
        errors = [json.dumps({"error": e, "type": t, "attempt": a}) for e, t, a in start.errors]
        progress = {"percent": start.progress, "message": None, "metadata": {}}
        ended = "now()" if start.state in ("retryable", "completed") else "NULL"
        beats = start.attended or start.overdue
        beat = "now() - interval '1 hour'" if start.silent else "now()" if beats else "NULL"
        deadline = "now() - interval '1 hour'" if start.overdue else "NULL"
        before = self.database.value("SELECT nextval('run_lease_seq')") if start.lease else None
        token = new_token()
        callback = {"known": token.id, "other": uuid4(), None: None}[start.callback]
        wait = f"now() {'-' if start.expired else '+'} interval '1 hour'" if callback else "NULL"
        answer = json.dumps({"callback": str(token.id), "payload": 1}) if start.answer else None
        table = "scheduled_jobs" if start.store == "scheduled" else "jobs_hot"
        [(job_id, lease)] = self.database.rows(
            f"INSERT INTO {table} "
            "(kind, priority, queue, state, attempt, max_attempts, run_lease, run_at, heartbeat_at, finalized_at, "
            "deadline_at, errors, progress, callback_id, callback_timeout_at, attended_at, callback_answer) VALUES "
            f"('signup', {start.priority}, %s, %s, %s, %s, nextval('run_lease_seq'), now() - interval '1 hour', "
            f"{beat}, {ended}, {deadline}, %s::jsonb[], %s, %s, {wait}, {'now()' if start.attended else 'NULL'}, %s) "
            "RETURNING id, run_lease",
            queue,
            start.state,
            start.attempt,
            start.max_attempts,
            errors,
            None if start.progress is None else json.dumps(progress),
            callback,
            answer,
        )
        if start.aged:
            self.database.execute("UPDATE jobs_hot SET aged = %s", start.aged)
        for outcome in start.owed:
            self.database.execute(
                "INSERT INTO follow_up_obligations (job_id, kind, outcome, spec, snapshot) "
                "SELECT id, kind, %s, %s, to_jsonb(job) || jsonb_build_object('meta', metadata) "
                "FROM jobs_hot AS job WHERE id = %s",
                outcome,
                outcome,
                job_id,
            )
        return Scene(Attempt(job_id, before or lease), token, queue, start.store, self.follow_ups.specs)

    def violations(
        self, scene: Scene, end: Job, notes: list[str], lease: int | None = None, token: str | None = None
    ) -> list[str]:
        """Where the committed rows are not those of the reference; `lease` and `token` are those last handed out."""
        held = scene.held
        found = self.database.rows(COMMITTED, held.id)
        if len(found) != 1:
            return [f"the job is in {[row.stored_in for row in found]}"]
        [row] = found
        callback = row.callback_id and str(row.callback_id)
        named = {None: None, str(scene.token.id): "known"}
        answer = row.callback_answer or {"callback": None, "payload": 1}
        checks = {
            "state": (row.state, end.state),
            "store": (row.stored_in, end.store),
            "attempt": (row.attempt, end.attempt),
            "snoozes": (row.snoozes, end.snoozes),
            "errors": (tuple((e["error"], e["type"], e["attempt"]) for e in row.errors), end.errors),
            "progress": (row.progress and row.progress["percent"], end.progress),
            "result": (row.result, end.result),
            "silence": (row.silent, end.silent if end.has_worker else None),
            "priority": ((row.priority, row.aged), (end.priority, end.aged)),
            "lateness": (row.overdue, end.overdue),
            "attendance": (row.attended_at is not None, end.attended),
            "answer": (named.get(answer["callback"], "other"), end.answer),
            "payload": (answer["payload"], 1),
            "dead letter": (row.dlq_reason, end.reason),
            "a lease moved on": (row.run_lease > held.run_lease, end.lease > 0),
            "a lease moved back": (row.run_lease < held.run_lease, False),
            "lease": (row.run_lease, lease or row.run_lease),
            "callback": (named.get(callback, "other"), end.callback),
            "token": (callback, token if token and end.callback else callback),
            "lateness of the callback": (row.expired, end.expired if end.callback else None),
            "children": (Counter(row.children), Counter(end.children)),
            "obligations": (Counter(row.owed), Counter(end.owed)),
            "rows of the application": (Counter(row.orders), Counter(notes)),
        }
        return [f"{what} is {is_!r}, not {must!r}" for what, (is_, must) in checks.items() if is_ != must]


# ------------------------------------------------------------------------------------------------------- the race
class How(Protocol):
    """The part of a cell that says how the first transaction goes."""

    @property
    def end(self) -> str: ...
    @property
    def commits(self) -> bool: ...
    @property
    def flushed(self) -> bool: ...


def duel(
    maker: Any,
    rival: Rival,
    database: Database,
    how: How,
    first: Callable[[Session], T],
    second: Callable[[Session], T],
    *,
    gives_up: bool = False,
) -> tuple[T, T, bool]:
    """Run two operations in two transactions: what both got, and whether the second waited for the first to end.

    With `gives_up`, the first ends only when the second has finished, though it may have waited for a lock.
    """
    session = opened(maker)
    running: Future[T] | None = None
    try:
        savepoint = session.begin_nested() if "savepoint" in how.end else None
        one = first(session)
        go_on_with(session, "first", flushed=how.flushed)
        running = rival.start(second, flushed=how.flushed)
        if gives_up:
            rival.finish()
        waited = not gives_up and rival.is_held_up(database)
        (savepoint.rollback if savepoint else session.commit if how.commits else session.rollback)()
        rival.let_go()
        two = running.result(PATIENCE)
        go_on_with(session, "after", flushed=False)
        session.commit()
    finally:
        session.close()
        rival.let_go()
        if running is not None:
            running.exception(PATIENCE)
    return one, two, waited


def notes(how: How) -> list[str]:
    """The rows of the application that must be there after a duel."""
    return ["first", "second", "after"] if how.commits else ["second", "after"]


def race(maker: Any, rival: Rival, stage: Stage, cell: Cell) -> list[str]:
    """Run one cell; what was not as the reference says."""
    verdict, scene = cell.verdict, stage.set(STARTS[cell.start])
    first, second = (
        lambda session, name=name: told(lambda: RACERS[name](session, scene)) for name in (cell.first, cell.second)
    )
    try:
        one, two, waited = duel(maker, rival, stage.database, cell, first, second)
    except Exception as exc:
        return [f"{type(exc).__name__}: {exc}"]
    wrong = _answers(cell, scene, one, two)
    if waited != verdict.waits:
        wrong.append("the second waited for the lock" if waited else "the second did not wait for the lock")
    lease, token = _last_lease(cell, one, two), _last_token(cell, one, two)
    return wrong + stage.violations(scene, verdict.end, notes(cell), lease, token)


def _answers(cell: Cell, scene: Scene, one: Told, two: Told) -> list[str]:
    """Where somebody was not told what the reference says."""
    verdict, start = cell.verdict, STARTS[cell.start]
    wrong: list[str] = []
    for who, name, is_, must, met in (
        ("first", cell.first, one, verdict.first, start),
        ("second", cell.second, two, verdict.second, verdict.met),
    ):
        if is_.answer != must:
            wrong.append(f"the {who} got {is_.answer}, not {must}")
        elif is_.error is not None:
            named = (is_.error.job_id, is_.error.run_lease, is_.error.state)
            if named != (*scene.held, met.state if met.store == "hot" else None):
                wrong.append(f"the {who}'s error says {named}")
        elif must is Answer.UNKNOWN and is_.callback != str(scene.token.id):
            wrong.append(f"the {who}'s error says {is_.callback}")
        elif is_.state is not None and is_.state != (RULES[name].does(met) if must is Answer.WON else met).state:
            wrong.append(f"the {who} was handed a job that is {is_.state}")
    return wrong


def _last_lease(cell: Cell, one: Told, two: Told) -> int | None:
    """The lease of the row that was handed out last and is committed, if nobody has stolen it since."""
    if two.answer is Answer.WON and (cell.second == "thief" or two.lease is not None):
        return two.lease
    return one.lease if cell.commits else None


def _last_token(cell: Cell, one: Told, two: Told) -> str | None:
    """The token that was registered last and is committed, if nobody has replaced it since."""
    if two.answer is Answer.WON and cell.second in ("register", "thief"):
        return two.callback
    return one.callback if cell.commits and cell.first == "register" else None
