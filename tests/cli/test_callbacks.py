"""`awa-sqla callbacks`: the ingress as a process, and signatures on the command line."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from sqlalchemy import URL
from sqlalchemy.orm import sessionmaker

import awa_sqla.web
from awa_sqla import callback_url, park, register_callback, sign_callback
from awa_sqla.cli import cli
from awa_sqla.session.marks import FOLLOW_UPS
from tests.processes import hear_interrupts
from tests.session.steps import HOUR, running
from tests.worlds import Database

KEY, OTHER = bytes(range(32)), bytes(reversed(range(32)))
ID = "0192d3f4-5a6b-4c7d-8e9f-a0b1c2d3e4f5"
APP = """
from awa_sqla import Awa
from tests.app import NotifyOps, Signup

awa = Awa()

@awa.on_completed(Signup)
def notify(event):
    return NotifyOps(job_id=event.job.id)
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWA_APP", "AWA_DATABASE_URL", "DATABASE_URL", "AWA_CALLBACK_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(*args: str, env: dict[str, str] | None = None, stdin: bytes | None = None) -> Any:
    return CliRunner().invoke(cli, ["callbacks", *args], env=env, input=stdin)


# ----------------------------------------------------------------------------------------------------------- sign
WAYS = {
    "hex": KEY.hex(),
    "upper case": KEY.hex().upper(),
    "base64": base64.b64encode(KEY).decode(),
    "base64 of URLs": base64.urlsafe_b64encode(KEY).decode().rstrip("="),
    "two": f" {KEY.hex()} , {base64.b64encode(OTHER).decode()} ",
}


@pytest.mark.parametrize("secret", list(WAYS.values()), ids=list(WAYS))
def test_the_printed_headers_are_those_of_sign_callback(secret: str) -> None:
    result = run(
        "sign", ID, "complete", "--body", '{"payload": "é"}', "--timestamp", "5", env={"AWA_CALLBACK_SECRET": secret}
    )
    expected = sign_callback(KEY, ID, "complete", '{"payload": "é"}'.encode(), timestamp=5)
    assert result.exit_code == 0, result.output
    assert result.output == "".join(f"{name}: {value}\n" for name, value in expected.items())


def test_the_body_may_come_from_a_file_or_from_stdin(tmp_path: Path) -> None:
    body = b'{"payload":\xff\r\n1}'
    (tmp_path / "body.json").write_bytes(body)
    env = {"MINE": KEY.hex()}
    expected = sign_callback(KEY, ID, "fail", body, timestamp=5)["X-Awa-Signature"]
    for given in ("@body.json", "-"):
        result = run(
            "sign", ID, "fail", "--body", given, "--timestamp", "5", "--secret-env", "MINE", env=env, stdin=body
        )
        assert expected in result.output


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (("17", "complete"), 2, "callback_id: '17' is no UUID"),
        ((ID, "retry"), 2, "is not one of"),
        ((ID, "complete", "--body", "@nowhere"), 2, "nowhere: No such file"),
        ((ID, "complete", "--timestamp", "-1"), 2, "timestamp: must be from 0"),
    ],
)
def test_a_wrong_argument_of_sign_is_named(args: tuple[str, ...], status: int, says: str) -> None:
    result = run("sign", *args, env={"AWA_CALLBACK_SECRET": KEY.hex()})
    assert (result.exit_code, says in result.output) == (status, True), result.output


@pytest.mark.parametrize("verb", [("sign", ID, "complete"), ("serve",)])
@pytest.mark.parametrize("secret", ["", "abc", KEY.hex()[:-1], "x" * 64, f"{KEY.hex()},", ",".join([KEY.hex()] * 3)])
def test_a_wrong_secret_is_refused_and_not_shown(verb: tuple[str, ...], secret: str) -> None:
    result = run(*verb, env={"AWA_CALLBACK_SECRET": secret})
    assert result.exit_code == 3
    assert "AWA_CALLBACK_SECRET" in result.output
    assert not secret or secret not in result.output


# ---------------------------------------------------------------------------------------------------------- serve
@contextmanager
def serving(db_url: URL, *args: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its address and its ready line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "awa_sqla", "callbacks", "serve", "--port", "0", *args],
        env=os.environ
        | {"AWA_DATABASE_URL": db_url.set(drivername="postgresql").render_as_string(hide_password=False)}
        | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
        | env,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stderr.read()
        yield process, found[0], line
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        process.stderr.close()


@pytest.fixture
def waiting(db_url: URL, engine: Any) -> tuple[int, str]:
    ever = FOLLOW_UPS.ever
    FOLLOW_UPS.ever = type(ever)()
    with sessionmaker(engine)() as session:
        job = running(session)
        token = register_callback(session, job, timeout=HOUR)
        park(session, job, token)
        session.commit()
        job_id = job.id
    FOLLOW_UPS.ever = ever
    return job_id, str(token.id)


