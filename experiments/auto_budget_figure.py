"""Draw docs/auto-budget.svg from the runs of auto_budget.py with three seeds: make evidence"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

plt.switch_backend("svg")
plt.rcParams["svg.hashsalt"] = "sparse-rl"

ROOT = Path(__file__).parents[1]
RUNS = {seed: f"benchmarks/results/auto-budget{f'-seed-{seed}' * (seed > 0)}.json" for seed in range(3)}
FIGURE = ROOT / "docs/auto-budget.svg"
ARMS = {"auto": "-", "fixed": "--"}


def draw(found: dict[int, dict[str, Any]], out: Path) -> None:
    """One column for each seed: tokens above, the rejected share of each step, and allocated bytes below."""
    figure, axes = plt.subplots(3, len(found), figsize=(9, 6.4), sharex=True, sharey="row", layout="constrained")
    for (above, middle, below), (seed, record) in zip(axes.T, found.items(), strict=True):
        target = 100 * record["options"]["kv.target-rejected"]
        for arm, line in ARMS.items():
            steps = record[arm]["steps"]
            name = arm if arm == "auto" else f"fixed {steps['budget'][0]:.0f}"
            at = range(1, len(steps["budget"]) + 1)
            above.plot(at, steps["budget"], f"C0{line}", label=f"budget, {name}")
            above.plot(at, steps["p90_tokens"], f"C2{line}", linewidth=1, label=f"response, 90th percentile, {name}")
            middle.plot(at, [100 * share for share in steps["rejected"]], f"C1{line}", label=f"rejected, {name}")
            below.plot(at, mib(steps["kv_bytes"]), f"C3{line}", label=f"allocated, {name}")
        below.plot(at, mib(record["auto"]["steps"]["dense_bytes"]), "C7-", linewidth=1, label="dense cache in pages, auto")
        middle.axhline(target, color="grey", linestyle=":", label=f"target, {target:g} %")
        above.set_title(f"seed {seed}")
        below.set_xlabel("step")
    for axis, title in zip(axes[:, 0], ("tokens", "rejected in a step, %", "keys and values, MiB"), strict=True):
        axis.set(ylabel=title, ylim=(0, None))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    labels = [each for axis in axes[:, 0] for each in zip(*axis.get_legend_handles_labels(), strict=True)]
    figure.legend(*zip(*labels, strict=True), loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def mib(counts: list[float]) -> list[float]:
    return [count / 2**20 for count in counts]


if __name__ == "__main__":
    draw({seed: json.loads((ROOT / file).read_text()) for seed, file in RUNS.items()}, FIGURE)
