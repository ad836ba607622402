"""Arguments that change: versions, upcasts, and rows that no longer fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from awa_sqla import FollowUps, InvalidJob, Job, JobArgs, JobRecord, JobSnapshot, claim, complete, enqueue, enqueue_many
from awa_sqla.args import _classes
from awa_sqla.stored import decode, decode_json
from tests.app import Welcome
from tests.worlds import Database, in_one_world


class Mail(JobArgs, kind="mail", version=3):
    """1 had `address`, 2 had `to`, 3 has `recipients`."""

    recipients: list[str]
    subject: str = "none"

    @classmethod
    def upcast(cls, data: dict[str, Any], version: int) -> dict[str, Any]:
        if version < 2:
            data["to"] = data.pop("address")
        if version < 3:
            data["recipients"] = [data.pop("to")]
        return data


class OldMail(JobArgs, kind="mail", version=2):
    """What the process of last year has."""

    to: str


@pytest.fixture(autouse=True)
def _kinds() -> Iterator[None]:
    yield
    _classes.pop("mail", None)


def put(database: Database, args: str, version: int = 1, job_id: int = 1) -> int:
    database.execute(
        "INSERT INTO jobs_hot (id, kind, args, args_version) VALUES (%s, 'mail', %s, %s)", job_id, args, version
    )
    return job_id


# ------------------------------------------------------------------------------------------------------- storing
@pytest.mark.parametrize("version", [0, -1, 32768, "2", 1.0, True])
def test_a_version_is_a_small_whole_number(version: Any) -> None:
    with pytest.raises(InvalidJob, match="version"):
        type("Bad", (JobArgs,), {}, version=version)


def test_a_subclass_inherits_the_version() -> None:
    class Base(JobArgs, abstract=True, version=4):
        pass

    class Child(Base):
        pass

    class Newer(Base, version=5):
        pass

    assert (Child.__awa__.version, Newer.__awa__.version) == (4, 5)


def test_the_version_is_stored_on_every_road(session: Session, follow_ups: FollowUps, database: Database) -> None:
    follow_ups.on_completed(Welcome, name="mail")(lambda event: Mail(recipients=["follow"]))
    job = enqueue(session, Mail(recipients=["a"]))
    late = enqueue(session, lambda: Mail(recipients=["b"]))
    session.flush()
    assert job.args_version == 3
    [bulk] = enqueue_many(session, [Mail(recipients=["c"])])
    plain = enqueue(session, Welcome(), queue="work")
    session.commit()
    [running] = claim(session, "work", limit=1)
    complete(session, running)
    session.commit()
    found = {row.id: row.args_version for row in database.jobs()}
    assert {found.pop(job_id) for job_id in (job.id, late.id, bulk)} == {3}
    assert found.pop(plain.id) == 1
    assert list(found.values()) == [3]  # the follow-up


# ------------------------------------------------------------------------------------------------------- reading
@pytest.mark.parametrize(
    ("args", "version"),
    [('{"address": "a"}', 1), ('{"to": "a"}', 2), ('{"recipients": ["a"]}', 3), ('{"to": "a", "unheard": 1}', 2)],
)
def test_an_old_row_is_brought_up_to_date_wherever_it_is_read(
    session: Session, follow_ups: FollowUps, database: Database, args: str, version: int
) -> None:
    seen: list[Mail] = []
    follow_ups.on_completed(Mail, name="x")(lambda event: seen.append(event.args) or [])  # type: ignore[func-returns-value]
    put(database, args, version)
    mail = Mail(recipients=["a"])
    [job] = claim(session, "default", limit=1)
    before = dict(job.args)
    assert job.args_as(Mail) == mail
    assert job.args == before
    assert JobSnapshot.of(job).args_as(Mail) == mail
    assert JobSnapshot.from_json(JobSnapshot.of(job).to_json()).args_as(Mail) == mail
    assert decode_json(Mail, args, version) == mail
    complete(session, job)
    session.commit()
    assert seen == [mail]
    assert session.get_one(JobRecord, job.id).args_as(Mail) == mail
    assert database.job(job.id).args_version == version


def test_upcast_is_called_for_older_rows_only() -> None:
    called: list[int] = []

    class Counted(JobArgs, version=2):
        n: int = 0

        @classmethod
        def upcast(cls, data: dict[str, Any], version: int) -> dict[str, Any]:
            called.append(version)
            return data

    assert decode(Counted, {"n": 1}) == decode(Counted, {"n": 1}, 2) == decode_json(Counted, '{"n": 1}', 2)
    assert called == []
    decode(Counted, {"n": 1}, 1)
    assert called == [1]


def test_a_snapshot_of_the_previous_release_has_version_1(session: Session) -> None:
    job = enqueue(session, Welcome())
    session.flush()
    data = JobSnapshot.of(session.get_one(Job, job.id, populate_existing=True)).to_json()
    del data["args_version"]
    assert JobSnapshot.from_json(data).args_version == 1


def test_a_row_of_a_newer_version_says_so() -> None:
    with pytest.raises(InvalidJob, match="written by version 3 of OldMail, and this process has version 2"):
        decode(OldMail, {"recipients": ["a"]}, 3)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [(None, "returned a NoneType, not a dict"), ([], "not a dict"), (KeyError("to"), "failed: KeyError: 'to'")],
)
def test_an_upcast_that_goes_wrong_is_a_clear_error(returned: Any, reason: str) -> None:
    class Broken(JobArgs, version=2):
        @classmethod
        def upcast(cls, data: dict[str, Any], version: int) -> Any:
            if isinstance(returned, Exception):
                raise returned
            return returned

    with pytest.raises(InvalidJob, match=reason) as caught:
        decode(Broken, {}, 1)
    assert caught.value.field == "args"


def test_a_row_that_does_not_fit_afterwards_names_the_field() -> None:
    with pytest.raises(ValidationError, match=r"recipients\.0"):
        decode(Mail, {"address": 5}, 1)


@pytest.mark.parametrize("args", ["[]", "null", '"x"', "{}", '{"recipients": 5}'])
def test_rows_that_do_not_fit_disturb_neither_claims_nor_selects(
    session: Session, database: Database, args: str
) -> None:
    put(database, args, 3, 1)
    put(database, '{"recipients": ["a"]}', 3, 2)
    put(database, '{"future": 1}', 99, 3)
    jobs = session.scalars(select(Job).order_by(Job.id)).all()
    assert [job.id for job in jobs] == [1, 2, 3]
    claimed = claim(session, "default", limit=9)
    assert [job.id for job in claimed] == [1, 2, 3]
    with pytest.raises(ValidationError):
        claimed[0].args_as(Mail)
    with pytest.raises(InvalidJob):
        claimed[2].args_as(Mail)
    assert claimed[1].args_as(Mail).recipients == ["a"]


# ------------------------------------------------------------------------------------------------------ follow-ups
def test_a_spec_that_is_older_than_the_row_is_owed(session: Session, follow_ups: FollowUps, database: Database) -> None:
    follow_ups.on_completed(OldMail, name="welcome")(lambda event: Welcome(email=event.args.to))
    put(database, '{"recipients": ["a"]}', 3)
    put(database, '{"to": "b"}', 2, 2)
    for job in claim(session, "default", limit=2):
        complete(session, job)
    session.commit()
    [owed] = database.obligations()
    assert (owed.job_id, owed.spec, owed.snapshot["args_version"]) == (1, "welcome", 3)
    assert [job.args for job in database.children(2)] == [{"email": "b"}]
    assert database.children(1) == []


@in_one_world
def test_the_base_class_has_an_upcast_that_changes_nothing(session: Session) -> None:
    assert JobArgs.upcast({"a": 1}, 1) == {"a": 1}
