"""`awa-sqla migrate`: our tables, for apps without Alembic and for DBAs."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from awa_sqla.cli.finding import Settings
from awa_sqla.cli.root import EXIT_PRECONDITION, Duration, after_verb, leave, statuses

if TYPE_CHECKING:
    from sqlalchemy import Engine


@click.command()
@after_verb
@click.option("--to", type=int, metavar="N", help="The version to reach, up or down; default: the latest.")
@click.option("--schema", default="awa", show_default=True)
@click.option("--sql", is_flag=True, help="Print the SQL and run nothing.")
@click.option("--from", "from_", type=int, metavar="N", help="With --sql: the version to start from; default: 0.")
@click.option("--check", is_flag=True, help="Compare, print what would mend it, exit with 0 or 4; change nothing.")
@click.option("--lock-wait", type=Duration(), default="1m", show_default=True, help="For the locks of each step.")
@click.option("--yes", is_flag=True, help="Go to a lower version although that drops data.")
@click.pass_obj
def migrate(
    settings: Settings,
    /,
    *,
    to: int | None,
    schema: str,
    sql: bool,
    from_: int | None,
    check: bool,
    lock_wait: timedelta,
    yes: bool,
) -> None:
    """Install or change our schema while others work, for apps without Alembic.

    Each step is a short transaction, which tries for its locks again and again; indexes are built CONCURRENTLY after
    it. Of several that run at once one works, and all exit with 0. Run it again after an interruption: it goes on.

    Exit status: 0; 1 others hold the tables; 2 usage; 3 no database found; 4 the schema is newer than this package, the
    database refused a statement or, with --check, something is not up to date; 6 the database cannot be reached; 130 or
    143 a signal.
    """
    from sqlalchemy import NullPool, create_engine, event

    from awa_sqla import schema as steps
    from awa_sqla.worker.engines import sync_url

    _together(sql=sql, from_=from_, check=check, to=to, yes=yes)
    target = steps.LATEST if to is None else to
    with statuses("viewer" if check else "owner", settings.database, schema):
        steps.known(from_ or 0, target, schema)
        if sql:
            _print(from_ or 0, target, schema)
            return
        engine = create_engine(sync_url(settings.database()), poolclass=NullPool)
        event.listen(engine, "connect", _unprepared)
        if check:
            sys.exit(_check(engine, schema))
        _migrate(engine, target, schema, lock_wait, yes=yes)


def _together(*, sql: bool, from_: int | None, check: bool, to: int | None, yes: bool) -> None:
    """Refuse options that say nothing together: one of them would be left out in silence."""
    if from_ is not None and not sql:
        raise click.UsageError("--from is for --sql: without it the database is asked for its version")
    if check and (sql or to is not None or yes):
        raise click.UsageError("--check changes nothing and compares with the latest version: no --sql, --to or --yes")


def _unprepared(driver_connection: Any, _record: object) -> None:
    """Prepare no statements: behind a pooler they may be another client's."""
    if hasattr(driver_connection, "prepare_threshold"):
        driver_connection.prepare_threshold = None


def _print(from_: int, to: int, schema: str) -> None:
    """What `migrate` would run, for `psql`."""
    from awa_sqla.schema.online import script

    click.echo("\\set ON_ERROR_STOP on\n")
    for statement in script(from_, to, schema):
        click.echo(f"{statement}\n" if statement.startswith("--") else f"{statement};\n")


def _check(engine: Engine, schema: str) -> int:
    """Print the version and what is not as its steps made it, with the statements that mend it."""
    from awa_sqla import schema as steps
    from awa_sqla.errors import ConfigurationError
    from awa_sqla.schema.drift import differences, lines
    from awa_sqla.schema.online import unfinished

    with engine.begin() as connection:
        found = steps.installed_version(connection, schema)
        there = f"version {found}" if found else "not installed"
        more = "" if found >= steps.LATEST else "; `awa-sqla migrate` brings it there"
        click.echo(f"-- schema {schema}: {there}, this package has version {steps.LATEST}{more}")
        for work in unfinished(connection, min(found, steps.LATEST), schema):
            click.echo(f"-- `awa-sqla migrate` would finish: {work.what}")
        try:
            different = differences(connection, schema)
        except ConfigurationError as exc:
            leave(f"only the version was compared: {exc}", EXIT_PRECONDITION)
    for line in lines(different):
        click.echo(line)
    return EXIT_PRECONDITION if found != steps.LATEST or different else 0


def _migrate(engine: Engine, target: int, schema: str, lock_wait: timedelta, *, yes: bool) -> None:
    from awa_sqla import schema as steps
    from awa_sqla.errors import SchemaLocked
    from awa_sqla.schema.online import Online

    def tell(line: str) -> None:
        click.echo(f"{schema}: {line}", err=True)

    try:
        with engine.begin() as connection:
            found = steps.installed_version(connection, schema)
        if target < found <= steps.LATEST and not yes:
            raise click.UsageError("a lower version drops what the higher one added, data included; say so with --yes")
        # Without --yes up only, also when another process has gone beyond the target meanwhile.
        before, after = Online(engine, schema, lock_wait, tell).run(target, None if yes else 1)
    except SchemaLocked as exc:
        leave(str(exc), 1)
    except KeyboardInterrupt:
        leave("interrupted; the same command goes on from here", 130)
    click.echo(f"schema {schema}: {'already at' if before == after else f'{before} ->'} version {after}")
