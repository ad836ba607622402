"""The adapter of awa_sqla as a script, for any runner that speaks the command line of `adapters.common`.

Run it with an interpreter that has awa_sqla: `python benchmarks/adapter.py COMMAND --dsn URL ...`.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the checkout, not this folder

from benchmarks.adapters.awa_sqla import AwaSQLA  # noqa: E402
from benchmarks.adapters.common import main  # noqa: E402

main(AwaSQLA(), sys.argv[1:])
