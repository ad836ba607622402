"""The group `awa-sqla` and its verbs."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from awa_sqla.cli.finding import Settings

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

EXIT_PRECONDITION = 4
EXIT_NOTHING = 5
EXIT_UNREACHABLE = 6


class Duration(click.ParamType[timedelta]):
    """`30s`, `500ms`, `5m`, `2h`, `7d`."""

    name = "duration"
    _UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}  # noqa: RUF012

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Parse; usage error for anything else."""
        if isinstance(value, timedelta):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no duration; write for instance 30s, 500ms, 5m, 2h or 7d", param, ctx)
        try:
            return timedelta(seconds=float(found[1]) * self._UNITS[found[2]])
        except OverflowError:
            self.fail(f"{value!r} is longer than any wait can be", param, ctx)


@contextmanager
def in_schema(url: str, schema: str) -> Generator[Any, None, None]:
    """The database as a process of ours takes it: its URL, or an engine where our tables are in another schema.

    The engine is of psycopg whatever the URL says: one of asyncpg could be closed only in the loop that has used it.
    """
    if schema == "awa":
        yield url
        return
    from sqlalchemy import create_engine

    from awa_sqla.schema import checked_schema
    from awa_sqla.worker.engines import sync_url

    checked_schema(schema)
    # Handlers with a session take their connections from it, as many as there are slots.
    options: Any = {"pool_pre_ping": True, "max_overflow": -1}
    engine = create_engine(sync_url(url), execution_options={"schema_translate_map": {"awa": schema}}, **options)
    try:
        yield engine
    finally:
        engine.dispose()


