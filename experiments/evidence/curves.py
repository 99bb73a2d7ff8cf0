"""Smooth the metrics of a run over its steps, and find when its reward reaches a level."""

import statistics
from collections.abc import Callable

from raw import Rows

WINDOW = 5
"""Steps that a point of a curve is the mean of."""

Curve = list[tuple[float, float]]


def smooth(curve: Curve, mean: Callable[[list[float]], float]) -> Curve:
    return [
        (step, mean([value for _, value in curve[max(0, at + 1 - WINDOW) : at + 1]])) for at, (step, _) in enumerate(curve)
    ]


def first_step(rows: Rows, level: float) -> int | None:
    """Return the first step whose reward, a mean over the last `WINDOW` steps, is at least `level`; None if none is."""
    curve = smooth([(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row], statistics.mean)
    return next((int(step) for step, mean in curve[WINDOW - 1 :] if mean >= level), None)
