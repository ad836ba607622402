"""The application's jobs: what they carry, what they do, and what follows on which outcome.

    HashFile ─── completed, a text ──> IndexWords
    either ───── exhausted ──────────> CountFailure
    either ───── retried, rescued ───> RecordIncident

    SummariseDirectory ── waits for its callback ──> CountRequest

Whichever job brings a directory's last file to its end also enqueues a `SummariseDirectory`. Its handler asks for an
approval and ends; the job waits, in no worker, for the callback that `approver` makes in a transaction of its own.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from awa_sqla import (
    Awa,
    Backoff,
    Completed,
    Exhausted,
    JobArgs,
    JobContext,
    QueueConfig,
    Rescued,
    Retried,
    WaitForCallback,
    WaitingForCallback,
    enqueue,
)
from awa_sqla.demo.content import NotAFileError, frequent_words, measure
from awa_sqla.demo.models import Directory, File, FileStatus, Incident, Word, path_from_text, path_to_text

#: Attempts at a time in each worker, by queue: also the number of connections that handlers can need.
CONCURRENCY = {"files": 8, "words": 8, "books": 4, "approval": 2}

#: How long an approval may take. A request that nobody answers is made again.
PATIENCE = timedelta(seconds=10)

awa = Awa(
    queues={queue: QueueConfig(concurrency=attempts, dead_letters=True) for queue, attempts in CONCURRENCY.items()}
)


# ------------------------------------------------------------------------------------------------ what jobs carry
def _as_path(value: object) -> object:
    return path_from_text(value) if isinstance(value, str) else value


#: A path in a job's arguments: JSON text from which the very bytes come back.
FilePath = Annotated[Path, PlainValidator(_as_path), PlainSerializer(path_to_text, return_type=str)]


SOON = Backoff(base=timedelta(milliseconds=200), max=timedelta(seconds=2))


class AboutFile(JobArgs, abstract=True, max_attempts=3, backoff=SOON):
    """A job that reads a file: two more attempts, soon."""

    file_id: int
    path: FilePath


class HashFile(AboutFile, queue="files"):
    """Read the file and write down what it is."""


class IndexWords(AboutFile, queue="words"):
    """Read the text again and write down its most frequent words."""


class CountFailure(JobArgs, queue="books"):
    """The file cannot be catalogued: say so, and count it as through."""

    file_id: int
    error: str


class RecordIncident(JobArgs, queue="books"):
    """An attempt failed and is tried again, or its worker died."""

    file_id: int
    what: str
    attempt: int
    detail: str


class SummariseDirectory(JobArgs, queue="approval", backoff=SOON):
    """All files are through: somebody writes the summary and approves it."""

    directory_id: int


class CountRequest(JobArgs, queue="books"):
    """An approval was asked for: count it."""

    directory_id: int


# -------------------------------------------------------------------------------------------------- what jobs do
@awa.task(HashFile, transactional=True, discard_on=[NotAFileError])
def hash_file(ctx: JobContext[HashFile]) -> dict[str, str]:
    """What it writes and its completion, with the follow-up, are one commit.

    The file is read first: until then the session has not begun to talk to the database.
    """
    content = measure(ctx.args.path)
    session: Session = ctx.session
    file = session.get_one(File, ctx.args.file_id)
    file.sha256, file.size, file.lines, file.type = content.sha256, content.size, content.lines, content.type
    file.changed_ns = content.changed_ns
    file.status = FileStatus.HASHED
    if content.type == "binary":
        settle(session, file, FileStatus.DONE)
    return {"type": content.type}


@awa.task(IndexWords, transactional=True)
def index_words(ctx: JobContext[IndexWords]) -> dict[str, int]:
    """Fifty words or fewer, and the file is done."""
    words = frequent_words(ctx.args.path)
    session: Session = ctx.session
    if words:
        rows = [{"file_id": ctx.args.file_id, "word": word, "count": count} for word, count in words]
        session.execute(insert(Word), rows)
    settle(session, session.get_one(File, ctx.args.file_id), FileStatus.DONE)
    return {"words": len(words)}


@awa.task(CountFailure, transactional=True)
def count_failure(ctx: JobContext[CountFailure]) -> None:
    """The dead letter stays for an operator; the directory must not wait for it."""
    session: Session = ctx.session
    file = session.get_one(File, ctx.args.file_id)
    file.error = ctx.args.error
    settle(session, file, FileStatus.FAILED)


@awa.task(RecordIncident, transactional=True)
async def record_incident(ctx: JobContext[RecordIncident]) -> None:
    """An `async def` is given an AsyncSession: the same road, awaited."""
    session: AsyncSession = ctx.session
    session.add(Incident(**ctx.args.model_dump()))


@awa.task(SummariseDirectory, transactional=True)
def ask_for_approval(ctx: JobContext[SummariseDirectory]) -> WaitForCallback:
    """The token is durable when it is there; the approver sees it when the job waits for it, which is one commit."""
    token = ctx.register_callback(timeout=PATIENCE)
    session: Session = ctx.session
    directory = session.get_one(Directory, ctx.args.directory_id)
    directory.approval_id = token.id
    return WaitForCallback(token)


@awa.task(CountRequest, transactional=True)
def count_request(ctx: JobContext[CountRequest]) -> None:
    """One more, whoever else counts."""
    session: Session = ctx.session
    directory = session.get_one(Directory, ctx.args.directory_id, with_for_update={"key_share": True})
    directory.requests += 1


def settle(session: Session, file: File, status: FileStatus) -> None:
    """One more file of its directory is through. Under a lock on the directory, so that exactly one is the last."""
    directory = session.get_one(Directory, file.directory_id, with_for_update={"key_share": True})
    file.status = status
    if status is FileStatus.FAILED:
        directory.files_failed += 1
    else:
        directory.files_done += 1
    summarise_when_done(session, directory)


def summarise_when_done(session: Session, directory: Directory) -> None:
    """Ask for the summary if no file is left: part of the caller's transaction, like all that `enqueue` does."""
    if directory.files_done + directory.files_failed == directory.files_total:
        enqueue(session, SummariseDirectory(directory_id=directory.id))


# --------------------------------------------------------------------------------------------------- what follows
@awa.on_completed(HashFile)
def index_texts(event: Completed[HashFile]) -> IndexWords | list[Any]:
    """An empty list says: nothing follows, on purpose."""
    if event.result["type"] != "text":
        return []
    return IndexWords(file_id=event.args.file_id, path=event.args.path)


def give_up(event: Exhausted[AboutFile]) -> CountFailure:
    """No attempt is left."""
    return CountFailure(file_id=event.args.file_id, error=event.error)


def note_failure(event: Retried[AboutFile]) -> RecordIncident:
    """The attempt failed, and there will be another."""
    return RecordIncident(file_id=event.args.file_id, what="retried", attempt=event.attempt, detail=event.error)


def note_death(event: Rescued[AboutFile]) -> RecordIncident:
    """The attempt's worker is gone. Rescue itself runs no code of ours: this is called when its debt is settled."""
    return RecordIncident(
        file_id=event.args.file_id, what="rescued", attempt=event.job.attempt, detail=event.reason.value
    )


@awa.on_waiting_for_callback(SummariseDirectory)
def count_requests(event: WaitingForCallback[SummariseDirectory]) -> CountRequest:
    """Exists only when the job waits, and the approver can see the token."""
    return CountRequest(directory_id=event.args.directory_id)


for _kind in (HashFile, IndexWords):
    awa.on_exhausted(_kind)(give_up)
    awa.on_retried(_kind)(note_failure)
    awa.on_rescued(_kind)(note_death)
