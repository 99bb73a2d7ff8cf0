"""Build the summary table printed after training: held-out scores before and after, and the KV cost of rollouts."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import Config
from ..format import size
from ..scores import are_shares, score_keys, score_name, score_set, score_text
from ..sizes import DENSE_SLOT_TOKENS
from ..text import printable
from .run_folder import RunFolder

HEADINGS = ("method", "cache", "before", "after", "KV allocated", "dense KV", "tokens not held", "rejected")
PEAKS = ("kv/peak_bytes", "kv/dense_bytes")
"""Metrics of the KV bytes: those allocated, and those that a dense cache would have held."""


def print_summary(configs: list[Config], console: Console) -> None:
    runs = [RunFolder(config.run_dir).read_metrics() for config in configs]
    console.print(summary_table(configs, runs))
    for config, rows in zip(configs, runs, strict=True):
        if sentence := memory_note(config, rows):
            console.print(sentence, soft_wrap=True, markup=False)


def summary_table(configs: list[Config], runs: list[list[dict[str, float]]]) -> Table:
    share = are_shares(row for rows in runs for row in rows)
    title = f"{_held_out(configs, share)}; KV: all rollouts that run at once; other columns: means over steps"
    table = Table(title=title, title_justify="left")
    several = len({score_set(key) for rows in runs for row in rows for key in score_keys(row)}) > 1
    for heading in ("method", *(["held-out set"] if several else []), *HEADINGS[1:]):
        left = heading in ("method", "held-out set", "cache")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for config, rows in zip(configs, runs, strict=True):
        for number, key in enumerate(dict.fromkeys(key for row in rows for key in score_keys(row)) or [""]):
            scored = [row for row in rows if key in row]
            before, after = (_score(scored[end], key, share) if scored else "" for end in (0, -1))
            cache = "dense" if config.method == "dense" or (key and not key.endswith("_sparse")) else _cache(config, rows)
            costs = _costs(rows) if number == 0 else [""] * 4
            held_out = [escape(printable(score_set(key), 60))] if several else []
            table.add_row(config.method if number == 0 else "", *held_out, cache, before, after, *costs)
    return table


def memory_note(config: Config, rows: list[dict[str, float]]) -> str | None:
    """Return a sentence if the bounded cache allocated more memory than a dense cache would have held; else None."""
    allocated, dense = (peak(rows, key) for key in PEAKS)
    if config.method == "dense" or allocated <= dense:
        return None
    if config.sets_budget:
        return (
            f"{config.method}: no memory was saved. Each slot had room for up to {peak(rows, 'kv/budget'):,.0f} tokens of kv.budget = "
            f"auto and {config.kv.interval:,} of kv.interval, more than the sequences held at once. Lower kv.interval, raise "
            "kv.target_rejected, or train dense."
        )
    if config.kv.policy == "full":
        return (
            f"{config.method}: no memory was saved. kv.policy = full allocates {DENSE_SLOT_TOKENS} tokens for each slot, and pages "
            "for longer sequences, more than the sequences held at once. Longer answers fill them."
        )
    return (
        f"{config.method}: no memory was saved. Each slot has room for kv.budget + kv.interval = {config.kv.capacity:,} "
        "tokens, more than the sequences held at once. Lower kv.budget (docs/choosing-a-budget.md)."
    )


def _cache(config: Config, rows: list[dict[str, float]]) -> str:
    """Return the name of the cache, with the last budget if the run set it."""
    budgets = [int(row["kv/budget"]) for row in rows if "kv/budget" in row]
    return f"{config.with_budget(budgets[-1]).kv.label} (auto)" if config.sets_budget and budgets else config.kv.label


def _held_out(configs: list[Config], share: bool) -> str:
    if not any(config.data.held_out for config in configs):
        return "not evaluated: there are no held-out problems (data.test)"
    if not any(config.eval.problems for config in configs):
        return "not evaluated (eval.problems = 0)"
    return f"held-out {score_name(share)} before and after, 95 % intervals"


def _costs(rows: list[dict[str, float]]) -> list[str]:
    means = []
    for key in ("kv/token_savings", "sparse/rejection_rate"):
        values = [row[key] for row in rows if key in row]
        means.append(f"{sum(values) / len(values):.0%}" if values else "")
    return [*(size(peak(rows, key)) for key in PEAKS), *means]


def peak(rows: list[dict[str, float]], key: str) -> float:
    """Return the highest value of a metric, or 0 if no step logged it."""
    return max((row[key] for row in rows if key in row), default=0.0)


def _score(row: dict[str, float], key: str, share: bool) -> str:
    return score_text(row[key], row.get(f"{key}_low"), row.get(f"{key}_high"), share=share)
