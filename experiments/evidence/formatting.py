"""Format means over seeds and Markdown tables."""

import statistics
from collections.abc import Sequence

from sparse_rl.evaluate.statistics import t_interval

NOT_YET = "Not run yet."


def interval(values: Sequence[float], digits: int = 1, sign: str = "") -> str:
    """Return the mean, with the half-width of its 95 % interval if there are three or more values."""
    if len(values) < 3:
        return f"{statistics.mean(values):{sign}.{digits}f}"
    mean, low, high = t_interval(values)
    return f"{mean:{sign}.{digits}f} ± {(high - low) / 2:.{digits}f}"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, or `NOT_YET` if it has no lines."""
    if not lines:
        return NOT_YET
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))
