"""`sparse-rl eval`: run benchmarks with several caches. Running the same command again continues an interrupted evaluation."""

import argparse
import gc
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bench.record import environment
from ..config import FORMAT, KV, DataConfig, RewardConfig, Sampling
from ..data.examples import Example, name_of
from ..data.prompts import encoded
from ..errors import PromptError, UserError
from ..kv import statistics
from ..kv.policies import from_settings
from ..models.load import load_model, load_tokenizer, no_progress_bar, place
from ..monitor.budget import ladder, smallest
from ..rewards.find import refuse_inside_a_reward
from ..rewards.pool import RewardPool, pool_for
from ..rewards.weighted_sum import refuse_without_answers, terms
from ..rollout.engine import Engine
from ..terminal import Terminal, wide_console
from .benchmark import Benchmark, run
from .compare import Setting, with_budget
from .mismatch import Mismatch, measure, summary
from .result import Result, as_json, results
from .slots import auto_slots, dense_cache_bytes
from .sources import evaluated_as, loaded
from .table import (
    are_shares,
    benchmark_tables,
    figures,
    latex_rows,
    score_name,
    smallest_budget,
    summary_table,
    targets_of,
)
from .watch import EvalProgress
from .work import Work

PLAIN_WIDTH = 240
"""Width of the output in columns if it is not a terminal. On a terminal, cells wrap instead."""
FILLS = {"cpu": 1, "cuda": 4}
"""Rollouts per chunk as a multiple of the slots. Slots idle at the end of a chunk, so a GPU uses larger chunks."""


@dataclass(frozen=True)
class BenchmarkSource:
    """A benchmark named in --benchmarks, with its examples and settings, before tokenization."""

    name: str
    title: str
    path: str
    examples: list[Example]
    sampling: Sampling
    samples: int
    ks: tuple[int, ...]
    reward: str
    note: str | None
    """Sentence about the data that is shown to the user."""


def evaluate(args: argparse.Namespace, settings: Sequence[Setting], data: DataConfig, reward: RewardConfig) -> None:
    refuse_inside_a_reward()
    console = wide_console(PLAIN_WIDTH)
    if args.json and not args.json.parent.is_dir():  # fail early, because the file is written at the end
        raise UserError(f"The folder of {args.json} does not exist: create it first.")
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
    asked = identity(args, settings, sources, data, reward, dtype)
    work = Work(args.out or default_folder(args.model, asked))
    with work.opened(asked, overwrite=args.overwrite):
        runner = Runner(args, settings, sources, data, reward, work, asked, console)
        before = work.written
        settings = runner.go()
        if work.written == before:
            console.print_line(f"The evaluation in {work.path} is already complete. --overwrite runs it again.")
        asked["settings"] = {setting.name: stored_settings(setting.kv) for setting in settings}
        report(args, settings, sources, work, asked, console)


def asked_sources(args: argparse.Namespace, data: DataConfig, reward: RewardConfig) -> list[BenchmarkSource]:
    paths = [path.strip() for path in args.benchmarks.split(",")]
    names = [name_of(path) for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--benchmarks has two entries named {name}: list it once, or rename one of the files.")
    found = []
    for path, name in zip(paths, names, strict=True):
        title, max_tokens, samples = evaluated_as(path)
        samples = args.samples_per_prompt or samples
        sampling = Sampling(
            max_tokens=args.max_tokens or max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
        )
        ks = asked_ks(args.pass_at, samples, name)
        data_of = loaded(path, data, args.problems)
        function = reward.function_for(path)
        refuse_without_answers(path, data_of.examples[0], function)
        found.append(
            BenchmarkSource(name, title or name, path, data_of.examples, sampling, samples, ks, function, data_of.note)
        )
    return found


def asked_ks(text: str | None, samples: int, name: str) -> tuple[int, ...]:
    """Return the values k of pass@k. The default is `samples` and all powers of two below it."""
    if text is None:
        return tuple(sorted({*(2**power for power in range(samples.bit_length())), samples}))
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text):
        raise UserError(f"--pass-at {text} is not a list of integers. Example: 1,8,32.")
    ks = sorted(set(map(int, text.split(","))))
    if ks[-1] > samples:
        raise UserError(
            f"pass@{ks[-1]} needs {ks[-1]} samples per problem, but {name} has {samples}: lower --pass-at or set "
            f"--samples-per-prompt {ks[-1]}."
        )
    return tuple(ks)


