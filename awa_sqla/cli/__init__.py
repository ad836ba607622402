"""The command line: `awa-sqla`.

`finding` finds the app and the database, `root` holds the group and its verbs, `maintenance` and `callbacks` those of
their processes, `schema` what changes and compares our tables. Each verb imports what it needs when it runs, so that
`--help` stays quick.
"""

from awa_sqla.cli.callbacks import callbacks
from awa_sqla.cli.maintenance import maintenance
from awa_sqla.cli.root import cli
from awa_sqla.cli.schema import migrate

cli.add_command(callbacks)
cli.add_command(maintenance)
cli.add_command(migrate)

__all__ = ["cli"]
