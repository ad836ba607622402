"""One run: set up, enqueue and hurt, let the rest drain, see that every slot is free, stop, audit, report."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL, create_engine, make_url, text
from sqlalchemy.orm import Session

from awa_sqla import EnqueueRequest
from awa_sqla import asyncio as later
from awa_sqla.localpg import LocalPostgres
from awa_sqla.schema import create_all
from awa_sqla.session import catalogue
from tests.soak import app, audit, upkeep
from tests.soak.chaos import Amounts, Chaos
from tests.soak.fleet import Fleet
from tests.soak.load import FINISHED, OPEN, Driver, Load
from tests.soak.outside import Outside
from tests.soak.tables import Asked, Base, Expected

SETTINGS = {"max_connections": "600", "max_prepared_transactions": "10"}
#: Seconds in which some job must end while the rest drains; longer than any backoff, rescue or pause.
PATIENCE = 45.0
#: What no worker should ever say.
ALARMING = (
    "broke, starting it again",
    "cannot be recorded",
    "was never retrieved",
    "was never awaited",
    "Fatal Python",
    "ERROR awa_sqla.maintenance: lane ",
    "ERROR awa_sqla.maintenance: schedule ",
)


#: What the summary counts, in this order.
DONE = ("kills", "terms", "stops", "kills of maintenance", "leaders frozen", "backend terminations", "restarts", "cuts")


@dataclass(frozen=True)
class Settings:
    """What is asked for on the command line."""

    jobs: int = 20_000
    seed: int = 1
    kills: int = 200
    stops: int | None = None
    slow: float = 0.1
    minutes: float | None = None
    workers: int = 3
    sabotage: str | None = None
    failovers: int = 0
    fight: bool = True
    database_url: str | None = None
    logs: Path | None = None
    quiet: bool = False

    @property
    def seconds(self) -> float:
        """How long to go on hurting: by default two seconds for each kill."""
        return self.minutes * 60 if self.minutes is not None else max(self.kills * 2.0, 8.0)


@dataclass
class Report:
    """What was done and found."""

    settings: Settings
    findings: audit.Findings = field(default_factory=audit.Findings)
    did: Counter[str] = field(default_factory=Counter[str])
    commits: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    wrong: list[str] = field(default_factory=list)
    stories: dict[int, str] = field(default_factory=dict)
    seconds: float = 0

    @property
    def clean(self) -> bool:
        return self.findings.clean and not self.wrong

    @property
    def summary(self) -> str:
        """One line."""
        found, counts, did = self.findings.found, self.findings.counts, self.did
        before, after = (sum(n for (how, _), n in self.commits.items() if how == cut) for cut in ("before", "after"))
        parts = [
            f"handled {counts.get('handled', 0)}",
            f"doubled effects {found('doubled effects')}",
            f"lost {found('lost')}",
            f"follow-ups missing {found('follow-ups missing')}, doubled {found('follow-ups doubled')}",
            f"stuck {found('stuck')}",
            "ticks {}: doubled {}, missing {}".format(
                counts.get("ticks", 0), found("ticks that fired twice"), found("ticks that did not fire")
            ),
            ", ".join(f"{what} {did[what]}" for what in DONE) + f", cuts in COMMIT {before + after} (before {before}, "
            f"after {after})",
            f"{self.seconds / 60:.1f} min",
        ]
        return f"soak seed {self.settings.seed}: " + " · ".join(parts)

    def violations(self, most: int = 5) -> str:
        """The first few of each, with all there is to know of the job."""
        lines = [f"  {one}" for one in self.wrong]
        for check, offenders in self.findings.offenders.items():
            if offenders:
                lines.append(f"  {check}: {len(offenders)}")
                for row in offenders[:most]:
                    lines.append(f"    {row}")
                    lines += [self.stories[row["id"]]] if row.get("id") in self.stories else []
        return "\n".join(lines)


class Soak:
    """One run over a database that is there."""

    def __init__(self, settings: Settings, url: URL, server: LocalPostgres | None, logs: Path) -> None:
        self._settings = settings
        self._url = url
        self._server = server
        self._logs = logs
        self._report = Report(settings)
        self._began = time.monotonic()

    async def run(self) -> Report:
        """All of it."""
        settings = self._settings
        set_up(self._url)
        self._driver = Driver(self._url)
        self._load = Load(self._driver, settings.jobs, settings.seed, settings.slow)
        try:
            forced, sabotage = settings.fight, settings.sabotage
            async with Fleet(
                self._url, self._logs, workers=settings.workers, forced=forced, sabotage=sabotage
            ) as fleet:
                amounts = Amounts.of(settings.kills, stops=settings.stops, failovers=settings.failovers)
                self._chaos = Chaos(fleet, self._driver, self._server, amounts, settings.seed)
                talk = asyncio.create_task(self._progress())
                others = Outside(self._driver, settings.seed)
                outside = asyncio.create_task(others.answer_all())
                await self._storm(settings.seconds)
                await self._driver.surely(self._end_of_time)
                if await self._drained():
                    await self._every_slot()
                outside.cancel()
                talk.cancel()
                await fleet.stop()
                self._report.wrong += fleet.wrong
                for place in fleet.places:
                    self._report.commits.update(place.proxy.cuts)
                self._report.did = self._chaos.did
                self._report.did["started again"] = fleet.no_start
                self._report.did["answers in vain"] = others.in_vain
        finally:
            await self._driver.close()
        self._report.wrong += alarms(self._logs)
        await asyncio.to_thread(self._audit)
        self._report.seconds = time.monotonic() - self._began
        return self._report

    async def _storm(self, seconds: float) -> None:
        cancels = asyncio.create_task(self._load.cancel_some(seconds / max(self._settings.jobs / 100, 1)))
        looks = asyncio.create_task(self._look())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._load.enqueue_all(seconds))
            tasks.create_task(self._chaos.rage(seconds, lambda: self._load.progress))
        for task in (cancels, looks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _look(self) -> None:
        """While it goes on: what must hold at any moment."""
        while True:
            await asyncio.sleep(5)
            with contextlib.suppress(psycopg.OperationalError):  # the server is just restarting
                found = await asyncio.to_thread(self._now)
                for check, rows in found.offenders.items():
                    self._report.findings.offenders.setdefault(check + " (at some moment)", []).extend(rows)

    def _now(self) -> audit.Findings:
        with connect(self._url) as connection:
            return audit.look_now(connection)

    async def _end_of_time(self) -> None:
        async with self._driver.engine.begin() as connection:
            await connection.execute(text(upkeep.END_OF_TIME))

    async def _drained(self) -> bool:
        """Whether all jobs end; as long as some do, there is hope."""
        finished, last = -1, time.monotonic()
        while time.monotonic() - last < PATIENCE:
            if await self._driver.scalar(OPEN) == 0:
                return True
            now = await self._driver.scalar(FINISHED)
            if now > finished:
                finished, last = now, time.monotonic()
            await asyncio.sleep(0.25)
        return False

    async def _every_slot(self) -> None:
        """As many jobs as there are slots, each of which waits for all others: a slot that leaked is missed."""
        async with self._driver.knowing() as session:
            for queue, slots in app.SLOTS.items():
                total = slots * self._settings.workers
                probes = [EnqueueRequest(app.Probe(slots=total), queue=queue, max_attempts=1) for _ in range(total)]
                ids = await later.enqueue_many(session, probes)
                session.add_all(Asked(job_id=job_id, batch=-1) for job_id in ids)
            await session.commit()
        await self._drained()

    async def _progress(self) -> None:
        while not self._settings.quiet:
            await asyncio.sleep(10)
            still = await self._driver.scalar(OPEN)
            did = " ".join(f"{what} {count}" for what, count in sorted(self._chaos.did.items()))
            passed = time.monotonic() - self._began
            print(f"{passed:5.0f} s: enqueued {self._load.enqueued}, open {still}, {did}", flush=True)

    def _audit(self) -> None:
        with connect(self._url) as connection:
            moments = self._report.findings.offenders
            self._report.findings = audit.audit(connection)
            self._report.findings.offenders |= moments
            for rows in self._report.findings.offenders.values():
                for row in rows[:5]:
                    if isinstance(job_id := row.get("id"), int):
                        self._report.stories[job_id] = audit.story(connection, job_id)


def connect(url: URL) -> psycopg.Connection[Any]:
    """A plain connection, past all proxies."""
    return psycopg.connect(url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True)


def set_up(url: URL) -> None:
    """The schema, the application's tables, and the catalogue of an application that was deployed a minute ago."""
    engine = create_engine(url)
    with engine.begin() as connection:
        create_all(connection)
        Base.metadata.create_all(connection)
        upkeep.set_up(connection)
    with Session(engine) as session, session.begin():
        session.add_all(Expected(kind=kind, outcome=outcome, spec=spec) for kind, outcome, spec in app.NOTING)
        catalogue.publish(session, [(one.kind, one.outcome, one.name) for one in app.awa.follow_ups.specs])
        session.execute(text("UPDATE awa.follow_up_specs SET created_at = created_at - interval '1 minute'"))
    engine.dispose()


def alarms(logs: Path) -> list[str]:
    """Lines of the workers' logs that tell of what should never happen."""
    return [
        f"{path}: {line}"
        for path in sorted(logs.glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if any(sign in line for sign in ALARMING)
    ]


def soak(settings: Settings) -> Report:
    """Run it on a server of its own, or on that of `settings.database_url`, which is never restarted."""
    logs = settings.logs or Path(tempfile.mkdtemp(prefix="awa-soak-"))
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if settings.database_url is not None:
            url, server = make_url(settings.database_url), None
            url = url.set(drivername="postgresql+psycopg", port=url.port or 5432)
        else:
            server = stack.enter_context(LocalPostgres(settings=SETTINGS))
            url = make_url(server.sqlalchemy_url())
        return asyncio.run(Soak(settings, url, server, logs).run())
