"""The pages of docs/tutorial, done as a reader does them: in an empty directory, with an empty database.

A Python block is a file: its first line is `# name.py`, or `# name.py, at the end` for what is added to one. The lines
of an `sh` block are run; those that prepare a machine are left out. A `text` block after them is what they print, all
of it. A worker is stopped with SIGINT, as by Ctrl-C, once it has printed what the page says.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import URL

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)(, at the end)?\n+")
PREPARES = ("python3 -m venv ", ". .venv/", "pip install ", "createdb ", "export DATABASE_URL=")
PATIENCE = 60.0


class Reader:
    """Somebody who follows a page."""

    def __init__(self, directory: Path, url: URL) -> None:
        self.directory = directory
        self.environment = os.environ | {
            "DATABASE_URL": url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.done: list[str] = []

    def follow(self, text: str) -> None:
        """Do what the page says, in its order."""
        blocks = [(match[1], match[2]) for match in BLOCK.finditer(text)]
        for (language, block), (following, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
            if language == "python":
                self.write(block)
            elif language == "sh":
                expected = shown if following == "text" else None
                commands = [line for line in block.splitlines() if not line.startswith(PREPARES)]
                printed = "".join([self.run(command, expected) for command in commands])
                if expected is not None:
                    assert printed == expected, commands

    def write(self, block: str) -> None:
        """Write the file that a block is."""
        name = FILE.match(block)
        assert name is not None, f"a block that names no file: {block[:60]!r}"
        with (self.directory / name[1]).open("a" if name[2] else "w") as file:
            file.write("\n\n" * bool(name[2]) + block[name.end() :])

    def run(self, command: str, expected: str | None) -> str:
        """Run a command to its end, and return what it has printed."""
        self.done.append(command)
        if " worker " in command:
            assert expected is not None
            return self.work(command, expected)
        result = subprocess.run(
            shlex.split(command),
            cwd=self.directory,
            env=self.environment,
            text=True,
            capture_output=True,
            check=False,
            timeout=PATIENCE,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def work(self, command: str, expected: str) -> str:
        """Run a worker until it has printed as many lines as expected; then interrupt it."""
        with subprocess.Popen(
            shlex.split(command),
            cwd=self.directory,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as worker:
            alarm = threading.Timer(PATIENCE, worker.kill)
            alarm.start()
            try:
                assert worker.stdout is not None
                lines = [worker.stdout.readline() for _ in expected.splitlines()]
                worker.send_signal(signal.SIGINT)
                rest, complaints = worker.communicate()
            finally:
                alarm.cancel()
                worker.kill()
        assert worker.returncode == 0, complaints
        return "".join(lines) + rest


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_works_from_an_empty_directory(path: Path, tmp_path: Path, empty_db_url: URL) -> None:
    reader = Reader(tmp_path, empty_db_url)
    reader.follow(path.read_text("utf-8"))
    assert any(" worker " in command for command in reader.done)


def test_what_a_page_promises_is_compared(tmp_path: Path, empty_db_url: URL) -> None:
    page = "```python\n# say.py\nprint('this')\n```\n```sh\npython say.py\n```\n```text\n{}\n```\n"
    Reader(tmp_path, empty_db_url).follow(page.format("this"))
    with pytest.raises(AssertionError, match=r"say\.py"):
        Reader(tmp_path, empty_db_url).follow(page.format("that"))


@pytest.mark.parametrize(
    ("page", "match"),
    [
        ("```python\nprint('no name')\n```\n", "names no file"),
        ("```python\n# fail.py\nraise SystemExit('broken')\n```\n```sh\npython fail.py\n```\n", "broken"),
    ],
)
def test_a_page_that_is_wrong_is_red(tmp_path: Path, empty_db_url: URL, page: str, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        Reader(tmp_path, empty_db_url).follow(page)


def test_there_is_a_tutorial() -> None:
    assert "first-job" in [path.stem for path in PAGES]
