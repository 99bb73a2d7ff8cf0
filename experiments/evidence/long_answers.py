"""Question L in three tables and one figure: scores, rejections, memory, step times and rewards of the arms with long answers."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from figures import WINDOW, draw, save, smooth
from formatting import interval
from raw import DENSE, SPARSE, Rows, read

QUESTION = "l-long"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "results"
ARMS = {
    "dense": "dense",
    "dense-4bit": "all keys, 4 bits",
    "streaming-protected-8bit": "prompt and last 512 tokens, 8 bits",
    "best": "TriAttention, budget auto, 8 bits",
    "paper": "R-KV 1,024 with the question evictable, corrected",
    "naive": "R-KV 1,024 with the question evictable, uncorrected",
}
END = 20
"""The step after which most runs end."""
HEADS = (
    "cache of the sampler",
    "seeds",
    *(f"right after {END} steps, dense cache, %", "mean, dense cache", "own cache, %", "mean, own cache"),
    *(f"after {step}, %" for step in (10, 30)),
    "rejected, steps 16 to 20, %",
    "KV bytes saved, steps 16 to 20, %",
)
REWARDS = (0.4, 0.45, 0.5)
"""Rewards whose first step is shown: between a third and three quarters of the way of the first dense run, from 0.30 to 0.57."""
TIMED = (
    (36, "64-dense", "dense"),
    (36, "64-dense-4bit", "all keys, 4 bits"),
    (36, "64-best", "TriAttention 1,112 + 128, 8 bits"),
    (36, "64-full-dense", "dense"),
    (34.5, "64-full-dense", "dense"),
    (34.5, "64-full-best", "TriAttention 896 + 128, 8 bits"),
)
"""Timed steps: cap of memory in GB, end of the name of the record, and the sampler's cache."""
STEP_HEADS = (
    "cap, GB",
    "mean answer",
    "cache of the sampler",
    "slots",
    "sampling",
    "learning",
    "step",
    "peak, GiB",
    "planned",
)
OVER_TIME = {"dense": "64-full-dense", "best": "64-full-best"}
"""Arms whose rewards are drawn over time, and the step that counts."""
TIMED_CAP = 34.5
REWARD_HEADS = ("cache of the sampler", "seed", *(f"steps to a reward of {level:g}" for level in REWARDS))


def runs_of() -> dict[str, dict[int, Rows]]:
    """Return the runs of each arm of `ARMS` that has any, by its title."""
    found = read(QUESTION)
    return {title: found[arm] for arm, title in ARMS.items() if arm in found}


def cells() -> list[list[str]]:
    """Return a row for each arm: scores of each seed with a dense cache and with the sampler's, and means over seeds and steps."""
    rows = []
    for title, runs in runs_of().items():
        late = [row for run in runs.values() for row in run if 16 <= row["step"] <= END and "reward/mean" in row]
        rows.append(
            [
                title,
                ", ".join(map(str, runs)),
                *summary(scores(runs, END)),
                *summary(scores(runs, END, SPARSE)),
                *(listed({seed: scores(runs, step).get(seed, math.nan) for seed in runs}) for step in (10, 30)),
                f"{statistics.mean(100 * row['sparse/rejection_rate'] for row in late):.1f}",
                "" if title == "dense" else f"{100 * statistics.mean(map(saved, late)):.0f}",
            ]
        )
    return rows


def scores(runs: dict[int, Rows], step: int, key: str = DENSE) -> dict[int, float]:
    """Return the test scores after a step in percent, by seed, of the runs that have one."""
    return {seed: 100 * row[key] for seed, run in runs.items() for row in run if row["step"] == step and key in row}


def summary(values: dict[int, float]) -> tuple[str, str]:
    """Return the values, and their mean if there are several."""
    return listed(values), interval(list(values.values())) if len(values) > 1 else ""