def complete(base: str, callback: str, key: bytes | None = KEY) -> httpx.Response:
    headers = sign_callback(key, callback, "complete", b'{"payload": 5}') if key else {}
    return httpx.post(callback_url(base, callback, "complete"), content=b'{"payload": 5}', headers=headers)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.beside)])
def test_without_an_app_what_follows_is_owed(
    db_url: URL, database: Database, waiting: tuple[int, str], number: signal.Signals
) -> None:
    database.execute(
        "INSERT INTO follow_up_specs (kind, outcome, name, created_at) "
        "VALUES ('signup', 'completed', 'elsewhere:notify', now() - interval '1 hour')"
    )
    job_id, callback = waiting
    with serving(db_url, AWA_CALLBACK_SECRET=f"{OTHER.hex()},{KEY.hex()}") as (process, base, line):
        assert "signed requests; follow-ups as obligations" in line
        assert base.endswith("/callbacks")
        reply = complete(base, callback)
        assert (reply.status_code, reply.json()) == (200, {"id": job_id, "state": "completed"})
        assert complete(base, callback, bytes(32)).status_code == 401
        assert httpx.get(base + "/openapi.json").json()["servers"] == [{"url": "/callbacks"}]
        elsewhere = httpx.post(base.removesuffix("/callbacks") + "/x")
        assert (elsewhere.status_code, elsewhere.json()["error"]["code"]) == (404, "not_found")
        assert "server" not in elsewhere.headers
        process.send_signal(number)
        assert process.wait(20) == 0
        [told] = process.stderr.read().splitlines()  # type: ignore[union-attr]
        assert told.endswith("a callback's request was not accepted: its signature is wrong")
    assert [owed.spec for owed in database.obligations()] == ["elsewhere:notify"]


def test_with_an_app_its_follow_ups_are_made(
    db_url: URL, database: Database, waiting: tuple[int, str], tmp_path: Path
) -> None:
    (tmp_path / "shop_app.py").write_text(APP)
    job_id, callback = waiting
    args = ("-A", "shop_app", "--prefix", "/", "--allow-unsigned")
    with serving(db_url, *args) as (process, base, line):
        assert "UNSIGNED" in line
        assert "follow-ups of the app" in line
        assert complete(base, callback, None).status_code == 200
        process.terminate()
        assert process.wait(20) == 0
    assert [child.kind for child in database.children(job_id)] == ["notify_ops"]


@pytest.mark.parametrize(
    ("args", "env", "status", "says"),
    [
        (("--allow-unsigned",), {"AWA_CALLBACK_SECRET": KEY.hex()}, 2, "which is set: give one of the two"),
        (("--prefix", "x"), {"AWA_CALLBACK_SECRET": KEY.hex()}, 2, "must begin with /"),
        (("--port", "70000"), {"AWA_CALLBACK_SECRET": KEY.hex()}, 2, "70000"),
        ((), {"AWA_CALLBACK_SECRET": KEY.hex()}, 3, "no database"),
        (("-A", "nosuch"), {"AWA_CALLBACK_SECRET": KEY.hex()}, 3, "no module 'nosuch'"),
    ],
)
def test_a_wrong_call_of_serve_is_explained(args: tuple[str, ...], env: dict[str, str], status: int, says: str) -> None:
    result = run("serve", *args, env=env)
    assert (result.exit_code, says in result.output) == (status, True), result.output


@pytest.mark.parametrize("driver", ["postgresql", "postgresql+asyncpg", "postgresql+psycopg2"])
def test_a_database_that_is_away_is_status_6(driver: str) -> None:
    result = serve_on(f"{driver}://nobody@127.0.0.1:1/nowhere")
    assert result.returncode == 6, result.stderr
    assert "the database cannot be reached" in result.stderr


def test_a_database_that_is_behind_is_status_4(empty_db_url: URL) -> None:
    result = serve_on(empty_db_url.render_as_string(hide_password=False))
    assert result.returncode == 4, result.stderr
    assert "is at version 0" in result.stderr


def test_a_port_that_is_taken_is_status_1(db_url_str: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = serve_on(db_url_str, "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "cannot listen on 127.0.0.1" in result.stderr


def serve_on(database_url: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "awa_sqla", "-d", database_url, "callbacks", "serve", *(args or ("--port", "0"))],
        env=os.environ | {"AWA_CALLBACK_SECRET": KEY.hex()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for module in ("serving", "callbacks"):
        monkeypatch.delitem(sys.modules, f"awa_sqla.web.{module}", raising=False)
        monkeypatch.delattr(awa_sqla.web, module, raising=False)
    for loaded in [name for name in sys.modules if name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)
    result = run("serve", env={"AWA_CALLBACK_SECRET": KEY.hex()})
    assert result.exit_code == 3, result.output
    assert "awa-sqla[web]" in result.output
