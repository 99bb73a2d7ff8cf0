"""`sparse-rl eval`: run benchmarks with several caches. Running the same command again continues an interrupted evaluation."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from ..bench.record import environment
from ..config import DataConfig, RewardConfig
from ..errors import UserError
from ..format import counted
from ..kv.policies import from_settings
from ..models.load import place
from ..rewards.find import refuse_inside_a_reward
from ..terminal import Terminal, wide_console
from .compare import Setting
from .identity import default_folder, identity, stored_settings
from .mismatch import Criteria
from .result import Result, as_json, results
from .runner import Runner
from .sources import BenchmarkSource, asked_sources
from .table import are_shares, benchmark_tables, latex_rows, score_name, smallest_budget, summary_table
from .work import Work

PLAIN_WIDTH = 240
"""Width of the output in columns if it is not a terminal. On a terminal, cells wrap instead."""


def evaluate(
    args: argparse.Namespace, settings: Sequence[Setting], data: DataConfig, reward: RewardConfig, criteria: Criteria
) -> None:
    refuse_inside_a_reward()
    console = wide_console(PLAIN_WIDTH)
    for setting in settings:  # report a misspelt policy before anything is loaded
        from_settings(setting.kv)
        if setting.kv.budget == "auto" and not args.mismatch:
            raise UserError(
                f"{setting.name} needs the mismatch of each budget that it tries: add --mismatch, or set a number of tokens."
            )
    sources = asked_sources(args, data, reward)
    for note in filter(None, (source.note for source in sources)):
        console.print_line(note)
    dtype, _ = place(args.dtype, args.device)
    asked = identity(args, settings, sources, data, reward, criteria, dtype)
    work = Work(args.out or default_folder(args.model, asked))
    with work.opened(asked, overwrite=args.overwrite):
        before = work.written
        settings = Runner(args, settings, sources, data, reward, criteria, work, asked, console).go()
        if work.written == before:
            console.print_line(f"The evaluation in {work.path} is already complete. --overwrite runs it again.")
        asked["settings"] = {setting.name: stored_settings(setting.kv) for setting in settings}
        report(args, settings, sources, criteria, work, asked, console)


def report(
    args: argparse.Namespace,
    settings: Sequence[Setting],
    sources: Sequence[BenchmarkSource],
    criteria: Criteria,
    work: Work,
    asked: dict[str, Any],
    console: Terminal,
) -> None:
    names = [setting.name for setting in settings]
    columns: list[tuple[str, list[Result]]] = []
    for source in sources:
        done = [work.of(source.name, name) for name in names]
        columns.append((source.title, results(source.name, names, done, source.samples, source.ks, criteria)))
    for title, rows in columns:
        console.print()
        for number, table in enumerate(benchmark_tables(title, rows)):
            if number:
                console.print()
            console.print(table)
    if len(columns) > 1:
        console.print()
        console.print(summary_table(columns))
    if sentence := smallest_budget([rows for _, rows in columns], settings, criteria):
        console.print_line(sentence)
    warn_of_missing_verdicts(columns, console)
    if args.rows:
        console.print()
        console.print_line("\n".join(latex_rows(columns)))
    write_json(args, work, asked, [row for _, rows in columns for row in rows])
    console.print_line(f"\nEvery sample is in {work.path / 'samples.jsonl'}; the scores are in {work.path / 'results.json'}.")


def warn_of_missing_verdicts(columns: Sequence[tuple[str, Sequence[Result]]], console: Terminal) -> None:
    for title, rows in columns:
        for row in rows:
            cost, problem = row.score.cost, ""
            if row.score.ungraded:
                problem = (
                    f"{score_name(row.score.samples, are_shares(rows))} excludes "
                    f"{counted(row.score.ungraded, 'rollout')} without a verdict ({cost.no_verdict} None, {cost.timeouts} timed "
                    f"out, {cost.errors} failed{f': {cost.first_error}' if cost.first_error else ''})."
                )
            elif cost.timeouts:
                problem = f"{counted(cost.timeouts, 'rollout')} exceeded reward.timeout_s and scored 0."
            if problem:
                console.print_line(f"warning: {title}, {row.setting}: {problem}", style="yellow")


def write_json(args: argparse.Namespace, work: Work, asked: dict[str, Any], rows: Sequence[Result]) -> None:
    _, device = place(args.dtype, args.device)
    values = environment("eval", torch.device(device)) | {"asked": asked, "results": [as_json(row) for row in rows]}
    for path in {work.path / "results.json", *([args.json] if args.json else [])}:
        with work.writing():
            path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
