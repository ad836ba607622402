"""The versioned steps, oldest first: `STEPS[n - 1]` leads from version n - 1 to n, and back."""

from __future__ import annotations

from awa_sqla.schema.steps import s0001, s0002, s0003, s0004, s0005, s0006, s0007
from awa_sqla.schema.steps.step import MODES, Index, Step, Validation

__all__ = ["MODES", "STEPS", "Index", "Step", "Validation"]

STEPS: tuple[Step, ...] = tuple(step.STEP for step in (s0001, s0002, s0003, s0004, s0005, s0006, s0007))
