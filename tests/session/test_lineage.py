"""`lineage()`: the whole tree, wherever its rows live."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import select

from awa_sqla import (
    EnqueueRequest,
    InvalidJob,
    Job,
    JobNotFound,
    UnsupportedSession,
    claim,
    complete,
    fail,
    lineage,
)
from tests.app import Charge, NotifyOps, Signup, Welcome
from tests.session.steps import again, available, running
from tests.worlds import in_one_world


def grow(session, follow_ups):
    """signup -> (welcome -> notify, charge (failed, dead), notify (scheduled)); the ids in that order."""
    follow_ups.on_completed(Signup, name="three")(
        lambda event: [
            Welcome(),
            EnqueueRequest(Charge(order_id=1), max_attempts=1),
            EnqueueRequest(NotifyOps(job_id=1), delay=timedelta(hours=1)),
        ]
    )
    follow_ups.on_completed(Welcome, name="one")(lambda event: NotifyOps(job_id=2))
    complete(session, running(session))
    session.commit()


def test_the_tree_is_told_depth_first_from_any_of_its_jobs(session, follow_ups, database):
    database.keep_dead_letters("payments")
    grow(session, follow_ups)
    (welcome,) = claim(session, "default", limit=1)
    complete(session, welcome)
    (charge,) = claim(session, "payments", limit=1)
    fail(session, charge, "no")
    session.commit()
    expected = [
        ("signup", "hot", None),
        ("welcome", "hot", "completed"),
        ("notify_ops", "hot", "completed"),
        ("charge", "dead", "completed"),
        ("notify_ops", "scheduled", "completed"),
    ]
    for row in database.jobs():
        told = [(job.kind, job.stored_in, job.parent_outcome) for job in lineage(session, row.id)]
        assert told == expected
    assert [job.kind for job in lineage(session, welcome)] == [kind for kind, *_ in expected]


def test_records_are_as_they_are_now(session, follow_ups):
    grow(session, follow_ups)
    (root, welcome, *_) = lineage(session, _root(session))
    assert (root.state, welcome.state) == ("completed", "available")
    claim(session, "default", limit=1)
    assert [job.state for job in lineage(session, root)][:2] == ["completed", "running"]


def _root(session):
    return session.scalars(select(Job.id).where(Job.root_id.is_(None))).one()


def test_a_lone_job_is_its_own_tree(session):
    job = available(session)
    assert [record.id for record in lineage(session, job)] == [job.id]


def test_what_retention_has_taken_leaves_its_children_at_the_top(session, follow_ups, database):
    grow(session, follow_ups)
    root = _root(session)
    database.execute("DELETE FROM jobs_hot WHERE id = %s", root)
    kinds = [job.kind for job in lineage(session, root + 1)]
    assert kinds == ["welcome", "charge", "notify_ops"]


def test_it_costs_two_statements(session, world):
    job = again(session, available(session))
    with world.counting() as sent:
        lineage(session, job.held_attempt.id)
    assert len(sent) == 2


@in_one_world
def test_what_is_no_job_is_said_so(session):
    with pytest.raises(JobNotFound):
        lineage(session, 999_999_999)
    with pytest.raises(InvalidJob, match="job"):
        lineage(session, "5")
    with pytest.raises(UnsupportedSession):
        lineage(None, 5)
