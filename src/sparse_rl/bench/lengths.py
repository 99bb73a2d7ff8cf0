"""The lengths of made-up responses: one stated distribution for every benchmark and every arm of it."""

import random
from collections.abc import Sequence

from ..kernels.counter_rng import derive

SHORTEST = 8


def drawn_lengths(seeds: Sequence[int], longest: int) -> list[int]:
    """Uniform from a sixteenth of the longest to all of it, by the rollout's seed: mean 53 %."""
    low = max(1, min(SHORTEST, longest), longest // 16)
    return [random.Random(derive(seed, 7)).randint(low, longest) for seed in seeds]
