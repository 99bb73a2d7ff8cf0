"""Rebuild what is made from `results`: python experiments/shootout/page.py

That is the tables of README.md and of docs/choosing-a-budget.md, details.csv with every figure of every arm, and the picture.
The text between `<!-- NAME -->` and `<!-- end -->` in a page is the table NAME; the rest is written by hand. Intervals are 95 %
over prompts. Differences are paired by prompt.
"""

import csv
import gzip
import io
import json
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from grid import DENSE, HERE, RESULTS, SPAN, chosen_tasks, read_plan, row_names

from sparse_rl.config.kv import PREDICTS_QUERIES
from sparse_rl.evaluate.statistics import Estimate, mean_interval, paired_difference

ROOT = HERE.parents[1]
README, GUIDE = HERE / "README.md", ROOT / "docs/choosing-a-budget.md"
DETAILS, FIGURE = HERE / "details.csv", ROOT / "docs/shootout.svg"
SPEED, EMBEDDED = ROOT / "benchmarks/results/policy-speed.json", ROOT / "benchmarks/results/policies-embedded.json"

BEST, RKV, MIXED, EQUAL = (
    "triattention protected recent 0.2",
    "rkv protected 0.2",
    "rkv protected mix 0.5 0.2",
    "rkv protected equal bytes",
)
RATIOS = (
    (BEST, (RKV,)),
    ("expected protected recent 0.2", (RKV,)),
    ("streaming protected 0.2", (RKV,)),
    ("snapkv protected 0.2", (RKV,)),
    ("random protected 0.2", (RKV,)),
    (BEST, (RKV, MIXED)),
    (BEST, (EQUAL,)),
)
"""(arm, baselines): the baseline of a task is the one that rejects the fewest."""
DIFFERENCES = (
    (BEST, RKV),
    (BEST, EQUAL),
    (BEST, DENSE),
    (BEST, "streaming protected 0.2"),
    (BEST, "expected protected recent 0.2"),
    (BEST, "triattention protected 0.2"),
    (BEST, "triattention protected more recent 0.2"),
    (BEST, "triattention recent 0.25"),
    ("triattention protected recent 0.3", "triattention recent 0.25"),
    ("triattention recent no sinks 0.25", "triattention recent 0.25"),
    ("triattention protected recent interval 8 0.2", BEST),
    ("triattention protected recent 8bit 0.2", BEST),
    ("expected protected recent 0.2", "expected protected 0.2"),
    ("expected protected recent 0.2", "expected recent 0.25"),
    ("rkv protected recent 0.2", RKV),
    ("rkv protected often 0.2", RKV),
    ("rkv protected 8bit 0.2", RKV),
    ("rkv protected 0.3", "rkv 0.35"),
    ("full 8bit", DENSE),
    ("full 4bit", DENSE),
)
SHOWN = (
    "full 8bit",
    "full 4bit",
    "rkv",
    "rkv protected",
    "streaming protected",
    "streaming protected 8bit",
    "streaming protected 4bit",
    "triattention protected recent",
    "triattention protected recent 8bit",
    "expected protected recent",
)
"""Caches that the figure names."""

Row = dict[str, Any]


def main() -> None:
    for page in PAGES:
        page.write_text(rebuilt(page))
    DETAILS.write_text(details())
    draw(FIGURE)


