"""`awa-sqla maintenance`: a process that keeps the tables moving, or one round of it."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from awa_sqla.cli.finding import Settings
from awa_sqla.cli.root import EXIT_PRECONDITION, Duration, after_verb, in_schema, leave, statuses

if TYPE_CHECKING:
    from awa_sqla.worker.maintainer import Maintenance


class Names(click.ParamType[tuple[str, ...]]):
    """Several names, with commas between them."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:  # noqa: ARG002
        """Split."""
        return tuple(name.strip() for name in str(value).split(",") if name.strip())


@click.command()
@after_verb
@click.option("--once", is_flag=True, help="Run every lane until it finds no more to do, and end.")
@click.option(
    "--only", type=Names(), metavar="LANE,...", help="Run only these lanes, for instance promote,rescue,cron."
)
@click.option("--heartbeat", type=Duration(), default="30s", show_default=True)
@click.option("--stale-after", type=Duration(), default="90s", show_default=True, help="When a silent worker is dead.")
@click.option("--schema", default="awa", show_default=True, help="Where our tables are.")
@click.option("--health", metavar="[HOST]:PORT", help="Serve /healthz and /readyz there.")
@click.pass_obj
def maintenance(settings: Settings, /, *, once: bool, schema: str, **options: Any) -> None:
    """Promote, rescue, dispatch what is owed, age, prune, count and fire schedules, without running jobs.

    Of all workers and maintenance processes one leads; the others stand by. Needs only a database; with an app, its
    follow-ups are dispatched here and its schedules declared. With --once, for cron or serverless use, it prints a line
    for each lane that this process has: its name, what it did, seconds, and its error.

    Exit status: 0; 1 a lane failed; 2 usage; 3 no app or database found; 4 another process leads, or the schema is not
    that of this version; 6 the database cannot be reached; 130 or 143 a signal has cut it.
    """
    from awa_sqla.app import Awa

    app = settings.find_app()
    database = settings.database(app)
    app = app or Awa()
    with statuses("maintenance", lambda: database, schema), in_schema(database, schema) as given:
        if not once:
            sys.exit(app.run_maintenance(given, **options))
        fares = asyncio.run(_once(app.maintenance(given, **options)))
    if fares is None:
        leave("another process leads maintenance; nothing was done", EXIT_PRECONDITION)
    for name, fare in fares.items():
        error = f"\t{fare['error']}" if fare["error"] else ""
        click.echo(f"{name}\t{fare['done']}\t{fare['seconds']:.3f}{error}")
    sys.exit(1 if any(fare["failures"] for fare in fares.values()) else 0)


async def _once(process: Maintenance) -> dict[str, dict[str, Any]] | None:
    """One round, which SIGINT and SIGTERM cut: the pass is rolled back, and another process may lead at once."""
    loop, task, caught = asyncio.get_running_loop(), asyncio.current_task(), list[int]()

    def cut(number: int) -> None:
        caught.append(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cut, number)
    try:
        return await process.once()
    except asyncio.CancelledError:
        if not caught:
            raise
        leave("cut before the round was over", 128 + caught[0])
