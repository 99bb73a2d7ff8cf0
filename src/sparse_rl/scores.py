"""Format held-out scores of a run: accuracy in percent, or mean reward.

All scores that are shown together use the same unit. The metric is called pass@1 in both cases.
"""

import math
from collections.abc import Iterable, Mapping

Row = Mapping[str, float]
GRADED = "graded"
"""Suffix of the metric `eval/<benchmark>/graded`, which is logged if any reward was neither 0 nor 1."""
CACHES = ("pass@1", "pass@1_sparse")


def score_keys(row: Row) -> list[str]:
    """Return the keys of the scores of all benchmarks and caches, e.g. `eval/gsm8k/pass@1_sparse`."""
    return [key for key in row if key.startswith("eval/") and key.endswith(CACHES)]


def score_set(key: str) -> str:
    """Return the held-out set of a score key, e.g. `gsm8k`."""
    return key.removeprefix("eval/").rsplit("/", 1)[0]


def are_shares(rows: Iterable[Row]) -> bool:
    """Return whether all held-out rewards were 0 or 1.

    Older versions do not log this; for their runs the scores decide.
    """
    for row in rows:
        if any(key.startswith("eval/") and key.endswith(f"/{GRADED}") for key in row):
            return False
        bounds = [row.get(f"{key}{end}", row[key]) for key in score_keys(row) for end in ("_low", "_high")]
        if any(bound < 0 or bound > 1 for bound in bounds):
            return False
    return True


def score_text(mean: float, low: float | None, high: float | None, *, share: bool, signed: bool = False) -> str:
    """Format the score, with its confidence interval if given."""
    form = f"{{:{'+' if signed else ''}{'.1%' if share else '.3g'}}}"
    if low is None or high is None or not math.isfinite(high - low):
        return form.format(mean)
    return f"{form} [{form}, {form}]".format(mean, low, high)


def score_name(share: bool) -> str:
    return "pass@1" if share else "mean reward"
