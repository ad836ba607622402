"""Forks: children of handlers leave the worker alone, and workers run in children of a program that was preloaded."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest

from awa_sqla import JobArgs
from tests.worker.programs import RUN, Program

pytestmark = [pytest.mark.slow, pytest.mark.beside]

TERM = signal.SIGTERM

#: What a child does, and the status it ends with.
WAYS = {
    "os._exit": ("os._exit(7)", 7),
    "sys.exit": ("sys.exit(7)", 7),
    "sys.exit with words": ("sys.exit('words of a child')", 1),
    "returns": ("return 'child'", 0),
    "raises": ("raise ValueError('error of a child')", 1),
    "collects": ("ctx = None; gc.collect(); sys.exit()", 0),
    "closes": ("[engine.dispose() for engine in ENGINES]; sys.exit()", 0),
}

APP = """
import gc, multiprocessing
from sqlalchemy import Engine, event, text

ENGINES = []

@event.listens_for(Engine, "connect")
def connected(connection, record):
    ENGINES[:] = {one for one in gc.get_objects() if isinstance(one, Engine) and not one.dialect.is_async}

class Plain(JobArgs):
    way: str

class Books(JobArgs):
    way: str

class AsyncPlain(JobArgs):
    way: str

class AsyncBooks(JobArgs):
    way: str

def ended(pid, way):
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == STATUS[way], (way, status)
    return "parent"

def in_child():
    mark("in child")

def through_multiprocessing():
    child = multiprocessing.get_context("fork").Process(target=in_child)
    child.start()
    child.join()
    assert child.exitcode == 0
    return "parent"
"""

HANDLER = """
@awa.task({name}, transactional={transactional})
{kind} handle_{name}(ctx):
    if {transactional}:
        {awaited} ctx.session.execute(text("SELECT 1"))
    if ctx.args.way == "multiprocessing":
        found = through_multiprocessing()
    else:
        pid = os.fork()
        if pid == 0:
{ways}
        found = ended(pid, ctx.args.way)
    {awaited} ctx.set_progress(50)
    if {transactional}:
        {awaited} ctx.session.execute(text("SELECT 1"))
    return found
"""


def source(*, transactional: bool, is_async: bool, name: str) -> str:
    ways = "\n".join(f"            if ctx.args.way == {way!r}: {body}" for way, (body, _) in WAYS.items())
    kind, awaited = ("async def", "await") if is_async else ("def", "_ =")
    return HANDLER.format(name=name, transactional=transactional, kind=kind, awaited=awaited, ways=ways)


class Plain(JobArgs):
    way: str


class Books(JobArgs):
    way: str


class AsyncPlain(JobArgs):
    way: str


class AsyncBooks(JobArgs):
    way: str


KINDS = (Plain, Books, AsyncPlain, AsyncBooks)
#: What a worker says of trouble.
TROUBLE = ("listener is down", "heartbeat failed", "broke, starting it again", "put back", "Bad file")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_children_of_handlers_leave_the_worker_alone(stage, tmp_path, driver, uvloop):
    if uvloop:
        pytest.importorskip("uvloop", reason="needs the extra `uvloop`")
    handlers = "".join(
        source(transactional="Books" in kind.__name__, is_async="Async" in kind.__name__, name=kind.__name__)
        for kind in KINDS
    )
    status = f"STATUS = { ({way: status for way, (_, status) in WAYS.items()})!r}\n"
    run = RUN.replace('["DATABASE_URL"]', f'["DATABASE_URL"].replace("+psycopg:", "+{driver}:")')
    options = f"dict(uvloop={uvloop}, heartbeat=timedelta(seconds=0.2), stale_after=timedelta(seconds=20))"
    with Program(stage, tmp_path, APP + status + handlers + run, options=options) as program:
        program.says(" serves ")
        for _ in range(2):  # the second time with connections that were there when the first children were forked
            stage.enqueue(*[kind(way=way) for kind in KINDS for way in (*WAYS, "multiprocessing")])
            program.until(stage.all_ended)
        jobs = stage.jobs()
        assert [(job.kind, job.args, job.state, job.attempt, job.errors) for job in jobs] == [
            (job.kind, job.args, "completed", 1, []) for job in jobs
        ]
        assert {job.result for job in jobs} == {"parent"}
        # `get_objects()` in a handler's thread may hand out a tuple that the heartbeat's is still making.
        said = program.stderr().replace("heartbeat failed: Objects/tupleobject.c", "")
        assert not [word for word in TROUBLE if word in said]
        assert said.count("Traceback") == said.count("ValueError: error of a child") == 8
        assert said.count("words of a child\n") == 8
        assert (tmp_path / "in child").exists()
        program.tell(TERM)
        assert program.status() == 0


USES = """
from sqlalchemy import text

