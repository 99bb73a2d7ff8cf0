"""The curves of a question: one panel for each metric, a line for each arm with the range of its seeds."""

import statistics
from collections.abc import Callable
from pathlib import Path

from raw import read

PANELS = {
    "reward/mean": "reward",
    "sparse/rejection_rate": "rejected",
    "policy/grad_norm": "gradient norm",
    "sparse/mismatch_k3": "mismatch, k3",
    "policy/entropy": "entropy",
}
LOGARITHMIC = ("policy/grad_norm", "sparse/mismatch_k3")
WINDOW = 5
"""Steps that a point of a curve is the mean of."""


def smooth(curve: list[tuple[float, float]], mean: Callable[[list[float]], float]) -> list[tuple[float, float]]:
    return [
        (step, mean([value for _, value in curve[max(0, at + 1 - WINDOW) : at + 1]])) for at, (step, _) in enumerate(curve)
    ]


def plot(question: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sparse-rl"
    import matplotlib.pyplot as plt

    arms = {arm: runs for arm, runs in read(question).items() if not arm.endswith("-again")}
    colours = list(dict.fromkeys(arm.removesuffix("-4") for arm in arms))
    figure, axes = plt.subplots(1, len(PANELS), figsize=(3 * len(PANELS), 3.4), layout="constrained")
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        mean = statistics.geometric_mean if key in LOGARITHMIC else statistics.mean
        for arm, runs in arms.items():
            colour, line = colours.index(arm.removesuffix("-4")), "--" if arm.endswith("-4") else "-"
            curves = [smooth([(row["step"], row[key]) for row in rows if key in row], mean) for rows in runs.values()]
            steps = [step for step, _ in min(curves, key=len)]
            if not any(value for curve in curves for _, value in curve):
                continue  # nobody rejects: no line
            values = [[curve[at][1] for curve in curves] for at in range(len(steps))]
            axis.plot(steps, [mean(at) for at in values], color=f"C{colour}", linestyle=line, label=arm)
            axis.fill_between(steps, [min(at) for at in values], [max(at) for at in values], color=f"C{colour}", alpha=0.15)
        axis.set(title=title, xlabel="step", yscale="log" if key in LOGARITHMIC else "linear")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(arms), frameon=False)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)
