"""Run one benchmark with one cache: sample responses to its problems, grade them and compute the score.

`train` and `eval` both use this module. Every cache uses the same seeds, so scores can be compared problem by problem.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..config import Sampling
from ..data.examples import Example
from ..kernels.counter_rng import derive_all
from ..rewards.batch import Graded
from ..rewards.pool import RewardPool
from ..rollout.engine import Engine
from ..rollout.graded import sample_and_grade
from ..rollout.rollout import Finish, Rollout
from ..rollout.stats import Progress
from .statistics import NOTHING, Estimate, mean_interval, pass_at_k, t_interval

PERIOD, SPAN = 64, 256
"""A truncated response counts as repeating if its last SPAN tokens have a period of at most PERIOD tokens."""


@dataclass(frozen=True)
class Benchmark:
    name: str
    examples: Sequence[Example]
    prompts: Sequence[list[int]]
    """Token ids, one list per example."""
    sampling: Sampling
    samples: int = 1
    """Samples per problem."""


@dataclass
class EvalSample:
    """One graded response."""

    problem: int
    sample: int
    reward: float | None
    tokens: int
    finish: Finish
    repeats: bool
    kv_peak: int
    text: str
    id: Any = None
    """Value of the column `id` of the problem; None if the data has no such column."""
    rejected: bool | None = None
    """True if a training run with this correction would have rejected the sample. None without --mismatch."""
    noise: float | None = None
    """Mean |log pi_sampler - log pi_replayed| over the tokens of the sample. None without --mismatch."""
    quantisation_k3: float | None = None
    """Mean k3 of pi_dense / pi_quantised over the tokens of the sample. None without --mismatch or without quantised keys."""
    eviction_k3: float | None = None
    """The same of pi_quantised / pi_sampler."""
    prompt_tokens: int = 0


@dataclass
class Cost:
    """Cost and failure counts of sampling and grading some problems. `+` combines two costs."""

    no_verdict: int = 0
    timeouts: int = 0
    errors: int = 0
    first_error: str | None = None
    tokens: int = 0
    seconds: float = 0.0
    """Seconds of sampling, without grading."""
    kept_tokens: int = 0
    dense_tokens: int = 0
    peak_kv_bytes: int = 0
    dense_kv_bytes: int = 0
    compactions: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        mine, theirs = asdict(self), asdict(other)
        total = {name: mine[name] + theirs[name] for name in mine if name not in ("first_error", *PEAKS)}
        peaks = {name: max(mine[name], theirs[name]) for name in PEAKS}
        return Cost(**total, **peaks, first_error=self.first_error or other.first_error)


PEAKS = ("peak_kv_bytes", "dense_kv_bytes")


@dataclass
class EvalChunk:
    """The graded samples of some problems of a benchmark, with their cost."""

    samples: list[EvalSample]
    cost: Cost
    rollouts: list[Rollout] = field(repr=False, default_factory=list)


def run(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    benchmark: Benchmark,
    pool: RewardPool,
    problems: Sequence[int],
    *,
    record: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> EvalChunk:
    """Sample and grade the problems with the indices `problems`.

    The seed of a rollout depends only on the problem index and the sample index. Running a benchmark in chunks therefore gives
    the same samples as running it at once. `record` stores the evictions in the rollouts.
    """
    samples = benchmark.samples
    seeds = derive_all(benchmark.sampling.seed, len(benchmark.examples), samples)
    result = sample_and_grade(
        engine,
        tokenizer,
        pool,
        [benchmark.examples[number] for number in problems],
        [benchmark.prompts[number] for number in problems],
        samples,
        benchmark.sampling,
        seeds=[seeds[number * samples + sample] for number in problems for sample in range(samples)],
        record=record,
        progress=progress,
    )
    done = [
        EvalSample(
            problem=problems[place // samples],
            sample=place % samples,
            reward=reward,
            tokens=len(rollout.response),
            finish=rollout.finish,
            repeats=rollout.finish != "stop" and ends_in_repetition(rollout.response),
            kv_peak=rollout.kv_peak,
            text=text,
            id=benchmark.examples[problems[place // samples]].columns.get("id"),
            prompt_tokens=len(rollout.prompt),
        )
        for place, rollout, text, reward in zip(
            result.places, result.rollouts, result.texts, result.graded.values, strict=True
        )
    ]
    return EvalChunk(done, cost_of(engine, result.graded), result.rollouts)


def cost_of(engine: Engine, graded: Graded) -> Cost:
    """Return the cost of the engine's last call and of grading its rollouts."""
    stats = engine.stats
    return Cost(
        no_verdict=graded.no_verdict,
        timeouts=graded.timeouts,
        errors=graded.errors,
        first_error=graded.first_error,
        tokens=stats.tokens,
        seconds=stats.seconds,
        kept_tokens=stats.kept_tokens,
        dense_tokens=stats.dense_tokens,
        peak_kv_bytes=stats.peak_kv_bytes,
        dense_kv_bytes=engine.cache.dense_bytes(stats.dense_peak_tokens),
        compactions=stats.compactions,
    )