def child_of(use):
    pid = os.fork()
    if pid == 0:
        try:
            use()
        except Exception as exc:
            print(type(exc).__name__, str(exc).partition(chr(10))[0], file=sys.stderr, flush=True)
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)

class Books(JobArgs):
    way: str = ""

@awa.task(Books, transactional=True)
def books(ctx):
    backend = ctx.session.scalar(text("SELECT pg_backend_pid()"))
    assert child_of(lambda: ctx.session.execute(text("SELECT 'child'"))) == 3
    engine = ctx.session.get_bind()
    assert child_of(lambda: engine.connect()) == 3
    assert ctx.session.scalar(text("SELECT pg_backend_pid()")) == backend
    return backend
"""


def test_what_belongs_to_the_worker_says_so_in_a_child(stage, tmp_path):
    stage.enqueue(Books(way=""))
    with Program(stage, tmp_path, USES + RUN) as program:
        program.until(stage.all_ended)
        assert [job.state for job in stage.jobs()] == ["completed"], [job.errors for job in stage.jobs()]
        assert "ConfigurationError this engine belongs to the worker of process" in program.stderr()
        assert "OperationalError" in program.stderr()
        program.tell(TERM)
        assert program.status() == 0


def test_a_worker_that_was_made_before_the_fork_is_refused(stage, tmp_path):
    program = """
@awa.task(Work)
def work(ctx):
    mark("worked")

worker = awa.worker(os.environ["DATABASE_URL"])

async def enter():
    async with worker:
        pass

async def run():
    async with worker:
        while not (HERE / "worked").exists():
            await asyncio.sleep(0.02)

pid = os.fork()
if pid == 0:
    asyncio.run(enter())
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
asyncio.run(run())
"""

    class Work(JobArgs):
        text: str = ""

    stage.enqueue(Work())
    with Program(stage, tmp_path, program) as started:
        assert started.status() == 0
        assert "ConfigurationError: this worker belongs to the worker of process" in started.stderr()


PRELOADED = """
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

@awa.task(Work)
def work(ctx):
    return os.getpid()

@awa.on_completed(Work)
def after(event):
    return Next()

class Next(JobArgs):
    pass

@awa.task(Next, transactional=True)
async def following(ctx):
    await ctx.session.execute(text("SELECT 1"))

engine = create_engine(os.environ["DATABASE_URL"])
sessions = sessionmaker(engine)
awa.attach(sessions)
with sessions.begin() as session:
    for _ in range(40):
        enqueue(session, Work())

children = []
for number in range(3):
    pid = os.fork()
    if pid == 0:
        sys.exit(awa.run_worker(os.environ["DATABASE_URL"]))
    children.append(pid)

import signal
deadline = time.monotonic() + 40
while True:
    with sessions() as session:
        live = session.scalar(text("SELECT count(*) FROM awa.jobs WHERE state <> 'completed'"))
        workers = session.scalar(text("SELECT count(*) FROM awa.runtime_instances"))
    if live == 0 and workers == 3:
        break
    assert time.monotonic() < deadline, (live, workers)
    time.sleep(0.05)
for pid in children:
    os.kill(pid, signal.SIGTERM)
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
with sessions.begin() as session:  # the same connection as before the forks
    enqueue(session, Work())
