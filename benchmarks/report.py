"""Rounds of figures as tables and verdicts. Pure: nothing here measures, reads or writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.environments import PEERS
from benchmarks.measures import MEASURES, Goal, Measure

OURS = "awa_sqla"

#: For each peer its rounds, in order; None where a round gave nothing.
Rounds = Mapping[str, Sequence[Mapping[str, float] | None]]


def value(rounds: Rounds, peer: str, figure: str) -> float | None:
    """The median of a figure over a peer's rounds."""
    found = [figures[figure] for figures in rounds.get(peer, ()) if figures and figure in figures]
    return median(found) if found else None


def spread(rounds: Rounds, peer: str, figure: str) -> tuple[float, float] | None:
    """The lowest and the highest of a figure."""
    found = [figures[figure] for figures in rounds.get(peer, ()) if figures and figure in figures]
    return (min(found), max(found)) if found else None


def compared(
    rounds: Rounds, peer: str, against: str, figure: str, how: Callable[[float, float], float]
) -> float | None:
    """The median of `how(peer's, against's)`, each pair from one round: a slow minute slows both."""
    pairs = zip(rounds.get(peer, ()), rounds.get(against, ()), strict=False)
    found = [
        how(one[figure], other[figure]) for one, other in pairs if one and other and figure in one and other.get(figure)
    ]
    return median(found) if found else None


def ratio(rounds: Rounds, peer: str, against: str, figure: str = "rate") -> float | None:
    """How many times `against` a peer is, round by round."""
    return compared(rounds, peer, against, figure, lambda one, other: one / other)


def measured(goal: Goal, rounds: Rounds) -> float | None:
    """What stands against a goal."""
    if goal.how == "value":
        return value(rounds, OURS, goal.figure)
    if goal.how == "ratio":
        return ratio(rounds, OURS, goal.against, goal.figure)
    return compared(rounds, OURS, goal.against, goal.figure, lambda one, other: one - other)


def verdict(goal: Goal, found: float) -> str:
    """Whether it is held. A difference is forgiven a hundredth: workers and clients prepare statements once."""
    slack = 0.01 if goal.how == "difference" else 0.0
    low = goal.at_least is not None and found < goal.at_least
    high = goal.at_most is not None and found > goal.at_most + slack
    if not (low or high):
        return "reached"
    if goal.floor is None:
        return "not reached"
    return "not reached, floor held" if found >= goal.floor else "FLOOR MISSED"


def number(given: float | None) -> str:
    """With as many digits as matter."""
    if given is None:
        return ""
    if abs(given) >= 100:
        return f"{given:,.0f}"
    if abs(given) >= 10:
        return f"{given:.1f}"
    if abs(given) >= 0.1 or given == 0:
        return f"{given:.2f}"
    return f"{given:.3f}" if abs(given) >= 0.01 else f"{given:.4f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bounds(goal: Goal) -> str:
    parts = [f"≥ {goal.at_least:g}"] if goal.at_least is not None else []
    parts += [f"≤ {goal.at_most:g}"] if goal.at_most is not None else []
    parts += [f"floor {goal.floor:g}"] if goal.floor is not None else []
    return ", ".join(parts)


def table(measure: Measure, rounds: Rounds) -> str:
    """One row for each peer; the last columns say how many times that peer awa_sqla is, and the goal."""
    goals = {goal.against: _bounds(goal) for goal in measure.goals if goal.how == "ratio" and goal.figure == "rate"}
    head = ["", *measure.columns.values(), "lowest and highest", "awa_sqla / this", "goal"]
    lines = [_row(head), _row(["---"] * len(head))]
    for peer in [name for name in PEERS if value(rounds, name, "rate") is not None]:
        low, high = spread(rounds, peer, "rate") or (0.0, 0.0)
        against = None if peer == OURS else ratio(rounds, OURS, peer)
        lines.append(
            _row(
                [
                    PEERS[peer].title,
                    *(number(value(rounds, peer, figure)) for figure in measure.columns),
                    f"{number(low)} to {number(high)}",
                    number(against) if against is not None else "",
                    goals.get(peer, ""),
                ]
            )
        )
    return "\n".join(lines)


def goals(measure: Measure, rounds: Rounds) -> list[str]:
    """One line for each goal that this run can speak of."""
    lines: list[str] = []
    for goal in measure.goals:
        found = measured(goal, rounds)
        if found is None:
            continue
        what = measure.columns[goal.figure]
        if goal.how == "ratio":
            what += f" / {PEERS[goal.against].title}"
        elif goal.how == "difference":
            what += f" - {PEERS[goal.against].title}"
        lines.append(f"- {what}: {number(found)} (goal {_bounds(goal)}): {verdict(goal, found)}")
    return lines


def markdown(results: Mapping[str, Any]) -> str:
    """The whole run."""
    about = results["about"]
    head = (
        f"{about['when']}, PostgreSQL {about['postgresql']}, {about['cores']} cores shared with the server, "
        f"load {about['load'][0]:.1f} before and {about['load'][1]:.1f} after, {about['rounds']} rounds. "
        "Medians; ratios are medians of same-round ratios; figures other than rates and RSS are for each job."
    )
    lines = [head]
    for key, rounds in results["figures"].items():
        measure = MEASURES[key]
        lines += ["", f"### {measure.title} ({about['jobs'][key]:,} jobs)", "", table(measure, rounds)]
        lines += ["", *goals(measure, rounds)]
        if missing := results["not_measured"][key]:
            lines.append(f"- not measured here: {', '.join(PEERS[peer].title for peer in missing)}")
    lines += ["", *(f"- skipped: {PEERS[peer].title}: {reason}" for peer, reason in results["skipped"].items())]
    lines += [f"- failed: {error}" for error in results["errors"]]
    return "\n".join(lines).rstrip() + "\n"
