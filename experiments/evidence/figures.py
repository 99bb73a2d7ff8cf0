"""The curves of a question, one panel for each metric and a line for each arm with the range of its seeds; and A in one picture."""

import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from curves import smooth
from raw import DENSE, SPARSE, Rows, ends, read, starts

plt.switch_backend("svg")
plt.rcParams["svg.hashsalt"] = "sparse-rl"

PANELS = {
    "reward/mean": "reward",
    "sparse/rejection_rate": "rejected",
    "policy/grad_norm": "gradient norm",
    "sparse/mismatch_k3": "mismatch, k3",
    "policy/entropy": "entropy",
}
LONG_PANELS = PANELS | {
    "response/mean_tokens": "response tokens",
    "sparse/xi_p05": "5th percentile of ξ",
    "sparse/xi_p05_long": "late in long answers",
}
"""Panels of the runs with long answers."""
LOGARITHMIC = ("policy/grad_norm", "sparse/mismatch_k3")


def draw(axis: Any, key: str, arm: str, runs: dict[int, Rows], colour: str) -> None:
    """Draw the mean over seeds and their range, up to the end of the shortest run. Runs without the metric are left out, and an
    arm whose values are all zero."""
    mean = statistics.geometric_mean if key in LOGARITHMIC else statistics.mean
    curves = [smooth([(row["step"], row[key]) for row in rows if key in row], mean) for rows in runs.values()]
    curves = [curve for curve in curves if curve]
    if not any(value for curve in curves for _, value in curve):
        return
    steps = [step for step, _ in min(curves, key=len)]
    values = [[curve[at][1] for curve in curves] for at in range(len(steps))]
    axis.plot(steps, [mean(at) for at in values], color=colour, linestyle="--" if arm.endswith("-4") else "-", label=arm)
    axis.fill_between(steps, [min(at) for at in values], [max(at) for at in values], color=colour, alpha=0.15)


def plot(question: str, out: Path, panels: dict[str, str] = PANELS, columns: int = len(PANELS)) -> None:
    """Draw a panel for each metric of `panels`, with a line for each arm."""
    arms = {arm: runs for arm, runs in read(question).items() if not arm.endswith("-again")}
    colours = list(dict.fromkeys(arm.removesuffix("-4") for arm in arms))
    rows = len(panels) // columns
    grid = plt.subplots(rows, columns, figsize=(3 * columns, 3.4 * rows), squeeze=False, layout="constrained")
    figure, axes = grid[0], grid[1].flat
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for arm, runs in arms.items():
            draw(axis, key, arm, runs, f"C{colours.index(arm.removesuffix('-4'))}")
        axis.set(title=title, xlabel="step", yscale="log" if key in LOGARITHMIC else "linear")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(arms), frameon=False)
    save(figure, out)


def before_training() -> float:
    return statistics.mean(starts("a-collapse", DENSE).values())


def summary(out: Path) -> None:
    """Draw the rewards with four updates a step, and the last score of every run of A."""
    methods = ("dense", "naive", "paper")
    found, scores = read("a-collapse"), ends("a-collapse", DENSE)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for number, method in enumerate(methods):
        draw(left, "reward/mean", method, found[f"{method}-4"], f"C{number}")
        for shift, suffixes in ((-0.15, ("", "-again")), (0.15, ("-4",))):
            ended = [score for suffix in suffixes for score in scores.get(f"{method}{suffix}", {}).values()]
            fill = f"C{number}" if shift < 0 else "none"
            right.scatter([number + shift] * len(ended), ended, 50, edgecolors=f"C{number}", facecolors=fill, zorder=3)
    before = before_training()
    right.axhline(before, color="grey", linestyle=":")
    right.annotate("before training", (2.45, before), ha="right", va="bottom", color="grey")
    left.set(title="reward of the rollouts, four updates a step", xlabel="step")
    right.set(title="test Pass@1, %, of every run\n(filled: one update a step, open: four)", xlim=(-0.5, 2.5), ylim=(0, None))
    right.set_xticks(range(len(methods)), ["dense", "sparse,\nno correction", "sparse,\npaper's correction"])
    for axis in (left, right):
        axis.grid(alpha=0.3)
    save(figure, out)


def budgets(out: Path) -> None:
    """Draw the last scores of question B, and the shares rejected at first and at the end, over the budget."""
    scores, found = {key: ends("b-budget", key) for key in (DENSE, SPARSE)}, read("b-budget")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for number, (policy, title) in enumerate({"rkv": "R-KV", "snapkv": "SnapKV"}.items()):
        sizes = sorted(int(arm.split("-")[1]) for arm in found if re.fullmatch(rf"{policy}-\d+", arm))
        arms, colour = [f"{policy}-{size}" for size in sizes], f"C{number}"
        for key, fill, line in ((DENSE, colour, "-"), (SPARSE, "none", ":")):
            cache = "dense" if key == DENSE else "the sampler's"
            left.plot(sizes, [statistics.mean(scores[key][arm].values()) for arm in arms], line, color=colour)
            points = [(size, score) for size, arm in zip(sizes, arms, strict=True) for score in scores[key][arm].values()]
            left.scatter(
                *zip(*points, strict=True), 40, edgecolors=colour, facecolors=fill, label=f"{title}, {cache} cache", zorder=3
            )
        for part, line, when in ((slice(5), ":", "first five steps"), (slice(-10, None), "-", "last ten")):
            shares = [
                100 * statistics.mean(row["sparse/rejection_rate"] for rows in found[arm].values() for row in rows[1:][part])
                for arm in arms
            ]
            right.plot(sizes, shares, line, marker="o", color=colour, label=f"{title}, {when}")
    for score, name in (
        (statistics.mean(scores[DENSE]["full"].values()), "dense training"),
        (before_training(), "before training"),
    ):
        left.axhline(score, color="grey", linestyle=":")
        left.annotate(name, (262, score), ha="right", va="bottom", color="grey")
    left.set(title="test Pass@1, %, of every run", xlabel="budget, tokens (a sequence has 390 at first)", ylim=(0, 36))
    right.set(title="rejected, %", xlabel="budget, tokens", ylim=(0, None))
    for axis in (left, right):
        axis.legend(fontsize="small", frameon=False)
        axis.grid(alpha=0.3)
    save(figure, out)


def save(figure: Any, out: Path) -> None:
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)
