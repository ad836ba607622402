"""The command line: `awa-sqla`.

`finding` finds the app and the database, `root` holds the group and its verbs, `callbacks` those of the callback
ingress. Each verb imports what it needs when it runs, so that `--help` stays quick.
"""

from awa_sqla.cli.callbacks import callbacks
from awa_sqla.cli.root import cli

cli.add_command(callbacks)

__all__ = ["cli"]
