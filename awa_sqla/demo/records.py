"""Everything that the run has left in the database, read back in one transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from awa_sqla import JobArgs, JobRecord, JobState, Outcome
from awa_sqla.demo.models import Directory, File, Incident, Word
from awa_sqla.models import Obligation


@dataclass(frozen=True, slots=True)
class JobRow:
    """What the checks want to know of a job, wherever its row is."""

    id: int
    kind: str
    state: JobState
    stored_in: str
    attempt: int
    parent_id: int | None
    root_id: int | None
    parent_outcome: str | None
    args: Mapping[str, Any]
    result: Any
    errors: list[dict[str, Any]]

    @property
    def is_dead(self) -> bool:
        """Whether it is a dead letter."""
        return self.stored_in == "dead"

    @property
    def rescues(self) -> int:
        """How many of its attempts died with their worker."""
        return sum(entry["type"] == "rescue" for entry in self.errors)

    @property
    def waits(self) -> int:
        """How many of its attempts ended by waiting for a callback: that came, or did not come in time."""
        in_vain = [entry for entry in self.errors if entry["error"] == "callback timed out"]
        return len(in_vain) + (self.state is JobState.COMPLETED)


@dataclass(frozen=True)
class Records:
    """The tables as Python objects, with the indexes that the checks share."""

    jobs: Mapping[int, JobRow]
    directories: Mapping[int, Directory]
    files: Mapping[int, File]
    words: Mapping[int, list[tuple[str, int]]]
    incidents: list[tuple[int, str, int]]
    obligations: int

    @classmethod
    def read(cls, session: Session) -> Records:
        """Read it all. The objects are detached and loaded."""
        columns = [getattr(JobRecord, name) for name in JobRow.__slots__]
        words: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        for file_id, word, count in session.execute(select(Word.file_id, Word.word, Word.count).order_by(Word.id)):
            words[file_id].append((word, count))
        incidents = session.execute(select(Incident.file_id, Incident.what, Incident.attempt)).all()
        found = cls(
            jobs={row.id: JobRow(*row) for row in session.execute(select(*columns).order_by(JobRecord.id))},
            directories={row.id: row for row in session.scalars(select(Directory).order_by(Directory.id))},
            files={row.id: row for row in session.scalars(select(File).order_by(File.id))},
            words=words,
            incidents=[(file_id, what, attempt) for file_id, what, attempt in incidents],
            obligations=session.scalar(select(func.count()).select_from(Obligation)) or 0,
        )
        session.expunge_all()
        return found

    def of(self, kind: type[JobArgs]) -> list[JobRow]:
        """The jobs of one kind."""
        return self.by_kind.get(kind.__awa__.kind, [])

    @cached_property
    def by_kind(self) -> Mapping[str, list[JobRow]]:
        """The jobs of each kind, in the order of their ids."""
        found: defaultdict[str, list[JobRow]] = defaultdict(list)
        for job in self.jobs.values():
            found[job.kind].append(job)
        return found

    @cached_property
    def children(self) -> Mapping[int, list[JobRow]]:
        """The jobs that each job has brought about."""
        found: defaultdict[int, list[JobRow]] = defaultdict(list)
        for job in self.jobs.values():
            if job.parent_id is not None:
                found[job.parent_id].append(job)
        return found

    @cached_property
    def files_in(self) -> Mapping[int, list[File]]:
        """The files of each directory."""
        found: defaultdict[int, list[File]] = defaultdict(list)
        for file in self.files.values():
            found[file.directory_id].append(file)
        return found

    @property
    def states(self) -> dict[str, int]:
        """How many jobs are in each state."""
        return {state.value: sum(job.state is state for job in self.jobs.values()) for state in JobState}

    @property
    def follow_ups(self) -> dict[str, int]:
        """How many jobs are follow-ups of each outcome."""
        return {outcome.value: sum(job.parent_outcome == outcome for job in self.jobs.values()) for outcome in Outcome}

    @property
    def dead_letters(self) -> list[JobRow]:
        """The dead letters."""
        return [job for job in self.jobs.values() if job.is_dead]

    @property
    def retries(self) -> int:
        """Attempts after a job's first."""
        return sum(max(job.attempt - 1, 0) for job in self.jobs.values())
