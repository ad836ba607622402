"""Flask-SQLAlchemy: jobs live with the request's session, and end with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import URL, Integer, NullPool, Text
from sqlalchemy.orm import DeclarativeBase, mapped_column

from awa_sqla import ConfigurationError, FollowUps, cancel, claim, complete, enqueue
from awa_sqla.models import AwaBase
from tests.app import Order, Signup
from tests.frameworks.apps import FlaskApp, flask_with_binds
from tests.worlds import Database

pytest.importorskip("flask_sqlalchemy", reason="flask-sqlalchemy is not installed")


@pytest.fixture
def shop(db_url: URL, follow_ups: FollowUps) -> Iterator[Any]:
    """A Flask application with two databases and three routes; yields (Flask, SQLAlchemy)."""
    [app] = flask_with_binds(db_url)
    assert isinstance(app, FlaskApp)
    flask, db = app.flask, app.db
    follow_ups.attach(db.session)

    @flask.post("/orders")
    def order() -> str:
        db.session.add(Order(note="paid"))
        job = enqueue(db.session, Signup())
        db.session.commit()
        return str(job.id)

    @flask.post("/forgotten")
    def forgotten() -> str:
        enqueue(db.session, Signup())
        db.session.flush()
        return "no commit"

    @flask.post("/work")
    def work() -> str:
        jobs = claim(db.session, "default", limit=1)
        for job in jobs:
            complete(db.session, job)
        db.session.commit()
        return str(len(jobs))

    yield flask, db
    follow_ups.detach(db.session)


def test_a_request_that_commits_leaves_its_row_and_its_job(shop: Any, database: Database) -> None:
    flask, _ = shop
    answer = flask.test_client().post("/orders")
    assert database.job(int(answer.text)).state == "available"
    assert database.value("SELECT note FROM app_order") == "paid"


def test_a_request_that_does_not_commit_leaves_nothing(shop: Any, database: Database) -> None:
    flask, _ = shop
    assert flask.test_client().post("/forgotten").status_code == 200
    assert database.jobs() == []


def test_follow_ups_hold_in_every_later_request(shop: Any, database: Database) -> None:
    client = shop[0].test_client()
    client.post("/orders")
    client.post("/orders")
    assert [client.post("/work").text for _ in range(2)] == ["1", "1"]
    assert database.kinds() == ["signup", "signup", "welcome", "welcome"]


def test_rows_with_a_bind_key_go_elsewhere_and_jobs_stay_with_the_default(shop: Any, database: Database) -> None:
    flask, db = shop

    class Elsewhere(DeclarativeBase):
        metadata = db.metadatas["elsewhere"]

    class Visit(Elsewhere):
        __tablename__ = "app_order"
        id = mapped_column(Integer, primary_key=True)
        note = mapped_column(Text)

    with flask.app_context():
        db.session.add_all([Order(note="here"), Visit(note="there")])
        enqueue(db.session, Signup())
        db.session.commit()
        assert db.session.get_bind(Visit) is not db.session.get_bind(Order)
    assert database.kinds() == ["signup"]


def test_job_tables_with_a_bind_key_of_their_own_are_refused(
    shop: Any, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    flask, db = shop
    monkeypatch.setitem(AwaBase.metadata.info, "bind_key", "elsewhere")
    with flask.app_context():
        db.session.add(Order(note="paid"))
        enqueue(db.session, Signup())
        with pytest.raises(ConfigurationError, match="two transactions"):
            db.session.commit()
        db.session.rollback()
        with pytest.raises(ConfigurationError, match="two transactions"):
            cancel(db.session, 1, reason="x")
    assert database.jobs() == []
    assert database.rows("SELECT * FROM app_order") == []


def test_a_registry_may_be_attached_before_the_application_is_made(db_url: URL, database: Database) -> None:
    from flask import Flask
    from flask_sqlalchemy import SQLAlchemy

    db = SQLAlchemy(engine_options={"poolclass": NullPool})
    registry = FollowUps()
    registry.attach(db.session)
    late = Flask("late")
    late.config["SQLALCHEMY_DATABASE_URI"] = db_url
    db.init_app(late)
    with late.app_context():
        enqueue(db.session, Signup())
        db.session.commit()
    assert database.kinds() == ["signup"]
