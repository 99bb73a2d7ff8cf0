"""Sample responses and grade them. Training and evaluation both use this module."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..config import Sampling
from ..data.examples import Example
from ..rewards.batch import Graded
from ..rewards.pool import RewardPool, rollout_columns
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
    """Decoded responses; empty if another rank sampled the rollouts."""
    graded: Graded
    stats: Stats
    grade_s: float
    """Seconds of grading after the last rollout ended."""


def text_of(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the decoded response, as rewards see it."""
    return tokenizer.batch_decode([rollout.response], skip_special_tokens=True)[0]


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
    routing: bool = False,
    take: Callable[[], int | None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> GradedRollouts:
    """Sample `samples` responses to each prompt and grade them. The arguments of sampling are those of `Engine.generate`.

    Workers grade rollouts that have ended while others are sampled. If `take` is given, only the problems it returned are in
    the result, in order.
    """
    taken: list[int] = []
    texts: dict[int, str] = {}  # by index of the rollout, in the order of grading
    grading = pool.start()

    def take_next() -> int | None:
        assert take is not None
        problem = take()
        if problem is not None:
            taken.append(problem)
        return problem

    def grade(index: int, rollout: Rollout) -> None:
        example = examples[index // samples]
        texts[index] = text_of(rollout, tokenizer)
        columns = {name: [example.columns[name]] for name in examples[0].columns}
        grading.add([example.prompt], [texts[index]], columns | rollout_columns([rollout], tokenizer))

    def advance(state: Progress) -> None:
        grading.advance()
        if progress is not None:
            progress(state)

    try:
        rollouts = engine.generate(
            prompts,
            samples,
            sampling,
            seeds=seeds,
            limits=limits,
            record=record if engine.is_sparse else False,
            routing=routing,
            take=None if take is None else take_next,
            progress=advance,
            on_end=grade if pool.has_workers else None,
        )
    except BaseException:
        grading.cancel()
        raise
    started = time.perf_counter()
    problems = range(len(prompts)) if take is None else sorted(taken)
    places = [problem * samples + sample for problem in problems for sample in range(samples)]
    if not pool.has_workers:  # a reward in this process grades all rollouts in one call, in order
        for place, rollout in zip(places, rollouts, strict=True):
            grade(place, rollout)
    order = {place: number for number, place in enumerate(texts)}
    graded = grading.finish().reordered([order[place] for place in places])
    return GradedRollouts(
        places, rollouts, [texts[place] for place in places], graded, engine.stats, time.perf_counter() - started
    )
