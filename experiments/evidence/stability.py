"""H: the lowest 5th percentile of xi of every run, and how far its model ended from dense training."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from collapse import ending
from figures import save
from raw import DENSE, Rows, read

from sparse_rl.evaluate.statistics import t_interval

LAW = 0.86
"""Runs were stable above this 5th percentile elsewhere (Sparrow, arXiv 2606.08446)."""
BOUNDS = (LAW, 0.7, 0.5, 0.0)
IN_A_ROW = 10
DENSE_ARMS = {
    "a-collapse": {"": ("dense", "dense-again"), "-4": ("dense-4",)},
    "a-corrections": {"": ("dense-4",)},
    "b-budget": {"": ("full", "full-again")},
    "l-long": {"": ("dense",)},
}
"""Dense arms that an arm is compared with, by the end of its name."""
NAIVE, PAPER, OTHER = "none", "`paper`", "others"


@dataclass(frozen=True)
class Ended:
    question: str
    arm: str
    seed: int
    correction: str
    lowest: float
    """Lowest mean of xi p05 over ten steps in a row."""
    away: float
    """Difference from dense training with the same seed, in points of the last test score (dense cache) that both have."""
    collapsed: bool


def ended_runs() -> Iterator[Ended]:
    for question, dense_arms in DENSE_ARMS.items():
        found = read(question)
        skipped = {arm for arms in dense_arms.values() for arm in arms}
        if question == "a-corrections":
            skipped |= {"dense-4", "naive-4", "paper-4"}  # A's
        if question == "b-budget":
            skipped |= {"rkv-160"}  # A's
        for arm, runs in found.items():
            if arm in skipped:
                continue
            base = dense_arms.get("-4" if arm.endswith("-4") else "", dense_arms[""])
            for seed, rows in runs.items():
                mine = scores(rows)
                dense = [scores(found[each][seed]) for each in base if seed in found.get(each, {})]
                if shared := set(mine).intersection(*dense) if dense else None:
                    last = max(shared)
                    away = mine[last] - statistics.mean(each[last] for each in dense)
                    yield Ended(question, arm, seed, correction(arm), lowest_p05(rows), 100 * away, ending(rows).collapsed)


def correction(arm: str) -> str:
    if arm.startswith("naive"):
        return NAIVE
    papers = ("paper", "rkv-", "snapkv-", "dense-4bit", "streaming", "best")
    return PAPER if arm.startswith(papers) and arm != "paper-guard" else OTHER


def lowest_p05(rows: Rows) -> float:
    values = [row["sparse/xi_p05"] for row in rows if "sparse/xi_p05" in row]
    return min(statistics.mean(values[at : at + IN_A_ROW]) for at in range(len(values) - IN_A_ROW + 1))


def scores(rows: Rows) -> dict[float, float]:
    """Return the test scores with a dense cache, by step."""
    return {row["step"]: row[DENSE] for row in rows if DENSE in row}


def stability_rows() -> list[list[str]]:
    """Return a row for each correction and range of the lowest percentile."""
    runs, made = list(ended_runs()), []
    for kind in (NAIVE, PAPER, OTHER):
        for high, low in zip((1.0, *BOUNDS), BOUNDS, strict=False):
            mine = [run for run in runs if run.correction == kind and low <= run.lowest < high]
            if mine:
                cells = [kind, f"{low:g} to {high:g}", str(len(mine)), str(len({(run.question, run.arm) for run in mine}))]
                cells.append(f"{sum(run.collapsed for run in mine)} of {len(mine)}")
                away = sorted(run.away for run in mine)
                made.append([*cells, with_interval(away), f"{away[0]:+.1f} to {away[-1]:+.1f}"])
    return made


def with_interval(values: list[float]) -> str:
    """Return the mean, with its 95 % interval if there are three or more values."""
    if len(values) < 3:
        return f"{statistics.mean(values):+.1f}"
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*t_interval(values))


STABILITY_HEADS = (
    "correction",
    "lowest 5th percentile of ξ",
    "runs",
    "arms",
    "collapsed",
    "from dense, points [95 %]",
    "range",
)


def plot_stability(out: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    runs = list(ended_runs())
    for number, kind in enumerate((NAIVE, PAPER, OTHER)):
        for long, marker in ((False, "o"), (True, "D")):
            mine = [run for run in runs if run.correction == kind and (run.question == "l-long") == long]
            label = f"{kind.strip('`')}{', long answers' if long else ''}"
            if mine:
                axis.scatter(
                    [run.lowest for run in mine],
                    [run.away for run in mine],
                    40,
                    marker=marker,
                    color=f"C{number}",
                    label=label,
                )
    axis.axvline(LAW, color="grey", linestyle=":")
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set(xlabel="lowest 5th percentile of ξ (mean of ten steps)", ylabel="from dense training, points")
    axis.grid(alpha=0.3)
    axis.legend(title="correction", fontsize="small", frameon=False)
    save(figure, out)
