"""The directory tree as rows and jobs, each directory in one transaction: rows and jobs commit together."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.orm import Session, sessionmaker

from awa_sqla import enqueue
from awa_sqla.demo.jobs import HashFile, summarise_when_done
from awa_sqla.demo.models import Directory, File


class BadDirectoryError(Exception):
    """What was given is no directory that we may list."""


@dataclass(slots=True)
class Listing:
    """One directory and what is in it besides directories. `error`: why it could not be listed."""

    path: Path
    files: list[Path] = field(default_factory=list[Path])
    error: str | None = None


def listings(directory: Path | None) -> list[Listing]:
    """The whole tree below `directory`, or that of Python's standard library. Raises `BadDirectoryError`."""
    if directory is None:
        root, skipped = Path(sysconfig.get_path("stdlib")), {"site-packages", "__pycache__"}
    else:
        root, skipped = Path(os.path.abspath(directory)), set[str]()  # noqa: PTH100 - a link stays as it was given
    if not root.is_dir():
        raise BadDirectoryError(f"not a directory: {root}")
    found = list(_walk(root, skipped))
    if found[0].error is not None:
        raise BadDirectoryError(found[0].error)
    return found


def _walk(root: Path, skipped: Collection[str]) -> Iterator[Listing]:
    waiting = [root]
    while waiting:
        listing = Listing(waiting.pop())
        try:
            with os.scandir(listing.path) as entries:
                for entry in sorted(entries, key=lambda entry: os.fsencode(entry.name)):
                    if entry.is_dir(follow_symlinks=False):
                        waiting += [Path(entry.path)] if entry.name not in skipped else []
                    elif not (entry.is_symlink() and Path(entry.path).is_dir()):  # a link could lead in a circle
                        listing.files.append(Path(entry.path))
        except OSError as exc:
            listing.error = f"{exc.strerror}: {str(listing.path)!r}"
        yield listing


def seed(maker: sessionmaker[Session], tree: Sequence[Listing], after_each: Callable[[], None]) -> None:
    """Enter every directory with its files, and enqueue a `HashFile` for each of them."""
    for listing in tree:
        with maker.begin() as session:
            _enter(session, listing)
        after_each()


def _enter(session: Session, listing: Listing) -> None:
    directory = Directory(path=listing.path, error=listing.error, files_total=len(listing.files))
    directory.files = [File(path=path, changed_ns=_changed_ns(path)) for path in listing.files]
    session.add(directory)
    session.flush()  # the jobs need the files' ids
    for file in directory.files:
        enqueue(session, HashFile(file_id=file.id, path=file.path))
    summarise_when_done(session, directory)  # an empty one is done already


def _changed_ns(path: Path) -> int | None:
    try:
        return path.stat().st_ctime_ns
    except OSError:
        return None
