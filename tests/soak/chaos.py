"""The schedule of what is done to the processes, their connections and the server, and who does it."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import exc as sa_exc
from sqlalchemy import text

from awa_sqla.localpg import LocalPostgres
from tests.soak.fleet import Fleet, Place
from tests.soak.load import DRIVER, Driver
from tests.soak.proxy import PURPOSES, Armed
from tests.soak.upkeep import LEADER, LEASE

#: Seconds to wait for somebody to hurt, for a COMMIT to cut, and between two kills.
PATIENCE, COMMIT_PATIENCE, BREATH = 60.0, 8.0, 0.7


@dataclass(frozen=True)
class Amounts:
    """How often each is done in one run."""

    kills: int
    terms: int
    stops: int
    terminations: int
    restarts: int
    cuts: int
    commits: int
    keeper_kills: int
    keeper_stops: int
    failovers: int = 0

    @classmethod
    def of(cls, kills: int, *, stops: int | None = None, failovers: int = 0) -> Amounts:
        """In proportion to the kills, but for what is given."""
        return cls(
            kills=kills,
            terms=max(kills // 8, 1),
            stops=max(kills // 10, 2) if stops is None else stops,
            terminations=max(kills // 3, 2),
            restarts=max(kills // 25, 1),
            cuts=max(kills // 3, 2),
            commits=max(kills, 4),
            keeper_kills=max(kills // 4, 1),
            keeper_stops=max(kills // 12, 1),
            failovers=failovers,
        )


_TERMINATE = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
    "pg_backend_pid() AND backend_type = 'client backend' AND application_name <> :driver ORDER BY random() LIMIT :most"
)


class Chaos:
    """Hurts a fleet and its server, as often as `amounts` says, evenly over some seconds."""

    def __init__(self, fleet: Fleet, driver: Driver, server: LocalPostgres | None, amounts: Amounts, seed: int) -> None:
        self._fleet = fleet
        self._driver = driver
        self._server = server
        self._amounts = amounts
        self._rng = random.Random(f"{seed} chaos")
        self._restarting = asyncio.Lock()
        self._killing = asyncio.Lock()
        #: What was done, how often and when.
        self.did: Counter[str] = Counter()
        self._journal = fleet.logs / "chaos.log"

    def schedule(self, seconds: float) -> list[tuple[float, str]]:
        """When to do what: each kind evenly over the time, at a random moment of each of its parts."""
        amounts = vars(self._amounts) | ({} if self._server else {"restarts": 0})
        return sorted(
            ((part + self._rng.random()) * seconds / count, what)
            for what, count in amounts.items()
            for part in range(count)
        )

    async def rage(self, seconds: float, progress: Callable[[], float]) -> None:
        """Do it all, each when its time has come and `progress()`, from 0 to 1, is as far as the time should be."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        doing: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "kills": self._kill,
            "terms": self._term,
            "stops": self._freeze,
            "terminations": self._terminate,
            "restarts": self._restart,
            "cuts": self._cut,
            "commits": self._cut_in_commit,
            "keeper_kills": self._kill_keeper,
            "keeper_stops": self._freeze_keeper,
            "failovers": self._fail_over,
        }
        async with asyncio.TaskGroup() as tasks:
            for when, what in self.schedule(seconds):
                await asyncio.sleep(max(began + when - loop.time(), 0))
                while progress() < when / seconds:  # noqa: ASYNC110 - it is no event
                    await asyncio.sleep(0.1)
                tasks.create_task(doing[what]())

    def _done(self, what: str, *details: object, times: int = 1) -> None:
        self.did[what] += times
        self._note(what, *details)

    def _note(self, *what: object) -> None:
        with self._journal.open("a") as journal:
            print(datetime.now().isoformat(" "), *what, file=journal)

    async def _victim(self, among: Sequence[Place] | None = None, *, spared: bool = False) -> Place | None:
        """Somebody at work to whom nobody does anything, a worker by default; not the spared one, unless it may be."""
        among = self._fleet.workers if among is None else among
        for _ in range(int(PATIENCE / 0.05)):
            free = [p for p in among if not p.busy and p.at_work and (spared or not p.spared)]
            if free:
                return self._rng.choice(free)
            await asyncio.sleep(0.05)
        return None

    async def _kill(self) -> None:
        async with self._killing:
            place = await self._victim()
            if place is not None:
                place.kill()
                place.start()
                self._done("kills", place.number)
                await asyncio.sleep(BREATH)  # kills that are late do not come all at once

    async def _term(self) -> None:
        place = await self._victim()
        if place is not None:
            twice = self._rng.random() < 0.5
            self._done("terms", place.number, "twice" if twice else "")
            await self._fleet.term(place, twice=twice)

    async def _freeze(self) -> None:
        """SIGSTOP until its jobs are rescued and perhaps run elsewhere, then SIGCONT."""
        place = await self._victim(spared=True)
        if place is not None:
            await self._freeze_for(place, place.role.stale_after.total_seconds() + self._rng.uniform(0.5, 3))
            self._done("stops", place.number, "goes on")

    async def _freeze_for(self, place: Place, seconds: float) -> None:
        place.busy = True
        try:
            place.send(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            place.send(signal.SIGCONT)
            await asyncio.sleep(0.5)
        finally:
            place.send(signal.SIGCONT)
            place.busy = False

    async def _kill_keeper(self) -> None:
        place = await self._victim(self._fleet.keepers)
        if place is not None:
            place.kill()
            place.start()
            self._done("kills of maintenance", place.number)

    async def _freeze_keeper(self) -> None:
        """SIGSTOP for longer than a lease lasts, of the leader if it is a keeper: it wakes up, and another leads."""
        place = await self._victim(self._leading(await self._leader()) or self._fleet.keepers)
        if place is not None:
            leads = place.pid == await self._leader()
            await self._freeze_for(place, LEASE.total_seconds() + self._rng.uniform(0.5, 2))
            self._done("leaders frozen" if leads or place.role.forced else "standbys frozen", place.number)

    async def _leader(self) -> int | None:
        """The process that leads by right."""

        async def ask() -> str | None:
            async with self._driver.engine.connect() as connection:
                return await connection.scalar(LEADER)

        holder = await self._driver.surely(ask)
        return None if holder is None else int(holder.split(":")[-2])

    def _leading(self, pid: int | None) -> list[Place]:
        return [place for place in self._fleet.keepers if place.pid == pid and not place.busy and place.at_work]

    async def _terminate(self) -> None:
        try:
            async with self._driver.engine.connect() as connection:
                most = self._rng.choice((1, 1, 2, 5))
                ended = await connection.execute(_TERMINATE, {"driver": DRIVER, "most": most})
                self._done("backend terminations", times=len(ended.all()))
        except (sa_exc.OperationalError, sa_exc.InterfaceError):
            pass  # the server is just restarting

    async def _restart(self) -> None:
        assert self._server is not None
        async with self._restarting:
            await asyncio.to_thread(self._server.restart, "immediate")
            self._done("restarts")

    async def _cut(self) -> None:
        place = await self._victim(self._fleet.places, spared=True)
        if place is not None and place.proxy.cut():
            self._done("cuts", place.number)

    async def _cut_in_commit(self) -> None:
        place = await self._victim(spared=True)
        if place is None:
            return
        what = self._rng.choice(PURPOSES)
        armed = Armed(self._rng.choice(("before", "after")), what)
        place.proxy.arm(armed)
        try:
            await asyncio.wait_for(armed.hit.wait(), COMMIT_PATIENCE)
            self._note("cut in COMMIT", place.number, armed.how, what)
        except TimeoutError:
            place.proxy.disarm(armed)
            self._done("no such commit", place.number, what)

    async def _fail_over(self) -> None:
        """The server takes no writes for a while, in sessions that begin now."""
        async with self._restarting:
            for value in ("on", "off"):
                setting = (
                    f"ALTER DATABASE {self._driver.engine.url.database} SET default_transaction_read_only = {value}"
                )

                async def alter(statement: str = setting) -> None:
                    async with self._driver.engine.begin() as connection:
                        await connection.execute(text(statement))

                await self._driver.surely(alter)
                if value == "on":
                    await self._terminate_all()
                    await asyncio.sleep(self._rng.uniform(1, 3))
            self._done("failovers")

    async def _terminate_all(self) -> None:
        async def once() -> None:
            async with self._driver.engine.connect() as connection:
                await connection.execute(_TERMINATE, {"driver": DRIVER, "most": 10_000})

        await self._driver.surely(once)
