"""The pure parts of the benchmarks: ratios, medians, verdicts, tables, the command line. Nothing is measured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import environments, idle, memory
from benchmarks.adapters.common import Adapter, Board, Payload, UnsupportedError, payload, peak_mb
from benchmarks.adapters.common import main as run_adapter
from benchmarks.environments import PEERS, Peer, prepare
from benchmarks.harness import PeerError
from benchmarks.measures import MEASURES, Goal, NotOfferedError, bulk
from benchmarks.report import goals, markdown, number, ratio, spread, table, value, verdict
from benchmarks.run import parsed

ROUNDS: dict[str, list[dict[str, float] | None]] = {
    "app_only": [{"rate": 900.0, "statements": 3.0}, {"rate": 450.0, "statements": 3.0}],
    "sqlalchemy": [{"rate": 800.0, "statements": 5.0}, {"rate": 400.0, "statements": 5.0}],
    "awa_sqla": [{"rate": 720.0, "statements": 4.0}, {"rate": 360.0, "statements": 4.0}],
}


def results(**others: Any) -> dict[str, Any]:
    about = {"when": "today", "postgresql": "18.6", "cores": 2, "load": [0.5, 1.5], "rounds": 2, "jobs": {"c": 2000}}
    found = {"about": about, "figures": {"c": ROUNDS}, "errors": [], "skipped": {}, "not_measured": {"c": []}}
    return found | others


# ------------------------------------------------------------------- figures


def test_a_figure_is_the_median_of_the_rounds_that_have_it():
    rounds = {"raw": [{"rate": 3.0}, None, {"rate": 1.0}, {"p50_ms": 9.0}, {"rate": 2.0}]}
    assert value(rounds, "raw", "rate") == 2.0
    assert spread(rounds, "raw", "rate") == (1.0, 3.0)
    assert value(rounds, "raw", "wal_bytes") is None
    assert value(rounds, "pgqueuer", "rate") is None


def test_a_ratio_compares_figures_of_the_same_round():
    assert ratio(ROUNDS, "awa_sqla", "sqlalchemy") == pytest.approx(0.9)
    slow_minute = {
        "raw": [{"rate": 100.0}, {"rate": 10.0}, {"rate": 100.0}],
        "awa_sqla": [{"rate": 50.0}, {"rate": 5.0}],
    }
    assert ratio(slow_minute, "awa_sqla", "raw") == pytest.approx(0.5)


def test_a_round_that_one_of_two_peers_missed_has_no_ratio():
    rounds = {"raw": [None, {"rate": 100.0}], "awa_sqla": [{"rate": 1.0}, {"rate": 50.0}]}
    assert ratio(rounds, "awa_sqla", "raw") == pytest.approx(0.5)
    assert ratio({"raw": [None], "awa_sqla": [{"rate": 1.0}]}, "awa_sqla", "raw") is None


# --------------------------------------------------------------------- goals


@pytest.mark.parametrize(
    ("found", "said"),
    [(1.3, "reached"), (1.25, "reached"), (1.1, "not reached, floor held"), (0.9, "FLOOR MISSED")],
)
def test_a_goal_with_a_floor_has_three_verdicts(found, said):
    assert verdict(Goal("rate", "ratio", "pgqueuer", at_least=1.25, floor=1.0), found) == said


def test_a_goal_without_a_floor_is_reached_or_not():
    goal = Goal("wal_bytes", "value", at_most=750)
    assert (verdict(goal, 750), verdict(goal, 751)) == ("reached", "not reached")


def test_a_difference_is_forgiven_a_hundredth():
    goal = Goal("statements", "difference", "app_only", at_most=1.0)
    assert (verdict(goal, 1.005), verdict(goal, 1.5)) == ("reached", "not reached")


def test_goals_name_what_they_compare_with():
    assert goals(MEASURES["c"], ROUNDS) == [
        "- tx/s / SQLAlchemy floor: 0.90 (goal ≥ 0.9, floor 0.85): reached",
        "- statements - the app's row alone: 1.00 (goal ≤ 1): reached",
    ]


def test_goals_that_a_run_cannot_speak_of_are_left_out():
    assert goals(MEASURES["c"], {"awa_sqla": ROUNDS["awa_sqla"]}) == []


def test_every_goal_speaks_of_a_column_and_of_a_known_peer():
    for measure in MEASURES.values():
        for goal in measure.goals:
            assert goal.figure in measure.columns
            assert goal.how == "value" or goal.against in PEERS


# -------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (None, ""),
        (0.0, "0.00"),
        (0.0042, "0.0042"),
        (0.042, "0.042"),
        (0.42, "0.42"),
        (42.0, "42.0"),
        (4200.0, "4,200"),
    ],
)
def test_numbers_have_as_many_digits_as_matter(given, written):
    assert number(given) == written


def test_a_table_has_a_row_for_each_peer_with_figures_and_the_goal_beside_its_ratio():
    lines = table(MEASURES["c"], {**ROUNDS, "pgqueuer": [None, None]}).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["the app's row alone", "SQLAlchemy floor", "awa_sqla"]
    floor, ours = lines[3].split("|"), lines[4].split("|")
    assert [cell.strip() for cell in floor[-4:-1]] == ["400 to 800", "0.90", "≥ 0.9, floor 0.85"]
    assert [cell.strip() for cell in ours[-3:-1]] == ["", ""]


def test_the_report_says_when_and_where_and_what_failed():
    text = markdown(results(errors=["round 1, (c), raw: PeerError: gone"]))
    assert "today, PostgreSQL 18.6, 2 cores" in text
    assert "(2,000 jobs)" in text
    assert text.endswith("- failed: round 1, (c), raw: PeerError: gone\n")


def test_the_report_says_which_peers_are_missing_and_why():
    text = markdown(results(skipped={"oban": "too new"}, not_measured={"c": ["awa_pg", "chancy"]}))
    assert "- not measured here: awa-pg, chancy\n" in text
    assert text.endswith("\n- skipped: oban: too new\n")


# -------------------------------------------------------------- command line


def test_all_measures_and_peers_are_the_default():
    given = parsed([])
    assert (given.rounds, given.jobs) == (5, None)
    assert (given.measures, given.peers) == (list(MEASURES), list(PEERS))


def test_quick_fills_in_what_was_not_given():
    assert (parsed(["--quick"]).rounds, parsed(["--quick"]).jobs) == (1, 300)
    assert (parsed(["--quick", "--rounds", "2", "--jobs", "50"]).rounds) == 2
    assert parsed(["--quick", "--jobs", "50"]).jobs == 50


@pytest.mark.parametrize("wrong", [["--measures", "z"], ["--peers", "nobody"], ["--rounds", "0"], ["--jobs", "-1"]])
def test_nonsense_is_refused_by_name(wrong, capsys):
    with pytest.raises(SystemExit):
        parsed(wrong)
    assert wrong[0] in capsys.readouterr().err


# -------------------------------------------------------------- environments


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "HOME", tmp_path)
    return tmp_path


def test_an_environment_that_is_there_is_not_made_again(home, monkeypatch):
    monkeypatch.setitem(PEERS, "raw", Peer("raw", "no:Thing", "made", ("one", "two"), oldest=(9, 0)))
    (home / "venvs" / "made").mkdir(parents=True)
    (home / "venvs" / "made" / "packages.txt").write_text("one\ntwo")
    assert prepare(["raw"]) == {}


def test_a_peer_without_a_python_that_is_new_enough_is_skipped_with_the_reason(home, monkeypatch):
    monkeypatch.setitem(PEERS, "oban", Peer("oban", "no:Thing", "oban", ("oban",), oldest=(9, 0)))
    assert prepare(["oban"]) == {"oban": "needs Python 9.0 or newer, and the PATH has none"}
    assert not (home / "venvs").exists()


def test_a_peer_that_cannot_be_installed_is_skipped_with_the_reason(home, monkeypatch):
    def run(argv: list[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, int("pip" in argv), stderr="WARNING: hm\nERROR: no such thing\n")

    monkeypatch.setattr(environments, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    assert prepare(["awa_sqla", "awa_sqla_unique"]) == dict.fromkeys(
        ["awa_sqla", "awa_sqla_unique"], "ERROR: no such thing"
    )
    assert not (home / "venvs").exists()


# ------------------------------------------------------------------ measures


class Told:
    """A harness whose peer stores so many jobs."""

    def __init__(self, stored: int, *offers: str) -> None:
        self.about = {"raw": {"offers": offers, "remaining_sql": "how many"}}
        self.stored = stored

    def fresh(self, peer: str) -> str:
        return f"bench_run_{peer}"

    def read(self, database: str) -> None:
        """Nothing is counted."""

    def dsn(self, database: str) -> str:
        return database

    def command(self, peer: str, command: str, dsn: str, **options: Any) -> dict[str, float]:
        assert (command, dsn, options) == ("enqueue_many", "bench_run_raw", {"n": 100})
        return {"total_s": 0.5, "peak_mb": 40.0}

    def spent(self, database: str, before: None, jobs: int) -> dict[str, float]:
        return {"statements": 10 / jobs}

    def count(self, database: str, query: str) -> int:
        assert query == "how many"
        return self.stored


def test_a_bulk_call_has_a_rate_and_its_costs_for_each_job():
    harness: Any = Told(100, "enqueue_many")
    assert bulk(harness, "raw", 100) == {"rate": 200.0, "peak_mb": 40.0, "statements": 0.1}


def test_jobs_that_a_bulk_call_did_not_store_are_an_error():
    harness: Any = Told(99, "enqueue_many")
    with pytest.raises(PeerError, match="99 of 100 jobs"):
        bulk(harness, "raw", 100)


def test_a_peer_without_a_bulk_call_is_not_measured():
    harness: Any = Told(100, "enqueue_one")
    with pytest.raises(NotOfferedError, match="enqueue_many"):
        bulk(harness, "raw", 100)


# ------------------------------------------------------------------ adapters


class Bulk(Adapter):
    """Notes what each call was given."""

    def __init__(self) -> None:
        self.calls: list[list[Payload]] = []

    def setup(self, dsn: str) -> None:
        raise UnsupportedError(f"no tables in {dsn}")

    @contextmanager
    def enqueue_many(self, dsn: str) -> Iterator[Any]:
        yield self.calls.append


def test_the_payload_is_about_sixty_bytes():
    assert 45 <= len(str(payload(1234))) <= 65


def test_an_adapter_says_what_it_offers(capsys):
    class Sends(Adapter):
        def enqueue_one(self, dsn: str) -> Any:
            raise NotImplementedError

    run_adapter(Sends(), ["meta"])
    assert '"offers": ["enqueue_one"]' in capsys.readouterr().out


def test_what_an_adapter_lacks_is_said_and_not_raised(capsys):
    run_adapter(Adapter(), ["enqueue_many", "--n", "1"])
    assert capsys.readouterr().out == '{"unsupported": "no jobs"}'


def test_many_jobs_are_one_call(capsys):
    adapter = Bulk()
    run_adapter(adapter, ["enqueue_many", "--n", "2", "--base", "7"])
    assert adapter.calls == [[payload(7), payload(8)]]
    found = json.loads(capsys.readouterr().out)
    assert found["total_s"] > 0
    assert found["peak_mb"] == pytest.approx(peak_mb(), rel=0.5)


def test_tables_that_cannot_be_made_are_said_and_not_raised(capsys):
    run_adapter(Bulk(), ["setup", "--dsn", "here"])
    assert capsys.readouterr().out == '{"unsupported": "no tables in here"}'


def test_every_adapter_is_a_class_of_a_module_that_is_there():
    for peer in PEERS.values():
        module, _, name = peer.adapter.partition(":")
        source = environments.CHECKOUT.joinpath(*module.split(".")).with_suffix(".py").read_text()
        assert f"class {name}(" in source


def test_a_handler_leaves_its_mark_on_the_board(tmp_path):
    board = Board(tmp_path / "board", create=True)
    Board(tmp_path / "board").handler()(7)
    assert board.cells[0] == 1
    assert board.begun == [board.cells[2 + 7]]


# ------------------------------------------------------------ a worker that lasts


@pytest.mark.parametrize(
    ("statement", "who"),
    [
        ("BEGIN ISOLATION LEVEL READ COMMITTED", idle.CONTROL),
        ("COMMIT", idle.CONTROL),
        ("SELECT $1", "pings and proofs"),
        ("SELECT anon_1.queue \nFROM unnest($1::TEXT[]) AS anon_1(queue)", "poll for work"),
        ("SELECT EXTRACT(epoch FROM min(awa.scheduled_jobs.run_at))", "promotion"),
        ("SELECT something  \n else entirely", "SELECT something else entirely"),
    ],
)
def test_every_statement_has_a_sender(statement, who):
    assert idle.sender(statement) == who


def idle_row(**others: Any) -> dict[str, Any]:
    row = {"mode": "notify", "queues": 1, "queries": 1.9, "with_control": 4.4, "commits": 2.6, "cpu_percent": 0.5}
    return row | {"rss_mb": 80.0, "senders": {"promotion": 1.0}} | others


def test_the_worst_number_of_queues_decides_whether_an_idle_worker_is_cheap():
    good, bad = idle_row(), idle_row(queues=50, queries=2.5, cpu_percent=1.5)
    assert [line.rpartition(": ")[2] for line in idle.verdicts([good])] == ["reached", "reached"]
    assert [line.rpartition(": ")[2] for line in idle.verdicts([good, bad])] == ["not reached", "not reached"]
    assert idle.verdicts([idle_row(mode="poll-only")]) == []


def test_the_idle_report_has_a_row_for_each_set_up_and_for_each_sender():
    about = {"when": "today", "postgresql": "18.6", "cores": 2, "load": [0.5, 1.5], "seconds": 60.0}
    text = idle.markdown(about, [idle_row(), idle_row(mode="poll-only", senders={"rescue": 0.1})])
    assert "| notify | 1 | 1.90 | 4.40 | 2.60 | 0.50 | 80.0 |" in text
    assert "| promotion | 1.00 | 0.00 |\n| rescue | 0.00 | 0.10 |" in text


def test_memory_grows_by_what_is_added_after_the_warm_up():
    objects = [{"builtins.list": n} for n in (0, 10, 11, 31)]
    samples = [
        {"jobs": n * 100, "seconds": 1.0, "rss": rss, "objects": objects[n], "all_objects": 1000 + n * 10}
        for n, rss in enumerate((0, 5_000_000, 5_000_100, 5_000_200))
    ]
    assert memory.slope(samples, "rss", 100) == pytest.approx(1.0)
    text = memory.markdown({"when": "today", "postgresql": "18.6", "cores": 2, "warm_up": 100}, samples)
    assert "- after 100 jobs: 1.00 bytes and 0.10000 objects for each job\n- +21 builtins.list\n" in text


def test_the_shares_of_kinds_make_a_thousand_and_all_come():
    assert sum(memory.KINDS.values()) == 1000
    assert {type(job) for job in memory.jobs(1000)} == set(memory.KINDS)
    assert memory.parsed(["--jobs", "50"]).warm_up == 10
