"""Held-out evaluation during training, with a dense cache and with the sampler's cache."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..config import KV, TASK_REWARDS, Config
from ..data.examples import Example, load, name_of
from ..data.prompts import encoded
from ..evaluate.benchmark import Benchmark, Cost, EvalChunk, EvalSample, run, score
from ..models.actor import Actor
from ..plan.memory import Plan
from ..rewards.pool import RewardPool, pool_for
from ..rollout.engine import Engine
from ..world import World
from .memory import dense_slots
from .terminal import RunTerminal

MIN_DENSE_SLOTS = 16
"""Slots of a dense cache below which `eval.cache = auto` evaluates with the sampler's cache alone."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out problems of a run. Empty if the run has no held-out data (`data.test`) or `eval.problems` is 0."""

    name: str
    examples: list[Example]
    prompts: list[list[int]]


def load_held_out(config: Config, tokenizer: PreTrainedTokenizerBase, terminal: RunTerminal) -> HeldOut:
    source = config.data.held_out or ""
    examples: list[Example] = []
    if source and config.eval.problems:
        loaded = load(source, "test", n=config.eval.problems, seed=0, **config.data.reading)
        examples = loaded.examples[: config.eval.problems]
        if loaded.note:
            terminal.note(loaded.note)
    return HeldOut(name_of(source), examples, encoded(tokenizer, examples, config.data))


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the sampler's weights on the held-out problems."""

    config: Config
    held_out: HeldOut
    engine: Engine
    """The engine that samples the training rollouts."""
    actor: Actor
    plan: Plan | None
    tokenizer: PreTrainedTokenizerBase
    pool: RewardPool
    world: World
    terminal: RunTerminal

    def evaluate(self) -> dict[str, float]:
        """Return the held-out metrics with each cache of `eval.cache`."""
        metrics: dict[str, float] = {}
        name, examples = self.held_out.name, self.held_out.examples
        if not examples:
            return metrics
        self.actor.merge()
        benchmark = Benchmark(name, examples, self.held_out.prompts, self.config.rollout.sampling(self.config.seed))
        for cache in self.caches():
            suffix = "_sparse" if cache == "sparse" else ""
            engine = self._engine(sparse=cache == "sparse")
            with self.terminal.evaluating(cache) as progress, self._grading() as pool:
                samples, cost = self._graded(engine, benchmark, pool, progress)
            result = score(samples, cost, benchmark.samples)
            key = f"eval/{name}/pass@1{suffix}"
            metrics |= {key: result.mean.mean, f"{key}_low": result.mean.low, f"{key}_high": result.mean.high}
            metrics[f"eval/{name}/no_verdict{suffix}"] = float(result.ungraded)
            if result.graded:
                metrics[f"eval/{name}/graded"] = 1.0
            if result.ungraded:
                self.terminal.warn(
                    f"{result.ungraded} of {len(examples)} evaluation rollouts got no verdict and are excluded from {key}."
                )
            if cost.timeouts and pool.timeout == "zero":
                self.terminal.warn(
                    f"{cost.timeouts} of {len(examples)} evaluation rollouts timed out and count as 0 in {key}."
                )
            del engine  # free its cache before the next engine allocates one
        return metrics

    def caches(self) -> list[str]:
        """Return the caches to evaluate with: dense, sparse or both. A dense sampler has no sparse cache."""
        chosen = self.config.eval.cache
        if not self.engine.policy.evicts:
            return ["dense"]
        if chosen == "auto":
            few = self._dense_slots() < min(MIN_DENSE_SLOTS, len(self.held_out.examples))
            chosen = "sparse" if few and self._may_skip_dense() else "both"
        return ["dense", "sparse"] if chosen == "both" else [chosen]

    def _may_skip_dense(self) -> bool:
        """Return whether `auto` may leave the dense cache out: on a GPU, unless its slots or its score are asked for."""
        asked = self.config.eval.slots != "auto" or self.config.checkpoint.best == f"eval/{self.held_out.name}/pass@1"
        return self.plan is not None and not asked

    def remark(self) -> str | None:
        """Return a sentence if `eval.cache = auto` leaves the dense cache out; else None."""
        if not self.held_out.examples or self.config.eval.cache != "auto" or "dense" in self.caches():
            return None
        return (
            f"Held-out problems are evaluated with the sampler's cache only, because a dense cache has room for "
            f"{self._dense_slots()} slots. Set eval.cache = both to evaluate with both."
        )

    def _dense_slots(self) -> int:
        if self.config.eval.slots != "auto":
            return self.config.eval.slots
        longest = max(map(len, self.held_out.prompts)) + self.config.rollout.max_tokens
        return dense_slots(self.plan, self.engine, longest)

    def _engine(self, *, sparse: bool) -> Engine:
        """Return the training engine if it has the wanted cache and slots, else a new engine for this evaluation."""
        slots = self.config.eval.slots
        if slots == "auto" and sparse == self.engine.policy.evicts:
            return self.engine
        if slots == "auto":
            slots = self._dense_slots()
        kv = self.engine.kv if sparse else KV(policy="full")
        return Engine(self.actor.sampler, kv, slots=min(slots, len(self.held_out.examples)))

    @contextmanager
    def _grading(self) -> Iterator[RewardPool]:
        """Yield the reward pool for the evaluation: the held-out task's reward, even if training uses another reward."""
        reward, source = self.config.reward, self.config.data.held_out or ""
        if source not in TASK_REWARDS or reward.function_for(source) == self.pool.function:
            yield self.pool
            return
        with pool_for(reward, reward.function_for(source), log=self.pool.log) as pool:
            yield pool

    def _graded(self, engine: Engine, benchmark: Benchmark, pool: RewardPool, progress) -> tuple[list[EvalSample], Cost]:
        """Sample and grade this rank's share of the problems. Return (samples, cost) gathered from all ranks."""
        mine = range(self.world.rank, len(benchmark.examples), self.world.size)
        chunk = run(engine, self.tokenizer, benchmark, pool, mine, progress=progress) if mine else EvalChunk([], Cost())
        parts = self.world.gather((chunk.samples, chunk.cost))
        samples = sorted((sample for part, _ in parts for sample in part), key=lambda each: (each.problem, each.sample))
        return samples, functools.reduce(Cost.__add__, (cost for _, cost in parts))
