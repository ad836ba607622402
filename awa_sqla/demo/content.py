"""Reading files: hash, size, lines, type and words. Blocks are read one by one, whatever the size of the file."""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

BLOCK = 1 << 20
WORDS_KEPT = 50
LONGEST_WORD = 40

_WORD = re.compile(r"[^\W\d_]+")


class NotAFileError(OSError):
    """A pipe, a socket, a device, a directory: it will be no file the next time either."""


@dataclass(frozen=True, slots=True)
class Content:
    """What was read. `lines` is None unless `type` is "text": UTF-8 without NUL."""

    sha256: str
    size: int
    lines: int | None
    type: str
    changed_ns: int


def open_file(path: Path) -> FileIO:
    """Open a regular file, or raise OSError at once: opening a pipe would wait for its writer."""
    _refuse_special(os.stat(path), path)  # noqa: PTH116 - before open, which can have effects on devices
    file = FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        _refuse_special(os.fstat(file.fileno()), path)  # it may have been replaced meanwhile
    except OSError:
        file.close()
        raise
    return file


def _refuse_special(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotAFileError(f"not a regular file: {str(path)!r}")


def measure(path: Path) -> Content:
    """Read the whole file once. Raises OSError."""
    digest, size, newlines, text = hashlib.sha256(), 0, 0, True
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_file(path) as file:
        changed_ns = os.fstat(file.fileno()).st_ctime_ns  # before reading: a change during it counts as one since
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
            newlines += block.count(b"\n")
            text = text and b"\0" not in block and _decodes(decoder, block)
        text = text and _decodes(decoder, b"", final=True)
    return Content(digest.hexdigest(), size, newlines if text else None, "text" if text else "binary", changed_ns)


def _decodes(decoder: codecs.IncrementalDecoder, block: bytes, *, final: bool = False) -> bool:
    try:
        decoder.decode(block, final)
    except UnicodeDecodeError:
        return False
    return True


def frequent_words(path: Path) -> list[tuple[str, int]]:
    """The most frequent words of a text file and how often they occur; the alphabet decides between equals.

    Raises OSError, and UnicodeDecodeError when it is no text (any more).
    """
    counts: Counter[str] = Counter()
    decoder = codecs.getincrementaldecoder("utf-8")()
    begun = ""
    with open_file(path) as file:
        while block := file.read(BLOCK):
            text = begun + decoder.decode(block).casefold()
            words, begun = _WORD.findall(text), ""
            if words and text.endswith(words[-1]):  # it may go on in the next block
                begun = words.pop()[: LONGEST_WORD + 1]
            counts.update(words)
    decoder.decode(b"", final=True)
    counts.update([begun] if begun else [])
    kept = [(word, count) for word, count in counts.items() if len(word) <= LONGEST_WORD]
    return sorted(kept, key=lambda pair: (-pair[1], pair[0]))[:WORDS_KEPT]