assert engine.pool.checkedin() == 1
"""


def test_a_program_may_use_its_engines_and_then_fork_workers(stage, tmp_path):
    with Program(stage, tmp_path, PRELOADED) as program:
        assert program.status() == 0
        assert program.stderr().count(" serves ") == 3
        assert "Traceback" not in program.stderr()
    states = stage.states()
    assert (states.count("completed"), states.count("available")) == (80, 1)
    assert len({job.result for job in stage.jobs("work")} - {None}) >= 1


@pytest.mark.parametrize("uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_signals_to_a_child_are_not_the_workers(stage, tmp_path, uvloop):
    if uvloop:
        pytest.importorskip("uvloop", reason="needs the extra `uvloop`")
    source = """
import multiprocessing, signal

def linger():
    mark("lingers")
    time.sleep(600)

@awa.task(Work)
async def work(ctx):
    statuses = []
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        child = multiprocessing.get_context("fork").Process(target=linger)
        child.start()
        while not (HERE / "lingers").exists():
            await asyncio.sleep(0.02)
        (HERE / "lingers").unlink()
        os.kill(child.pid, number)
        child.join(20)
        statuses.append(child.exitcode)
        child.kill()
    await asyncio.sleep(0.5)
    return statuses
"""

    class Work(JobArgs):
        text: str = ""

    stage.enqueue(Work())
    with Program(stage, tmp_path, source + RUN, options=f"dict(uvloop={uvloop})") as program:
        program.until(stage.all_ended)
        assert stage.jobs()[0].result == [-TERM, -signal.SIGHUP, -signal.SIGUSR1]
        assert "no more claims" not in program.stderr()
        assert "jobs are running" not in program.stderr()
        program.tell(TERM)
        assert program.status() == 0


@pytest.mark.parametrize("uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_a_child_does_not_go_on_with_the_workers_loop(stage, tmp_path, uvloop):
    if uvloop:
        pytest.importorskip("uvloop", reason="needs the extra `uvloop`")
    source = """
@awa.task(Work)
async def work(ctx):
    pid = os.fork()
    if pid == 0:
        await asyncio.sleep(0)
        mark("went on")
        await asyncio.sleep(600)
    await asyncio.sleep(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

    class Work(JobArgs):
        text: str = ""

    stage.enqueue(Work())
    with Program(stage, tmp_path, source + RUN, options=f"dict(uvloop={uvloop})") as program:
        program.until(stage.all_ended)
        (job,) = stage.jobs()
        assert (job.state, job.result, job.attempt) == ("completed", 1, 1)
        program.says("it must end with os._exit()")
        assert not (tmp_path / "went on").exists()
        program.tell(TERM)
        assert program.status() == 0


@pytest.mark.parametrize("last", [TERM, signal.SIGKILL])
def test_a_child_that_outlives_the_worker_keeps_neither_its_port_nor_its_connections(stage, tmp_path, last):
    source = """
@awa.task(Work)
def work(ctx):
    if ctx.args.text == "warm":
        return None
    pid = os.fork()
    if pid == 0:
        os.close(1); os.close(2)
        time.sleep(60)
        os._exit(0)
    return pid
"""

    class Work(JobArgs):
        text: str = ""

    def backends() -> set[int]:
        found = stage.sql(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
        )
        return {row.pid for row in found}

    stage.enqueue(Work(text="warm"))
    before = backends()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with Program(stage, tmp_path, source + RUN, options=f"dict(health={address!r}, maintenance=False)") as program:
        # A connection that is being made in the moment of the fork is not known yet; lanes would make some at any time.
        program.until(lambda: stage.sql("SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN %'"))
        program.until(stage.all_ended)
        stage.enqueue(Work())
        program.until(stage.all_ended)
        assert backends() - before
        program.tell(last)
        assert program.status() == (0 if last == TERM else -last)
        child: Any = stage.jobs()[1].result
        try:
            program.until(lambda: not backends() - before)
            socket.create_server(("127.0.0.1", port)).close()
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)
