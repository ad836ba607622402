"""What a person sees: progress on stderr while it runs, tables on stdout at the end; or one JSON object."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from awa_sqla import JobArgs
from awa_sqla.demo.check import Check, shown
from awa_sqla.demo.jobs import HashFile, IndexWords, SummariseDirectory
from awa_sqla.demo.records import Records
from awa_sqla.demo.watch import Counts

#: Seconds between lines where there is no terminal to draw bars on.
LINE_EVERY = 3.0
DEAD_LETTERS_SHOWN = 5

BARS: dict[str, type[JobArgs]] = {
    "files hashed": HashFile,
    "texts indexed": IndexWords,
    "directories approved": SummariseDirectory,
}


def console(*, stderr: bool = False) -> Console:
    """A console for plain text: nothing that comes from a file or a table is taken for markup."""
    return Console(file=sys.stderr if stderr else sys.stdout, markup=False, highlight=False, emoji=False)


def say(message: str) -> None:
    """One line for people, on stderr."""
    console(stderr=True).print(Text(message), soft_wrap=True)


# ------------------------------------------------------------------------------------------------------ progress
class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.0f}/s", justify="right")


class Display:
    """Bars on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._begun = self._last_line = time.monotonic()
        self._bars: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), _Rate())
            self._bars = Progress(*columns, console=self._console)
            self._tasks = {name: self._bars.add_task(name, total=None) for name in BARS}

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, counts: Counts, files: int) -> None:
        """How far it is."""
        if self._bars is not None:
            for name, kind in BARS.items():
                done, every = counts.of(kind)
                self._bars.update(
                    self._tasks[name], completed=done, total=(files if kind is HashFile else every) or None
                )
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_EVERY:
            self._last_line = now
            spent = now - self._begun
            say(
                f"{spent:5.1f} s: {counts.of(HashFile)[0]} of {files} files hashed, {counts.ended} jobs ended "
                f"({counts.ended / spent:.0f}/s), {counts.live} to go"
            )


# ------------------------------------------------------------------------------------------------------- results
@dataclass(frozen=True, slots=True)
class Result:
    """What came of the run; the fields are those of `--json`."""

    ok: bool
    files: int
    jobs: dict[str, int]
    follow_ups: dict[str, int]
    retries: int
    dead_letters: int
    obligations: int
    killed: int
    seconds: float
    jobs_per_second: float
    checks: list[Check]

    @classmethod
    def of(cls, records: Records, checks: Sequence[Check], *, killed: int, seconds: float) -> Result:
        """Sum up."""
        return cls(
            ok=all(check.ok for check in checks),
            files=len(records.files),
            jobs=records.states,
            follow_ups=records.follow_ups,
            retries=records.retries,
            dead_letters=len(records.dead_letters),
            obligations=records.obligations,
            killed=killed,
            seconds=round(seconds, 3),
            jobs_per_second=round(len(records.jobs) / seconds, 1),
            checks=list(checks),
        )


def write_json(result: Result) -> None:
    """One object on stdout."""
    sys.stdout.write(json.dumps(asdict(result), indent=2) + "\n")


def write_tables(result: Result, records: Records) -> None:
    """Tables on stdout."""
    out = console()
    out.print(_numbers(result, records))
    if records.dead_letters:
        out.print(_letters(records))
    out.print(_checks(result.checks))
    if not result.ok:
        out.print("Not as it should be: see the checks marked OFF.")
    else:
        out.print(f"All {len(result.checks)} checks agree.")


def _numbers(result: Result, records: Records) -> Table:
    rows = [("files", result.files), ("directories", len(records.directories)), ("jobs", len(records.jobs))]
    rows += [(f"  {state}", count) for state, count in result.jobs.items() if count]
    rows += [("follow-ups", sum(result.follow_ups.values()))]
    rows += [(f"  of {outcome}", count) for outcome, count in result.follow_ups.items() if count]
    rows += [
        ("retries", result.retries),
        ("dead letters", result.dead_letters),
        ("follow-ups owed", result.obligations),
        ("processes killed", result.killed),
    ]
    table = _table("What was done")
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, count in rows:
        table.add_row(name, f"{count:,}")
    table.add_row("seconds", f"{result.seconds:.1f}")
    table.add_row("jobs per second", f"{result.jobs_per_second:.0f}")
    return table


def _letters(records: Records) -> Table:
    table = _table("Dead letters")
    table.add_column("job", justify="right", no_wrap=True)
    table.add_column("error", overflow="fold")
    for job in records.dead_letters[:DEAD_LETTERS_SHOWN]:
        table.add_row(str(job.id), Text(shown(job.errors[-1]["error"])))
    if len(records.dead_letters) > DEAD_LETTERS_SHOWN:
        table.add_row("", f"and {len(records.dead_letters) - DEAD_LETTERS_SHOWN} more")
    return table


def _checks(checks: Iterable[Check]) -> Table:
    table = _table("Checks")
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        verdict = Text("ok", style="green") if check.ok else Text("OFF", style="bold red")
        table.add_row(verdict, check.name, Text(check.detail))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
