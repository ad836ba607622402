"""The versioned steps, oldest first: `STEPS[n - 1]` leads from version n - 1 to n, and back."""

from __future__ import annotations

from typing import NamedTuple

from awa_sqla.schema.steps import s0001, s0002, s0003, s0004, s0005, s0006


class Step(NamedTuple):
    """The statements of one step, in order. Placeholders are filled in by `awa_sqla.schema`."""

    up: tuple[str, ...]
    down: tuple[str, ...]


STEPS: tuple[Step, ...] = tuple(Step(step.UP, step.DOWN) for step in (s0001, s0002, s0003, s0004, s0005, s0006))
