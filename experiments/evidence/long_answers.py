"""Question L in one table and one figure: test score, rejection and memory of each arm with long answers."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from figures import WINDOW, draw, save, smooth
from pages import interval
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
    *(f"right after {END} steps, %", "mean", "with its own cache, %", "mean"),
    *(f"after {step}, %" for step in (10, 30)),
    "rejected, steps 16 to 20, %",
    "KV bytes saved, steps 16 to 20, %",
)
REWARD = 0.45
"""About three quarters of the way of the first dense run from its first reward to its last."""
TIMED = {
    "64-dense": "dense",
    "64-dense-4bit": "all keys, 4 bits",
    "64-best": "TriAttention 1,112 + 128, 8 bits",
    "64-full-dense": "dense",
    "64-full-best": "TriAttention 896 + 128, 8 bits",
}
"""Ends of the names of the records of timed steps: what the sampler's cache is."""
CAPS = (36, 34.5)
"""Caps of memory under which steps were timed, in GB."""
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
RACE = {"dense": "64-full-dense", "best": "64-full-best"}
"""Arms whose time to a reward is compared, and the step that counts."""
RACE_CAP = 34.5
RACE_HEADS = (
    "cache of the sampler",
    "seeds",
    f"steps to a reward of {REWARD}",
    "seconds a step",
    "seconds to the reward",
    "mean",
)


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


def steps_to_reward(run: Rows) -> float:
    """Return the first step whose mean over the last five is at least REWARD. NaN if there is none."""
    curve = [(row["step"], row["reward/mean"]) for row in run if "reward/mean" in row]
    return next((step for step, mean in smooth(curve, statistics.mean)[WINDOW - 1 :] if mean >= REWARD), math.nan)


def race() -> list[list[str]]:
    """Return a row for each arm of RACE: steps to the reward by seed, and what they take if all answers have full length."""
    rows = []
    for arm, record in RACE.items():
        runs = read(QUESTION)[arm]
        step_s = last_step(timed(RACE_CAP, record))["step_s"]
        steps = [steps_to_reward(run) for run in runs.values()]
        seconds = [count * step_s for count in steps]
        each = (", ".join(f"{count:.0f}" for count in values) for values in (steps, seconds))
        rows.append([ARMS[arm], ", ".join(map(str, runs)), next(each), f"{step_s:.1f}", next(each), interval(seconds, 0)])
    return rows


def saved(row: dict[str, float]) -> float:
    """Return the share of a 16-bit cache of the live tokens that the allocated cache saves."""
    return 1 - row["kv/peak_bytes"] / row["kv/dense_bytes"]


def timed(cap: float, name: str) -> dict[str, Any]:
    """Return the record of a step that was timed under a cap of memory. Empty if it was not."""
    path = BENCHMARKS / f"step-1.5B-{cap:g}gb-{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def last_step(record: dict[str, Any]) -> dict[str, float]:
    [arm] = record["arms"]
    return arm["steps"][-1]


def step_times() -> list[list[str]]:
    """Return a row for each timed step: seconds of the last step of its record."""
    rows = []
    for cap in CAPS:
        for name, title in TIMED.items():
            if not (record := timed(cap, name)):
                continue
            [result], step = record["arms"], last_step(record)
            tokens = step["tokens"] / math.prod(
                record["config"]["rollout"][key] for key in ("prompts_per_step", "samples_per_prompt")
            )
            sampling = sum(step[part] for part in ("prefill", "decode", "compaction", "host"))
            seconds = (sampling, step["old log-probs"] + step["update"], step["step_s"])
            peaks = (result["memory/peak_gib"], result["memory/predicted_gib"])
            numbers = (f"{value:.1f}" for value in (*seconds, *peaks))
            rows.append([f"{cap:g}", f"{tokens:,.0f}", title, f"{result['slots']}", *numbers])
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
        if arm in RACE:
            step_min = last_step(timed(RACE_CAP, RACE[arm]))["step_s"] / 60
            draw(minutes, "reward/mean", title, at_minutes(runs, step_min), colour)
    left.set(title="test score with a dense cache, %", xlabel="step", ylim=(0, None))
    right.set(title="share of rollouts rejected", xlabel="step", ylim=(0, None))
    reward.set(title="reward, means of five steps", xlabel="step", ylim=(0, None))
    minutes.set(
        title=f"reward, if answers of 4,096 tokens\nare sampled under {RACE_CAP:g} GB", xlabel="minutes", ylim=(0, None)
    )
    for axis in (left, right, reward, minutes):
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, out)


def at_minutes(runs: dict[int, Rows], step_min: float) -> dict[int, Rows]:
    """Return the runs with minutes in place of steps."""
    return {seed: [row | {"step": row["step"] * step_min} for row in run] for seed, run in runs.items()}
