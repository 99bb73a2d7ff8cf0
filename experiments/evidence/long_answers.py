"""Question L in one table and one figure: test score, rejection and memory of each arm with long answers."""

import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from figures import WINDOW, draw, save, smooth
from raw import DENSE, Rows, read

QUESTION = "l-long"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "results"
TIMED = {"dense": "dense", "dense-4bit": "all keys, 4 bits", "best": "TriAttention 1,112 + 128, 8 bits"}
STEP_HEADS = ("cache of the sampler", "slots", "sampling", "old log-probs", "update", "step", "peak, GiB", "planned")
ARMS = {
    "dense": "dense",
    "dense-4bit": "all keys, 4 bits",
    "streaming-protected-8bit": "prompt and last 512 tokens, 8 bits",
    "best": "TriAttention, budget auto, 8 bits",
    "paper": "R-KV 1,024 with the question evictable, corrected",
    "naive": "R-KV 1,024 with the question evictable, uncorrected",
}
REWARD = 0.45
"""About three quarters of the way of dense training from its first reward to its last."""
SCORED = (0, 10, 20, 30)
"""Steps with a held-out score."""
HEADS = (
    "cache of the sampler",
    "seeds",
    *(f"right at step {step}, %" for step in SCORED),
    f"steps to a reward of {REWARD}",
    "rejected, steps 16 to 20, %",
    "KV bytes saved, steps 16 to 20, %",
)


def runs_of() -> dict[str, dict[int, Rows]]:
    """Return the runs of each arm of `ARMS` that has any, by its title."""
    found = read(QUESTION)
    return {title: found[arm] for arm, title in ARMS.items() if arm in found}


def cells() -> list[list[str]]:
    """Return a row for each arm: a score of each seed, and means over the seeds."""
    rows = []
    for title, runs in runs_of().items():
        scored = [{row["step"]: f"{100 * row[DENSE]:.1f}" for row in run if DENSE in row} for run in runs.values()]
        late = [row for run in runs.values() for row in run if 16 <= row["step"] <= 20 and "reward/mean" in row]
        rejected = statistics.mean(100 * row["sparse/rejection_rate"] for row in late)
        rows.append(
            [
                title,
                ", ".join(map(str, runs)),
                *(", ".join(score.get(step, "-") for score in scored) for step in SCORED),
                ", ".join(steps_to_reward(run) for run in runs.values()),
                f"{rejected:.1f}",
                "" if title == "dense" else f"{100 * statistics.mean(map(saved, late)):.0f}",
            ]
        )
    return rows


def steps_to_reward(run: Rows) -> str:
    """Return the first step whose mean over the last five is at least REWARD."""
    curve = [(row["step"], row["reward/mean"]) for row in run if "reward/mean" in row]
    reached = (step for step, mean in smooth(curve, statistics.mean)[WINDOW - 1 :] if mean >= REWARD)
    return f"{next(reached, 'not reached')}"


def saved(row: dict[str, float]) -> float:
    """Return the share of a 16-bit cache of the live tokens that the allocated cache saves."""
    return 1 - row["kv/peak_bytes"] / row["kv/dense_bytes"]


def step_times() -> list[list[str]]:
    """Return a row for each arm whose step was timed under the cap: seconds of the last step."""
    rows = []
    for arm, title in TIMED.items():
        record = json.loads((BENCHMARKS / f"step-1.5B-36gb-64-{arm}.json").read_text())
        [result] = record["arms"]
        step = result["steps"][-1]
        sampling = sum(step[part] for part in ("prefill", "decode", "compaction", "host"))
        seconds = (sampling, step["old log-probs"], step["update"], step["step_s"])
        peaks = (result["memory/peak_gib"], result["memory/predicted_gib"])
        rows.append([title, f"{result['slots']}", *(f"{value:.1f}" for value in (*seconds, *peaks))])
    return rows


def plot_long_answers(out: Path) -> None:
    """Draw over the steps: the test score of each run, and the rejected share of each arm, as mean and range of its seeds."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for number, (title, runs) in enumerate(runs_of().items()):
        colour = f"C{number}"
        for place, run in enumerate(runs.values()):
            scores = {row["step"]: 100 * row[DENSE] for row in run if DENSE in row}
            left.plot(list(scores), list(scores.values()), marker="o", color=colour, label="" if place else title)
        if title != "dense":
            draw(right, "sparse/rejection_rate", title, runs, colour)
    left.set(title="test score with a dense cache, %", xlabel="step", ylim=(0, None))
    right.set(title="share of rollouts rejected", xlabel="step", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, out)
