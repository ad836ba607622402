"""A worker and rows of other versions: the older are read, the newer wait, what does not fit fails alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from awa_sqla import Exhausted, JobArgs
from awa_sqla.args import _classes
from tests.app import Signup


class Mail(JobArgs, kind="worker_mail", version=2, max_attempts=5):
    to: list[str]

    @classmethod
    def upcast(cls, data: dict[str, Any], version: int) -> dict[str, Any]:
        return {"to": [data["address"]]}


@pytest.fixture(autouse=True)
def _kinds() -> Iterator[None]:
    yield
    _classes.pop("worker_mail", None)


def put(stage: Any, args: str, version: int) -> int:
    return int(
        stage.sql(
            "INSERT INTO awa.jobs_hot (kind, args, args_version, max_attempts) "
            "VALUES ('worker_mail', %s, %s, 5) RETURNING id",
            args,
            version,
        )[0].id
    )


def test_old_rows_are_read_and_what_does_not_fit_fails_alone(stage: Any) -> None:
    seen: list[list[str]] = []
    told: list[tuple[int, str]] = []

    @stage.app.task(Mail)
    async def mail(ctx: Any) -> None:
        seen.append(ctx.args.to)
        assert ctx.job.args_as(Mail) == ctx.args

    @stage.app.on_exhausted(Mail, name="told")
    def tell(event: Exhausted[Mail]) -> list[Any]:
        told.append((event.job.id, event.error))
        return []

    good = [put(stage, '{"address": "a"}', 1), put(stage, '{"to": ["b"]}', 2)]
    no_key, no_list, no_fit = (
        put(stage, '{"adress": "typo"}', 1),
        put(stage, '{"address": 5}', 1),
        put(stage, '{"to": "text"}', 2),
    )
    stage.play()
    jobs = {row.id: row for row in stage.jobs()}
    assert sorted(seen) == [["a"], ["b"]]
    assert {jobs[one].state for one in good} == {"completed"}
    for bad, field in ((no_key, "args: Mail.upcast()"), (no_list, "args.to[0]"), (no_fit, "args.to")):
        row = jobs[bad]
        assert (row.state, row.attempt, len(row.errors)) == ("failed", 1, 1)
        assert row.errors[0]["error"].startswith(field)
        assert row.errors[0]["terminal"] is True
    assert sorted(job for job, _ in told) == sorted([no_key, no_list, no_fit])


def test_a_newer_row_waits_uncharged_for_a_newer_worker(stage: Any) -> None:
    @stage.app.task(Mail)
    async def mail(ctx: Any) -> None:
        raise AssertionError("cannot be read here")

    @stage.app.task(Signup)
    async def signup(ctx: Any) -> None: ...

    newer = put(stage, '{"future": true}', 3)
    stage.enqueue(Signup())
    stage.play(lambda: stage.states("signup") == ["completed"] and stage.states("worker_mail") == ["scheduled"])
    [row] = stage.jobs("worker_mail")
    assert (row.id, row.attempt, row.errors, row.args_version, row.args) == (newer, 0, [], 3, {"future": True})
    assert stage.sql("SELECT run_at - now() > interval '20 s' AS later FROM awa.scheduled_jobs")[0].later
