"""Make the tables and plots of docs/evidence.md again from the raw metrics: `make evidence`.

What stands in the page between `<!-- NAME -->` and `<!-- end -->` is replaced by the table of that name; the rest is written by
hand. Intervals are 95 % over seeds (Student's t); a difference is of the same seeds.
"""

import argparse
import gzip
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from sparse_rl.evaluate.statistics import t_interval

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "evidence.md"
PROBLEMS = 1319
DENSE, SPARSE = "eval/pass@1", "eval/pass@1_sparse"
"""Whatever the test problems are called."""

TEST = re.compile("^eval/[^/]+/")

Rows = list[dict[str, float]]
"""Of one run: step 0 has the first evaluation, the last step the last one."""


def read(question: str) -> dict[str, dict[int, Rows]]:
    """The finished runs of a question, by arm and seed."""
    found: dict[str, dict[int, Rows]] = {}
    for path in sorted((HERE / question / "raw").glob("*.jsonl.gz")):
        arm, seed = path.name.removesuffix(".jsonl.gz").rsplit("-", 1)
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line in file]
        found.setdefault(arm, {})[int(seed)] = [{TEST.sub("eval/", key): value for key, value in row.items()} for row in rows]
    if question == "a-collapse":  # seeds 0 and 1 of its dense arm are the pilot's
        found = found | {"dense": read("pilot")["full-3e-6"] | found.get("dense", {})}
    return dict(sorted(found.items()))


def interval(values: Sequence[float], digits: int = 1) -> str:
    """The mean over seeds and the half-width of its interval."""
    if len(values) < 2:
        return f"{values[0]:+.{digits}f}"
    mean, low, high = t_interval(values)
    return f"{mean:+.{digits}f} ± {(high - low) / 2:.{digits}f}"


def gain(rows: Rows, key: str) -> float:
    return 100 * (rows[-1][key] - rows[0][key])


def mean_of(key: str, scale: float = 1.0) -> Callable[[Rows], float]:
    """Over the steps of a run."""

    def of(rows: Rows) -> float:
        values = [row[key] for row in rows if key in row]
        return scale * statistics.mean(values) if values else math.nan

    return of


