"""The self-check: what the queue has done, against the files and against itself.

Each check is a function of the `Records` and says in one line what it compared, or what is off.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from awa_sqla import JobArgs, JobState, Outcome
from awa_sqla.demo.approver import TOP_WORDS
from awa_sqla.demo.content import BLOCK, WORDS_KEPT, frequent_words, open_file
from awa_sqla.demo.jobs import CountFailure, CountRequest, HashFile, IndexWords, RecordIncident, SummariseDirectory
from awa_sqla.demo.models import Directory, File, FileStatus
from awa_sqla.demo.records import JobRow, Records
from awa_sqla.demo.watch import LIVE

#: How many files have their words counted again, spread over all of them.
SAMPLE = 300


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found."""

    name: str
    ok: bool
    detail: str


def check_all(records: Records) -> list[Check]:
    """Every check, in the order in which to read them."""
    return [check(records) for check in CHECKS]


def shown(text: object) -> str:
    r"""Text from outside, fit for any terminal: what is not printable as \x1b, \n, \u202e."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _verdict(name: str, wrong: Sequence[str], fine: str) -> Check:
    if not wrong:
        return Check(name, ok=True, detail=fine)
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Check(name, ok=False, detail=shown("; ".join(wrong[:3])) + more)


# ------------------------------------------------------------------------------------------------------- files
class _Seen(Enum):
    """How a file on the disk compares with its row."""

    SAME = "same"
    UNREADABLE = "unreadable"
    CHANGED = "changed"
    WRONG = "wrong"


def files(records: Records) -> Check:
    """Every file, hashed and counted once more by other code than the handler's."""
    seen = [(file, _compared(file)) for file in records.files.values()]
    wrong = [f"{file.path}: {_complaint(file)}" for file, how in seen if how is _Seen.WRONG]
    tally = Counter(how for _, how in seen)
    fine = f"{tally[_Seen.SAME]} read again: SHA-256, size, lines and type agree"
    if tally[_Seen.UNREADABLE]:
        fine += f"; {tally[_Seen.UNREADABLE]} cannot be read, as recorded"
    if tally[_Seen.CHANGED]:
        fine += f"; {tally[_Seen.CHANGED]} changed or vanished meanwhile"
    return _verdict("files", wrong, fine)


def _compared(file: File) -> _Seen:
    if file.status not in (FileStatus.DONE, FileStatus.FAILED):
        return _Seen.WRONG
    now: tuple[str, int, int | None, str] | None
    try:
        now = _read(file.path)
    except OSError:
        now = None
    if file.status == FileStatus.FAILED and now is None:
        return _Seen.UNREADABLE if file.error else _Seen.WRONG
    if file.status == FileStatus.DONE and now == (file.sha256, file.size, file.lines, file.type):
        return _Seen.SAME
    return _Seen.CHANGED if _changed(file) else _Seen.WRONG


def _complaint(file: File) -> str:
    if file.status == FileStatus.FAILED:
        return "given up, though it can be read" if file.error else "given up without an error"
    return "its content is another" if file.status == FileStatus.DONE else f"still {file.status}"


def _changed(file: File) -> bool:
    try:
        return os.stat(file.path).st_ctime_ns != file.changed_ns  # noqa: PTH116
    except OSError:
        return True


def _read(path: Path) -> tuple[str, int, int | None, str]:
    """(SHA-256, size, lines, type)."""
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
        file.seek(0)
        lines = 0
        try:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            while part := text.read(BLOCK):
                if "\0" in part:
                    return digest, size, None, "binary"
                lines += part.count("\n")
        except UnicodeDecodeError:
            return digest, size, None, "binary"
    return digest, size, lines, "text"


