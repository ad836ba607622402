"""An application that catalogues a directory of real files through the queue, and then checks the queue's work.

It is the shortest complete program we have, meant to be read. In the order of what happens:

* `models`: the application's own tables: directories, files, words, incidents;
* `jobs`: its `Awa` app: what the jobs carry, what their handlers do, what follows on which outcome;
* `content`: reading files, which knows nothing of databases;
* `migrations`: an Alembic history that holds both its tables and ours;
* `database`: a private PostgreSQL, or the one that was given, brought to that history's head;
* `processes`: starting, killing and stopping; `worker` and `approver` are what runs in them;
* `seed`: rows and jobs in one transaction for each directory;
* `watch`: until everything is through, with a SIGKILL now and then if wanted;
* `records` and `check`: everything read back and compared with the files themselves;
* `report`: what a person or a program sees of it; `main`: the whole story.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Plan", "run"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What `awa-sqla demo` was asked to do.

    `directory`: what to catalogue (Python's standard library). `database_url`: where (a private server). `kill`:
    end workers and the approver with SIGKILL in the middle. `as_json`: one JSON object on stdout instead of tables.
    `keep`: leave the schemas in the database that was given. `workers`: how many worker processes.
    """

    directory: Path | None = None
    database_url: str | None = None
    kill: bool = False
    as_json: bool = False
    keep: bool = False
    workers: int = 2


def run(plan: Plan) -> int:
    """Do it and report it. Returns the exit status: 0 all is well, 1 a check is off, 2 no such directory, 3 no
    database, 130 after Ctrl-C. Whatever happens, no process of ours stays behind.
    """
    from awa_sqla.demo.main import main  # noqa: PLC0415 - workers import this package, and need no tables and bars

    return main(plan)
