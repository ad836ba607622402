"""Watching the work from outside: how far it is, when it is over, and whom to kill in the middle."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from awa_sqla import Job, JobArgs, JobRecord, JobState
from awa_sqla.demo.approver import application_name
from awa_sqla.demo.jobs import HashFile
from awa_sqla.demo.processes import Process, Processes
from awa_sqla.models import Obligation, RuntimeInstance

#: Seconds between two looks, and without any change until we give up waiting.
PAUSE, STALLED = 0.2, 60.0

#: A worker, and the approver, are killed when this part of all files is hashed.
KILLS = (0.0, 0.3, 0.6)

#: What the connection of a process does now.
_DOES = text("SELECT state FROM pg_stat_activity WHERE datname = current_database() AND application_name = :name")

LIVE = (JobState.SCHEDULED, JobState.AVAILABLE, JobState.RUNNING, JobState.RETRYABLE, JobState.WAITING_EXTERNAL)


@dataclass(frozen=True, slots=True)
class Counts:
    """How the queue stands at one moment: jobs by kind and state, and follow-ups still owed."""

    jobs: Mapping[tuple[str, JobState], int]
    owed: int

    @classmethod
    def read(cls, engine: Engine) -> Counts:
        """Both in one snapshot: a follow-up that is owed now is a job a moment later."""
        with Session(engine) as session:
            session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            rows = session.execute(
                select(JobRecord.kind, JobRecord.state, func.count()).group_by(JobRecord.kind, JobRecord.state)
            )
            jobs = {(kind, state): count for kind, state, count in rows}
            owed = session.scalar(select(func.count()).where(Obligation.next_attempt_at.is_not(None)))
        return cls(jobs, owed or 0)

    def of(self, kind: type[JobArgs]) -> tuple[int, int]:
        """(jobs that have ended, all jobs) of one kind."""
        name = kind.__awa__.kind
        every = [(state, count) for (found, state), count in self.jobs.items() if found == name]
        return sum(count for state, count in every if state not in LIVE), sum(count for _, count in every)

    @property
    def live(self) -> int:
        """Jobs that have not ended."""
        return sum(count for (_, state), count in self.jobs.items() if state in LIVE)

    @property
    def ended(self) -> int:
        """Jobs that have."""
        return sum(self.jobs.values()) - self.live


class Shown(Protocol):
    """What a progress display must be able to show."""

    def show(self, counts: Counts, files: int) -> None: ...


class Watch:
    """Looks every now and then, shows what it sees, and kills when it is time to."""

    def __init__(self, engine: Engine, processes: Processes, shown: Shown, *, files: int, kill: bool) -> None:
        self._engine = engine
        self._processes = processes
        self._shown = shown
        self._files = files
        self._kills = [part * files for part in KILLS] if kill else []
        self._approver_kills = list(self._kills)
        self._next_look = 0.0
        self.counts = Counts({}, 0)

    def look(self) -> None:
        """Look, unless it is too soon. Raises `ProcessDiedError`."""
        if self._is_time(self._approver_kills):  # its transactions are short: look for one at every turn
            self._kill_approver()
        if time.monotonic() < self._next_look:
            return
        self._processes.check()
        begun = time.monotonic()
        self.counts = Counts.read(self._engine)
        self._shown.show(self.counts, self._files)
        # Looking takes longer the more jobs there are: a tenth of the time for it, more while the moment matters.
        took = time.monotonic() - begun
        self._next_look = time.monotonic() + (4 * took if self._kills else max(PAUSE, 10 * took))
        if self._is_time(self._kills):
            self._kill_worker()

    def until_done(self) -> None:
        """Until no job is live and nothing is owed, or nothing moves any more: the checks will tell which."""
        self._next_look = 0.0  # the last look may be older than the last jobs
        changed, before = time.monotonic(), self.counts
        while True:
            self.look()
            if not self.counts.live and not self.counts.owed and self._all_up():
                return
            running = any(state is JobState.RUNNING for _, state in self.counts.jobs)
            if self.counts != before or running:
                changed, before = time.monotonic(), self.counts
            elif time.monotonic() - changed > STALLED:
                return
            time.sleep(0.005 if self._kills or self._approver_kills else PAUSE / 4)

    def _all_up(self) -> bool:
        """Whether every process has reported itself: one that still starts would not hear that it is to stop."""
        with Session(self._engine) as session:
            up = set(session.scalars(select(RuntimeInstance.pid)))
        workers, approvers = self._processes.named("worker"), self._processes.named("approver")
        return all(worker.pid in up for worker in workers) and all(map(self._does, approvers))

    def _is_time(self, kills: list[float]) -> bool:
        return bool(kills) and self.counts.of(HashFile)[0] >= kills[0]

    def _kill_worker(self) -> None:
        """Kill a worker that has jobs in hand, if there is one right now."""
        for worker in self._processes.named("worker"):
            if self._in_hand(worker)[0]:
                worker.send(signal.SIGSTOP)  # so that what we see is still so when the blow falls
                jobs, spares = self._in_hand(worker)
                if jobs and spares:
                    self._processes.replace(worker)
                    self._kills.pop(0)
                    return
                worker.send(signal.SIGCONT)

    def _in_hand(self, worker: Process) -> tuple[int, bool]:
        """How many jobs it runs, and whether each has an attempt to spare: a death costs one."""
        with Session(self._engine) as session:
            jobs, spares = session.execute(
                select(func.count(), func.bool_and(Job.attempt < Job.max_attempts)).where(
                    Job.state == JobState.RUNNING, Job.worker_id.like(f"%:{worker.pid}:%")
                )
            ).one()
        return jobs, bool(spares)

    def _kill_approver(self) -> None:
        """Kill an approver that is in the middle of a transaction, if there is one right now."""
        for approver in self._processes.named("approver"):
            if self._does(approver) in ("active", "idle in transaction"):
                approver.send(signal.SIGSTOP)
                if self._does(approver) == "idle in transaction":  # no COMMIT is on its way
                    self._processes.replace(approver)
                    self._approver_kills.pop(0)
                    return
                approver.send(signal.SIGCONT)

    def _does(self, approver: Process) -> str | None:
        """The state of its connection; None when it has none."""
        with Session(self._engine) as session:
            state: str | None = session.scalar(_DOES, {"name": application_name(approver.pid)})
        return state
