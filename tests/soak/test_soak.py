"""Short soaks: a few seconds among the other tests, about a minute beside them, and red without a guard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.soak import Report, Settings, soak

#: For each guard: the shortest run that misses it, and what that run must find.
RUNS = {
    "lease": (Settings(jobs=400, kills=0, stops=12, slow=1, minutes=0.6, seed=1), {"outcomes of a stale attempt"}),
    "claim": (Settings(jobs=200, kills=1, minutes=0.1), {"attempts that do not add up"}),
    "ledger": (Settings(jobs=100, kills=0, minutes=0.1), {"follow-ups missing", "buckets without a tally"}),
    "obligation": (Settings(jobs=200, kills=3, minutes=0.1), {"follow-ups missing"}),
    "rescue": (Settings(jobs=300, kills=8, minutes=0.2), {"lane rescue_stale of maintenance failed: NoResultFound"}),
    "cron": (Settings(jobs=100, kills=1, minutes=0.2), {"ticks that fired twice"}),
}


def run(settings: Settings, logs: Path) -> Report:
    report = soak(replace(settings, logs=logs, quiet=True))
    print(report.summary)
    return report


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_nothing_is_lost_or_doubled_in_a_short_soak(tmp_path: Path) -> None:
    report = run(Settings(jobs=100, kills=2, stops=1, minutes=0.06, workers=2), tmp_path)
    assert report.clean, report.violations()
    assert report.findings.counts["handled"] > 100
    assert report.did["kills"] == 2
    assert report.did["restarts"] == 1


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_or_doubled(tmp_path: Path, seed: int) -> None:
    report = run(Settings(jobs=800, kills=12, seed=seed), tmp_path)
    assert report.clean, report.violations()
    assert report.findings.counts["handled"] > 1600
    assert report.did["kills"] == 12
    assert report.did["kills of maintenance"] == 3
    assert report.did["leaders frozen"] + report.did["standbys frozen"] == 1
    for what in ("ticks", "deleted", "rises", "rescues"):
        assert report.findings.counts[what] > 3, what
    assert report.findings.counts["changes of the leader"] > 2  # one by right, one by force, and one that took over
    assert {how for how, _ in report.commits} == {"before", "after"}


@pytest.mark.slow
@pytest.mark.sabotage
@pytest.mark.timeout(400)
@pytest.mark.parametrize("guard", [*RUNS])
def test_the_soak_is_red_without_a_guard(tmp_path: Path, guard: str) -> None:
    settings, checks = RUNS[guard]
    report = run(replace(settings, sabotage=guard), tmp_path)
    violations = report.violations(most=0)
    print(violations)
    assert [what for what in checks if what not in violations] == []
