"""The application's own tables, in a schema of their own: it has never heard of a queue.

Nothing here is unique on purpose: if the queue let a job take effect twice, the second effect would be stored, and
`check` would find it.
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import URL, BigInteger, Dialect, Engine, ForeignKey, MetaData, Text, create_engine
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from sqlalchemy.types import TypeDecorator

#: Where these tables are, and where those of the queue.
APP_SCHEMA, JOBS_SCHEMA = "awa_demo_app", "awa_demo"


def engine_on(url: URL, **options: Any) -> Engine:
    """An engine that finds the queue's tables in our schema instead of `awa`."""
    return create_engine(url, **options).execution_options(schema_translate_map={"awa": JOBS_SCHEMA})


def path_to_text(path: Path) -> str:
    r"""A path as text that any database and any JSON can hold: a byte that is not UTF-8 as \xff, a \ as \\."""
    return os.fsencode(path).replace(b"\\", rb"\\").decode("utf-8", "backslashreplace")


def path_from_text(text: str) -> Path:
    """The path, to the byte, that `path_to_text` wrote."""
    raw = re.sub(rb"\\(?:\\|x([0-9a-f]{2}))", lambda m: bytes.fromhex(m[1].decode()) if m[1] else b"\\", text.encode())
    return Path(os.fsdecode(raw))


class StoredPath(TypeDecorator[Path]):
    """A `Path` in a text column."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Path | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else path_to_text(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Path | None:  # noqa: ARG002
        return None if value is None else path_from_text(value)


class FileStatus(StrEnum):
    """How far a file is. A binary file goes from listed to done at once."""

    LISTED = "listed"
    HASHED = "hashed"
    DONE = "done"
    FAILED = "failed"


class Base(DeclarativeBase):
    """The application's base."""

    metadata = MetaData(schema=APP_SCHEMA)
    type_annotation_map = {str: Text, int: BigInteger, Path: StoredPath}  # noqa: RUF012 - SQLAlchemy's way


class Directory(Base):
    """A directory, how many of its files are through, and the summary that somebody has approved.

    `approval_id` is the callback with which to approve it, `requests` how often that was asked for.
    """

    __tablename__ = "directory"

    id: Mapped[int] = mapped_column(primary_key=True)
    path: Mapped[Path]
    error: Mapped[str | None]
    files_total: Mapped[int]
    files_done: Mapped[int] = mapped_column(default=0)
    files_failed: Mapped[int] = mapped_column(default=0)
    requests: Mapped[int] = mapped_column(default=0)
    approval_id: Mapped[UUID | None]
    summary: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))

    files: Mapped[list[File]] = relationship(back_populates="directory")


class File(Base):
    """A file and what is known of its content. `lines` is null for binary files.

    `changed_ns` is the file's `st_ctime_ns` when it was last looked at, null when it could not be: what has changed
    since then is no fault of the catalogue.
    """

    __tablename__ = "file"

    id: Mapped[int] = mapped_column(primary_key=True)
    directory_id: Mapped[int] = mapped_column(ForeignKey(Directory.id), index=True)
    path: Mapped[Path]
    status: Mapped[str] = mapped_column(default=FileStatus.LISTED)
    changed_ns: Mapped[int | None]
    sha256: Mapped[str | None]
    size: Mapped[int | None]
    lines: Mapped[int | None]
    type: Mapped[str | None]
    error: Mapped[str | None]

    directory: Mapped[Directory] = relationship(back_populates="files")


class Word(Base):
    """One of the most frequent words of a text file."""

    __tablename__ = "word"

    id: Mapped[int] = mapped_column(primary_key=True)
    file_id: Mapped[int] = mapped_column(ForeignKey(File.id), index=True)
    word: Mapped[str]
    count: Mapped[int]


class Incident(Base):
    """An attempt that did not go well, in the application's own words."""

    __tablename__ = "incident"

    id: Mapped[int] = mapped_column(primary_key=True)
    file_id: Mapped[int] = mapped_column(ForeignKey(File.id), index=True)
    what: Mapped[str]
    attempt: Mapped[int]
    detail: Mapped[str]
