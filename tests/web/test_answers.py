"""Every answer of the ingress, one after the other."""

from __future__ import annotations

import pytest

from awa_sqla import Completed, FollowUps
from tests.app import NotifyOps, Signup
from tests.web.rig import Web
from tests.worlds import Database

in_one_kind = pytest.mark.parametrize("web", ["sync-psycopg"], indirect=True)


# -------------------------------------------------------------------------------------------------------- 200
@pytest.mark.parametrize("how", ["running", "parked"])
def test_complete_completes_the_job_with_its_follow_ups(web: Web, database: Database, how: str) -> None:
    @web.follow_ups.on_completed(Signup, name="notify")
    def notify(event: Completed[Signup]) -> NotifyOps:
        return NotifyOps(job_id=event.job.id)

    waiting = getattr(web, how)()
    reply = web.post(waiting, "complete", {"payload": {"amount": 5}})
    assert (reply.status, reply.json) == (200, {"id": waiting.job_id, "state": "completed"})
    row = database.job(waiting.job_id)
    assert (row.state, row.result) == ("completed", {"amount": 5})
    assert [child.kind for child in database.children(waiting.job_id)] == ["notify_ops"]


def test_an_empty_body_completes_without_a_result(web: Web, database: Database) -> None:
    waiting = web.parked()
    assert web.post(waiting, "complete").status == 200
    assert database.job(waiting.job_id).result is None
