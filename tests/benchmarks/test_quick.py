"""The pure parts of the benchmarks: ratios, medians, verdicts, tables, the command line. Nothing is measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.adapters.common import Adapter, Board, payload
from benchmarks.adapters.common import main as run_adapter
from benchmarks.environments import PEERS
from benchmarks.measures import MEASURES, Goal
from benchmarks.report import goals, markdown, number, ratio, spread, table, value, verdict
from benchmarks.run import parsed

ROUNDS: dict[str, list[dict[str, float] | None]] = {
    "app_only": [{"rate": 900.0, "statements": 3.0}, {"rate": 450.0, "statements": 3.0}],
    "sqlalchemy": [{"rate": 800.0, "statements": 5.0}, {"rate": 400.0, "statements": 5.0}],
    "awa_sqla": [{"rate": 720.0, "statements": 4.0}, {"rate": 360.0, "statements": 4.0}],
}


def results(**errors: Any) -> dict[str, Any]:
    about = {"when": "today", "postgresql": "18.6", "cores": 2, "load": [0.5, 1.5], "rounds": 2, "jobs": {"c": 2000}}
    return {"about": about, "figures": {"c": ROUNDS}, "errors": [], **errors}


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


# ------------------------------------------------------------------ adapters


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


def test_a_handler_leaves_its_mark_on_the_board(tmp_path):
    board = Board(tmp_path / "board", create=True)
    Board(tmp_path / "board").handler()(7)
    assert board.cells[0] == 1
    assert board.begun == [board.cells[2 + 7]]