def gains(question: str) -> str:
    """What each arm gained in test Pass@1."""
    lines = [
        "| arm | seeds | before, % | after, % | gain, points | gain under the sampler's cache |",
        "|---|---|---|---|---|---|",
    ]
    for arm, runs in read(question).items():
        runs = dict(sorted(runs.items()))
        cells = [arm, ", ".join(map(str, runs))]
        cells += [", ".join(f"{100 * rows[end][DENSE]:.1f}" for rows in runs.values()) for end in (0, -1)]
        cells.append(interval([gain(rows, DENSE) for rows in runs.values()]))
        has = all(SPARSE in rows[-1] for rows in runs.values())
        cells.append(interval([gain(rows, SPARSE) for rows in runs.values()]) if has else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


COLUMNS = {
    "reward, last": lambda rows: rows[-1].get("reward/mean", math.nan),
    "rejected": mean_of("sparse/rejection_rate", 100),
    "wasted": mean_of("sparse/wasted_tokens", 100),
    "clipped": mean_of("policy/clip_ratio"),
    "ξ p05": mean_of("sparse/xi_p05"),
    "k3": mean_of("sparse/mismatch_k3"),
    "ESS": mean_of("sparse/ess"),
    "gradient": mean_of("policy/grad_norm"),
    "its variance": lambda rows: statistics.variance(row["policy/grad_norm"] for row in rows if "policy/grad_norm" in row),
    "entropy, last": lambda rows: rows[-1].get("policy/entropy", math.nan),
    "tokens, last": lambda rows: rows[-1].get("response/mean_tokens", math.nan),
    "repeats, last": lambda rows: 100 * rows[-1].get("response/repetition", math.nan),
    "cut off, last": lambda rows: 100 * rows[-1].get("response/truncated", math.nan),
    "saved": mean_of("kv/token_savings", 100),
}


def health(question: str) -> str:
    """How each arm trained: means over steps and seeds, or the last step."""
    lines = [f"| arm | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for arm, runs in read(question).items():
        values = [statistics.mean(column(rows) for rows in runs.values()) for column in COLUMNS.values()]
        lines.append(f"| {arm} | {' | '.join('' if math.isnan(value) else f'{value:.3g}' for value in values)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def kept(question: str, dense: str = "dense") -> str:
    """The share of dense training's test accuracy that each arm keeps, seed by seed. The last interval is over problems: how
    sure the difference of these very runs is, whatever other seeds would do."""
    runs = read(question)
    lines = [
        "| arm | seeds | of dense accuracy kept, % | difference, points, over seeds | over problems |",
        "|---|---|---|---|---|",
    ]
    for arm, mine in runs.items():
        base = runs.get(f"{dense}-4" if arm.endswith("-4") else dense, {})
        both = sorted(mine.keys() & base.keys())
        if arm in (dense, f"{dense}-4") or not both:
            continue
        scores = [(mine[seed][-1][DENSE], base[seed][-1][DENSE]) for seed in both]
        shares = [100 * own / theirs for own, theirs in scores]
        points = [100 * (own - theirs) for own, theirs in scores]
        errors = [math.sqrt(share * (1 - share) / PROBLEMS) for pair in scores for share in pair]
        over_problems = 196 * math.hypot(*errors) / len(both)
        cells = [
            arm,
            ", ".join(map(str, both)),
            interval(shares).removeprefix("+"),
            interval(points),
            f"± {over_problems:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


SETTLED = 4
"""Steps after which nothing is compiled any more."""

COSTS: dict[str, tuple[str, float, int]] = {
    "KV allocated, MiB": ("kv/peak_bytes", 2**-20, 0),
    "sampled tokens/s": ("perf/rollout_tokens_per_s", 1, 0),
    "sampling, s": ("perf/rollout_s", 1, 2),
    "learning, s": ("perf/learner_s", 1, 2),
    "step, s": ("perf/step_s", 1, 2),
    "peak, GiB": ("memory/peak_gib", 1, 1),
}


def costs(question: str) -> str:
    """What a step takes, medians of the settled steps of runs that had the GPU to themselves."""
    lines = [f"| arm | {' | '.join(COSTS)} |", "|---|" + "---|" * len(COSTS)]
    for arm, runs in read(question).items():
        rows = [row for each in runs.values() for row in each if row["step"] > SETTLED]
        values = [
            f"{scale * statistics.median(row[key] for row in rows):,.{digits}f}" for key, scale, digits in COSTS.values()
        ]
        lines.append(f"| {arm} | {' | '.join(values)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def evaluated(question: str) -> dict[str, dict]:
    """What the trained models scored under other caches, by run."""
    paths = sorted((HERE / question / "raw").glob("*-eval.json"))
    return {path.name.removesuffix("-eval.json"): json.loads(path.read_text()) for path in paths}


def robust(question: str) -> str:
    """Every trained model under every cache: accuracy, what that is from its own dense one, and the mismatch."""
    lines = [
        "| trained | cache | tokens | Pass@1, % | from its dense, points | rejected, % | saved, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, found in evaluated(question).items():
        for row in found["results"]:
            away = row.get("difference")
            points = f"{100 * away['mean']:+.1f} [{100 * away['low']:+.1f}, {100 * away['high']:+.1f}]" if away else ""
            cells = [run, row["setting"], f"{row['mean_tokens']:.0f}", f"{100 * row['pass@1']['mean']:.1f}", points]
            cells += [f"{100 * row['mismatch']['rejection_rate']:.1f}", f"{100 * row['token_savings']:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def narrowed(question: str, dense: str, sparse: str) -> str:
    """By how much less a cache costs the second model than the first. Problems are the same, answers are not: the intervals of
    the two add in squares."""
    runs = evaluated(question)
    lines = ["| cache | costs dense-trained | costs sparse-trained | narrower by, points |", "|---|---|---|---|"]
    pairs = zip(*([row for row in runs[run]["results"] if "difference" in row] for run in (dense, sparse)), strict=True)
    for one, other in pairs:
        assert one["setting"] == other["setting"]
        first, second = one["difference"], other["difference"]
        half = math.hypot(*((each["high"] - each["low"]) / 2 for each in (first, second)))
        costs = [f"{-100 * each['mean']:.1f}" for each in (first, second)]
        lines.append(
            f"| {one['setting']} | {' | '.join(costs)} | {100 * (second['mean'] - first['mean']):+.1f} ± {100 * half:.1f} |"
        )
    return "\n".join(lines)


def numerics(question: str, columns: Sequence[tuple[str, str]], noise_of: tuple[str, str]) -> str:
    """Mean |log xi| by position in the response for each (run, cache), and the engine's noise by the response's length."""
    found = {run: result["by_position"] for run, result in evaluated(question).items()}
    heads = [f"{run}, {setting}" for run, setting in columns]
    lines = [f"| tokens from | {' | '.join(heads)} | noise of {', '.join(noise_of)} |", "|---|" + "---|" * (len(heads) + 1)]
    values = [{row[0]: row[2] for row in found[run][setting]["xi"] if row[1] >= FEWEST} for run, setting in columns]
    run, setting = noise_of
    values.append({row[0]: row[2] for row in found[run][setting]["noise"] if row[1] * row[0] >= FEWEST})
    for first in sorted(set().union(*values)):
        cells = [f"{of[first]:.4f}" if first in of else "" for of in values]
        lines.append(f"| {first:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_compactions(question: str, settings: Sequence[str]) -> str:
    """Mean |log xi| by how many compactions the cache had been through, over all models that were evaluated so."""
    rows: dict[str, dict[float, list[tuple[float, float]]]] = {setting: {} for setting in settings}
    for result in evaluated(question).values():
        for setting in settings:
            for number, tokens, mean, *_ in result["by_position"][setting].get("compactions", ()):
                rows[setting].setdefault(number, []).append((tokens, mean))
    numbers = sorted(set().union(*rows.values()))
    if not numbers:
        return "Not run yet."
    lines = [f"| compactions | {' | '.join(settings)} |", "|---|" + "---|" * len(settings)]
    for number in numbers:
        cells = []
        for setting in settings:
            parts = rows[setting].get(number, [])
            tokens = sum(each for each, _ in parts)
            cells.append(f"{sum(each * mean for each, mean in parts) / tokens:.3f}" if tokens >= FEWEST else "")
        if any(cells):
            lines.append(f"| {number:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


FEWEST = 2000
"""Tokens whose mean is shown."""

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


def smooth(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [
        (step, statistics.mean(value for _, value in curve[max(0, at + 1 - WINDOW) : at + 1]))
        for at, (step, _) in enumerate(curve)
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
        for arm, runs in arms.items():
            colour, line = colours.index(arm.removesuffix("-4")), "--" if arm.endswith("-4") else "-"
            curves = [smooth([(row["step"], row[key]) for row in rows if key in row]) for rows in runs.values()]
            steps = [step for step, _ in min(curves, key=len)]
            if not any(value for curve in curves for _, value in curve):
                continue  # nobody rejects: no line
            values = [[curve[at][1] for curve in curves] for at in range(len(steps))]
            axis.plot(steps, [statistics.mean(at) for at in values], color=f"C{colour}", linestyle=line, label=arm)
            axis.fill_between(steps, [min(at) for at in values], [max(at) for at in values], color=f"C{colour}", alpha=0.15)
        axis.set(title=title, xlabel="step", yscale="log" if key in LOGARITHMIC else "linear")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(arms), frameon=False)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


TABLES = {
    "pilot-gains": lambda: gains("pilot"),
    "pilot-health": lambda: health("pilot"),
    "a-gains": lambda: gains("a-collapse"),
    "a-kept": lambda: kept("a-collapse"),
    "a-health": lambda: health("a-collapse"),
    "corrections-gains": lambda: gains("a-corrections"),
    "corrections-health": lambda: health("a-corrections"),
    "e-compactions": lambda: by_compactions("a-collapse", ("rkv@256", "rkv@192", "rkv@160", "rkv@128", "rkv@96")),
    "b-gains": lambda: gains("b-budget"),
    "b-health": lambda: health("b-budget"),
    "d-costs": lambda: costs("d-savings"),
    "d-gains": lambda: gains("d-samples"),
    "g-gains": lambda: gains("g-graded"),
    "g-health": lambda: health("g-graded"),
    "c-robust": lambda: robust("a-collapse"),
    "c-narrowed": lambda: narrowed("a-collapse", "dense-again-1", "paper-1"),
    "e-position": lambda: numerics(
        "a-collapse",
        [("dense-again-1", "full"), ("dense-again-1", "rkv@256"), ("dense-again-1", "rkv@160"), ("paper-1", "rkv@160")],
        ("dense-again-1", "rkv@160"),
    ),
}
PLOTS = {"pilot": "evidence-pilot.svg", "a-collapse": "evidence-a.svg", "a-corrections": "evidence-corrections.svg"}


def with_table(page: str, name: str, table: str) -> str:
    made, found = re.subn(
        rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", lambda block: block[1] + table + block[2], page, flags=re.DOTALL
    )
    if found != 1:
        raise SystemExit(f"{PAGE} has {found} places for {name}: it needs one.")
    return made


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    page = PAGE.read_text()
    for name, table in TABLES.items():
        page = with_table(page, name, table())
    PAGE.write_text(page)
    for question, name in PLOTS.items():
        if read(question):
            plot(question, PAGE.with_name(name))


if __name__ == "__main__":
    main()
