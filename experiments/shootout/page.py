"""Rebuild the tables and the figure of README.md from `results`: python experiments/shootout/page.py

Intervals are 95 % over prompts. Differences are paired by prompt.
"""

import gzip
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from grid import DENSE, SPAN

from sparse_rl.evaluate.statistics import Estimate, mean_interval, paired_difference

HERE = Path(__file__).parent
RESULTS, PAGE, FIGURE = HERE / "results", HERE / "README.md", HERE.parents[1] / "docs/shootout.svg"
BASELINE, SHARE = "rkv protected", "0.2"
COMPARED = (
    "triattention protected recent",
    "expected protected recent",
    "streaming protected",
    "snapkv protected",
    "random protected",
)
SHOWN = (
    "full 8bit",
    "full 4bit",
    "rkv",
    "rkv protected",
    "rkv protected 8bit",
    "streaming protected",
    "streaming protected 8bit",
    "streaming protected 4bit",
    "triattention protected recent",
    "expected protected recent",
)
"""Caches that the figure names."""


def main() -> None:
    PAGE.write_text(rebuilt())
    draw(RESULTS, FIGURE)


def rebuilt() -> str:
    """Return the text of the page with every table made from the raw data."""
    page = PAGE.read_text()
    for name, made in tables(RESULTS).items():
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = block.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", page)
    return page


def results_of(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (task, results of its arms, those with the fewest bytes first).

    `saved` is relative to the dense arm's live tokens. `raw` holds the rows of the answers.
    """
    for task in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = [path for path in task.glob("*.json") if path.name != "task.json"]
        samples = json.loads((task / "task.json").read_text())["task"]["samples"]
        rows = [json.loads(path.read_text()) | {"raw": raw_of(path), "samples": samples} for path in files]
        dense = [row["live_bytes_16bit"] for row in rows if row["arm"] == DENSE]
        if dense:
            found = [row | {"saved": 1 - row["bytes_per_sequence"] / dense[0]} for row in rows]
            yield task.name, sorted(found, key=lambda row: (-row["saved"], row["arm"]))


def raw_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path.with_suffix(".raw.jsonl.gz"), "rt") as file:
        return [json.loads(each) for each in file]


def tables(folder: Path) -> dict[str, str]:
    """Return the results as Markdown: a table per task, and one of ratios to R-KV."""
    found = {"ratios": ratios(folder)}
    for task, rows in results_of(folder):
        baselines = {share_of(row): row for row in rows if row["arm"].startswith(BASELINE + " 0")}
        lines = [
            "| arm | KV bytes saved, % | right, % | rejected, % | rejected, difference to R-KV in points | k3 | xi, 5th percentile | "
            "tokens | tokens below the veto per 10,000: first 512, to 1,536, later |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            right = mean_interval(by_prompt(row, "reward"), row["samples"])
            rejected = mean_interval(by_prompt(row, "rejected"), row["samples"])
            base = baselines.get(share_of(row)) if row["kv"]["protect_prompt"] else None
            lines.append(
                f"| {row['arm']} | {100 * row['saved']:.0f} | {percent(right)} | {percent(rejected)} | {difference(row, base)} | "
                f"{row['k3']:.4f} | {row['xi_p05']:.2f} | {row['tokens']:,.0f} | {tail(row['raw'])} |"
            )
        found[task] = "\n".join(lines)
    return found


def ratios(folder: Path) -> str:
    """Return a table of the rejected share of policies as a multiple of R-KV's, with bootstrap intervals over prompts."""
    found = {task: {row["arm"]: row for row in rows} for task, rows in results_of(folder)}
    lines = [f"| arm, against {BASELINE} {SHARE} | {' | '.join(found)} |", "|---|" + "---|" * len(found)]
    for arm in COMPARED:
        cells = []
        for arms in found.values():
            pair = (arms.get(f"{arm} {SHARE}"), arms.get(f"{BASELINE} {SHARE}"))
            cells.append("" if None in pair else ratio(*(np.array(by_prompt(row, "rejected")) for row in pair if row)))
        lines.append(f"| {arm} {SHARE} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio(mine: np.ndarray, theirs: np.ndarray) -> str:
    draws = np.random.default_rng(0).integers(len(mine), size=(10_000, len(mine)))
    low, high = np.quantile(mine[draws].mean(axis=1) / theirs[draws].mean(axis=1), (0.025, 0.975))
    return f"{mine.mean() / theirs.mean():.2f} [{low:.2f}, {high:.2f}]"


def by_prompt(row: dict[str, Any], name: str) -> list[float]:
    """Return the mean of a value over the answers of each prompt."""
    values, samples = [float(each[name]) for each in row["raw"]], row["samples"]
    return [statistics.fmean(values[start : start + samples]) for start in range(0, len(values), samples)]


def share_of(row: dict[str, Any]) -> str:
    """Return the last word of an arm's name: its budget as a share, if it evicts."""
    return row["arm"].rsplit(" ", 1)[-1]


def percent(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def difference(row: dict[str, Any], base: dict[str, Any] | None) -> str:
    if base is None or base is row:
        return ""
    found = paired_difference(by_prompt(row, "rejected"), by_prompt(base, "rejected"), row["samples"])
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def tail(raw: list[dict[str, Any]]) -> str:
    """Return how many of 10,000 tokens have a xi below the veto, by position."""
    parts = []
    for first, last in ((0, 512), (512, 1536), (1536, None)):
        spans_of = slice(first // SPAN, None if last is None else last // SPAN)
        below = sum(sum(row["below"][spans_of]) for row in raw)
        tokens = sum(min(row["tokens"], last or row["tokens"]) - min(row["tokens"], first) for row in raw)
        parts.append(f"{1e4 * below / tokens:.1f}" if tokens else "")
    return ", ".join(parts)


def draw(folder: Path, file: Path) -> None:
    """Draw a panel per task: bytes saved against answers rejected. Caches that are not SHOWN are grey dots."""
    import matplotlib.pyplot as plt

    plt.switch_backend("svg")
    plt.rcParams["svg.hashsalt"] = "sparse-rl"
    results = list(results_of(folder))
    figure, axes = plt.subplots(1, len(results), figsize=(4.5 * len(results), 4), squeeze=False)
    for axis, (task, rows) in zip(axes[0], results, strict=True):
        caches: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            name = row["arm"] if row["kv"]["policy"] == DENSE else row["arm"].rsplit(" ", 1)[0]
            caches.setdefault(name, []).append((100 * row["saved"], 100 * row["rejected"]))
        for points in (points for name, points in caches.items() if name not in SHOWN):
            axis.plot(*zip(*points, strict=True), marker=".", color="lightgrey", linestyle="")
        for number, name in enumerate(SHOWN):
            points = caches.get(name, [(float("nan"), float("nan"))])
            axis.plot(*zip(*points, strict=True), marker="o", color=f"C{number}", label=name)
        axis.set(title=task, xlabel="KV bytes saved, %", ylabel="rejected, %", xlim=(-12, 100), ylim=(-3, 83))
    axes[0][-1].legend(fontsize="x-small", loc="upper left")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