def identity(
    args, settings: Sequence[Setting], sources: Sequence[BenchmarkSource], data: DataConfig, reward: RewardConfig, dtype: str
) -> dict[str, Any]:
    """Return all settings that the results depend on, for asked.json. Settings that affect only speed are left out."""
    return {
        "model": args.model,
        "weights": weights_hash(args.model),
        "dtype": dtype,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
        "mismatch": args.mismatch,
        "template": data.template,
        "raw": data.raw,
        "reward.truncated": reward.truncated,
        "reward.timeout": reward.timeout,
        "settings": {setting.name: stored_settings(setting.kv) for setting in settings},
        **({"format": FORMAT} if any(setting.kv.stores_prompts for setting in settings) else {}),
        "benchmarks": {
            source.name: {
                "source": source.path,
                "problems": len(source.examples),
                "contents": contents_hash(source.examples),
                "samples_per_prompt": source.samples,
                "max_tokens": source.sampling.max_tokens,
                "reward": source.reward,
                "reward_contents": reward_hash(source.reward),
            }
            for source in sources
        },
    }


def stored_settings(kv: KV) -> dict[str, Any]:
    """Return the settings for asked.json. Evaluations of earlier versions have no dtype."""
    return kv.model_dump(mode="json", exclude={"target_rejected"} | (set() if kv.quantised else {"dtype"}))


def weights_hash(model: str) -> str | None:
    """Return a hash of the names, sizes and modification times of the model's files, to detect changed weights.

    Return None if `model` is not on disk.
    """
    path = Path(model)
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    files = [file for file in found if file.is_file()]  # skip links to themselves; loading raises an error for them
    return _hash([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]) if files else None


def reward_hash(function: str) -> str | None:
    """Return a hash of the Python files that the reward uses, to detect changed code. None for built-in rewards."""
    files = [Path(term.function.rpartition(":")[0]) for term in terms(function) if ".py:" in term.function]
    return _hash([file.read_text() for file in files if file.is_file()]) if files else None


def contents_hash(examples: Sequence[Example]) -> str:
    return _hash([(example.prompt, example.columns, example.template) for example in examples])


def _hash(values: Any) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def default_folder(model: str, asked: dict[str, Any]) -> Path:
    """Return the default of --out. The same model and settings always give the same folder."""
    name = re.sub(r"[^\w.-]+", "-", model).strip("-.")
    return Path("runs/eval") / f"{name}-{_hash(asked)[:8]}"


