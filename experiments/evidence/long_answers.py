"""Build the tables and the figure of question L: scores, rejections, memory, step times and rewards with long answers."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from curves import WINDOW, first_step, smooth
from figures import draw, save
from formatting import interval, table
from raw import DENSE, HERE, SPARSE, Rows, read

QUESTION = "l-long"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "results"
ARMS = {
    "dense": "dense",
    "dense-4bit": "all keys, 4 bits",
    "streaming-protected-8bit": "prompt and last 512 tokens, 8 bits",
    "best": "TriAttention, budget auto, 8 bits",
    "paper": "R-KV 1,024, prompt evictable, corrected",
    "naive": "R-KV 1,024, prompt evictable, uncorrected",
}
UNREJECTED = (ARMS["dense"], ARMS["naive"])
"""Arms that reject no rollouts."""
END = 20
"""Last step of most runs."""
DIFFERENCE_HEADS = (
    "cache of the sampler",
    "seeds",
    *(f"{what} {step} steps, points" for step in (10, END) for what in ("from dense after", "mean after")),
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
    (36, "32-64-full", "dense"),
    (36, "32-64-full", "prompt and last 752 tokens, 4 bits"),
)
"""Timed steps: cap of memory in GB, end of the name of the record, and the sampler's cache. `32` has prompts of 32 problems."""
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
STEPS_OF = {"dense": ((36, "64-dense"), (36, "64-full-dense")), "best": ((36, "64-best"), (34.5, "64-full-best"))}
"""Timed steps of an arm with short and with long answers, for 36 GB. (`best` has all 64 slots under both caps.)"""
REWARD_HEADS = ("cache of the sampler", "seed", *(f"steps to a reward of {level:g}" for level in REWARDS))


def runs_of() -> dict[str, dict[int, Rows]]:
    """Return the runs of each arm of `ARMS` that has any, by its title."""
    found = read(QUESTION)
    return {title: found[arm] for arm, title in ARMS.items() if arm in found}


def score_table(*steps: int) -> str:
    """Return a table with a row for each arm: scores of each seed after `END` steps, with a dense cache and with the sampler's,
    their means, scores after other `steps`, and means over five steps: the last of the first `END` that all seeds have."""
    heads = ["cache of the sampler", "seeds", f"right after {END} steps, dense cache, %", "mean, dense cache", "own cache, %"]
    heads += ["mean, own cache", *(f"after {step}, %" for step in steps), "rejected, %", "KV bytes saved, %"]
    rows = []
    for title, runs in runs_of().items():
        last = min(END, *(run[-1]["step"] for run in runs.values()))
        late = [row for run in runs.values() for row in run if last - 5 < row["step"] <= last]
        rejected = statistics.mean(100 * row["sparse/rejection_rate"] for row in late)
        rows.append(
            [
                title,
                ", ".join(map(str, runs)),
                *summary(runs, END),
                *summary(runs, END, SPARSE),
                *(summary(runs, step)[0] for step in steps),
                "" if title in UNREJECTED else f"{rejected:.1f}",
                "" if title == ARMS["dense"] else f"{100 * statistics.mean(map(saved, late)):.0f}",
            ]
        )
    return table(heads, rows)


def difference_rows() -> list[list[str]]:
    """Return a row for each sparse arm: the score less that of dense training with the same seed, in points, dense cache."""
    found, rows = runs_of(), []
    dense = found.pop(ARMS["dense"])
    for title, runs in found.items():
        cells = [title, ", ".join(map(str, runs))]
        for step in (10, END):
            mine, theirs = scores(runs, step), scores(dense, step)
            away = [mine[seed] - theirs[seed] for seed in mine]
            cells += [", ".join(f"{points:+.1f}" for points in away), interval(away, sign="+") if len(away) > 1 else ""]
        rows.append(cells)
    return rows


def scores(runs: dict[int, Rows], step: int, key: str = DENSE) -> dict[int, float]:
    """Return the test scores after a step in percent, by seed, of the runs that have one."""
    return {seed: 100 * row[key] for seed, run in runs.items() for row in run if row["step"] == step and key in row}


def summary(runs: dict[int, Rows], step: int, key: str = DENSE) -> tuple[str, str]:
    """Return the scores after a step, "-" for a seed without one, and their mean if there are several. Nothing if there are none."""
    found = scores(runs, step, key)
    if not found:
        return "", ""
    listed = ", ".join(f"{found[seed]:.1f}" if seed in found else "-" for seed in runs)
    return listed, interval(list(found.values())) if len(found) > 1 else ""


def steps_to_rewards() -> list[list[str]]:
    """Return a row for each run: the first steps whose mean over the last five is at least each of REWARDS."""
    return [
        [title, f"{seed}", *(f"{first_step(run, level) or 'never'}" for level in REWARDS)]
        for title, runs in runs_of().items()
        for seed, run in runs.items()
    ]


def seconds_table(*levels: float) -> str:
    """Return a table with a row for each timed arm: steps and seconds to rewards, seed by seed, and means if all seeds reach them."""
    rows = []
    for arm in STEPS_OF:
        cells = [ARMS[arm]]
        for level in levels:
            reached = {seed: first_step(run, level) for seed, run in read(QUESTION)[arm].items()}
            spent = {seed: seconds_until(arm, seed, step) for seed, step in reached.items() if step}
            probed = {seed: seconds + probe_s(seed) for seed, seconds in spent.items()} if arm == "best" else {}
            cells.append(", ".join(f"{step or 'never'}" for step in reached.values()))
            cells += [seconds_cell(found, reached) if found else "" for found in (spent, probed)]
        rows.append(cells)
    heads = [f"{what} {level:g}" for level in levels for what in ("steps to a reward of", "seconds to", "with the probe, to")]
    return table(["cache of the sampler", *heads], rows)


