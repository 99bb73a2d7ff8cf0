"""Format results: one table per benchmark, one table of all benchmarks, and LaTeX rows."""

import math
from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from ..format import counted, size
from ..scores import score_text
from .compare import Setting
from .mismatch import Criteria, Mismatch
from .result import Result
from .statistics import Estimate, average

MISMATCH: list[tuple[str, Callable[[Mismatch], str]]] = [
    ("rejected", lambda each: f"{each.rejection_rate:.1%}"),
    ("wasted tokens", lambda each: f"{each.wasted_tokens:.1%}"),
    ("k1", lambda each: f"{each.mismatch_k1:.2e}"),
    ("k3", lambda each: f"{each.mismatch_k3:.2e}"),
    ("xi p05", lambda each: f"{each.xi_p05:.3f}"),
    ("xi p05, long", lambda each: f"{each.xi_p05_long:.3f}"),
    ("xi min", lambda each: f"{each.xi_min:.1e}"),
    ("ESS", lambda each: f"{each.ess:.3f}"),
    ("engine noise", lambda each: f"{each.engine_noise:.1e}"),
]
"""Heading and formatter of each column of the mismatch table."""
UNLIKELY: list[tuple[str, Callable[[Mismatch], str]]] = [("unlikely", lambda each: f"{each.unlikely:.1%}")]
"""First column, if the correction does not reject the same rollouts as the paper's."""
SPLIT: list[tuple[str, Callable[[Mismatch], str]]] = [
    ("k3, quantised", lambda each: "" if each.quantisation_k3 is None else f"{each.quantisation_k3:.2e}"),
    ("k3, evicted", lambda each: "" if each.eviction_k3 is None else f"{each.eviction_k3:.2e}"),
]
"""Columns that follow if a cache quantises keys and values."""


def shown(estimate: Estimate, share: bool, signed: bool = False) -> str:
    """Return the estimate with its interval as text. If `share` is true, the numbers are percentages."""
    return "-" if math.isnan(estimate.mean) else score_text(*estimate, share=share, signed=signed)


def are_shares(results: Sequence[Result]) -> bool:
    """Return whether every reward of a benchmark is 0 or 1, so that all rows are percentages."""
    return not any(each.score.is_mean_reward for each in results)


def score_name(samples: int, share: bool) -> str:
    return f"Avg@{samples}" if samples > 1 else "Pass@1" if share else "mean reward"


def _named(results: Sequence[Result]) -> str:
    return score_name(results[0].score.samples, are_shares(results))


def benchmark_tables(title: str, results: Sequence[Result]) -> list[Table]:
    """Return the tables of one benchmark for all settings: scores and costs, pass@k, and the mismatch.

    The pass@k table needs several samples per problem. The mismatch table needs --mismatch.
    """
    first, name, share = results[0].score, _named(results), are_shares(results)
    title = f"{escape(title)}: {counted(first.problems, 'problem')}, {name}, 95 % intervals"
    main = table(title, ["cache", name, *([f"against {results[0].setting}"] if len(results) > 1 else ()),
                         "tokens", "cut off", "repeating", "KV saved", "KV held", "no verdict", "tokens/s"])  # fmt: skip
    for each in results:
        score, cells = each.score, [escape(each.setting), shown(each.score.mean, share)]
        if len(results) > 1:
            cells.append("" if each.difference is None else shown(each.difference, share, signed=True))
        cells += [f"{score.mean_tokens:,.0f}", f"{score.truncated:.1%}", f"{score.repetition:.1%}"]
        cells += [f"{score.token_savings:.1%}", size(score.cost.peak_kv_bytes), str(score.ungraded or "")]
        main.add_row(*cells, f"{score.tokens_per_s:,.0f}")
    found = [main]
    if ks := [k for k in first.pass_at if k > 1]:
        chances = table("", ["cache", *(f"pass@{k}" for k in ks)])
        for each in results:
            pass_at = each.score.pass_at
            chances.add_row(escape(each.setting), *(shown(pass_at[k], share=True) if pass_at else "-" for k in ks))
        found.append(chances)
    if all(each.mismatch is not None for each in results):
        found.append(mismatch_table(results))
    return found