def words(records: Records) -> Check:
    """The words of a sample of the text files, counted again; others have none."""
    texts = [file for file in records.files.values() if file.status == FileStatus.DONE and file.type == "text"]
    sample = texts[:: max(len(texts) // SAMPLE, 1)]
    wrong = [f"{file.path}: other words are in it" for file in sample if not _same_words(file, records)]
    known = {file.id for file in texts}
    wrong += [
        f"words of file {id_}, which is no text" for id_, found in records.words.items() if found and id_ not in known
    ]
    total = sum(map(len, records.words.values()))
    return _verdict("words", wrong, f"{total} words of {len(texts)} texts, {len(sample)} of them counted again")


def _same_words(file: File, records: Records) -> bool:
    try:
        now = frequent_words(file.path)
    except (OSError, UnicodeDecodeError):
        return _changed(file)
    return now == records.words.get(file.id, []) or _changed(file)


# --------------------------------------------------------------------------------------------------- directories
def directories(records: Records) -> Check:
    """The counters that every job has counted up, against the files."""
    wrong = [
        f"{directory.path}: counted {directory.files_done} done and {directory.files_failed} failed of "
        f"{directory.files_total}, but {done} and {failed} of {total} are"
        for directory in records.directories.values()
        for done, failed, total in [_tally(records.files_in.get(directory.id, []))]
        if (directory.files_done, directory.files_failed, directory.files_total) != (done, failed, total)
        or done + failed != total
    ]
    fine = f"{len(records.directories)}: their counters agree with their files"
    if unlisted := sum(directory.error is not None for directory in records.directories.values()):
        fine += f"; {unlisted} could not be listed"
    return _verdict("directories", wrong, fine)


def _tally(found: Sequence[File]) -> tuple[int, int, int]:
    status = Counter(file.status for file in found)
    return status[FileStatus.DONE], status[FileStatus.FAILED], len(found)


def summaries(records: Records) -> Check:
    """One approval for each directory, by the callback that was asked for last, with the right summary."""
    approvals: dict[int, list[JobRow]] = {id_: [] for id_ in records.directories}
    for job in records.of(SummariseDirectory):
        approvals.setdefault(job.args["directory_id"], []).append(job)
    wrong = [f"{len(jobs)} approvals of directory {id_}" for id_, jobs in approvals.items() if len(jobs) != 1]
    for job in records.of(SummariseDirectory):
        directory = records.directories.get(job.args["directory_id"])
        if directory is None or job.state is not JobState.COMPLETED:
            wrong.append(f"approval {job.id} is {job.state}")
        elif directory.approval_id is None or directory.requests != job.waits:
            wrong.append(f"{directory.path}: {directory.requests} approvals were asked for in {job.waits} waits")
        elif not directory.summary == job.result == _summary(directory, records):
            wrong.append(f"{directory.path}: its summary is {directory.summary}")
    return _verdict("summaries", wrong, f"{len(approvals)} directories, one approval each, all completed")


def _summary(directory: Directory, records: Records) -> dict[str, object]:
    found = records.files_in.get(directory.id, [])
    counts: Counter[str] = Counter()
    for file in found:
        for word, count in records.words.get(file.id, []):
            counts[word] += count
    return {
        "files": len(found),
        "bytes": sum(file.size or 0 for file in found),
        "lines": sum(file.lines or 0 for file in found),
        "words": sorted(counts, key=lambda word: (-counts[word], word))[:TOP_WORDS],
    }


# ---------------------------------------------------------------------------------------------------- follow-ups
_FOLLOWS: dict[str | None, type[JobArgs]] = {
    Outcome.COMPLETED.value: IndexWords,
    Outcome.EXHAUSTED.value: CountFailure,
    Outcome.RETRIED.value: RecordIncident,
    Outcome.RESCUED.value: RecordIncident,
    Outcome.WAITING_FOR_CALLBACK.value: CountRequest,
    None: SummariseDirectory,  # enqueued by a handler
}


def follow_ups(records: Records) -> Check:
    """Exactly one follow-up for each outcome that has one: completion of a text, retry, rescue, dead letter,
    wait for an approval."""
    wrong: list[str] = []
    expected_in_all = 0
    for job in records.jobs.values():
        expected = _expected(job)
        found = Counter(child.parent_outcome for child in records.children.get(job.id, []))
        del found[None]
        expected_in_all += expected.total()
        if found != expected:
            wrong.append(f"{job.kind} {job.id} was followed by {dict(found)} instead of {dict(expected)}")
    return _verdict("follow-ups", wrong, f"{expected_in_all}: one for each outcome that asks for one, no more")


def _expected(job: JobRow) -> Counter[str | None]:
    """The follow-ups that the job's own row asks for."""
    expected: Counter[str | None] = Counter()
    if job.kind == SummariseDirectory.__awa__.kind:
        expected[Outcome.WAITING_FOR_CALLBACK.value] = job.waits
        return +expected
    if job.kind not in (HashFile.__awa__.kind, IndexWords.__awa__.kind):
        return expected
    gave_up = job.is_dead and not (job.errors and job.errors[-1]["type"] == "rescue")
    found_text = job.kind == HashFile.__awa__.kind and job.result == {"type": "text"}
    expected[Outcome.COMPLETED.value] = int(found_text and job.state is JobState.COMPLETED)
    expected[Outcome.EXHAUSTED.value] = int(job.is_dead)
    expected[Outcome.RESCUED.value] = job.rescues
    expected[Outcome.RETRIED.value] = len(job.errors) - job.rescues - gave_up
    return +expected


def lineage(records: Records) -> Check:
    """Every job under its parent, every parent of the right kind and about the same file, all under one root."""
    wrong = [
        f"{job.kind} {job.id} {complaint}" for job in records.jobs.values() if (complaint := _parted(job, records))
    ]
    roots = sum(job.parent_id is None for job in records.jobs.values())
    return _verdict("lineage", wrong, f"{len(records.jobs)} jobs in {roots} trees")


def _parted(job: JobRow, records: Records) -> str | None:
    """What is wrong with a job's place in its tree."""
    if job.parent_id is None:
        empty = job.kind == SummariseDirectory.__awa__.kind and not records.files_in.get(job.args["directory_id"])
        is_root = job.root_id is None and job.parent_outcome is None
        return None if is_root and (job.kind == HashFile.__awa__.kind or empty) else "has no parent"
    parent = records.jobs.get(job.parent_id)
    follows = _FOLLOWS.get(job.parent_outcome)
    if parent is None or follows is None or job.kind != follows.__awa__.kind:
        return f"follows on {job.parent_outcome} of job {job.parent_id}"
    if job.root_id != (parent.id if parent.root_id is None else parent.root_id):
        return f"has the root {job.root_id}"
    about, above = job.args, parent.args
    if "directory_id" in about and "file_id" in above:
        file = records.files.get(above["file_id"])
        above = {} if file is None else {"directory_id": file.directory_id}
    same = any(about.get(name) == above.get(name) is not None for name in ("file_id", "directory_id"))
    return None if same else f"is about something else than its parent {parent.id}"


# --------------------------------------------------------------------------------------------------- what failed
def dead_letters(records: Records) -> Check:
    """Every file that was given up has one dead letter with its error, and nothing failed without one."""
    wrong = [
        f"{job.kind} {job.id} failed and left no dead letter"
        for job in records.jobs.values()
        if job.state is JobState.FAILED and not job.is_dead
    ]
    given_up = {file.id: file for file in records.files.values() if file.status == FileStatus.FAILED}
    letters = Counter(job.args.get("file_id") for job in records.dead_letters)
    wrong += [f"{letters[id_]} dead letters for {file.path}" for id_, file in given_up.items() if letters[id_] != 1]
    for job in records.dead_letters:
        file = given_up.get(job.args.get("file_id", 0))
        if file is None or not job.errors or job.errors[-1]["error"] != file.error:
            wrong.append(f"dead letter {job.id}: its error is not that of its file")
    fine = (
        f"{letters.total()}: each with the error of a file that was given up" if letters else "none, and no file failed"
    )
    return _verdict("dead letters", wrong, fine)


def incidents(records: Records) -> Check:
    """The application's own log of incidents against the jobs' errors."""
    expected: Counter[tuple[int, str, int]] = Counter()
    for job in (*records.of(HashFile), *records.of(IndexWords)):
        for position, entry in enumerate(job.errors, 1):
            rescued = entry["type"] == "rescue"
            if rescued or not (job.is_dead and position == len(job.errors)):
                expected[job.args["file_id"], "rescued" if rescued else "retried", entry["attempt"]] += 1
    found = Counter(records.incidents)
    wrong = [
        f"{found[key]} incidents instead of {expected[key]} for {key}"
        for key in found | expected
        if found[key] != expected[key]
    ]
    fine = f"{expected.total()}: one for each attempt that failed or died on the way" if expected else "none"
    return _verdict("incidents", wrong, fine)


# ----------------------------------------------------------------------------------------------------- the queue
def effects(records: Records) -> Check:
    """Nothing took effect twice: one job of each kind for a file at most, no word written twice."""
    wrong = list(_doubled(records))
    return _verdict("effects", wrong, f"{len(records.files)} files, none handled twice")


def _doubled(records: Records) -> Iterator[str]:
    hashed = Counter(job.args["file_id"] for job in records.of(HashFile))
    yield from (
        f"{hashed[id_]} HashFile jobs for {file.path}" for id_, file in records.files.items() if hashed[id_] != 1
    )
    for kind in (IndexWords, CountFailure):
        times = Counter(job.args["file_id"] for job in records.of(kind))
        yield from (f"{count} {kind.__name__} jobs for file {id_}" for id_, count in times.items() if count > 1)
    for id_, found in records.words.items():
        if len({word for word, _ in found}) != len(found) or len(found) > WORDS_KEPT:
            yield f"words of file {id_} were written twice"


def queue(records: Records) -> Check:
    """Nothing is left to do."""
    live = Counter(job.state.value for job in records.jobs.values() if job.state in LIVE)
    wrong = [f"{count} jobs are {state}" for state, count in live.items()]
    wrong += [f"{records.obligations} follow-ups are owed"] if records.obligations else []
    return _verdict("queue", wrong, "no job is live, no follow-up is owed")


CHECKS: tuple[Callable[[Records], Check], ...] = (
    files,
    words,
    directories,
    summaries,
    follow_ups,
    lineage,
    dead_letters,
    incidents,
    effects,
    queue,
)