def seconds_until(arm: str, seed: int, step: float) -> float:
    """Return the seconds of the steps up to `step`, each from the mean length of its answers."""
    rows = read(QUESTION)[arm][seed]
    return sum(step_s(arm, row["response/mean_tokens"]) for row in rows if 0 < row["step"] <= step)


def step_s(arm: str, tokens: float) -> float:
    """Return the seconds of a step with answers of this mean length, on the line through the two timed steps of the arm."""
    (short, short_s), (long, long_s) = ((mean_tokens(record), last_step(record)["step_s"]) for record in timed_steps(arm))
    return short_s + (long_s - short_s) * (tokens - short) / (long - short)


def timed_steps(arm: str) -> list[dict[str, Any]]:
    return [timed(cap, name) for cap, name in STEPS_OF[arm]]


def probe_s(seed: int) -> float:
    """Return the seconds that `kv.budget = "auto"` took to measure budgets before the first step."""
    lines = (HERE / QUESTION / "raw" / f"best-{seed}-probe.txt").read_text().splitlines()
    return sum(float(line.split("│")[8]) for line in lines if line.startswith("│"))


def seconds_cell(found: dict[int, float], reached: dict[int, int | None]) -> str:
    listed = ", ".join(f"{found[seed]:.0f}" if seed in found else "never" for seed in reached)
    return f"{listed}: {interval(list(found.values()), 0)}" if len(found) == len(reached) else listed


def saved(row: dict[str, float]) -> float:
    """Return the share of a 16-bit cache of the live tokens that the allocated cache saves."""
    return 1 - row["kv/peak_bytes"] / row["kv/dense_bytes"]


def timed(cap: float, name: str) -> dict[str, Any]:
    """Return the record of a step that was timed under a cap of memory."""
    return json.loads((BENCHMARKS / f"step-1.5B-{cap:g}gb-{name}.json").read_text())


def measured(record: dict[str, Any], dense: bool = False) -> dict[str, Any]:
    """Return the results of the dense arm of a record, or else of the sparse one. A record may have just one arm."""
    arms = record["arms"]
    return next((arm for arm in arms if (arm["method"] == "dense") == dense), arms[0])


def last_step(record: dict[str, Any], dense: bool = False) -> dict[str, float]:
    return measured(record, dense)["steps"][-1]


def mean_tokens(record: dict[str, Any]) -> float:
    rollouts = math.prod(record["config"]["rollout"][key] for key in ("prompts_per_step", "samples_per_prompt"))
    return last_step(record)["tokens"] / rollouts


def step_times() -> list[list[str]]:
    """Return a row for each timed step: seconds of the last step of its record."""
    rows = []
    for cap, name, title in TIMED:
        record = timed(cap, name)
        result, step = (find(record, title == "dense") for find in (measured, last_step))
        sampling = sum(step[part] for part in ("prefill", "decode", "compaction", "host"))
        seconds = (sampling, step["old log-probs"] + step["update"], step["step_s"])
        peaks = (result["memory/peak_gib"], result["memory/predicted_gib"])
        numbers = (f"{value:.1f}" for value in (*seconds, *peaks))
        rows.append([f"{cap:g}", f"{mean_tokens(record):,.0f}", title, f"{result['slots']}", *numbers])
    return rows


def plot_long_answers(out: Path) -> None:
    """Draw test score, rejected share and reward over the steps, and reward over time under 36 GB: a line per run for scores and
    time, mean and range of the seeds for the others."""
    figure, ((left, right), (reward, minutes)) = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    named = read(QUESTION)
    for number, (arm, title) in enumerate((arm, title) for arm, title in ARMS.items() if arm in named):
        runs, colour = named[arm], f"C{number}"
        for place, run in enumerate(runs.values()):
            scored = {row["step"]: 100 * row[DENSE] for row in run if DENSE in row}
            left.plot(list(scored), list(scored.values()), marker="o", color=colour, label="" if place else title)
        if title not in UNREJECTED:
            draw(right, "sparse/rejection_rate", title, runs, colour)
        draw(reward, "reward/mean", title, runs, colour)
        for seed in runs if arm in STEPS_OF else ():
            minutes.plot(*reward_over_minutes(arm, seed), color=colour)
    left.set(title="test score with a dense cache, %", xlabel="step", ylim=(0, None))
    right.set(title="share of rollouts rejected", xlabel="step", ylim=(0, None))
    reward.set(title="reward, means of five steps and of seeds", xlabel="step", ylim=(0, None))
    minutes.set(title="reward of each run under 36 GB,\nafter the measurement of budgets", xlabel="minutes", ylim=(0, None))
    for axis in (left, right, reward, minutes):
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, out)


def reward_over_minutes(arm: str, seed: int) -> tuple[list[float], list[float]]:
    """Return the minutes and the rewards, means of five steps, of a run. `best` begins when its budget is known."""
    begins = probe_s(seed) if arm == "best" else 0.0
    steps = [(row["step"], row["reward/mean"]) for row in read(QUESTION)[arm][seed] if "reward/mean" in row]
    curve = [(step, value) for step, value in smooth(steps, statistics.mean) if WINDOW <= step <= END]
    return [(begins + seconds_until(arm, seed, step)) / 60 for step, _ in curve], [value for _, value in curve]
