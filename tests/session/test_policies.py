"""Callbacks that are resolved by a policy: CEL expressions over the payload."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from sqlalchemy.orm import Session

from awa_sqla import (
    CallbackNotFound,
    CallbackPolicy,
    CallbackToken,
    ConfigurationError,
    DeadLetter,
    DefaultAction,
    FollowUps,
    InvalidJob,
    Job,
    complete_external,
    park,
    register_callback,
    resolve_callback,
)
from awa_sqla.cel import evaluator
from awa_sqla.cel.evaluator import EVALUATOR, Evaluator, UnansweredError
from tests.app import NotifyOps, Order, Signup
from tests.session.steps import HOUR, running
from tests.worlds import Database, World, in_one_world, in_two_worlds

COMPLETE, FAIL, IGNORE = DefaultAction.COMPLETE, DefaultAction.FAIL, DefaultAction.IGNORE


def waiting(session: Session, **policy: Any) -> tuple[Job, CallbackToken]:
    """A committed job that waits for its callback, with this policy."""
    job = running(session)
    token = register_callback(session, job, timeout=HOUR, policy=CallbackPolicy(**policy) if policy else None)
    park(session, job, token)
    session.commit()
    return job, token


OK = {"status": "ok", "amount": 5}
BAD = {"status": "bad"}
ALL = {
    "filter": "has(payload.status)",
    "on_fail": "payload.status == 'bad'",
    "on_complete": "payload.status == 'ok'",
    "transform": "{'paid': payload.amount * 2}",
}
ON_FAIL = "callback failed: on_fail expression matched"
UNMATCHED = "no expression matched, default is ignore"

RULES: list[tuple[dict[str, str], Any, DefaultAction, tuple[str, Any, str | None]]] = [
    (ALL, OK, IGNORE, ("completed", {"paid": 10}, None)),
    (ALL, BAD, COMPLETE, ("failed", BAD, ON_FAIL)),
    (ALL, {"other": 1}, COMPLETE, ("ignored", {"other": 1}, "filter expression returned false")),
    (ALL, {"status": "?"}, IGNORE, ("ignored", {"status": "?"}, UNMATCHED)),
    (ALL, {"status": "?"}, FAIL, ("failed", {"status": "?"}, "callback failed: default action")),
    (ALL, {"status": "?", "amount": 1}, COMPLETE, ("completed", {"paid": 2}, None)),
    ({}, OK, COMPLETE, ("completed", OK, None)),
    ({}, OK, FAIL, ("failed", OK, "callback failed: default action")),
    ({}, OK, IGNORE, ("ignored", OK, "no expressions configured, default is ignore")),
    # on_fail goes before on_complete
    ({"on_fail": "true", "on_complete": "true"}, OK, IGNORE, ("failed", OK, ON_FAIL)),
    # an expression that fails, or that is no bool, decides nothing
    ({"filter": "payload.missing == 1"}, OK, COMPLETE, ("completed", OK, None)),
    ({"filter": "payload.amount"}, OK, COMPLETE, ("completed", OK, None)),
    ({"filter": "null"}, OK, COMPLETE, ("completed", OK, None)),
    ({"on_fail": "payload.missing"}, OK, COMPLETE, ("completed", OK, None)),
    ({"on_complete": "payload.missing"}, OK, IGNORE, ("ignored", OK, UNMATCHED)),
    ({"on_complete": "1"}, OK, IGNORE, ("ignored", OK, UNMATCHED)),
    ({"transform": "payload.missing"}, OK, COMPLETE, ("completed", OK, None)),
    ({"transform": "timestamp('2026-01-01T00:00:00Z')"}, OK, COMPLETE, ("completed", OK, None)),
    ({"transform": "payload.amount / 0"}, OK, COMPLETE, ("completed", OK, None)),
    ({"transform": "0.0 / 0.0"}, OK, COMPLETE, ("completed", OK, None)),
    ({"transform": "null"}, OK, COMPLETE, ("completed", None, None)),
    ({"transform": "payload.items.filter(i, i > 1).map(i, i * 10)"}, {"items": [1, 2, 3]}, COMPLETE,
     ("completed", [20, 30], None)),
    ({"on_complete": "payload == null"}, None, IGNORE, ("completed", None, None)),
    ({"on_complete": "payload.n == 9007199254740993"}, {"n": 2**53 + 1}, IGNORE, ("completed", {"n": 2**53 + 1}, None)),
]  # fmt: skip


@in_two_worlds
@pytest.mark.parametrize(("policy", "payload", "default", "expected"), RULES)
def test_what_a_policy_says(
    session: Session, database: Database, policy: Any, payload: Any, default: DefaultAction, expected: Any
) -> None:
    job, token = waiting(session, **policy)
    resolution = resolve_callback(session, token.id, payload, default=default)
    session.commit()
    assert (resolution.outcome, resolution.payload, resolution.reason) == expected
    row = database.job(job.id)
    assert resolution.job.id == row.id
    if resolution.outcome == "ignored":
        assert (row.state, row.callback_id, row.result) == ("waiting_external", token.id, None)
    elif resolution.outcome == "completed":
        assert (row.state, row.result, row.callback_filter) == ("completed", expected[1], None)
    else:
        matched = {"expression": policy["on_fail"]} if resolution.reason == ON_FAIL else {}
        entry = {"error": expected[2], "type": "callback", "attempt": 1, "terminal": True} | matched
        assert row.state == "failed"
        assert {key: value for key, value in row.errors[-1].items() if key != "at"} == entry


def test_a_failure_by_policy_is_kept_as_a_dead_letter(session: Session, database: Database) -> None:
    database.execute("INSERT INTO queue_meta (queue, override_dead_letters) VALUES ('default', true)")
    job, token = waiting(session, on_fail="true")
    resolution = resolve_callback(session, str(token.id), default=COMPLETE)
    session.commit()
    assert isinstance(resolution.job, DeadLetter)
    assert (database.job(job.id).stored_in, resolution.job.dlq_reason) == ("dead", "callback_failed")


def test_the_app_row_the_job_and_its_follow_ups_are_one_commit(
    session: Session, database: Database, follow_ups: FollowUps
) -> None:
    follow_ups.on_completed(Signup, name="told")(lambda event: NotifyOps(job_id=event.result["paid"]))
    job, token = waiting(session, **ALL)
    for ends in (session.rollback, session.commit):
        session.add(Order(note="paid"))
        assert resolve_callback(session, token.id, OK, default=IGNORE).outcome == "completed"
        ends()
    assert [child.args["job_id"] for child in database.children(job.id)] == [10]
    assert len(database.rows("SELECT 1 FROM app_order")) == 1


@in_two_worlds
def test_a_callback_that_is_used_up_or_anothers_is_not_found(session: Session, database: Database) -> None:
    _, token = waiting(session, **ALL)
    with pytest.raises(CallbackNotFound):
        resolve_callback(session, token.id, OK, default=COMPLETE, run_lease=1_000_000)
    complete_external(session, token.id)
    session.commit()
    before = database.jobs()
    with pytest.raises(CallbackNotFound):
        resolve_callback(session, token.id, OK, default=COMPLETE)
    session.commit()
    assert database.jobs() == before


@in_one_world
def test_of_two_that_resolve_at_once_one_wins(world: World, session: Session, database: Database) -> None:
    for _ in range(10):
        job, token = waiting(session, on_complete="true")
        barrier, found = threading.Barrier(2), []

        def resolve(payload: int, token: CallbackToken = token, barrier: Any = barrier, found: Any = found) -> None:
            with world.session() as mine:
                barrier.wait()
                try:
                    found.append((resolve_callback(mine, token.id, payload, default=FAIL).outcome, payload))
                    mine.commit()
                except CallbackNotFound:
                    found.append(("not found", payload))
                    mine.rollback()

        threads = [threading.Thread(target=resolve, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = dict(found)
        assert sorted(won) == ["completed", "not found"]
        assert database.job(job.id).result == won["completed"]


BROKEN = {
    "payload.": "Syntax error",
    "": "empty",
    "order.status == 'ok'": "unknown variable 'order'",
    "env.HOME != ''": "unknown variable 'env'",
    "payload.all(x, y > 1)": "unknown variable 'y'",
    "now() > 1": "unknown function now()",
    "payload.frobnicate()": "unknown function frobnicate()",
    "'" + "x" * 2_000 + "' == 'x'": "2000",
    "(" * 900 + "1" + ")" * 900: "parse",
    "a\x00b": "NUL",
}


@in_two_worlds
@pytest.mark.parametrize("name", ["filter", "on_complete", "on_fail", "transform"])
@pytest.mark.parametrize("expression", ["payload.", "order.status == 'ok'"])
def test_a_broken_expression_is_refused_when_it_is_registered(
    session: Session, database: Database, name: str, expression: str
) -> None:
    job = running(session)
    before = database.jobs()
    session.add(Order(note="kept"))
    with pytest.raises(InvalidJob) as caught:
        register_callback(session, job, policy=CallbackPolicy(**{name: expression}))
    assert caught.value.field == f"policy.{name}"
    session.commit()  # the caller's transaction is as usable as before
    assert database.jobs() == before
    assert len(database.rows("SELECT 1 FROM app_order")) == 1


@in_one_world
@pytest.mark.parametrize("expression", list(BROKEN))
def test_the_error_says_what_is_wrong(session: Session, expression: str) -> None:
    with pytest.raises(InvalidJob, match=BROKEN[expression].replace("(", r"\(").replace(")", r"\)")):
        register_callback(session, running(session), policy=CallbackPolicy(filter=expression))


@in_one_world
@pytest.mark.parametrize("wrong", ["payload.a", {"filter": "true"}, 1])
def test_what_is_no_policy_is_refused(session: Session, wrong: Any) -> None:
    with pytest.raises(InvalidJob) as caught:
        register_callback(session, running(session), policy=wrong)
    assert caught.value.field == "policy"
    with pytest.raises(InvalidJob):
        register_callback(session, running(session), policy=CallbackPolicy(filter=wrong) if wrong == 1 else wrong)


@in_one_world
@pytest.mark.parametrize("wrong", ["complete", None, True])
def test_what_is_no_default_is_refused(session: Session, wrong: Any) -> None:
    _, token = waiting(session)
    with pytest.raises(InvalidJob) as caught:
        resolve_callback(session, token.id, default=wrong)
    assert caught.value.field == "default"


def test_a_second_callback_has_its_own_policy(session: Session, database: Database) -> None:
    job = running(session)
    register_callback(session, job, policy=CallbackPolicy(filter="false"))
    token = register_callback(session, job)
    session.commit()
    assert database.job(job.id).callback_filter is None
    assert resolve_callback(session, token.id, 1, default=COMPLETE).outcome == "completed"


HOSTILE: dict[str, tuple[dict[str, str], Any]] = {
    "slow": ({"filter": "payload.a.all(x, payload.a.all(y, x + y >= 0))"}, {"a": list(range(20_000))}),
    "large": ({"transform": "payload.a.map(x, payload.s)"}, {"a": list(range(3_000)), "s": "x" * 60_000}),
    "too large": ({"filter": "true"}, "x" * 300_000),
}


@in_two_worlds
@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_payload_that_is_too_much_for_the_policy_changes_nothing(
    session: Session, database: Database, name: str
) -> None:
    policy, payload = HOSTILE[name]
    _, token = waiting(session, **policy)
    before, begun = database.jobs(), time.monotonic()
    with pytest.raises(InvalidJob) as caught:
        resolve_callback(session, token.id, payload, default=COMPLETE)
    assert caught.value.field == "payload"
    assert time.monotonic() - begun < 30
    session.commit()
    assert database.jobs() == before
    assert resolve_callback(session, token.id, {"a": [], "s": ""}, default=COMPLETE).outcome == "completed"


@in_one_world
@pytest.mark.parametrize("depth", [990, 50_000])
def test_a_payload_that_is_nested_too_deep_is_refused(session: Session, database: Database, depth: int) -> None:
    _, token = waiting(session, filter="true")
    nest: Any = []
    for _ in range(depth):
        nest = [nest]
    with pytest.raises(InvalidJob) as by_policy:
        resolve_callback(session, token.id, nest, default=COMPLETE)
    with pytest.raises(InvalidJob) as directly:
        complete_external(session, token.id, nest)
    assert (by_policy.value.field, directly.value.field) == ("payload", "payload")
    assert resolve_callback(session, token.id, [], default=COMPLETE).outcome == "completed"


def test_a_nest_that_ends_the_process_is_an_answer_all_the_same() -> None:
    nest: Any = []
    for _ in range(900):
        nest = [nest]
    policy = {"filter": "payload == payload", "on_fail": None, "on_complete": None, "transform": None}
    assert EVALUATOR.ask({"policy": policy, "payload": nest, "completes": False}) == {"says": "default"}
    with pytest.raises(UnansweredError):
        _ask_raw(
            b'{"policy": {"filter": "size(payload) == 1", "on_fail": null, "on_complete": null, "transform": null}, '
            b'"completes": false, "payload": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
        )


def _ask_raw(line: bytes) -> None:
    mine = Evaluator()
    child = mine._started()
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(line)
        child.stdin.flush()
        if not child.stdout.readline():
            raise UnansweredError
    finally:
        mine._end(child)


def test_many_threads_ask_at_the_same_time_and_few_processes_answer_and_are_kept() -> None:
    mine = Evaluator()
    answers: list[Any] = []
    for _ in range(2):
        threads = [threading.Thread(target=lambda: answers.append(mine.ask({"check": "payload ="}))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(answers), None in answers) == (32, False)
    kept = list(mine._idle)
    assert 1 <= len(kept) <= evaluator.MOST
    assert mine.ask({"check": "true"}) is None
    assert set(mine._idle) == set(kept)
    mine.close()
    assert (mine._idle, [child.poll() is None for child in kept]) == ([], [False] * len(kept))


SLOW: dict[str, Any] = {
    "policy": {
        "filter": None,
        "on_fail": "payload.a.all(x, payload.a.all(y, x + y >= 0))",
        "on_complete": None,
        "transform": None,
    },
    "completes": True,
}


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_is_no_verdict(number: signal.Signals) -> None:
    mine = Evaluator()
    assert mine.ask({"check": "true"}) is None
    [child] = mine._idle
    question = SLOW | {"payload": {"a": list(range(400))}}
    timer = threading.Timer(0.02, child.send_signal, [number])
    timer.start()
    assert mine.ask(question) == {"says": "fail"}
    timer.join()
    assert mine.ask(question) == {"says": "fail"}
    assert mine._idle == [child]
    mine.close()


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="needs alarms")
def test_a_question_ends_also_when_nobody_is_left_to_end_it() -> None:
    child = Evaluator()._started()
    assert child.stdin is not None
    child.stdin.write(json.dumps(SLOW | {"payload": {"a": list(range(20_000))}}).encode() + b"\n")
    evaluator._close_pipes(child)
    assert child.wait(30) == -signal.SIGALRM


@pytest.mark.skipif(sys.platform != "linux", reason="the address space can be limited, and is not always")
def test_a_process_may_be_limited_further_from_outside() -> None:
    code = "from awa_sqla.cel.evaluator import EVALUATOR; print(EVALUATOR.ask({'check': 'true'}))"
    command = f'ulimit -v 900000; exec "{sys.executable}" -c "{code}"'
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("None\n", 0), done.stderr


def test_a_process_that_was_killed_is_replaced() -> None:
    mine = Evaluator()
    assert mine.ask({"check": "true"}) is None
    [kept] = mine._idle
    kept.kill()
    kept.wait()
    assert mine.ask({"check": "true"}) is None
    mine.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_does_not_share_the_process() -> None:
    mine = Evaluator()
    assert mine.ask({"check": "true"}) is None
    [parents] = mine._idle
    mine._forget()  # what a fork calls in the child
    assert mine._idle == []
    parents.returncode = None
    assert parents.wait() == 0  # it lost its parent
    assert mine.ask({"check": "true"}) is None
    mine.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_does_not_share_a_process_that_another_thread_is_asking() -> None:
    mine = Evaluator()
    assert mine.ask({"check": "true"}) is None
    [asked] = mine._idle
    pipes = [os.fstat(pipe.fileno()).st_ino for pipe in (asked.stdin, asked.stdout) if pipe is not None]
    question = SLOW | {"payload": {"a": list(range(400))}}
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(mine.ask(question)))
    thread.start()
    while mine._idle:
        threading.Event().wait(0.001)
    pid = os.fork()
    if pid == 0:
        mine_now = [os.fstat(pipe.fileno()).st_ino for pipe in (asked.stdin, asked.stdout) if pipe is not None]
        os._exit(len(set(mine_now) & set(pipes)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    thread.join()
    assert answers == [{"says": "fail"}]
    assert mine._idle == [asked]
    mine.close()


def test_without_the_extra_the_error_names_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(EVALUATOR, "_idle", [])
    with pytest.raises(ConfigurationError, match=r"awa-sqla\[cel\]"):
        register_callback(session, running(session), policy=CallbackPolicy(filter="payload.unseen == 1"))
    assert register_callback(session, running(session)).id  # which needs none