def mismatch_table(results: Sequence[Result]) -> Table:
    measured = [(each.setting, each.mismatch) for each in results if each.mismatch is not None]
    differs = any(each.unlikely != each.rejection_rate for _, each in measured)
    quantised = any(each.quantisation_k3 is not None for _, each in measured)
    columns = (UNLIKELY if differs else []) + MISMATCH + (SPLIT if quantised else [])
    found = table("", ["cache", *(name for name, _ in columns)])
    for setting, mismatch in measured:
        found.add_row(escape(setting), *(form(mismatch) for _, form in columns))
    return found


def smallest_budget(results: Sequence[Sequence[Result]], settings: Sequence[Setting], criteria: Criteria) -> str | None:
    """Return a sentence with the smallest compared budget that meets the targets of `kv.budget = "auto"` on every benchmark.

    `results` holds the results of each benchmark. None if no cache evicts or --mismatch is off.
    """
    sparse = [number for number, setting in enumerate(settings) if setting.kv.policy != "full"]
    found = {number: [each[number].mismatch for each in results] for number in sparse}
    if not sparse or any(each is None for mismatches in found.values() for each in mismatches):
        return None
    targets = criteria.targets(settings[sparse[0]].kv)
    met = [number for number in sparse if all(each and targets.met_by(each.figures) for each in found[number])]
    where = " on every benchmark" if len(results) > 1 else ""
    if met:
        best = min(met, key=lambda number: settings[number].kv.kept_tokens)
        return f"Smallest compared budget with {targets}{where}: {settings[best].name}."
    return f"No compared budget has {targets}{where}. Compare larger ones, or another policy."


def summary_table(columns: Sequence[tuple[str, Sequence[Result]]]) -> Table:
    """Return a table with one row per setting and one column per benchmark, plus their unweighted average."""
    headings = [f"{escape(title)} {_named(results)}" for title, results in columns]
    shares = [are_shares(results) for _, results in columns]
    found = table("All benchmarks, 95 % intervals", ["cache", *headings, "average", "KV saved"])
    for row in zip(*(results for _, results in columns), strict=True):
        means, costs = [each.score.mean for each in row], [each.score.cost for each in row]
        dense = sum(cost.dense_tokens for cost in costs)
        saved = 1 - sum(cost.kept_tokens for cost in costs) / dense if dense else 0.0
        found.add_row(escape(row[0].setting), *map(shown, means, shares), shown(average(means), all(shares)), f"{saved:.1%}")
    return found


def latex_rows(columns: Sequence[tuple[str, Sequence[Result]]]) -> list[str]:
    """Return rows like `name & $45.1^{+2.3}_{-2.2}$ & … \\\\`, with shares in percent.

    With several benchmarks, the last column is their average.
    """
    several, shares = len(columns) > 1, [are_shares(results) for _, results in columns]
    titles = [
        *(f"{title} {_named(results)}" for title, results in columns),
        *(["Average"] if several else []),
    ]
    rows = [["cache", *titles]]
    for row in zip(*(results for _, results in columns), strict=True):
        means = [each.score.mean for each in row]
        cells = [_latex(mean, share) for mean, share in zip(means, shares, strict=True)]
        rows.append([row[0].setting, *cells, *([_latex(average(means), all(shares))] if several else [])])
    return [" & ".join(map(_escaped, row)) + r" \\" for row in rows]


def _latex(estimate: Estimate, share: bool) -> str:
    if math.isnan(estimate.mean):
        return "--"
    scale, form = (100, ".1f") if share else (1, ".3g")
    mean, low, high = (scale * number for number in estimate)
    ends = "" if math.isnan(low) else f"^{{+{high - mean:{form}}}}_{{-{mean - low:{form}}}}"
    return f"${mean:{form}}{ends}$"


def _escaped(cell: str) -> str:
    return cell if cell.startswith("$") else cell.replace("_", r"\_").replace("&", r"\&").replace("%", r"\%")


def table(title: str, headings: Sequence[str]) -> Table:
    found = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0)
    )
    for number, heading in enumerate(headings):
        found.add_column(heading, justify="right" if number else "left", no_wrap=not number)
    return found