def listed(values: dict[int, float]) -> str:
    return ", ".join("-" if math.isnan(value) else f"{value:.1f}" for value in values.values())


def steps_to_rewards() -> list[list[str]]:
    """Return a row for each run: the first steps whose mean over the last five is at least each of REWARDS."""
    rows = []
    for title, runs in runs_of().items():
        for seed, run in runs.items():
            curve = [(row["step"], row["reward/mean"]) for row in run if "reward/mean" in row]
            means = smooth(curve, statistics.mean)[WINDOW - 1 :]
            reached = (next((f"{step}" for step, mean in means if mean >= level), "never") for level in REWARDS)
            rows.append([title, f"{seed}", *reached])
    return rows


def saved(row: dict[str, float]) -> float:
    """Return the share of a 16-bit cache of the live tokens that the allocated cache saves."""
    return 1 - row["kv/peak_bytes"] / row["kv/dense_bytes"]


def timed(cap: float, name: str) -> dict[str, Any]:
    """Return the record of a step that was timed under a cap of memory."""
    return json.loads((BENCHMARKS / f"step-1.5B-{cap:g}gb-{name}.json").read_text())


def last_step(record: dict[str, Any]) -> dict[str, float]:
    [arm] = record["arms"]
    return arm["steps"][-1]


def step_times() -> list[list[str]]:
    """Return a row for each timed step: seconds of the last step of its record."""
    rows = []
    for cap, name, title in TIMED:
        record = timed(cap, name)
        [result], step = record["arms"], last_step(record)
        rollouts = math.prod(record["config"]["rollout"][key] for key in ("prompts_per_step", "samples_per_prompt"))
        sampling = sum(step[part] for part in ("prefill", "decode", "compaction", "host"))
        seconds = (sampling, step["old log-probs"] + step["update"], step["step_s"])
        peaks = (result["memory/peak_gib"], result["memory/predicted_gib"])
        numbers = (f"{value:.1f}" for value in (*seconds, *peaks))
        rows.append([f"{cap:g}", f"{step['tokens'] / rollouts:,.0f}", title, f"{result['slots']}", *numbers])
    return rows


def plot_long_answers(out: Path) -> None:
    """Draw test score, rejected share and reward over the steps, and the reward over the time of steps of full length under a
    cap: a line per run for scores, mean and range of the seeds for the others."""
    figure, ((left, right), (reward, minutes)) = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    named = read(QUESTION)
    for number, (arm, title) in enumerate((arm, title) for arm, title in ARMS.items() if arm in named):
        runs, colour = named[arm], f"C{number}"
        for place, run in enumerate(runs.values()):
            scored = {row["step"]: 100 * row[DENSE] for row in run if DENSE in row}
            left.plot(list(scored), list(scored.values()), marker="o", color=colour, label="" if place else title)
        if arm != "dense":
            draw(right, "sparse/rejection_rate", title, runs, colour)
        draw(reward, "reward/mean", title, runs, colour)
        if arm in OVER_TIME:
            step_min = last_step(timed(TIMED_CAP, OVER_TIME[arm]))["step_s"] / 60
            draw(minutes, "reward/mean", title, at_minutes(runs, step_min), colour)
    left.set(title="test score with a dense cache, %", xlabel="step", ylim=(0, None))
    right.set(title="share of rollouts rejected", xlabel="step", ylim=(0, None))
    reward.set(title="reward, means of five steps", xlabel="step", ylim=(0, None))
    minutes.set(
        title=f"reward, if answers of 4,096 tokens\nare sampled under {TIMED_CAP:g} GB", xlabel="minutes", ylim=(0, None)
    )
    for axis in (left, right, reward, minutes):
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, out)


def at_minutes(runs: dict[int, Rows], step_min: float) -> dict[int, Rows]:
    """Return the runs with minutes in place of steps."""
    return {seed: [row | {"step": row["step"] * step_min} for row in run] for seed, run in runs.items()}
