"""Sample responses and grade them. Training and evaluation both use this module."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from ..config import Sampling
from ..data.examples import Example
from ..rewards.pool import Graded, RewardPool, rollout_columns
from .engine import Engine
from .rollout import Rollout
from .stats import Progress, Stats


@dataclass(frozen=True)
class GradedRollouts:
    """Rollouts of some problems with their texts and rewards."""

    places: list[int]
    """Index of each rollout among all requested rollouts: problem index * samples + sample index."""
    rollouts: list[Rollout]
    texts: list[str]
    graded: Graded
    stats: Stats
    grade_s: float

    def without_traces(self) -> "GradedRollouts":
        return replace(self, rollouts=[replace(rollout, trace=None) for rollout in self.rollouts])


def sample_and_grade(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    pool: RewardPool,
    examples: Sequence[Example],
    prompts: Sequence[list[int]],
    samples: int,
    sampling: Sampling,
    *,
    seeds: Sequence[int],
    limits: Sequence[int] | None = None,
    record: bool | Collection[int] = False,
    take: Callable[[], int | None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> GradedRollouts:
    """Sample `samples` responses to each prompt and grade them. The sampling arguments are those of `Engine.generate`.

    If `take` is given, the result contains only the problems that it returned, in order.
    """
    taken: list[int] = []

    def take_next() -> int | None:
        assert take is not None
        problem = take()
        if problem is not None:
            taken.append(problem)
        return problem

    rollouts = engine.generate(
        prompts,
        samples,
        sampling,
        seeds=seeds,
        limits=limits,
        record=record if engine.policy.evicts else False,
        take=None if take is None else take_next,
        progress=progress,
    )
    started = time.perf_counter()
    problems = range(len(prompts)) if take is None else sorted(taken)
    places = [problem * samples + sample for problem in problems for sample in range(samples)]
    texts = tokenizer.batch_decode([rollout.response for rollout in rollouts], skip_special_tokens=True)
    asked = [examples[place // samples] for place in places]
    columns = {name: [example.columns[name] for example in asked] for name in examples[0].columns}
    graded = pool.grade([example.prompt for example in asked], texts, columns | rollout_columns(rollouts, tokenizer))
    return GradedRollouts(places, rollouts, texts, graded, engine.stats, time.perf_counter() - started)
