"""A worker as a process: what signals do, what it leaves behind, and how it ends."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest

from awa_sqla import ConfigurationError, JobArgs, QueueConfig
from awa_sqla.worker.loops import loop_factory
from tests.worker.programs import RUN, Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.beside,
    pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning"),
]

TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


class Work(JobArgs):
    text: str = ""


def handler(body: str, *, kind: str = "async def", options: str = "") -> str:
    return f"""
@awa.task(Work{options})
{kind} work(ctx):
    mark("started")
    {body}
    mark("ended")
"""


# ------------------------------------------------------------------- the ends


def test_a_second_signal_interrupts_what_runs_and_the_end_is_still_graceful(stage, tmp_path):
    stage.enqueue(Work())
    with Program(stage, tmp_path, handler("await asyncio.sleep(600)") + RUN) as program:
        program.marked("started")
        program.tell(TERM, INT)
        assert program.status() == 0
    (job,) = stage.jobs()
    assert (job.state, job.attempt) == ("scheduled", 0)


@pytest.mark.parametrize("last", [INT, TERM])
@pytest.mark.parametrize(
    "body", ["await asyncio.shield(asyncio.sleep(600))", "time.sleep(600)"], ids=["open", "blocked"]
)
def test_a_third_signal_leaves_at_once_also_when_a_handler_blocks_the_loop(stage, tmp_path, last, body):
    stage.enqueue(Work())
    swallow = f"""
    while True:
        try:
            {body}
        except asyncio.CancelledError:
            pass
"""
    with Program(stage, tmp_path, handler(swallow) + RUN) as program:
        program.marked("started")
        program.tell(TERM, TERM)
        assert program.process.poll() is None
        program.tell(last)
        assert program.status() == 128 + last
    assert stage.states() == ["running"]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_jobs_that_had_to_be_abandoned_are_in_the_exit_status(stage, tmp_path, kind):
    stage.enqueue(Work())
    body = "time.sleep(600)" if kind == "def" else "await stubborn()"
    stubborn = """
async def stubborn():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
"""
    source = stubborn + handler(body, kind=kind) + RUN
    with Program(stage, tmp_path, source, options="dict(grace=timedelta(seconds=0.2))") as program:
        program.marked("started")
        program.tell(TERM)
        assert program.status() == 1
    assert stage.states() == ["scheduled"]


def test_a_lifespan_that_cannot_end_keeps_no_process_with_abandoned_jobs(stage, tmp_path):
    stage.enqueue(Work())
    source = """
from contextlib import asynccontextmanager

@asynccontextmanager
async def lifespan():
    yield
    raise RuntimeError("cannot end")

awa = Awa(lifespan=lifespan)

async def stubborn():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
"""
    with Program(
        stage, tmp_path, source + handler("await stubborn()") + RUN, options="dict(grace=timedelta(seconds=0.2))"
    ) as program:
        program.marked("started")
        program.tell(TERM)
        assert program.status() == 1
        assert "RuntimeError: cannot end" in program.stderr()
    assert stage.states() == ["scheduled"]


def test_a_closed_terminal_drains_although_it_says_so_twice(stage, tmp_path):
    stage.enqueue(Work())
    with Program(stage, tmp_path, handler("await asyncio.sleep(2)") + RUN) as program:
        program.marked("started")
        program.tell(HUP, HUP, HUP)
        assert program.status() == 0
    assert stage.states() == ["completed"]


def test_nohup_is_heeded(stage, tmp_path):
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with Program(stage, tmp_path, handler("pass") + RUN, preexec_fn=ignore) as program:
        program.says(" serves ")
        program.tell(HUP)
        stage.enqueue(Work())
        program.marked("ended")
        program.tell(TERM)
        assert program.status() == 0


def test_signals_mean_what_they_did_before_when_the_worker_has_ended(stage, tmp_path):
    source = (
        handler("os.kill(os.getpid(), signal.SIGTERM)")
        + """
import signal
own = lambda number, frame: mark("own")
signal.signal(signal.SIGTERM, own)
assert awa.run_worker(os.environ["DATABASE_URL"]) == 0
assert signal.getsignal(signal.SIGTERM) is own
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
mark("after")
"""
    )
    stage.enqueue(Work())
    with Program(stage, tmp_path, source) as program:
        assert program.status() == 0
    assert (tmp_path / "after").exists()
    assert not (tmp_path / "own").exists()


# ---------------------------------------------------------- embedded elsewhere

EMBEDDED = """
async def main():
    async with awa.worker(os.environ["DATABASE_URL"], **OPTIONS):
        while not (HERE / "started").exists():
            await asyncio.sleep(0.02)
    mark("left")

