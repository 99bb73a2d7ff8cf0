"""Run the problems of an evaluation that have no samples yet, with one cache after the other."""

import argparse
import gc
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import KV, DataConfig, RewardConfig
from ..data.prompts import encoded
from ..errors import PromptError, UserError
from ..kv import statistics
from ..kv.policies import from_settings
from ..models.load import load_model, load_tokenizer, no_progress_bar
from ..models.stored_statistics import stored_statistics
from ..monitor.budget import ladder, smallest
from ..rewards.pool import pool_for
from ..rollout.engine import Engine
from ..terminal import Terminal
from .benchmark import Benchmark, run
from .compare import Setting, with_budget
from .identity import stored_settings
from .mismatch import Criteria, replay_samples
from .result import mismatch_of
from .slots import auto_slots, dense_cache_bytes
from .sources import BenchmarkSource
from .watch import EvalProgress
from .work import Work

FILLS = {"cpu": 1, "cuda": 4}
"""Rollouts per chunk as a multiple of the slots. Slots idle at the end of a chunk, so a GPU uses larger chunks."""


class Runner:
    """Runs the unfinished problems, one setting after the other, so that only one cache is allocated at a time."""

    def __init__(
        self,
        args: argparse.Namespace,
        settings: Sequence[Setting],
        sources: Sequence[BenchmarkSource],
        data: DataConfig,
        reward: RewardConfig,
        criteria: Criteria,
        work: Work,
        asked: dict[str, Any],
        console: Terminal,
    ):
        self.args, self.settings, self.sources, self.data = args, settings, sources, data
        self.reward, self.criteria, self.work, self.asked, self.console = reward, criteria, work, asked, console
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
        """Run all settings. Return them, with the budgets that were tried instead of `auto`."""
        if all(setting.kv.budget != "auto" for setting in self.settings) and not self.left:
            return list(self.settings)
        with ExitStack() as opened:
            log = self.work.path / "reward.log"
            functions = dict.fromkeys(source.reward for source in self.sources)
            self.pools = {each: opened.enter_context(pool_for(self.reward, each, log=log)) for each in functions}
            self.watch = opened.enter_context(EvalProgress(self.console))
            opened.enter_context(no_progress_bar())
            self._load()
            for setting in self.settings:
                self._check_search(setting)
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
        self.watch.add_rollouts(sum(len(missing) * source.samples for _, source, missing in self.left))
        for setting, source, missing in self.left:
            self._benchmark(setting, source, missing)

    def _searched_lengths(self, kv: KV) -> tuple[int, int]:
        """Return (the longest prompt, the tokens that a budget counts in the longest sequence)."""
        longest_prompt = max(len(prompt) for benchmark in self.benchmarks.values() for prompt in benchmark.prompts)
        return longest_prompt, self._max_tokens + (0 if kv.protect_prompt else longest_prompt)

    @property
    def _max_tokens(self) -> int:
        return max(source.sampling.max_tokens for source in self.sources)

    def _check_search(self, setting: Setting) -> None:
        """Refuse a search for a budget in which nothing would be evicted."""
        kv, max_tokens = setting.kv, self._max_tokens
        if kv.budget != "auto":
            return
        longest_prompt, _ = self._searched_lengths(kv)
        if not kv.never_evicts(longest_prompt, max_tokens):
            return
        interval = kv.evicting_interval(longest_prompt, max_tokens)
        if interval is None:
            raise UserError(
                f"{setting.name} tries budgets from {kv.least_auto} tokens on, and no sequence fills them at a compaction: raise "
                f"--max-tokens to {kv.shortest_evicted(longest_prompt)} or more, or compare full."
            )
        raise UserError(
            f"{setting.name} never evicts: responses of {max_tokens:,} tokens are too short for an interval of {kv.interval}. Add "
            f"a smaller one, as in {kv.policy}@auto+{interval}, or raise --max-tokens."
        )

    def _with_budgets(self, setting: Setting) -> list[Setting]:
        """Return the setting, or for `auto` one setting for each budget that the search tried.

        This is the probe of a training run with `kv.budget = "auto"`, on all problems.
        """
        if setting.kv.budget != "auto":
            return [setting]
        kv, targets = setting.kv, self.criteria.targets(setting.kv)
        _, longest = self._searched_lengths(kv)
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
            done = [self.work.of(source.name, each.name) for source in self.sources]
            return all(targets.met_by(mismatch_of(part, self.criteria).figures) for part in done)

        smallest(ladder(kv.least_auto, longest), meets)
        if not tried:
            raise UserError(
                f"No budget of {setting.name} fits in memory: lower --slots or --max-tokens, or use a smaller model."
            )
        return [tried[budget] for budget in sorted(tried)]

    def _load(self) -> None:
        args = self.args
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(args.model, trust_remote_code=args.trust_remote_code)
        self.benchmarks = {
            each.name: Benchmark(
                each.name, each.examples, encoded(self.tokenizer, each.examples, self.data), each.sampling, each.samples
            )
            for each in self.sources
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

    def _benchmark(self, setting: Setting, source: BenchmarkSource, missing: list[int]) -> None:
        benchmark, pool, watch = self.benchmarks[source.name], self.pools[source.reward], self.watch
        what = f"{source.name}, {setting.name}"
        watch.set_status(what)
        engine = self._engine(setting, source)
        fill = FILLS.get(self.model.device.type, 1) * engine.slots
        for problems in parts(missing, max(1, len(missing) * benchmark.samples // fill)):
            chunk = run(engine, self.tokenizer, benchmark, pool, problems, record=self.args.mismatch, progress=watch.sampled)
            log_xi = None
            if self.args.mismatch:
                watch.set_status(f"{what}, replaying")
                log_xi = replay_samples(self.model, chunk.rollouts, chunk.samples, self.criteria.spec)
            self.work.add(source.name, setting.name, chunk, log_xi)
            watch.chunk(what, len(chunk.samples), chunk.cost.tokens / max(chunk.cost.seconds, 1e-9))
            watch.set_status(what)

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
        needed = engine.needed_statistics
        if needed:
            found, stored = statistics.load(self.work.path), stored_statistics(self.args.model)
            # The folder has those of the caches that ran before. If this one needs others, the same prompts give the same again.
            if stored.keys() & set(needed) or found.keys() >= set(needed):
                engine.load_statistics(found | stored)
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
