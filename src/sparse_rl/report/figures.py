"""Draw the main plots as SVG and PNG with matplotlib, an optional dependency."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..monitor.ratios import BINS, HIGH, LOW
from ..text import printable
from .document import PHASES, ReportSource
from .runs import Run, grouped

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
STYLES = ("-", "--", ":", "-.")
CURVES = {
    "reward": ("reward/mean", "mean reward"),
    "entropy": ("policy/entropy", "entropy per token (nats)"),
    "rejection": ("sparse/rejection_rate", "rollouts rejected"),
    "mismatch": ("sparse/mismatch_k3", "mismatch (k3)"),
    "xi-p05": ("sparse/xi_p05", "5th percentile of ξ"),
    "length": ("response/mean_tokens", "response tokens"),
    "budget": ("kv/budget", "kv.budget (tokens)"),
    "savings": ("kv/token_savings", "tokens not held"),
}
"""(metric, axis label) of each figure, by file name."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "figure.figsize": (4.2, 2.8),
    "figure.dpi": 200,
    "svg.hashsalt": "sparse-rl",
    "text.parse_math": False,
}


def write_figures(source: ReportSource, folder: Path) -> list[Path]:
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--figures needs matplotlib: pip install 'sparse-rl[figures]'.") from error
    from matplotlib.figure import Figure

    runs, _ = source.runs()
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for name, draw in _plots(runs):
            figure = Figure(layout="constrained")
            draw(figure.subplots())
            written += _save(figure, folder, name)
    if not written:
        raise UserError("No figures were written: none of these runs has logged a metric yet.")
    return written


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    files = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise UserError(
            f"The figures cannot be written to {folder} ({error.strerror or error}): pass another folder with --figures."
        ) from error
    return files


def _plots(runs: Sequence[Run]) -> Iterator[tuple[str, Callable[[Any], None]]]:
    written = {key for run in runs for row in run.rows for key in row}
    for name, (key, label) in CURVES.items():
        if key in written:
            yield name, partial(_curve, runs=runs, key=key, label=label)
    names: Counter[str] = Counter()
    for key in sorted(key for key in written if key.endswith(("/pass@1", "/pass@1_sparse"))):
        name = re.sub(r"[^\w-]+", "-", key.replace("pass@1", "pass1"), flags=re.ASCII)[:80]
        names[name] += 1
        name += f"-{names[name]}" if names[name] > 1 else ""  # sets such as a.b and a-b
        yield name, partial(_curve, runs=runs, key=key, label=printable(key.removeprefix("eval/"), 40))
    if "kv/peak_bytes" in written:
        yield "kv-memory", partial(_memory, runs=runs)
    for place, run in enumerate(runs):
        number = f"-{place + 1}" if len(runs) > 1 else ""
        if run.xi:
            yield f"xi{number}", partial(_ratio, run=run)
        if any("perf/step_s" in row for row in run.rows):
            yield f"time{number}", partial(_time, run=run)


def _curve(axes: Any, runs: Sequence[Run], key: str, label: str) -> None:
    """Draw one line per group of runs, with a band.

    A single run has its 95 % interval as the band, if there is one. Several seeds have their mean as the line and their range
    as the band.
    """
    for number, (name, places) in enumerate(grouped(runs)):
        rows = [{int(row["step"]): row for row in runs[place].rows if key in row} for place in places]
        steps = sorted(set().union(*rows))
        if not steps:
            continue
        values = [[each[step][key] for each in rows if step in each] for step in steps]
        means = [math.fsum(found) / len(found) for found in values]
        look = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number % len(STYLES)]}
        axes.plot(
            steps, means, label=_label(name), marker="o" if len(steps) < 12 else None, markersize=3, linewidth=1.4, **look
        )
        low, high = [min(found) for found in values], [max(found) for found in values]
        if len(rows) == 1 and f"{key}_low" in rows[0][steps[0]]:
            low, high = ([rows[0][step].get(f"{key}_{end}", math.nan) for step in steps] for end in ("low", "high"))
        axes.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
    _finish(axes, label)


def _memory(axes: Any, runs: Sequence[Run]) -> None:
    for number, run in enumerate(runs):
        rows = [row for row in run.rows if "kv/peak_bytes" in row and "kv/dense_bytes" in row]
        steps, colour = [row["step"] for row in rows], COLOURS[number % len(COLOURS)]
        axes.plot(steps, [row["kv/peak_bytes"] / 2**20 for row in rows], color=colour, label=_label(f"{run.name}, held"))
        dense = [row["kv/dense_bytes"] / 2**20 for row in rows]
        axes.plot(steps, dense, color=colour, linestyle="--", linewidth=1, label=_label(f"{run.name}, dense"))
    axes.set_ylim(bottom=0)
    _finish(axes, "KV cache (MiB)")


def _ratio(axes: Any, run: Run) -> None:
    steps = [step for step, _ in run.xi]
    ends = {share: [quantile(counts, share) for _, counts in run.xi] for share in (0.001, 0.05, 0.95, 0.999)}
    axes.fill_between(steps, ends[0.001], ends[0.999], color=COLOURS[0], alpha=0.18, linewidth=0, label="99.8 % of tokens")
    axes.fill_between(steps, ends[0.05], ends[0.95], color=COLOURS[0], alpha=0.35, linewidth=0, label="90 %")
    rows = [row for row in run.rows if "sparse/xi_p05" in row]
    axes.plot([row["step"] for row in rows], [row["sparse/xi_p05"] for row in rows], color=COLOURS[1], label="5th percentile")
    if run.veto > 0:
        axes.axhline(run.veto, color="#c22f2f", linestyle="--", linewidth=1, label=f"veto {run.veto:g}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")  # matplotlib's default renders powers of ten as formulas
    _finish(axes, _label(f"ξ, {run.name}"))


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the quantile of xi at `share`, estimated from token counts in bins of log10 xi."""
    left, width = share * sum(counts), (HIGH - LOW) / BINS
    for place, count in enumerate(counts):
        if count and left <= count:
            return 10 ** (LOW + (place + left / count) * width)
        left -= count
    return math.nan


def _time(axes: Any, run: Run) -> None:
    rows = [row for row in run.rows if "perf/step_s" in row]
    parts = [[row.get(key, 0.0) for row in rows] for _, key in PHASES]
    rest = [max(0.0, row["perf/step_s"] - math.fsum(part[place] for part in parts)) for place, row in enumerate(rows)]
    labels = [*(label for label, _ in PHASES), "rest"]
    axes.stackplot([row["step"] for row in rows], *parts, rest, labels=labels, colors=COLOURS, alpha=0.75, linewidth=0)
    _finish(axes, _label(f"seconds per step, {run.name}"))


def _label(text: str) -> str:
    """Return the label without leading underscores, because matplotlib omits such labels from the legend."""
    return printable(text, 60).lstrip("_") or "run"


def _finish(axes: Any, label: str) -> None:
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(label)
    axes.margins(x=0.02)
    if named := len(axes.get_legend_handles_labels()[0]):
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2} if named > 4 else {}
        axes.legend(frameon=False, fontsize=7, **above)
