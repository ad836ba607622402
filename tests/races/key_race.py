"""One race for a unique key: the jobs it begins with, and the comparison with the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from awa_sqla import Attempt
from tests.races.key_cells import KeyCell, Situation
from tests.races.keys import ROADS, Said, Verdict, Wait, World
from tests.races.matrix import Answer
from tests.races.race import Rival, Stage, duel, notes
from tests.races.roads import Heard, KeyScene, carry, run, twin
from tests.races.verbs import new_token

#: The jobs that may hold the key, those that have claimed it, and those of which only one of the two is so: claims
#: without a row in one of its unique states, and such rows without a claim.
_HOLDERS = """
    SELECT ARRAY(SELECT id FROM jobs WHERE kind = 'signup') AS jobs,
        ARRAY(SELECT job_id FROM job_unique_claims) AS claims,
        ARRAY(
            SELECT coalesce(claim.job_id, job.id) FROM job_unique_claims AS claim
            FULL JOIN (SELECT * FROM jobs WHERE unique_key IS NOT NULL AND in_unique_state(state, unique_states)) AS job
            ON claim.job_id = job.id AND claim.unique_key = job.unique_key
            WHERE claim.job_id IS NULL OR job.id IS NULL
        ) AS lies
"""
_UNIQUE_NOW = "UPDATE {} SET args = %s, unique_key = %s, unique_states = %s WHERE id = %s"
_TWIN = (
    "INSERT INTO jobs_hot (kind, queue, args, unique_key, unique_states) VALUES ('signup', %s, %s, %s, %s) RETURNING id"
)
_CARRIER = (
    "INSERT INTO jobs_hot (kind, queue, state, attempt, run_lease, args) VALUES ('carrier', 'carriers', 'running', 1, "
    "nextval('run_lease_seq'), jsonb_build_object('mask', %s::text, 'policy', %s::text)) RETURNING id, run_lease"
)


class KeyStage:
    """The database of the races for a key."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.database = stage.database
        carry(stage.follow_ups)

    def set(self, situation: Situation, *racers: str) -> KeyScene:
        """The jobs of a situation, by plain SQL, and a carrier for each racer that enqueues by a follow-up."""
        jobs, mask = situation.world.jobs, situation.mask
        request = twin(mask).columns()
        unique = ('{"email": "ada@example.org"}', request["unique_key"], request["unique_states"])
        if "holder" in jobs:
            scene = self._stage.set(jobs["holder"])
            table = "scheduled_jobs" if scene.store == "scheduled" else "jobs_hot"
            self.database.execute(_UNIQUE_NOW.format(table), *unique, scene.held.id)
            held, queue, store = scene.held, scene.queue, scene.store
        else:
            self._stage.clear()
            held, queue, store = Attempt(0, 0), "race", "hot"
        twin_id = self.database.value(_TWIN, request["queue"], *unique) if "twin" in jobs else None
        carriers = {
            who: Attempt(*self.database.rows(_CARRIER, mask, "raise" if "raise" in name else "skip")[0])
            for who, name in zip(("first", "second"), racers, strict=True)
            if name in ROADS and ROADS[name].is_follow_up
        }
        return KeyScene(held, new_token(), queue, store, self._stage.follow_ups.specs, mask, twin_id, carriers)

    def violations(self, scene: KeyScene, end: World, ids: dict[str, int], written: list[str]) -> list[str]:
        """Where the committed rows and claims are not those of the reference."""
        [found] = self.database.rows(_HOLDERS)
        wrong = [f"what is claimed for job {job_id} is not true" for job_id in found.lies]
        if len(found.claims) > 1:
            wrong.append(f"the key is held by {found.claims}")
        if any(name not in ids for name in end.jobs):
            return wrong  # an answer was wrong already
        holders, jobs = [ids[name] for name in end.jobs if name == end.holder], {ids[name] for name in end.jobs}
        if found.claims != holders:
            wrong.append(f"the key is held by {found.claims}, not {holders}")
        if set(found.jobs) != jobs:
            return [*wrong, f"the jobs are {found.jobs}, not {jobs}"]
        for name, job in end.jobs.items():
            errors = tuple((error.format_map(ids), sort, attempt) for error, sort, attempt in job.errors)
            own = scene if name == "holder" else replace(scene, held=Attempt(ids[name], 0))
            must_be = replace(job, errors=errors)
            wrong += [f"{name}: {what}" for what in self._stage.violations(own, must_be, written)]
        return wrong

    def carried(self, scene: KeyScene) -> dict[str, bool]:
        """Which carriers are completed, by who was to complete them."""
        query = "SELECT state = 'completed' FROM jobs WHERE id = %s"
        return {who: self.database.value(query, carrier.id) for who, carrier in scene.carriers.items()}


def race_for_key(maker: Any, rival: Rival, stage: KeyStage, cell: KeyCell) -> list[str]:
    """Run one cell; what was not as the reference says."""
    verdict, scene = cell.verdict, stage.set(cell.situation, cell.first, cell.second)
    try:
        one, two, waited = duel(
            maker,
            rival,
            stage.database,
            cell,
            lambda session: run(cell.first, "first", session, scene, flushed=cell.flushed),
            lambda session: run(cell.second, "second", session, scene, flushed=cell.flushed),
            gives_up=verdict.wait is Wait.BRIEFLY,
        )
    except Exception as exc:
        return [f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"]
    ids = {"holder": scene.held.id, "twin": scene.twin or 0}
    wrong: list[str] = []
    for who, is_, must, sees in (
        ("first", one, verdict.first, verdict.first_sees),
        ("second", two, verdict.second, verdict.second_sees),
    ):
        if must.of == who and is_.job_id is not None:
            ids[who] = is_.job_id
        wrong += _answered(who, is_, must, ids)
        holders = () if sees is None else (ids.get(sees),)
        if is_.holders not in (None, holders):
            wrong.append(f"the {who} sees the key held by {is_.holders}, not {holders}")
    if waited != (verdict.wait is Wait.LONG):
        wrong.append("the second waited for the first" if waited else "the second did not wait for the first")
    wrong += stage.violations(scene, verdict.end, ids, notes(cell))
    must_carry = {who: _carries(cell, who, verdict) for who in scene.carriers}
    if (carried := stage.carried(scene)) != must_carry:
        wrong.append(f"the carriers' completion is {carried}, not {must_carry}")
    return wrong


def _answered(who: str, is_: Heard, must: Said, ids: dict[str, int]) -> list[str]:
    if is_.answer != must.answer:
        return [f"the {who} got {is_.answer}, not {must.answer}"]
    if is_.job_id is not None and is_.job_id != ids.get(must.of or ""):
        return [f"the {who} was told of job {is_.job_id}, not of {must.of}: {ids}"]
    return []


def _carries(cell: KeyCell, who: str, verdict: Verdict) -> bool:
    """Whether a carrier is completed: unless its follow-up was refused, or the first was rolled back."""
    said = verdict.first if who == "first" else verdict.second
    return said.answer is not Answer.REFUSED and (who == "second" or cell.commits)