asyncio.run(main())
mark("after")
"""


def test_a_thread_that_never_ends_does_not_keep_a_program_that_has_a_worker_inside(stage, tmp_path):
    stage.enqueue(Work())
    source = handler("threading.Event().wait()", kind="def") + EMBEDDED
    with Program(stage, tmp_path, source, options="dict(grace=timedelta(seconds=0.2))") as program:
        assert program.status() == 0
        program.marked("left", "after")
        assert "Traceback" not in program.stderr()
    assert stage.states() == ["scheduled"]


def test_threads_are_used_again_and_end_with_the_worker(stage):
    seen: set[int] = set()

    def work(ctx: Any) -> None:
        seen.add(threading.get_ident())

    stage.app.task(Work)(work)
    before = threading.active_count()

    async def one_by_one(worker: Any) -> None:
        for _ in range(20):
            stage.enqueue(Work())
            await stage.until(stage.all_ended)

    stage.play(during=one_by_one)
    assert len(seen) == 1
    while threading.active_count() > before:  # at most until the test's timeout
        threading.Event().wait(0.02)


# ------------------------------------------------------------------- the dump

HANDLERS = """
class Outer(JobArgs):
    secret: str

class Thread(JobArgs):
    secret: str

class Sent(JobArgs):
    secret: str

async def deepest(name="outer"):
    mark(name)
    await asyncio.sleep(600)

async def generated():
    await deepest()
    yield

async def in_a_task():
    async for _ in generated():
        pass

@awa.task(Outer)
async def outer_handler(ctx):
    await asyncio.create_task(in_a_task())

def deep_in_a_thread(secret):
    mark("in_thread")
    time.sleep(600)

@awa.task(Thread)
def thread_handler(ctx):
    deep_in_a_thread(ctx.args.secret)

@awa.task(Sent, transactional=True)
async def transactional_handler(ctx):
    await deepest("sent")
"""


class Outer(JobArgs):
    secret: str


class Thread(JobArgs):
    secret: str


class Sent(JobArgs):
    secret: str


def test_usr1_shows_running_jobs_with_the_stacks_of_tasks_and_threads(stage, tmp_path):
    ids = stage.enqueue(Outer(secret="pass-word"), Thread(secret="pass-word"), Sent(secret="pass-word"))
    with Program(stage, tmp_path, HANDLERS + RUN) as program:
        program.marked("outer", "sent", "in_thread")
        program.until(lambda: stage.states().count("running") == 3)
        program.tell(USR1)
        program.says("the event loop's thread")
        shown = program.stderr()
        program.tell(TERM, TERM, USR1)
        program.says("asked to stop: the worker is shutting down")
    assert "3 jobs are running" in shown
    for number, kind in zip(ids, ("outer", "thread", "sent"), strict=True):
        assert re.search(rf"job {number}, kind {kind}, queue default, attempt 1, running for \d+\.\d s", shown)
    sections = {part.split(",")[0]: part for part in shown.partition("the event loop's")[0].split("\njob ")[1:]}
    names = {key: re.findall(r", in (\w+)", part) for key, part in sections.items()}
    assert names[str(ids[0])][:3] == ["outer_handler", "in_a_task", "generated"]
    assert "deepest" in names[str(ids[0])]
    assert names[str(ids[1])] == ["thread_handler", "deep_in_a_thread"]
    assert names[str(ids[2])][:2] == ["transactional_handler", "deepest"]
    assert "pass-word" not in shown


def test_usr1_shows_who_blocks_the_event_loop(stage, tmp_path):
    (job,) = stage.enqueue(Work())
    source = "def blocking():\n    mark('blocked')\n    time.sleep(600)\n" + handler("blocking()") + RUN
    with Program(stage, tmp_path, source) as program:
        program.marked("blocked")
        program.tell(USR1)
        program.says("the event loop's thread")
        shown = program.stderr().partition("the event loop's")[0]
        assert re.findall(r", in (\w+)", shown.partition(f"job {job},")[2])[:2] == ["work", "blocking"]


def test_a_dump_is_bounded(stage):
    def deep(left: int) -> Any:
        return asyncio.sleep(600) if left == 0 else down(left - 1)

    async def down(left: int) -> None:
        await deep(left)

    started: list[int] = []

    async def work(ctx: Any) -> None:
        started.append(1)
        await down(50)

    stage.app.task(Work)(work)
    stage.app.queues["wide"] = QueueConfig(concurrency=100)
    stage.enqueue(*[Work() for _ in range(60)], queue="wide")
    dumps: list[str] = []

    async def during(worker: Any) -> None:
        await stage.until(lambda: len(started) == 60)
        dumps.append(worker.dump())

    stage.play(lambda: True, during=during, grace=timedelta(seconds=0))
    (shown,) = dumps
    assert "60 jobs are running" in shown
    assert len(re.findall(r"^job ", shown, re.MULTILINE)) == 50
    assert "and 10 jobs more" in shown
    assert all(part.count("File ") == 10 for part in shown.partition("and 10")[0].split("\njob ")[1:])


# ------------------------------------------------------------------- the loop

LOOPS = """
class Plain(JobArgs):
    pass