def rebuilt(page: Path) -> str:
    """Return the text of the page with every table made from the raw data."""
    text = page.read_text()
    for name, make in PAGES[page].items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{make()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


@cache
def results() -> dict[str, dict[str, Row]]:
    """Return the results of each task by arm, in the order of arms.toml. `saved` is relative to the dense arm's live tokens.
    `raw` holds the rows of the answers."""
    plan, found = read_plan(), {}
    for task in chosen_tasks(plan, ["all"]):
        files = [path for path in (RESULTS / task).glob("*.json") if path.name != "task.json"]
        rows = {row["arm"]: row | {"raw": raw_of(path)} for path in files for row in [json.loads(path.read_text())]}
        samples, dense = plan["tasks"][task]["samples"], rows[DENSE]["live_bytes_16bit"]
        for row in rows.values():
            row |= {"samples": samples, "saved": 1 - row["bytes_per_sequence"] / dense}
        found[task] = {name: rows[name] for name in row_names(plan) if name in rows}
    return found


def raw_of(path: Path) -> list[Row]:
    with gzip.open(path.with_suffix(".raw.jsonl.gz"), "rt") as file:
        return [json.loads(each) for each in file]


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---", *["---:"] * (len(heads) - 1)], *rows))


# Tables of README.md


def arms() -> str:
    """Return the table of all arms, a group of columns per task. Brackets are rounded to whole percents."""
    speed = speeds()
    heads = ["arm"] + [f"`{task}`: {name}" for task in results() for name in ("saved, %", "rejected, %", "right, %", "k3")]
    names = [name for name in row_names(read_plan()) if any(name in rows for rows in results().values())]
    lines = [[name] + [cell for rows in results().values() for cell in task_cells(rows.get(name))] for name in names]
    if speed:
        heads.append("decode at 512 + 128, tokens/s")
        lines = [[*line, f"{speed[line[0]]:,.0f}" if line[0] in speed else ""] for line in lines]
    return table(heads, lines)


def task_cells(row: Row | None) -> list[str]:
    if row is None:
        return [""] * 4
    shares = [mean_interval(by_prompt(row, name), row["samples"]) for name in ("rejected", "reward")]
    short = [f"{100 * each.mean:.1f} [{100 * each.low:.0f}, {100 * each.high:.0f}]" for each in shares]
    return [saved(row), *short, f"{row['k3']:.4f}"]


def speeds() -> dict[str, float]:
    """Return the decode speed of every policy by the arm with its default window; nothing if it was not measured."""
    if not SPEED.exists():
        return {}
    measured = {arm["policy"]: arm["decode_tokens_per_s"] for arm in json.loads(SPEED.read_text())["arms"]}
    recent = {policy: " recent" if policy in PREDICTS_QUERIES else "" for policy in measured}
    names = {policy: policy if policy == DENSE else f"{policy} protected{recent[policy]} 0.2" for policy in measured}
    return {names[policy]: speed for policy, speed in measured.items() if speed}


def ring() -> str:
    """Return the bytes that policies save, with and without a ring of queries."""
    kinds = {"R-KV, SnapKV and TOVA at 0.2": RKV, "the other policies at 0.2": BEST, "arms of `equal bytes`": EQUAL}
    lines = [[kind, *(saved(rows.get(arm)) for rows in results().values())] for kind, arm in kinds.items()]
    made = table(["KV bytes saved, %", *(f"`{task}`" for task in results())], [line for line in lines if any(line[1:])])
    return (
        made
        if all(EQUAL in rows for rows in results().values())
        else f"{made}\n\nSome arms of `equal bytes` have not run yet."
    )


def saved(row: Row | None) -> str:
    return "" if row is None else str(round(100 * row["saved"]))


def ratios() -> str:
    """Return the rejected share of arms as a multiple of R-KV's, with bootstrap intervals over prompts."""
    lines = []
    for arm, baselines in RATIOS:
        cells = []
        for rows in results().values():
            base = min((rows[each] for each in baselines if each in rows), key=lambda row: row["rejected"], default=None)
            cells.append("" if base is None or arm not in rows else ratio(rows[arm], base))
        name = baselines[0] if len(baselines) == 1 else f"the better of {' and '.join(baselines)}"
        lines.append([f"{arm}, against {name}", *cells])
    return table(["rejected share, ratio", *(f"`{task}`" for task in results())], [line for line in lines if any(line[1:])])


def ratio(row: Row, base: Row) -> str:
    mine, theirs = (np.array(by_prompt(each, "rejected")) for each in (row, base))
    draws = np.random.default_rng(0).integers(len(mine), size=(10_000, len(mine)))
    low, high = np.quantile(mine[draws].mean(axis=1) / theirs[draws].mean(axis=1), (0.025, 0.975))
    return f"{mine.mean() / theirs.mean():.2f} [{low:.2f}, {high:.2f}]"


def differences() -> str:
    """Return paired differences between arms in points, of right answers and of rejected ones."""
    heads = ["difference, points"] + [f"`{task}`: {what}" for task in results() for what in ("rejected", "right")]
    lines = []
    for arm, other in DIFFERENCES:
        cells = [
            signed(difference(rows.get(arm), rows.get(other), value))
            for rows in results().values()
            for value in ("rejected", "reward")
        ]
        lines.append([f"{arm}, against {other}", *cells])
    return table(heads, [line for line in lines if any(line[1:])])


def difference(row: Row | None, base: Row | None, value: str) -> Estimate | None:
    if row is None or base is None or row is base:
        return None
    return paired_difference(by_prompt(row, value), by_prompt(base, value), row["samples"])


def signed(found: Estimate | None) -> str:
    return "" if found is None else f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def by_prompt(row: Row, name: str) -> list[float]:
    """Return the mean of a value over the answers of each prompt."""
    values, samples = [float(each[name]) for each in row["raw"]], row["samples"]
    return [statistics.fmean(values[start : start + samples]) for start in range(0, len(values), samples)]


# Tables of docs/choosing-a-budget.md

QUANTISED = (
    ("`full`", "full"),
    ("`full`, 8 bits", "full 8bit"),
    ("`full`, 4 bits", "full 4bit"),
    ("R-KV {size}, protected", "rkv protected 0.2"),
    ("TriAttention {size}, half of it recent, protected, 8 bits", "triattention protected recent 8bit 0.2"),
    ("streaming {size}, protected, 4 bits", "streaming protected 4bit 0.3"),
    ("R-KV {size}, prompt evictable", "rkv 0.35"),
)
TITLES = {"long": "16 problems in a prompt", "math": "MATH-500", "gsm8k": "GSM8K"}
COMPARED = (BEST, EQUAL, "streaming protected 0.2")


def quantised() -> str:
    lines = []
    for label, arm in QUANTISED:
        row = results()["long"][arm]
        size = f"{row['kv']['budget']:,} + {row['kv']['interval']:,}"
        shares = [f"{saved(row)} %", f"{100 * row['accuracy']:.1f} %", f"{100 * row['rejected']:.1f} %"]
        lines.append([label.format(size=size), *shares, f"{row['k3']:.4f}"])
    return table(["cache", "KV bytes saved", "right", "rejected", "k3"], lines)


def policies() -> str:
    heads = ["rejected, % (KV bytes saved, %)", *(f"`{arm.split()[0]}`" for arm in COMPARED)]
    lines = [
        [TITLES[task], *(f"{100 * rows[arm]['rejected']:.1f} ({saved(rows[arm])})" for arm in COMPARED)]
        for task, rows in results().items()
    ]
    return table(heads, [*lines, embedded()])


def embedded() -> list[str]:
    """Return the row of the embedded task, whose answers are graded and replayed by `sparse-rl eval`."""
    found = {each["setting"].split("@")[0]: each for each in json.loads(EMBEDDED.read_text())["results"]}
    cells = [f"{100 * found[arm.split()[0]]['mismatch']['rejection_rate']:.1f}" for arm in COMPARED]
    return ["embedded task, 54 + 13", *cells]


PAGES = {
    README: {"ring": ring, "ratios": ratios, "arms": arms, "differences": differences},
    GUIDE: {"shootout-quantised": quantised, "shootout-policies": policies},
}


# Every figure


def details() -> str:
    """Return a CSV with a row per arm and task. Shares are percents, differences points."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    lines = [detail(task, row, rows) for task, rows in results().items() for row in rows.values()]
    writer.writerow(lines[0])
    writer.writerows(line.values() for line in lines)
    return text.getvalue()


def detail(task: str, row: Row, rows: dict[str, Row]) -> dict[str, Any]:
    kv, share = row["kv"], re.findall(r"equal bytes$|\S+$", row["arm"])[0]
    same = rows.get(f"rkv protected {share}") if kv["policy"] != DENSE and kv["protect_prompt"] else None
    estimates = {
        "right": mean_interval(by_prompt(row, "reward"), row["samples"]),
        "right_minus_full": difference(row, rows[DENSE], "reward"),
        "right_minus_rkv": difference(row, same, "reward"),
        "rejected": mean_interval(by_prompt(row, "rejected"), row["samples"]),
        "rejected_minus_rkv": difference(row, same, "rejected"),
    }
    sizes = {"budget": kv["budget"], "interval": kv["interval"]} if kv["policy"] != DENSE else {"budget": "", "interval": ""}
    found = {"task": task, "arm": row["arm"], **sizes, "saved": f"{100 * row['saved']:.1f}"}
    for name, each in estimates.items():
        for end, value in zip(("", "_low", "_high"), each or [None] * 3, strict=True):
            found[name + end] = "" if value is None else f"{100 * value:.1f}"
    found |= {"k3": f"{row['k3']:.4f}", "xi_p05": f"{row['xi_p05']:.2f}", "tokens": f"{row['tokens']:.0f}"}
    return found | tail(row["raw"])


def tail(raw: list[Row]) -> dict[str, str]:
    """Return how many of 10,000 tokens have a xi below the veto, by position."""
    parts = {}
    for first, last in ((0, 512), (512, 1536), (1536, None)):
        spans_of = slice(first // SPAN, None if last is None else last // SPAN)
        below = sum(sum(row["below"][spans_of]) for row in raw)
        tokens = sum(min(row["tokens"], last or row["tokens"]) - min(row["tokens"], first) for row in raw)
        parts[f"below_veto_per_10000_tokens_{first}_to_{last or 'end'}"] = f"{1e4 * below / tokens:.1f}" if tokens else ""
    return parts


def draw(file: Path) -> None:
    """Draw a panel per task: bytes saved against answers rejected. Caches that are not SHOWN are grey dots."""
    import matplotlib.pyplot as plt

    plt.switch_backend("svg")
    plt.rcParams["svg.hashsalt"] = "sparse-rl"
    figure, axes = plt.subplots(1, len(results()), figsize=(4.5 * len(results()), 4.6), squeeze=False)
    for axis, (task, rows) in zip(axes[0], results().items(), strict=True):
        caches: dict[str, list[tuple[float, float]]] = {}
        for row in sorted(rows.values(), key=lambda row: -row["saved"]):
            name = row["arm"] if row["kv"]["policy"] == DENSE else re.sub(r" (equal bytes|\S+)$", "", row["arm"])
            caches.setdefault(name, []).append((100 * row["saved"], 100 * row["rejected"]))
        for points in (points for name, points in caches.items() if name not in SHOWN):
            axis.plot(*zip(*points, strict=True), marker=".", color="lightgrey", linestyle="")
        for number, name in enumerate(SHOWN):
            points = caches.get(name, [(float("nan"), float("nan"))])
            axis.plot(*zip(*points, strict=True), marker="o", color=f"C{number}", label=name)
        axis.set(title=task, xlabel="KV bytes saved, %", ylabel="rejected, %", xlim=(-30, 100), ylim=(-3, 100))
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize="small", loc="lower center", ncols=5)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
