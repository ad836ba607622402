"""`python -m benchmarks.adapters MODULE:CLASS COMMAND ...`: one adapter, one command."""

import pkgutil
import sys

from benchmarks.adapters.common import main

main(pkgutil.resolve_name(sys.argv[1])(), sys.argv[2:])
