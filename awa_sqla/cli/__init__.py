"""The command line: `awa-sqla`.

`finding` finds the app and the database, `root` holds the group and its verbs. Each verb imports what it needs when
it runs, so that `--help` stays quick.
"""

from awa_sqla.cli.root import cli

__all__ = ["cli"]
