"""`awa-sqla worker --reload`, with real files and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from awa_sqla import JobArgs
from tests.worker.programs import Program

pytest.importorskip("watchfiles", reason="--reload needs the extra `reload`")
pytestmark = [pytest.mark.slow, pytest.mark.beside]

TERM, HUP = signal.SIGTERM, signal.SIGHUP

SOURCE = """
os.chdir("/")
os.environ["LEAK"] = os.environ.get("LEAK", "") + "x"
mark(f"loaded {os.environ['LEAK']} {len(list(HERE.glob('loaded*')))}")

import atexit
atexit.register(mark, "app's own end")

@awa.task(Work)
async def work(ctx):
    mark(f"VERSION {ctx.args.text}")
    while ctx.args.text == "first" and not (HERE / "go").exists():
        await asyncio.sleep(0.02)
"""


class Work(JobArgs):
    text: str = ""


def reloading(stage: Any, here: Path, source: str = SOURCE, *options: str) -> Program:
    program = Program(stage, here, source.replace("VERSION", "old"))
    program.command = [sys.executable, "-m", "awa_sqla", "-A", "program:awa", "worker", "--reload", *options]
    return program


def change(program: Program, before: str, after: str) -> None:
    text = program.script.read_text()
    assert before in text
    program.script.write_text(text.replace(before, after))


def states_of_children(pid: int) -> list[str]:
    """One letter each: a dead one that nobody has waited for is Z."""
    listed = subprocess.run(["ps", "-A", "-o", "ppid=,stat="], capture_output=True, check=True, text=True).stdout
    return [state[0] for parent, state in map(str.split, listed.splitlines()) if int(parent) == pid]


def test_a_changed_file_is_loaded_when_running_jobs_have_ended(stage, tmp_path):
    stage.enqueue(Work(text="first"))
    with reloading(stage, tmp_path) as program:
        program.marked("old first")
        change(program, "old", "new")
        program.says("SIGHUP: no more claims")
        stage.enqueue(Work(text="second"))
        change(program, "new", "newer")  # while it drains: no reason to interrupt what runs
        assert stage.states() == ["running", "available"]
        (tmp_path / "go").touch()
        program.marked("newer second", "app's own end")
        # As the first time: neither the directory nor the environment that the app has set.
        program.marked("loaded x 0", "loaded x 1")
        program.until(stage.all_ended)
        program.tell(TERM)
        assert program.status() == 0
    assert [job.attempt for job in stage.jobs()] == [1, 1]


def test_hup_loads_anew_and_leaves_no_process_behind(stage, tmp_path):
    policy = "\nfrom awa_sqla.cel.evaluator import EVALUATOR\nEVALUATOR.ask({'check': 'true'})\n"
    with reloading(stage, tmp_path, SOURCE + policy) as program:
        program.says(" serves ")
        for times in (2, 3):
            program.tell(HUP)
            program.says(" serves ", times)
        assert states_of_children(program.process.pid) in (["S"], ["R"])
        program.tell(TERM)
        assert program.status() == 0


def test_a_stop_during_a_reload_is_a_stop(stage, tmp_path):
    stage.enqueue(Work(text="first"))
    with reloading(stage, tmp_path) as program:
        program.marked("old first")
        program.tell(HUP, TERM)
        (tmp_path / "go").touch()
        assert program.status() == 0
        assert program.stderr().count(" serves ") == 1
    assert stage.states() == ["completed"]


def test_jobs_that_do_not_end_do_not_keep_the_new_code_out(stage, tmp_path):
    stuck = SOURCE.replace("async def", "def").replace("await asyncio.sleep", "time.sleep")
    stage.enqueue(Work(text="first"))
    with reloading(stage, tmp_path, stuck, "--grace", "200ms") as program:
        program.marked("old first")
        change(program, "old", "new")
        program.marked("new first")
        (tmp_path / "go").touch()
        program.until(stage.all_ended)
        program.tell(TERM)
        assert program.status() == 0


def test_a_module_that_is_broken_is_shown_and_waited_for(stage, tmp_path):
    stage.enqueue(Work())
    with reloading(stage, tmp_path, "raise ValueError('half written')\n" + SOURCE) as program:
        program.says("ValueError: half written")
        program.says("waiting until a Python file changes")
        change(program, "raise ValueError('half written')", "")
        program.marked("old ")
        change(program, "import atexit", "import import")
        program.says("SyntaxError")
        os.kill(program.process.pid, signal.SIGINT)
        assert program.status() == 130


def test_a_change_while_the_app_is_being_loaded_is_not_missed(stage, tmp_path):
    edit = """
if not (HERE / "edited").exists():
    mark("edited")
    Path(__file__).write_text(Path(__file__).read_text().replace("o" + "ld", "new"))
"""
    with reloading(stage, tmp_path, edit + SOURCE) as program:
        program.marked("loaded x 1")
        stage.enqueue(Work(text="only"))
        program.marked("new only")
        program.tell(TERM)
        assert program.status() == 0