class Runner:
    """Runs the unfinished problems, one setting after the other, so that only one cache is allocated at a time."""

    def __init__(self, args, settings, sources, data: DataConfig, reward: RewardConfig, work: Work, asked, console: Terminal):
        self.args, self.settings, self.sources, self.data = args, settings, sources, data
        self.reward, self.work, self.asked, self.console = reward, work, asked, console
        self.left = self._missing([setting for setting in settings if setting.kv.budget != "auto"])
        self.engine: Engine | None = None
        self.engine_key: tuple[str, int] | None = None

    def _missing(self, settings: Sequence[Setting]) -> list[tuple[Setting, BenchmarkSource, list[int]]]:
        """Return the problems of these settings that have no samples yet."""
        return [
            (setting, source, missing)
            for setting in settings
            for source in self.sources
            if (missing := sorted(set(range(len(source.examples))) - self.work.of(source.name, setting.name).problems))
        ]

    def go(self) -> list[Setting]:
        """Run all settings. Return them, with the budgets that were tried in place of `auto`."""
        if all(setting.kv.budget != "auto" for setting in self.settings) and not self.left:
            return list(self.settings)
        with ExitStack() as opened:
            log = self.work.path / "reward.log"
            functions = dict.fromkeys(source.reward for source in self.sources)
            self.pools = {each: opened.enter_context(pool_for(self.reward, each, log=log)) for each in functions}
            self.watch = opened.enter_context(EvalProgress(self.console))
            opened.enter_context(no_progress_bar())
            self._load()
            self.watch.restart()
            try:
                self._run()
                found = [each for setting in self.settings for each in self._with_budgets(setting)]
                return list({each.name: each for each in found}.values())
            except KeyboardInterrupt:
                self.console.print_line(f"Finished samples are in {self.work.path}: run the same command again to continue.")
                raise

    def _run(self) -> None:
        """Run the problems that are left."""
        for setting, source, _ in self.left:
            self._check(setting, source)
        self.watch.more(sum(len(missing) * source.samples for _, source, missing in self.left))
        for setting, source, missing in self.left:
            self._benchmark(setting, source, missing, self.pools[source.reward], self.watch)

    def _with_budgets(self, setting: Setting) -> list[Setting]:
        """Return the setting, or for `auto` those with the budgets that the search for the smallest one tried.

        This is the probe of a training run with `kv.budget = "auto"`, on all problems.
        """
        if setting.kv.budget != "auto":
            return [setting]
        kv, targets = setting.kv, targets_of(setting.kv)
        longest_prompt = max(len(prompt) for benchmark in self.benchmarks.values() for prompt in benchmark.prompts)
        longest = max(source.sampling.max_tokens for source in self.sources) + (0 if kv.protect_prompt else longest_prompt)
        if longest < kv.least_auto:
            raise UserError(
                f"{setting.name} tries budgets from {kv.least_auto} tokens on, and no sequence fills them: raise --max-tokens, or "
                "compare full."
            )
        tried: dict[int, Setting] = {}

        def meets(budget: int) -> bool | None:
            each = with_budget(setting, budget)
            with self.work.writing():
                self.work.ask(self.asked | {"settings": {each.name: stored_settings(each.kv)}})
            self.left = self._missing([each])
            try:
                self._run()
            except torch.OutOfMemoryError:
                self.engine = self.engine_key = None
                gc.collect()
                torch.cuda.empty_cache()
                return None
            tried[budget] = each
            return all(targets.met_by(figures(found)) for found in self._mismatches(each))

        smallest(ladder(kv.least_auto, longest), meets)
        if not tried:
            raise UserError(
                f"No budget of {setting.name} fits in memory: lower --slots or --max-tokens, or use a smaller model."
            )
        return [tried[budget] for budget in sorted(tried)]

    def _mismatches(self, setting: Setting) -> list[Mismatch]:
        """Return the mismatch of a setting on each benchmark."""
        parts = [self.work.of(source.name, setting.name) for source in self.sources]
        return [summary([np.load(path) for path in part.log_xi], part.samples) for part in parts]

    def _load(self) -> None:
        args = self.args
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(args.model, trust_remote_code=args.trust_remote_code)
        self.benchmarks = {
            source.name: Benchmark(
                source.name,
                source.examples,
                encoded(self.tokenizer, source.examples, self.data),
                source.sampling,
                source.samples,
            )
            for source in self.sources
        }
        self.model: PreTrainedModel = load_model(
            args.model, dtype=args.dtype, device=args.device, trust_remote_code=args.trust_remote_code
        )

    def _check(self, setting: Setting, source: BenchmarkSource) -> None:
        """Raise PromptError if the longest prompt does not fit the engine, before any sampling."""
        self.probe = Engine(self.model, setting.kv, slots=1)
        benchmark = self.benchmarks[source.name]
        number, longest = max(enumerate(benchmark.prompts, 1), key=lambda pair: len(pair[1]))
        try:
            self.probe.check_prompt(longest, benchmark.sampling)
        except PromptError as error:
            fix = f"--max-tokens {error.fits} fits" if error.fits else error.fix
            raise error.named(f"Problem {number} of {source.path}", fix) from None

    def _benchmark(
        self, setting: Setting, source: BenchmarkSource, missing: list[int], pool: RewardPool, watch: EvalProgress
    ) -> None:
        benchmark = self.benchmarks[source.name]
        what = f"{source.name}, {setting.name}"
        watch.doing(what)
        engine = self._engine(setting, source)
        fill = FILLS.get(self.model.device.type, 1) * engine.slots
        for problems in parts(missing, max(1, len(missing) * benchmark.samples // fill)):
            chunk = run(engine, self.tokenizer, benchmark, pool, problems, record=self.args.mismatch, progress=watch.sampled)
            log_xi = None
            if self.args.mismatch:
                watch.doing(f"{what}, replaying")
                log_xi = measure(self.model, chunk.rollouts, chunk.samples)
            self.work.add(source.name, setting.name, chunk, log_xi)
            watch.chunk(what, len(chunk.samples), chunk.cost.tokens / max(chunk.cost.seconds, 1e-9))
            watch.doing(what)

    def _engine(self, setting: Setting, source: BenchmarkSource) -> Engine:
        """Return the engine of a setting. A bounded cache uses one engine for all benchmarks.

        A dense cache uses one engine per response length.
        """
        dense = not from_settings(setting.kv).evicts
        key = (setting.name, source.sampling.max_tokens if dense else 0)
        if self.engine is None or self.engine_key != key:
            self.engine = None  # free its cache before the next engine allocates one
            gc.collect()
            alike = [
                (self.benchmarks[other.name], missing)
                for each, other, missing in self.left
                if each is setting and (not dense or other.sampling.max_tokens == source.sampling.max_tokens)
            ]
            tokens = max(benchmark.sampling.max_tokens for benchmark, _ in alike)
            prompts = [len(prompt) for benchmark, _ in alike for prompt in benchmark.prompts]
            samples = min(benchmark.samples for benchmark, _ in alike)
            slots = self.args.slots or auto_slots(self.probe, setting.kv, tokens, prompts, samples)
            most = max(len(missing) * benchmark.samples for benchmark, missing in alike)
            self.engine, self.engine_key = Engine(self.model, setting.kv, slots=min(slots, most)), key
            if dense:
                kv_bytes = dense_cache_bytes(self.engine, tokens, prompts, samples)
                self.engine.reserve_dense(max(prompts), tokens, len(prompts), samples, kv_bytes=kv_bytes)
            self._load_statistics(self.engine)
        return self.engine

    def _load_statistics(self, engine: Engine) -> None:
        """Use the statistics of the model or of the folder. Else gather them and write them to the folder."""
        if engine.needed_statistics:
            found = statistics.load(self.work.path)
            engine.load_statistics(found | statistics.load(Path(self.args.model)))
            if not engine.statistics:
                prompts = [prompt for benchmark in self.benchmarks.values() for prompt in benchmark.prompts]
                tokens = max(benchmark.sampling.max_tokens for benchmark in self.benchmarks.values())
                engine.calibrate(prompts, max(map(len, prompts)) + tokens)
                with self.work.writing():
                    statistics.save(found | engine.statistics, self.work.path)


def parts(numbers: Sequence[int], count: int) -> list[Sequence[int]]:
    """Split the numbers, in order, into `count` parts of nearly equal size."""
    count = min(count, len(numbers))
    edges = [round(part * len(numbers) / count) for part in range(count + 1)]
    return [numbers[start:stop] for start, stop in pairwise(edges)]


def report(
    args, settings: Sequence[Setting], sources: Sequence[BenchmarkSource], work: Work, asked, console: Terminal
) -> None:
    names = [setting.name for setting in settings]
    columns = [
        (source.title, results(source.name, names, [work.of(source.name, name) for name in names], source.samples, source.ks))
        for source in sources
    ]
    for title, rows in columns:
        console.print()
        for number, table in enumerate(benchmark_tables(title, rows)):
            if number:
                console.print()
            console.print(table)
    if len(columns) > 1:
        console.print()
        console.print(summary_table(columns))
    if sentence := smallest_budget([rows for _, rows in columns], settings):
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
                    f"{row.score.ungraded} rollouts got no verdict and are excluded from "
                    f"{score_name(row.score.samples, are_shares(rows))} ({cost.no_verdict} None, {cost.timeouts} timed "
                    f"out, {cost.errors} failed{f': {cost.first_error}' if cost.first_error else ''})."
                )
            elif cost.timeouts:
                problem = f"{cost.timeouts} rollouts exceeded reward.timeout_s and count as 0."
            if problem:
                console.print_line(f"warning: {title}, {row.setting}: {problem}", style="yellow")


def write_json(args, work: Work, asked: dict[str, Any], rows: Sequence[Result]) -> None:
    _, device = place(args.dtype, args.device)
    values = environment("eval", torch.device(device)) | {"asked": asked, "results": [as_json(row) for row in rows]}
    for path in {work.path / "results.json", *([args.json] if args.json else [])}:
        with work.writing():
            path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
