"""The benchmark of upgrades, small: both ways end, and are measured while there are writers."""

from __future__ import annotations

import json

import pytest

from benchmarks import migrating


@pytest.mark.beside
def test_both_ways_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    migrating.main(["--rows", "5000"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["way"] for one in found] == list(migrating.WAYS)
    for one in found:
        assert one["rows"] == 5000
        assert one["inserts"] > 0
        assert min(one["slowest"], one["p99 before"], one["seconds"]) > 0
