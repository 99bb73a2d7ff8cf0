"""Held-out evaluation during training, with a dense cache and with the sampler's cache."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..config import KV, TASK_REWARDS, Config
from ..evaluate.benchmark import Benchmark, Cost, EvalChunk, EvalSample, run, score
from ..format import counted
from ..models.actor import Actor
from ..plan.memory import Plan
from ..rewards.pool import RewardPool, pool_for
from ..rollout.engine import Engine
from ..sizes import pool_pages
from ..world import World
from .inputs import HeldOut
from .memory import dense_slots, evaluation_bytes
from .rollouts import ProgressCallback
from .terminal import RunTerminal


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the sampler's weights on the held-out sets."""

    config: Config
    sets: Sequence[HeldOut]
    engine: Engine
    """The engine that samples the training rollouts."""
    actor: Actor
    plan: Plan | None
    tokenizer: PreTrainedTokenizerBase
    pool: RewardPool
    world: World
    terminal: RunTerminal

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of all held-out sets, one set after the other, with each cache of `eval.cache`."""
        if not self.sets:
            return {}
        self.actor.merge()
        metrics: dict[str, dict[str, float]] = {held_out.name: {} for held_out in self.sets}
        for cache in self.caches():
            engine = self._engine(sparse=cache == "sparse")
            with self._prompt_store(engine):
                for held_out in self.sets:
                    metrics[held_out.name] |= self._scored(engine, held_out, cache)
            del engine  # free its cache before the next engine allocates one
        return {key: value for of_set in metrics.values() for key, value in of_set.items()}

    def _scored(self, engine: Engine, held_out: HeldOut, cache: str) -> dict[str, float]:
        """Return the metrics of one held-out set with one cache."""
        name, problems, suffix = held_out.name, len(held_out.examples), "_sparse" if cache == "sparse" else ""
        benchmark = Benchmark(name, held_out.examples, held_out.prompts, self.config.rollout.sampling(self.config.seed))
        with self.terminal.evaluating(name, cache) as progress, self._grading(held_out.source) as pool:
            samples, cost = self._graded(engine, benchmark, pool, progress)
        result = score(samples, cost, benchmark.samples)
        key = f"eval/{name}/pass@1{suffix}"
        metrics = {key: result.mean.mean, f"{key}_low": result.mean.low, f"{key}_high": result.mean.high}
        metrics[f"eval/{name}/no_verdict{suffix}"] = float(result.ungraded)
        if result.is_mean_reward:
            metrics[f"eval/{name}/graded"] = 1.0
        if result.ungraded:
            self.terminal.warn(
                f"{result.ungraded} of {problems} evaluation rollouts got no verdict and are excluded from {key}."
            )
        if cost.timeouts and pool.timeout == "zero":
            self.terminal.warn(f"{cost.timeouts} of {problems} evaluation rollouts timed out and count as 0 in {key}.")
        return metrics

    @property
    def problems(self) -> int:
        """Number of problems of the largest set."""
        return max(len(held_out.examples) for held_out in self.sets)

    def caches(self) -> list[str]:
        """Return the caches to evaluate with: dense, sparse or both. Without a plan, memory is not considered."""
        return self.config.evaluation_caches(
            is_sparse=self.engine.is_sparse,
            dense_slots=self._dense_slots() if self.plan is not None else None,
            problems=self.problems,
        )

    def remark(self) -> str | None:
        """Return a sentence if `eval.cache = auto` leaves the dense cache out; else None."""
        if not self.sets or self.config.eval.cache != "auto" or "dense" in self.caches():
            return None
        return (
            f"Held-out problems are evaluated with the sampler's cache only, because a dense cache has room for "
            f"{counted(self._dense_slots(), 'slot')}. Set eval.cache = both to evaluate with both."
        )

    def _dense_slots(self) -> int:
        if self.config.eval.slots != "auto":
            return self.config.eval.slots
        return dense_slots(self.plan, self.engine, self._longest_prompt + self.config.rollout.max_tokens)

    @property
    def _longest_prompt(self) -> int:
        return max(len(prompt) for held_out in self.sets for prompt in held_out.prompts)

    def _engine(self, *, sparse: bool) -> Engine:
        """Return the training engine if it has the wanted cache and slots, else a new engine for this evaluation."""
        slots = self.config.eval.slots
        if slots == "auto" and sparse == self.engine.is_sparse:
            return self.engine
        if slots == "auto":
            slots = self._dense_slots()
        kv = self.engine.kv if sparse else KV(policy="full")
        engine = Engine(self.actor.sampler, kv, slots=min(slots, self.problems))
        engine.load_statistics(self.engine.statistics)
        if not engine.policy.evicts:  # once for all sets
            longest, tokens = self._longest_prompt, self.config.rollout.max_tokens
            kv_bytes = evaluation_bytes(self.plan, engine, longest, tokens)
            engine.reserve_dense(longest, tokens, self.problems, 1, kv_bytes=kv_bytes)
        return engine

    @contextmanager
    def _prompt_store(self, engine: Engine) -> Iterator[None]:
        """Let the training engine use a larger prompt store, if it protects prompts.

        Its own store holds a prompt once for several samples. An evaluation has one sample per prompt, so it needs more
        prompts to fill the slots. The plan limits the store; on a GPU without a plan, the engine keeps its own store.
        """
        if engine is not self.engine or not engine.kv.stores_prompts:
            yield
            return
        lengths = [[len(prompt) for prompt in held_out.prompts] for held_out in self.sets]
        pages = max(pool_pages(of_set, engine.slots, 1) for of_set in lengths)
        if engine.limits.shape.device.type == "cuda":
            pages = min(pages, 0 if self.plan is None else self.plan.evaluation_pages)
        with engine.larger_store(pages, self._longest_prompt):
            yield

    @contextmanager
    def _grading(self, source: str) -> Iterator[RewardPool]:
        """Yield the reward pool for a held-out set: its task's reward, even if training uses another reward."""
        reward = self.config.reward
        if source not in TASK_REWARDS or reward.function_for(source) == self.pool.function:
            yield self.pool
            return
        with pool_for(reward, reward.function_for(source), log=self.pool.log) as pool:
            yield pool

    def _graded(
        self, engine: Engine, benchmark: Benchmark, pool: RewardPool, progress: ProgressCallback | None
    ) -> tuple[list[EvalSample], Cost]:
        """Sample and grade this rank's share of the problems. Return (samples, cost) gathered from all ranks."""
        mine = range(self.world.rank, len(benchmark.examples), self.world.size)
        chunk = run(engine, self.tokenizer, benchmark, pool, mine, progress=progress) if mine else EvalChunk([], Cost())
        parts = self.world.gather((chunk.samples, chunk.cost))
        samples = sorted((sample for part, _ in parts for sample in part), key=lambda each: (each.problem, each.sample))
        return samples, functools.reduce(Cost.__add__, (cost for _, cost in parts))