def ends_in_repetition(tokens: Sequence[int]) -> bool:
    """Return whether the last `SPAN` tokens repeat with a period of at most `PERIOD`."""
    tail = tokens[-SPAN:]
    return len(tail) == SPAN and any(tail[shift:] == tail[:-shift] for shift in range(1, PERIOD + 1))


@dataclass(frozen=True)
class BenchmarkScore:
    """The score of a benchmark with one cache."""

    problems: int
    """Number of problems with at least one reward. Problems without a reward are excluded from all means."""
    samples: int
    """Samples per problem."""
    mean: Estimate
    """Mean reward. If all rewards are 0 or 1, this is Pass@1 (one sample per problem) or Avg@k (k samples)."""
    pass_at: dict[int, Estimate]
    """Unbiased pass@k over the problems with at least k rewards. Empty if a reward is neither 0 nor 1."""
    mean_tokens: float
    truncated: float
    repetition: float
    kv_peak: int
    token_savings: float
    tokens_per_s: float
    cost: Cost
    ungraded: int
    """Number of rollouts without a reward, for any reason."""

    @property
    def is_mean_reward(self) -> bool:
        """True if some reward is neither 0 nor 1, so that `mean` is a mean reward and not a share of correct answers."""
        return self.problems > 0 and not self.pass_at


def score(samples: Sequence[EvalSample], cost: Cost, per_problem: int, ks: Iterable[int] = (1,)) -> BenchmarkScore:
    verdicts = by_problem(samples)
    means = [math.fsum(rewards) / len(rewards) for rewards in verdicts.values()]
    binary = is_binary(verdicts)
    return BenchmarkScore(
        problems=len(verdicts),
        samples=per_problem,
        mean=mean_interval(means, per_problem) if binary else t_interval(means),
        pass_at={k: pass_interval(list(verdicts.values()), k) for k in ks} if binary and verdicts else {},
        mean_tokens=sum(sample.tokens for sample in samples) / len(samples),
        truncated=sum(sample.finish != "stop" for sample in samples) / len(samples),
        repetition=sum(sample.repeats for sample in samples) / len(samples),
        kv_peak=max(sample.kv_peak for sample in samples),
        token_savings=1 - cost.kept_tokens / cost.dense_tokens if cost.dense_tokens else 0.0,
        tokens_per_s=cost.tokens / cost.seconds if cost.seconds else 0.0,
        cost=cost,
        ungraded=sum(sample.reward is None for sample in samples),
    )


def by_problem(samples: Sequence[EvalSample]) -> dict[int, list[float]]:
    """Return the rewards of each problem, by problem index. Problems without a reward are left out."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            found.setdefault(sample.problem, []).append(sample.reward)
    return found


def is_binary(verdicts: dict[int, list[float]]) -> bool:
    """Return whether all rewards are 0 or 1."""
    return all(reward in (0.0, 1.0) for rewards in verdicts.values() for reward in rewards)


def pass_interval(verdicts: Sequence[Sequence[float]], k: int) -> Estimate:
    enough = [rewards for rewards in verdicts if len(rewards) >= k]
    values = [pass_at_k(len(rewards), sum(map(int, rewards)), k) for rewards in enough]
    return mean_interval(values, sum(map(len, enough)) / len(enough)) if values else NOTHING