class Books(JobArgs):
    pass

class AsyncBooks(JobArgs):
    pass

from sqlalchemy import text

def loop():
    return type(asyncio.get_running_loop()).__module__

@awa.task(Work)
async def work(ctx):
    await ctx.set_progress(50)
    return loop()

@awa.task(Plain)
def plain(ctx):
    ctx.set_progress(50)
    return 1

@awa.task(Books, transactional=True)
def books(ctx):
    return ctx.session.scalar(text("SELECT 2"))

@awa.task(AsyncBooks, transactional=True)
async def async_books(ctx):
    return await ctx.session.scalar(text("SELECT 3"))
"""


class Plain(JobArgs):
    pass


class Books(JobArgs):
    pass


class AsyncBooks(JobArgs):
    pass


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize(("option", "loop"), [(None, "uvloop"), (True, "uvloop"), (False, "asyncio.unix_events")])
def test_handlers_of_all_sorts_run_in_the_loop_that_is_asked_for(stage, tmp_path, driver, option, loop):
    pytest.importorskip("uvloop", reason="needs the extra `uvloop`")
    stage.enqueue(Work(), Plain(), Books(), AsyncBooks())
    run = RUN.replace('["DATABASE_URL"]', f'["DATABASE_URL"].replace("+psycopg:", "+{driver}:")')
    with Program(stage, tmp_path, LOOPS + run, options=f"dict(uvloop={option})") as program:
        program.until(stage.all_ended)
        assert [job.state for job in stage.jobs()] == ["completed"] * 4, [job.errors for job in stage.jobs()]
        assert [job.result for job in stage.jobs()] == [loop, 1, 2, 3]
        program.tell(USR1)
        program.says("the event loop's thread")
        program.tell(TERM)
        assert program.status() == 0


@pytest.mark.parametrize("body", ["await asyncio.sleep(2)", "time.sleep(600)"])
def test_signals_do_the_same_in_uvloop(stage, tmp_path, body):
    pytest.importorskip("uvloop", reason="needs the extra `uvloop`")
    stage.enqueue(Work())
    with Program(stage, tmp_path, handler(body) + RUN, options="dict(uvloop=True)") as program:
        program.marked("started")
        program.tell(USR1)
        program.says(", in work")
        if "asyncio" in body:
            program.tell(HUP)
            assert program.status() == 0
        else:
            program.tell(TERM, TERM, INT)
            assert program.status() == 130


def test_uvloop_that_is_not_there_is_refused_only_when_it_is_insisted_on(stage, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    stage.app.task(Work)(lambda ctx: None)
    with pytest.raises(ConfigurationError, match=r"awa-sqla\[uvloop\]"):
        stage.app.run_worker(stage.url, uvloop=True)
    with pytest.raises(ConfigurationError, match="uvloop must be"):
        stage.app.worker(stage.url, uvloop="yes")
    assert loop_factory(None) is None


def test_a_worker_inside_another_loop_does_not_pretend_to_run_in_uvloop(stage):
    uvloop = pytest.importorskip("uvloop", reason="needs the extra `uvloop`")
    stage.app.task(Work)(lambda ctx: None)
    with pytest.raises(ConfigurationError, match=r"running asyncio\.unix_events"):
        stage.play(lambda: True, uvloop=True)
    stage.play(lambda: True, uvloop=False)

    async def play() -> None:
        async with stage.app.worker(stage.url, uvloop=True):
            pass

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())