def after_verb(command: Any) -> Any:
    """Let -A and -d also be written after the verb, where many look for them."""

    def keep(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.obj = replace(ctx.obj, **{param.name: value})

    for flags, metavar in ((("-A", "--app"), "MODULE:ATTR"), (("-d", "--database-url"), "URL")):
        option = click.option(*flags, metavar=metavar, expose_value=False, callback=keep, help="As before the verb.")
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-A", "--app", metavar="MODULE:ATTR", help="The app; else AWA_APP or pyproject.toml.")
@click.option("-d", "--database-url", metavar="URL", help="The database; else AWA_DATABASE_URL, DATABASE_URL.")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@click.option("-q", "--quiet", is_flag=True, help="Log errors only.")
@click.version_option(package_name="awa-sqla", prog_name="awa-sqla")
@click.pass_context
def cli(ctx: click.Context, app: str | None, database_url: str | None, *, verbose: bool, quiet: bool) -> None:
    """Background jobs inside your SQLAlchemy session."""
    level = logging.DEBUG if verbose else logging.ERROR if quiet else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("awa_sqla").setLevel(level)
    ctx.obj = Settings(app, database_url)


@cli.command()
@after_verb
@click.option("-Q", "--queue", "queues", multiple=True, help="Serve only this queue; may be repeated.")
@click.option("--grace", type=Duration(), default="30s", show_default=True, help="For running jobs at a stop.")
@click.option("--heartbeat", type=Duration(), default="30s", show_default=True)
@click.option("--stale-after", type=Duration(), default="90s", show_default=True, help="When a silent worker is dead.")
@click.option("--listen-url", metavar="URL", help="Direct URL for LISTEN, where the database is behind a pooler.")
@click.option("--no-notify", is_flag=True, help="Poll only.")
@click.option(
    "--no-maintenance", is_flag=True, help="Leave promotion, rescue, schedules, retention and the like to others."
)
@click.option("--schema", default="awa", show_default=True, help="Where our tables are.")
@click.option("--health", metavar="[HOST]:PORT", help="Serve /healthz and /readyz there.")
@click.option("--uvloop/--no-uvloop", default=None, help="Insist on uvloop, or avoid it; else used where installed.")
@click.option("--reload", "reloads", is_flag=True, help="Start anew when a Python file has changed, and on SIGHUP.")
@click.pass_obj
def worker(
    settings: Settings,
    /,
    queues: tuple[str, ...],
    *,
    schema: str,
    no_notify: bool,
    no_maintenance: bool,
    reloads: bool,
    **options: Any,
) -> None:
    """Run the app's jobs until SIGINT or SIGTERM.

    The first signal stops claiming and lets running jobs end, the second asks them to stop, the third leaves at once
    with status 130 or 143. SIGHUP is a first one; with --reload it loads the app anew when running jobs have ended.
    SIGUSR1 prints the running jobs and their stacks. Exit status 1: jobs had to be abandoned.
    """
    from awa_sqla.cli.reload import FileReloader
    from awa_sqla.worker.process import run_until_stopped

    reloader = FileReloader(settings) if reloads else None
    app = settings.load_app() if reloader is None else reloader.load_app()
    options |= {"queues": queues or None, "notify": not no_notify, "maintenance": not no_maintenance}
    database = settings.database(app)
    with statuses("worker", lambda: database, schema), in_schema(database, schema) as given:
        status = run_until_stopped(lambda: app.worker(given, **options), uvloop=options["uvloop"], reloader=reloader)
    sys.exit(status)


@cli.command()
@after_verb
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--kill", is_flag=True, help="Kill processes with SIGKILL in the middle; the result must be the same.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--keep", is_flag=True, help="Keep the demo's schemas in a database that was given.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 16), help="Worker processes.")
@click.pass_obj
def demo(settings: Settings, directory: Path | None, *, kill: bool, as_json: bool, keep: bool, workers: int) -> None:
    """Catalogue the files of DIRECTORY through the queue, the way an application would.

    Without a database URL it starts a PostgreSQL of its own and removes it at the end. Without a directory it takes
    Python's standard library.
    """
    from awa_sqla.demo import Plan, run

    sys.exit(
        run(
            Plan(
                directory=directory,
                database_url=settings.given_database(),
                kill=kill,
                as_json=as_json,
                keep=keep,
                workers=workers,
            )
        )
    )


@cli.group()
def specs() -> None:
    """The catalogue of follow-up specs that some process can dispatch."""


@specs.command("list")
@after_verb
@click.pass_obj
def specs_list(settings: Settings, /) -> None:
    """Print each spec: kind, outcome, name, and when a process that has it was last seen (UTC)."""
    from sqlalchemy import select

    from awa_sqla.models import FollowUpSpec

    with _session(settings, "viewer") as session:
        for spec in session.scalars(
            select(FollowUpSpec).order_by(FollowUpSpec.kind, FollowUpSpec.outcome, FollowUpSpec.name)
        ):
            seen = spec.last_seen.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            click.echo("\t".join((spec.kind, spec.outcome, _shown(spec.name), seen)))


@specs.command("forget")
@after_verb
@click.argument("name")
@click.pass_obj
def specs_forget(settings: Settings, /, name: str) -> None:
    """Forget the spec NAME: a renamed or removed spec to which nothing more shall be owed.

    Exit status 5 when the catalogue does not have it.
    """
    from awa_sqla.session.catalogue import forget

    with _session(settings, "owner") as session:
        gone = forget(session, name)
    if not gone:
        leave(f"no spec is named {_shown(name)!r}; see `awa-sqla specs list`", EXIT_NOTHING)
    click.echo(f"forgotten: {_shown(name)}")


@contextmanager
def _session(settings: Settings, role: str) -> Generator[Session, None, None]:
    """A transaction on the database that was asked for; leaves with a status when it cannot be had."""
    from sqlalchemy import NullPool, create_engine
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.orm import Session

    from awa_sqla.worker.engines import sync_url

    url = sync_url(settings.database())
    try:
        with Session(create_engine(url, poolclass=NullPool)) as session, session.begin():
            yield session
    except DBAPIError as exc:
        _failed(exc, role, settings.database)


@contextmanager
def statuses(role: str, database: Callable[[], str], schema: str = "awa") -> Generator[None, None, None]:
    """What keeps a process of ours from running, as an exit status; `role` is what its database user has to be."""
    from sqlalchemy.exc import DBAPIError

    from awa_sqla.errors import AwaError, SchemaVersionError

    try:
        yield
    except SchemaVersionError as exc:
        leave(str(exc), EXIT_PRECONDITION)
    except AwaError as exc:
        raise click.UsageError(str(exc)) from exc
    except (DBAPIError, OSError) as exc:
        _failed(exc, role, database, schema)
    except Exception as exc:
        if not hasattr(exc, "sqlstate"):
            raise
        _failed(exc, role, database, schema)  # asyncpg's own, out of a new connection


def _failed(error: Exception, role: str, database: Callable[[], str], schema: str = "awa") -> NoReturn:
    """Leave with what the database, or the way to it, has said: what it refused, or that it cannot be reached."""
    from awa_sqla.cli.grants import refused
    from awa_sqla.sqlstates import MISSING, UNREACHABLE, driver_sqlstate

    if (told := refused(error, role, database(), schema=schema)) is not None:
        leave(told, EXIT_PRECONDITION)
    said = getattr(error, "orig", None) or error
    code = driver_sqlstate(said)
    if code is None or code.startswith(UNREACHABLE):
        leave(f"the database cannot be reached: {said}", EXIT_UNREACHABLE)
    more = ""
    if code in MISSING:
        check = f"awa-sqla migrate --check{'' if schema == 'awa' else f' --schema {schema}'}"
        more = f"\nIts schema is not whole, or older: `{check}` says what is missing"
    leave(f"the database refused: {said}{more}", EXIT_PRECONDITION)


def _shown(text: str) -> str:
    """Text from the database, harmless on a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def leave(message: str, status: int) -> NoReturn:
    click.echo(f"awa-sqla: {message}", err=True)
    sys.exit(status)
