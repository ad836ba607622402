"""What runs, with the stack of each handler: for whoever wonders what a worker is doing.

May be asked from any thread, also while a handler blocks the event loop. Shows nothing of the arguments of jobs, which
may be secret, and not more than fits on a few screens.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import dropwhile
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, cast

from awa_sqla.worker.run import Run

#: What is shown at most: the jobs that have run longest, and of each stack the innermost frames.
JOBS, FRAMES = 50, 10

_OURS = str(Path(__file__).parent)
#: What the attributes of things that can be suspended begin with.
_PREFIX: dict[type, str] = {CoroutineType: "cr", GeneratorType: "gi", AsyncGeneratorType: "ag"}

Frames = list[tuple[FrameType, int]]


def dump(name: str, runs: Sequence[Run], loop_thread: int) -> str:
    """The text for one worker; ends with a newline."""
    threads = sys._current_frames()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - documented, for this
    lines = [f"worker {name}: {len(runs)} jobs are running"]
    for run in sorted(runs, key=lambda run: run.since)[:JOBS]:
        lines += [_headline(run), *_rendered(_stack(run, threads, loop_thread))]
    if len(runs) > JOBS:
        lines.append(f"and {len(runs) - JOBS} jobs more, which have run for less time")
    lines += ["the event loop's thread", *_rendered(_of_thread(threads.get(loop_thread)))]
    return "\n".join(lines) + "\n"


def _headline(run: Run) -> str:
    claimed = run.claimed
    said = (
        f"job {run.attempt.id}, kind {claimed.kind}, queue {claimed.queue}, attempt {claimed.snapshot.attempt}, "
        f"running for {time.monotonic() - run.since:.1f} s"
    )
    return said if run.stop_reason is None else f"{said}, asked to stop: {run.stop_reason}"


def _stack(run: Run, threads: dict[int, FrameType], loop_thread: int) -> Frames:
    """The frames of a handler and of what it has called or awaits, outermost first."""
    if run.thread is not None:
        return _theirs(_of_thread(threads.get(run.thread)))
    if run.asyncio_task is None or run.asyncio_task.done():
        return []
    coroutine: Any = run.asyncio_task.get_coro()
    if not coroutine.cr_running:
        return _theirs(_suspended(coroutine))
    return _theirs(_of_thread(threads.get(loop_thread), coroutine.cr_frame))  # it holds the loop in this moment


def _of_thread(frame: FrameType | None, outermost: FrameType | None = None) -> Frames:
    found: Frames = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        if frame is outermost:
            break
        frame = frame.f_back
    return found[::-1]


def _suspended(awaited: Any) -> Frames:
    """The frames of what is awaited, and of what that awaits in turn, across tasks."""
    found: Frames = []
    while (awaited := _with_frame(awaited)) is not None and len(found) < 1000:
        prefix = _PREFIX[type(awaited)]
        frame = getattr(awaited, f"{prefix}_frame")
        if frame is None:
            break
        found.append((frame, frame.f_lineno))
        awaited = getattr(awaited, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")
    return found


def _with_frame(awaited: Any) -> Any:
    """The coroutine or generator behind what is awaited, which may be a task or a wrapper; None when there is none."""
    behind: list[Any] = [awaited, *gc.get_referents(awaited)]
    for one in behind:
        if isinstance(one, asyncio.Task):
            return cast("Any", one).get_coro()
        if type(one) in _PREFIX:
            return one
    return None


def _theirs(frames: Frames) -> Frames:
    """Without the worker's own frames around the handler."""
    begun = dropwhile(lambda one: not _is_ours(one), frames)
    return list(dropwhile(_is_ours, begun))


def _is_ours(one: tuple[FrameType, int]) -> bool:
    return one[0].f_code.co_filename.startswith(_OURS)


def _rendered(frames: Frames) -> Iterator[str]:
    if not frames:
        yield "  (no handler: it has not begun, or its outcome is being written)"
    shown: Iterable[tuple[FrameType, int]] = frames[-FRAMES:]
    for entry in traceback.StackSummary.extract(iter(shown), lookup_lines=True):
        yield f'  File "{entry.filename}", line {entry.lineno}, in {entry.name}'
        if entry.line:
            yield f"    {entry.line}"
