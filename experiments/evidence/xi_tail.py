"""H: the lower tail of xi of the runs with long answers: in the latter halves of the longest ones, and far below the 5th percentile."""

import gzip
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from curves import WINDOW
from raw import HERE, read

from sparse_rl.monitor.ratios import BINS, HIGH, LOW

QUESTION = "l-long"
TAIL_HEADS = (
    "run",
    *(
        f"{what}, {when} five"
        for what in ("ξ p05", "ξ p05, long", "‰ below 0.1", "per million below 1e-4")
        for when in ("first", "last")
    ),
)


def tail_rows() -> list[list[str]]:
    """Return a row for each sparse run. Cells are empty where a run did not record a metric."""
    return [
        [
            f"{arm}-{seed}",
            *ends([row["sparse/xi_p05"] for row in rows if "sparse/xi_p05" in row], "{:.3f}".format),
            *ends([row["sparse/xi_p05_long"] for row in rows if "sparse/xi_p05_long" in row], "{:.3f}".format),
            *ends([1e3 * share_below(-1, counts) for counts in histograms(f"{arm}-{seed}")], "{:.2f}".format),
            *ends([1e6 * share_below(-4, counts) for counts in histograms(f"{arm}-{seed}")], "{:.0f}".format),
        ]
        for arm, runs in read(QUESTION).items()
        if arm != "dense"
        for seed, rows in runs.items()
    ]


def ends(values: list[float], form: Callable[[float], str]) -> list[str]:
    """Return the means of the first and of the last `WINDOW` values."""
    return [form(statistics.mean(part)) if part else "" for part in (values[:WINDOW], values[-WINDOW:])]


def histograms(run: str) -> list[list[int]]:
    """Return the tokens per bin of log10 xi for each step, as monitor/ratios.py counted them; none if they were not kept."""
    path: Path = HERE / QUESTION / "raw" / f"{run}-xi.json.gz"
    if not path.exists():
        return []
    with gzip.open(path, "rt") as file:
        return [json.loads(line)["counts"] for line in file]


def share_below(log10_xi: float, counts: list[int]) -> float:
    """Return the share of the tokens whose log10 xi is below an edge of the bins."""
    return sum(counts[: round((log10_xi - LOW) / (HIGH - LOW) * BINS)]) / sum(counts)
