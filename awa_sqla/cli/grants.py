"""`awa-sqla grants`: the statements of a role; and what to say when the database refuses a process for want of one."""

from __future__ import annotations

import click

from awa_sqla.schema.grants import ROLES


@click.command()
@click.option("--role", type=click.Choice(tuple(ROLES)), required=True, help="What the database role is for.")
@click.option("--to", required=True, metavar="NAME", help="The database role that is granted it; it must be there.")
@click.option("--schema", default="awa", show_default=True)
def grants(role: str, to: str, schema: str) -> None:
    """Print the GRANT statements of a role, for psql; touches no database.

    Run them as the owner of the schema, those of `owner` as a superuser, and all of them again after each upgrade of
    the schema. A process that is two of these, such as a worker that also leads maintenance, is granted both.
    """
    from awa_sqla.errors import ConfigurationError
    from awa_sqla.schema import LATEST
    from awa_sqla.schema.grants import grants as statements

    try:
        found = list(statements(role, to, schema=schema))
    except ConfigurationError as exc:
        raise click.UsageError(str(exc)) from exc
    click.echo(f"-- {role}, for version {LATEST} of the schema. {ROLES[role].may}")
    if role == "owner":
        click.echo("SET client_min_messages = warning;  -- what is not there yet is no news")
    for statement in found:
        click.echo(f"{statement};")


def refused(error: BaseException, role: str, url: str, *, schema: str = "awa") -> str | None:
    """What to tell a person when the server has refused a process of ours for want of a privilege; else None.

    Asks the database at `url` which grants of `role` its user lacks, where it can be asked.
    """
    from sqlalchemy import NullPool, create_engine
    from sqlalchemy.exc import SQLAlchemyError

    from awa_sqla.schema.grants import missing
    from awa_sqla.sqlstates import INSUFFICIENT_PRIVILEGE, driver_sqlstate
    from awa_sqla.worker.engines import sync_url

    told = getattr(error, "orig", None) or error
    if driver_sqlstate(told) != INSUFFICIENT_PRIVILEGE:
        return None
    text = f"the database refused: {str(told).partition(chr(10))[0].rpartition(': ')[2]}."
    try:
        with create_engine(sync_url(url), poolclass=NullPool).connect() as connection:
            lacking = missing(connection, role, schema=schema)
    except SQLAlchemyError:
        lacking = []
    lines = [f"  {statement};" for statement in lacking]
    advice = f"`awa-sqla grants --role {role} --to NAME` prints all that a database role needs for this"
    return "\n".join([f"{text} Its user lacks:", *lines, advice] if lines else [f"{text} {advice}"])
