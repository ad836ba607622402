"""The pure parts of the benchmark of maintenance. The lanes themselves: `tests/maintenance/test_upkeep.py`."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import upkeep
from benchmarks.upkeep_lanes import LANES, Look

ABOUT = {"when": "today", "postgresql": "18.6", "cores": 2, "load": [0.5, 1.5], "jobs": 1_000_000}


def looks(**others: Any) -> dict[str, Look]:
    return {lane.name: Look(**({"done": 1000, "milliseconds": 2.0, "rows": 2050} | others)) for lane in LANES}


def test_the_report_has_a_row_for_each_lane_and_takes_the_worst_that_was_read():
    found = {
        "no statistics": looks(indexes={"b"}),
        "statistics": looks(milliseconds=3.0, indexes={"a"}),
        "old snapshot": looks(milliseconds=44.44, rows=3000),
    }
    text = upkeep.markdown(ABOUT, found, {})
    assert "load 0.5 before and 1.5 after; 1,000,000 finished jobs." in text
    for lane in LANES:
        assert f"| {lane.name} | 1000 | 2.0 | 3.0 | 44.4 | 3,000 | `a`, `b` |" in text
    assert "read from end to end: none." in text
    found["statistics"]["age"].scanned.add("jobs_hot")
    assert "read from end to end: jobs_hot." in upkeep.markdown(ABOUT, found, {})


def test_the_report_says_what_deleting_did_to_claims():
    row = {"p50": 1.25, "p99": 9.0, "dead": 12_345, "autovacuums": 1}
    deleted = {"nothing else": {"before": row, "during": row | {"rows": 50_000, "seconds": 2.0}, "after": row}}
    found = dict.fromkeys(("no statistics", "statistics", "old snapshot"), looks())
    text = upkeep.markdown(ABOUT, found, deleted)
    assert text.count(" | 1.2 | 9.0 | 12,345 | 1 |") == 3
    assert "50,000 rows in 2 s, 25,000 in a second" in text


def test_latency_is_the_middle_and_the_slowest_hundredth():
    assert upkeep.latency([float(n) for n in range(1, 1000)]) == {"p50": 500, "p99": pytest.approx(990), "claims": 999}


def test_a_look_and_the_command_line_read_as_they_are_written():
    assert upkeep.vars_of(Look(done=1, indexes={"b", "a"}))["indexes"] == ["a", "b"]
    given = upkeep.parsed(["--jobs", "5", "--set", "fillfactor=90", "--parts", "plans"])
    assert (given.jobs, given.set, given.parts) == (5, ["fillfactor=90"], ["plans"])
